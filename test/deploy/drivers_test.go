package deploy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/parser"
)

// alertSeries are, for each alert, series of a driver that make it fire, and the same of a driver that is well.
var alertSeries = map[string]struct{ ill, well string }{
	"CSINodeVolumesFailing": {
		`csi_node_volumes{state="failing"} 1x60`,
		`csi_node_volumes{state="failing"} 0x60`,
	},
	"CSINodeCallsRefused": {
		`csi_node_rpc_duration_seconds_count{method="NodeStageVolume", code="InvalidArgument"} 0+1x60`,
		`csi_node_rpc_duration_seconds_count{method="NodeStageVolume", code="OK"} 0+1x60`,
	},
	"CSINodeMountsKeepBreaking": {
		`csi_node_repairs_total{part="stage"} 0+1x60`,
		`csi_node_repairs_total{part="stage"} 0x60`,
	},
	"CSINodeOrphans": {
		`csi_node_orphans{} 1x60`,
		`csi_node_orphans{} 0x60`,
	},
	"CSINodePoolOvercommitted": {
		"csi_node_pool_owed_bytes{} 30x60\ncsi_node_pool_free_bytes{} 10x60\ncsi_node_pool_size_bytes{} 100x60",
		"csi_node_pool_owed_bytes{} 30x60\ncsi_node_pool_free_bytes{} 90x60\ncsi_node_pool_size_bytes{} 100x60",
	},
	"CSINodePoolNearlyFull": {
		"csi_node_pool_available_bytes{} 5x60\ncsi_node_pool_size_bytes{} 100x60",
		"csi_node_pool_available_bytes{} 50x60\ncsi_node_pool_size_bytes{} 100x60",
	},
	"CSINodePoolNotSeen": {
		`csi_node_pool_seen_timestamp_seconds{} 0x60`,
		`csi_node_pool_seen_timestamp_seconds{} 1e10x60`,
	},
	"CSINodeLVMDiskMissing": {
		`csi_node_lvm_missing_disks{group="vg0"} 1x60`,
		`csi_node_lvm_missing_disks{group="vg0"} 0x60`,
	},
	"CSINodeLVMMirrorDegraded": {
		`csi_node_lvm_degraded_volumes{group="vg0"} 1x60`,
		`csi_node_lvm_degraded_volumes{group="vg0"} 0x60`,
	},
	"CSINodeLVMThinPoolNearlyFull": {
		`csi_node_lvm_thin_pool_metadata_used_ratio{group="vg0", thin_pool="thin"} 0.8x60`,
		`csi_node_lvm_thin_pool_metadata_used_ratio{group="vg0", thin_pool="thin"} 0.1x60`,
	},
	"CSINodeLVMNotSeen": {
		`csi_node_lvm_seen_timestamp_seconds{} 0x60`,
		`csi_node_lvm_seen_timestamp_seconds{} 1e10x60`,
	},
	"CSINodeNotReady": {
		`csi_node_ready{} 0x60`,
		`csi_node_ready{} 1x60`,
	},
	"CSINodeNotRegistered": {
		`csi_node_registered{} 0x60`,
		`csi_node_registered{} 1x60`,
	},
	"CSINodeDown": {
		`up{} 0x60`,
		`up{} 1x60`,
	},
}

// TestAlertsTellDriversApart: of two drivers on one node an alert names the one that is not well, and only that.
func TestAlertsTellDriversApart(t *testing.T) {
	for _, r := range rules(t) {
		if alertSeries[r.Alert].ill == "" {
			t.Errorf("there are no series for %s", r.Alert)
			continue
		}
		var text strings.Builder
		of := func(driver, series string) {
			for line := range strings.SplitSeq(series, "\n") {
				labels := fmt.Sprintf(`{driver=%q, node="one", namespace="csi-node", pod="p-%s", container="csi-node", `, driver, driver)
				text.WriteString(strings.Replace(line, "{", labels, 1) + "\n")
			}
		}
		of("fast.example", alertSeries[r.Alert].ill)
		of("slow.example", alertSeries[r.Alert].well)
		found, err := load(t, time.Now().Add(-time.Hour), text.String()).ask(t, r.Expr, 50*time.Minute)
		must(t, err)
		if len(found) != 1 || found[0].Metric.Get("driver") != "fast.example" {
			t.Errorf("%s finds %v", r.Alert, found)
		}
		checkLabels(t, r, found)
	}
}

// TestDownIsOfDrivers: a scrape that fails of another job, also one that asks the same container, is no driver's.
func TestDownIsOfDrivers(t *testing.T) {
	s := load(t, time.Now().Add(-time.Hour), `up{container="csi-node", job="all-pods", namespace="csi-node", pod="p"} 0x60
		up{container="prometheus", job="prometheus"} 0x60
		up{container="other", driver="fast.example", job="other", node="one"} 0x60`)
	for _, r := range rules(t) {
		if found, err := s.ask(t, r.Expr, 50*time.Minute); err != nil || len(found) > 0 {
			t.Errorf("%s finds %v: %v", r.Alert, found, err)
		}
	}
}

// TestDashboardCountsWhoIsDown: a plugin that is down has no other series, so that of these each panel leaves it out.
func TestDashboardCountsWhoIsDown(t *testing.T) {
	s := load(t, time.Now().Add(-time.Hour), `up{container="csi-node", driver="fast.example", node="one"} 0x60
		up{container="csi-node", driver="fast.example", node="two"} 1x60
		up{container="csi-node", job="all-pods", namespace="csi-node", pod="p"} 0x60
		up{container="other", driver="fast.example", job="other", node="one"} 0x60`)
	panels := readDashboard(t).Panels
	at := slices.IndexFunc(panels, func(p panel) bool { return p.Title == "Not answering" })
	if at < 0 {
		t.Fatal("no panel counts them")
	}
	if found, err := s.ask(t, grafana.Replace(panels[at].Targets[0].Expr), 50*time.Minute); err != nil || len(found) != 1 || found[0].F != 1 {
		t.Errorf("it counts %v: %v", found, err)
	}
}

// TestDashboardTellsDriversApart: whatever a panel shows is of the drivers and nodes that are chosen.
func TestDashboardTellsDriversApart(t *testing.T) {
	seen := 0
	for _, p := range readDashboard(t).Panels {
		for _, target := range p.Targets {
			query, err := language.ParseExpr(strings.NewReplacer("$__rate_interval", "5m").Replace(target.Expr))
			if err != nil {
				t.Errorf("%s: %v", p.Title, err)
				continue
			}
			parser.Inspect(query, func(n parser.Node, _ []parser.Node) error {
				s, is := n.(*parser.VectorSelector)
				if !is || !strings.HasPrefix(s.Name, "csi_node_") {
					return nil
				}
				seen++
				by := map[string]string{}
				for _, m := range s.LabelMatchers {
					by[m.Name] = m.Value
				}
				if by["driver"] != "$driver" || by["node"] != "$node" {
					t.Errorf("%s: %s is about all drivers or nodes, whichever are chosen", p.Title, s)
				}
				return nil
			})
		}
	}
	if seen < 20 {
		t.Errorf("found only %d selectors", seen)
	}
}
