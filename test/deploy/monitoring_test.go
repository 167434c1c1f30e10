package deploy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql"

	"github.com/csi-node/csi-node/test/harness"
)

type dashboard struct {
	Panels     []panel
	Templating struct {
		List []struct{ Name, Definition string }
	}
}

type panel struct {
	ID                       int
	Title, Type, Description string
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []struct{ Expr string }
	FieldConfig              struct {
		Defaults struct {
			Thresholds struct{ Steps []struct{ Value float64 } } // the first has none
		}
	}
	Panels []panel // of a row that is folded
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	must(t, json.Unmarshal([]byte(read(t, filepath.Join(root, "chart", "files", "dashboard.json"))), &d))
	for _, p := range d.Panels {
		d.Panels = append(d.Panels, p.Panels...)
	}
	return d
}

// ofThinPools tells of a query whether it asks for what only the device mapper makes.
func ofThinPools(query string) bool { return strings.Contains(query, "csi_node_lvm_thin_pool_") }

// TestDashboard: every query of the dashboard finds series of a plugin that has staged, published and repaired a volume,
// refused a call, and has a volume group; those of thin pools are asked in a virtual machine.
func TestDashboard(t *testing.T) {
	t.Parallel()
	d := readDashboard(t)
	ids := map[int]bool{}
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("the panel %q is beyond the right edge", p.Title)
		}
	}
	s := used(t)
	queries := d.ask(t, s, func(query string) bool { return !ofThinPools(query) })
	for _, v := range d.Templating.List {
		m := variable.FindStringSubmatch(v.Definition)
		if m == nil {
			continue
		}
		queries++
		found, err := s.ask(t, grafana.Replace(m[1]), 10*time.Minute)
		if err != nil || len(found) == 0 {
			t.Errorf("the variable %s: %s finds nothing: %v", v.Name, v.Definition, err)
		}
		for _, sample := range found {
			if sample.Metric.Get(m[2]) == "" {
				t.Errorf("the variable %s: %s has no label %s", v.Name, sample.Metric, m[2])
			}
		}
	}
	if queries < 20 {
		t.Errorf("the dashboard asks %d times", queries)
	}
}

// TestDashboardShowsWhatAlertsTell: each metric of an alert is on the dashboard, and that of thin pools has lines where
// the alert fires.
func TestDashboardShowsWhatAlertsTell(t *testing.T) {
	metric, bound := regexp.MustCompile(`\b(?:csi_node_\w+|up)\b`), regexp.MustCompile(`_used_ratio > (0\.\d+)`)
	shown := map[string]panel{}
	for _, p := range readDashboard(t).Panels {
		for _, target := range p.Targets {
			for _, name := range metric.FindAllString(target.Expr, -1) {
				shown[name] = p
			}
		}
	}
	for _, r := range rules(t) {
		for _, name := range metric.FindAllString(r.Expr, -1) {
			if _, is := shown[name]; !is {
				t.Errorf("%s asks for %s, which no panel shows", r.Alert, name)
			}
		}
		if !ofThinPools(r.Expr) {
			continue
		}
		var fires, lines []string
		for _, m := range bound.FindAllStringSubmatch(r.Expr, -1) {
			fires = append(fires, m[1])
		}
		for _, step := range shown["csi_node_lvm_thin_pool_data_used_ratio"].FieldConfig.Defaults.Thresholds.Steps {
			if step.Value != 0 {
				lines = append(lines, fmt.Sprint(step.Value))
			}
		}
		if slices.Sort(fires); len(fires) != 2 || !slices.Equal(fires, lines) {
			t.Errorf("%s fires at %v, and the lines of the panel are at %v", r.Alert, fires, lines)
		}
	}
}

// variable is what one of the dashboard asks for: the values of a label.
var variable = regexp.MustCompile(`^label_values\((.*), (\w+)\)$`)

// grafana puts values in the place of variables.
var grafana = strings.NewReplacer("$__rate_interval", "5m", "$node", ".*", "$driver", ".*")

// ask asks the queries that are chosen, each of which is to find something.
func (d dashboard) ask(t *testing.T, s database, chosen func(query string) bool) (queries int) {
	t.Helper()
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			if !chosen(target.Expr) {
				continue
			}
			queries++
			if found, err := s.ask(t, grafana.Replace(target.Expr), 10*time.Minute); err != nil || len(found) == 0 {
				t.Errorf("%s: %s finds nothing: %v", p.Title, target.Expr, err)
			}
		}
	}
	return queries
}

// used is what a plugin tells that is well, and of which all was asked that the dashboard shows.
func used(t *testing.T) database {
	t.Helper()
	n := newNode(t)
	group, _ := n.volumeGroup()
	n.start("--registration-dir", filepath.Join(n.Dir, "registry"), "--lvm-groups", group)
	v := n.volume("volume", 32, "thin", "ext4")
	pod := v.Target("pod")
	must(t, v.Up(t.Context(), pod))
	for _, path := range []string{pod, v.Staging} {
		before := len(n.Mounts())
		harness.Command(t, "umount", "--lazy", path)
		harness.Eventually(t, "the mount is back", func() bool { return len(n.Mounts()) == before })
	}
	if _, err := v.Expand(t.Context(), -1); err == nil {
		t.Error("it has grown to a negative size")
	}
	n.scrape()
	v.End(pod)
	return n.told(10 * time.Minute)
}

type rule struct {
	Alert, Expr string
	For         string
	Annotations map[string]string
}

func rules(t *testing.T) (all []rule) {
	t.Helper()
	groups := parseOne(t, read(t, filepath.Join(root, "chart", "files", "rules.yaml")))
	text, err := json.Marshal(object(groups).at("spec", "groups"))
	must(t, err)
	var read []struct{ Rules []rule }
	must(t, json.Unmarshal(text, &read))
	for _, g := range read {
		all = append(all, g.Rules...)
	}
	return all
}

