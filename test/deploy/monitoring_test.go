package deploy

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
)

// What a Prometheus adds when it scrapes by deploy/monitoring/podmonitor.yaml.
const target = `namespace="csi-node", pod="csi-node-x", node="node-1", job="csi-node/csi-node", instance="10.0.0.1:9810"`

// scraped returns a plugin's scrape of every minute for two hours. test/node holds the record to the
// plugin of today.
func scraped(t *testing.T) database {
	t.Helper()
	var text strings.Builder
	for line := range strings.Lines(read(t, "../node/testdata/scrape.txt")) {
		at := strings.LastIndexByte(line, ' ')
		name, own, _ := strings.Cut(strings.TrimSuffix(line[:at], "}"), "{")
		fmt.Fprintf(&text, "%s{%s} %sx120\n", name, strings.TrimPrefix(own+", "+target, ", "), strings.TrimSpace(line[at:]))
	}
	return load(t, text.String())
}

type dashboard struct {
	Panels []struct {
		ID                       int
		Title, Type, Description string
		GridPos                  struct{ X, Y, W, H int }
		Targets                  []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Name, Definition string }
	}
}

// TestDashboard: every query of the dashboard finds series in a real scrape.
func TestDashboard(t *testing.T) {
	var d dashboard
	if err := json.Unmarshal([]byte(read(t, filepath.Join(root, "monitoring", "dashboard.json"))), &d); err != nil {
		t.Fatal(err)
	}
	s := scraped(t)
	grafana := strings.NewReplacer("$__rate_interval", "5m", "$node", ".*")
	queries, ids := 0, map[int]bool{}
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("the panel %q is beyond the right edge", p.Title)
		}
		for _, target := range p.Targets {
			queries++
			if found, err := s.ask(t, grafana.Replace(target.Expr), 2*time.Hour); err != nil || len(found) == 0 {
				t.Errorf("%s: %s finds nothing: %v", p.Title, target.Expr, err)
			}
		}
	}
	for _, v := range d.Templating.List {
		if metric, _, is := strings.Cut(strings.TrimPrefix(v.Definition, "label_values("), ","); is {
			queries++
			if found, err := s.ask(t, metric, time.Hour); err != nil || len(found) == 0 {
				t.Errorf("the variable %s: %s finds nothing: %v", v.Name, v.Definition, err)
			}
		}
	}
	if queries < 20 {
		t.Errorf("the dashboard asks %d times", queries)
	}
}

type rule struct {
	Alert, Expr string
	For         string
	Annotations map[string]string
}

func rules(t *testing.T) (all []rule) {
	t.Helper()
	groups := parseOne(t, read(t, filepath.Join(root, "monitoring", "rules.yaml")))
	text, err := json.Marshal(object(groups).at("spec", "groups"))
	if err != nil {
		t.Fatal(err)
	}
	var read []struct{ Rules []rule }
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	for _, g := range read {
		all = append(all, g.Rules...)
	}
	return all
}

// causes are, for each alert, what its cause makes of the metrics, minute by minute, and when the alert must have fired:
// after its "for". Before that, and of the series of a node that is well, it does not.
var causes = map[string]struct {
	series string
	fires  time.Duration
}{
	"CSINodeVolumesFailing": {`csi_node_volumes{state="failing", %s} 0x29 2x60`, 40 * time.Minute},
	"CSINodeCallsRefused": {`csi_node_rpc_duration_seconds_count{method="NodeStageVolume", code="Internal", %s} 0x29 0+1x60`,
		30*time.Minute + 4*time.Minute + 15*time.Minute},
	"CSINodeMountsKeepBreaking": {`csi_node_repairs_total{part="target", %s} 0x29 0+1x60`, 45 * time.Minute},
	"CSINodeOrphans":            {`csi_node_orphans{%s} 0x29 3x90`, 90 * time.Minute},
	"CSINodePoolOvercommitted": {`csi_node_pool_size_bytes{%[1]s} 1000x120
		csi_node_pool_free_bytes{%[1]s} 500x29 100x60
		csi_node_pool_owed_bytes{%[1]s} 600x120`, 35 * time.Minute},
	"CSINodePoolNearlyFull": {`csi_node_pool_size_bytes{%[1]s} 1000x120
		csi_node_pool_available_bytes{%[1]s} 500x29 50x60`, 45 * time.Minute},
	"CSINodePoolNotSeen":       {`csi_node_pool_seen_timestamp_seconds{%s} 0+60x29 1740x60`, 41 * time.Minute},
	"CSINodeLVMDiskMissing":    {`csi_node_lvm_missing_disks{group="vg0", %s} 0x29 1x60`, 35 * time.Minute},
	"CSINodeLVMMirrorDegraded": {`csi_node_lvm_degraded_volumes{group="vg0", %s} 0x29 2x60`, 60 * time.Minute},
	"CSINodeLVMThinPoolNearlyFull": {`csi_node_lvm_thin_pool_data_used_ratio{group="vg0", thin_pool="thin", %[1]s} 0.1x120
		csi_node_lvm_thin_pool_metadata_used_ratio{group="vg0", thin_pool="thin", %[1]s} 0.1x29 0.8x60`, 35 * time.Minute},
	"CSINodeLVMNotSeen":    {`csi_node_lvm_seen_timestamp_seconds{%s} 0+60x29 1740x60`, 41 * time.Minute},
	"CSINodeNotRegistered": {`csi_node_registered{%s} 1x29 0x60`, 35 * time.Minute},
	"CSINodeDown":          {`kube_daemonset_status_number_unavailable{namespace="csi-node", daemonset="csi-node"} 0x29 1x60`, 45 * time.Minute},
}