// TestAlerts: each alert fires once its cause has been there for as long as it says, and not before; and it says what to
// do, in docs.
func TestAlerts(t *testing.T) {
	t.Parallel()
	left := map[string]bool{}
	for _, name := range slices.Concat(slices.Collect(maps.Keys(causes)), inGuest) {
		left[name] = true
	}
	for _, r := range rules(t) {
		checkRunbook(t, r)
		if !left[r.Alert] {
			t.Errorf("nobody makes the cause of %s", r.Alert)
		}
		delete(left, r.Alert)
		if cause := causes[r.Alert]; cause != nil {
			t.Run(r.Alert, func(t *testing.T) {
				t.Parallel()
				checkCause(t, r, cause)
			})
		}
	}
	for name := range left {
		t.Errorf("there is no alert %s", name)
	}
}

// checkCause makes the cause of an alert, which is to fire.
func checkCause(t *testing.T, r rule, cause func(t *testing.T, n *node)) {
	t.Helper()
	wait, err := time.ParseDuration(cmp.Or(r.For, "0s"))
	must(t, err)
	n := newNode(t)
	cause(t, n)
	checkFires(t, r, n.told(wait+slack), n.cause, wait+slack+time.Duration(len(n.scrapes))*time.Minute)
}

// slack is what an alert may take beyond its "for": the ten minutes of some are in what they ask.
const slack = 15 * time.Minute

// checkFires evaluates an alert each minute, as Prometheus does: it fires between the minute in which its cause begins
// and the end.
func checkFires(t *testing.T, r rule, s database, cause int, end time.Duration) {
	t.Helper()
	wait, err := time.ParseDuration(cmp.Or(r.For, "0s"))
	must(t, err)
	since := time.Duration(-1) // pending
	for at := time.Duration(0); at <= end; at += time.Minute {
		found, err := s.ask(t, r.Expr, at)
		must(t, err)
		checkLabels(t, r, found)
		switch {
		case len(found) == 0:
			since = -1
		case since < 0:
			since = at
		}
		if since >= 0 && at-since >= wait {
			if at < time.Duration(cause)*time.Minute {
				t.Errorf("it fires after %s, before its cause is there", at)
			}
			return
		}
	}
	t.Errorf("%s has not fired after %s", r.Expr, end)
}

var named = regexp.MustCompile(`\$labels\.(\w+)`)

// checkLabels: what the texts name, the series have.
func checkLabels(t *testing.T, r rule, found promql.Vector) {
	t.Helper()
	for _, sample := range found {
		if sample.Metric.Get("driver") == "" {
			t.Errorf("%s says of no driver: %v", r.Alert, sample.Metric)
		}
	}
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

// ofDaemonSets finds the query in metrics.md that tells of nodes without a pod of the plugin.
var ofDaemonSets = regexp.MustCompile("(?m)^```text\n([^`]*\\bkube_daemonset_[^`]*)^```$")

// TestQueryOfDaemonSets: the query finds the DaemonSet of the plugin while it lacks a pod, and no other.
func TestQueryOfDaemonSets(t *testing.T) {
	all := ofDaemonSets.FindAllStringSubmatch(read(t, filepath.Join(root, "..", "docs", "metrics.md")), -1)
	if len(all) != 1 {
		t.Fatalf("docs/metrics.md has %d queries of DaemonSets", len(all))
	}
	// What kube-state-metrics has of one that should be on three nodes, and is on so many.
	of := func(namespace, name string, running int) (text string) {
		for metric, value := range map[string]int{"desired_number_scheduled": 3, "current_number_scheduled": running, "number_ready": running,
			"number_available": running, "number_unavailable": 3 - running, "number_misscheduled": 0, "updated_number_scheduled": running} {
			text += fmt.Sprintf("kube_daemonset_status_%s{job=\"kube-state-metrics\", namespace=%q, daemonset=%q} %dx60\n", metric, namespace, name, value)
		}
		return text
	}
	own := object(parseOne(t, read(t, filepath.Join(root, "base", "daemonset.yaml")))).at("metadata", "name").(string)
	for title, test := range map[string]struct {
		series string
		found  int
	}{
		"a pod is missing":   {of("csi-node", own, 2), 1},
		"all pods are":       {of("csi-node", own, 0), 1},
		"whole":              {of("csi-node", own, 3), 0},
		"another's":          {of("csi-node", own, 3) + of("csi-node", "other", 2), 0},
		"of another place":   {of("csi-node", own, 3) + of("other", own, 2), 0},
		"no DaemonSet":       {"", 0},
		"the other is whole": {of("csi-node", own, 2) + of("kube-system", "other", 3), 1},
	} {
		found, err := load(t, time.Now().Add(-time.Hour), test.series).ask(t, all[0][1], 30*time.Minute)
		must(t, err)
		if len(found) != test.found {
			t.Errorf("%s: it finds %v", title, found)
		}
		for _, sample := range found {
			if sample.Metric.Get("daemonset") != own || sample.Metric.Get("namespace") != "csi-node" {
				t.Errorf("%s: it finds %s", title, sample.Metric)
			}
		}
	}
}

const runbooks = "https://github.com/csi-node/csi-node/blob/main/docs/metrics.md#"

// checkRunbook: an alert links to the heading of its name.
func checkRunbook(t *testing.T, r rule) {
	t.Helper()
	if r.Annotations["summary"] == "" || r.Annotations["runbook_url"] != runbooks+strings.ToLower(r.Alert) {
		t.Errorf("%s: its summary is %q, and its runbook %q", r.Alert, r.Annotations["summary"], r.Annotations["runbook_url"])
	}
}