// TestAlerts: each alert fires when its cause is there for as long as it says, and not before; its metrics are in a real
// scrape, of which it does not fire; and it says what to do, in docs.
func TestAlerts(t *testing.T) {
	all := rules(t)
	known := map[string]bool{}
	well := scraped(t)
	for _, r := range all {
		known[r.Alert] = true
		cause, is := causes[r.Alert]
		if !is {
			t.Errorf("%s: no test makes its cause", r.Alert)
			continue
		}
		t.Run(r.Alert, func(t *testing.T) {
			series := strings.ReplaceAll(cause.series, "%s", target)
			series = strings.ReplaceAll(series, "%[1]s", target)
			s := load(t, series)
			var wait time.Duration
			if r.For != "" {
				var err error
				if wait, err = time.ParseDuration(r.For); err != nil {
					t.Fatal(err)
				}
			}
			// pending since, as Prometheus counts.
			fired, since := time.Duration(-1), time.Duration(-1)
			for at := time.Duration(0); at <= cause.fires && fired < 0; at += time.Minute {
				found, err := s.ask(t, r.Expr, at)
				switch {
				case err != nil:
					t.Fatal(err)
				case len(found) == 0:
					since = -1
				case since < 0:
					since = at
				}
				if since >= 0 && at-since >= wait {
					fired = at
				}
				if since >= 0 {
					checkLabels(t, r, found)
				}
			}
			if fired < 0 {
				t.Errorf("%s has not fired %s after its cause began", r.Expr, cause.fires-30*time.Minute)
			} else if fired < 30*time.Minute {
				t.Errorf("%s fires before its cause is there", r.Expr)
			}
			for at := 40 * time.Minute; at <= 60*time.Minute && r.Alert != "CSINodeNotRegistered" && !strings.HasSuffix(r.Alert, "NotSeen"); at += 10 * time.Minute {
				if found, err := well.ask(t, r.Expr, at); err != nil || len(found) > 0 {
					t.Errorf("of a plugin that is well %s finds %v, %v", r.Expr, found, err)
				}
			}
			for _, name := range metrics(t, r.Expr) {
				if strings.HasPrefix(name, "csi_node_lvm_") { // of which only a plugin with volume groups has any
					if !strings.Contains(read(t, filepath.Join(root, "..", "docs", "metrics.md")), "| `"+name+"` |") {
						t.Errorf("docs/metrics.md has no %s", name)
					}
					continue
				}
				if found, err := well.ask(t, name, time.Hour); !strings.HasPrefix(name, "kube_") && (err != nil || len(found) == 0) {
					t.Errorf("no plugin has %s: %v", name, err)
				}
			}
		})
		checkRunbook(t, r)
	}
	for name := range causes {
		if !known[name] {
			t.Errorf("there is no alert %s", name)
		}
	}
}

var named = regexp.MustCompile(`\$labels\.(\w+)`)

// checkLabels: what the texts name, the series have.
func checkLabels(t *testing.T, r rule, found promql.Vector) {
	t.Helper()
	for _, text := range r.Annotations {
		for _, name := range named.FindAllStringSubmatch(text, -1) {
			for _, sample := range found {
				if sample.Metric.Get(name[1]) == "" {
					t.Errorf("%q names the label %s, and the series are %v", text, name[1], sample.Metric)
				}
			}
		}
	}
}

// metrics returns the names of the metrics that a query selects.
func metrics(t *testing.T, query string) (names []string) {
	t.Helper()
	expr, err := language.ParseExpr(query)
	if err != nil {
		t.Fatal(err)
	}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if selector, is := node.(*parser.VectorSelector); is {
			for _, m := range selector.LabelMatchers {
				if m.Name == model.MetricNameLabel {
					names = append(names, m.Value)
				}
			}
		}
		return nil
	})
	if len(names) == 0 {
		t.Errorf("%s selects no metric", query)
	}
	return names
}

const runbooks = "https://github.com/csi-node/csi-node/blob/main/docs/metrics.md#"

// checkRunbook: an alert links to the heading of its name.
func checkRunbook(t *testing.T, r rule) {
	t.Helper()
	if r.Annotations["summary"] == "" || r.Annotations["runbook_url"] != runbooks+strings.ToLower(r.Alert) {
		t.Errorf("%s: its summary is %q, and its runbook %q", r.Alert, r.Annotations["summary"], r.Annotations["runbook_url"])
	}
}
