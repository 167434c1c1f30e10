package docs

import (
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

var (
	metricName  = regexp.MustCompile(`\bcsi_node_[a-z_]*[a-z]`)
	metricType  = regexp.MustCompile(`(?m)^# TYPE (csi_node_[a-z_]+) `)
	groupMetric = regexp.MustCompile(`Name: "([a-z_]+)", Help:`)
	metricRow   = regexp.MustCompile("(?m)^\\| `(csi_node_[a-z_]+)` \\|")
	alertName   = regexp.MustCompile(`(?m)^\s*- alert: (\w+)$`)
	// histogramPart is what Prometheus makes of a histogram's name.
	histogramPart = regexp.MustCompile(`_(?:bucket|sum|count)$`)
)

func matches(of *regexp.Regexp, text string) []string {
	var all []string
	for _, m := range of.FindAllStringSubmatch(text, -1) {
		all = append(all, m[len(m)-1])
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// exported returns the metrics of a plugin that has staged a volume.
func exported(t *testing.T) []string {
	t.Helper()
	address := harness.FreeAddress(t)
	p := harness.New(t)
	registry := filepath.Join(p.Dir, "registry")
	harness.Command(t, "mkdir", registry)
	p.Start(harness.Options{Flags: []string{"--http-endpoint", address, "--registration-dir", registry}})
	v := harness.NewVolume(t, p, "volume", harness.Shared("ext4"))
	require.NoError(t, v.Create(t.Context(), 32<<20, "thin"))
	require.NoError(t, v.Stage(t.Context()))
	resp, err := http.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	v.End()
	return matches(metricType, string(text))
}

// TestMetricsAreDocumented: the tables of metrics.md have every metric that the plugin exports, and no other page,
// no alert and no dashboard names one that there is not.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	listed, real := matches(metricRow, read(t, "docs/metrics.md")), exported(t)
	for _, name := range matches(groupMetric, read(t, "pkg/devices/lvm/check.go")) { // which need a volume group
		real = append(real, "csi_node_lvm_"+name)
	}
	for _, name := range real {
		if !slices.Contains(listed, name) {
			t.Errorf("docs/metrics.md lacks %s", name)
		}
	}
	for _, name := range listed {
		if !slices.Contains(real, name) {
			t.Errorf("docs/metrics.md has %s, which the plugin does not export", name)
		}
	}
	texts := map[string]string{}
	for _, name := range []string{"deploy/chart/files/rules.yaml", "deploy/chart/files/dashboard.json"} {
		texts[name] = read(t, name)
	}
	for _, p := range pages(t) {
		texts[p.name] = strings.Join(p.lines, "\n")
	}
	for where, text := range texts {
		for _, name := range matches(metricName, text) {
			if !slices.Contains(real, histogramPart.ReplaceAllString(name, "")) {
				t.Errorf("%s names %s, which the plugin does not export", where, name)
			}
		}
	}
}

// TestAlertsAreExplained: metrics.md has a heading for each alert, and for no other.
func TestAlertsAreExplained(t *testing.T) {
	alerts := matches(alertName, read(t, "deploy/chart/files/rules.yaml"))
	var explained []string
	for _, h := range pageNamed(t, "docs/metrics.md").headings {
		if h.level == 3 {
			explained = append(explained, h.text)
		}
	}
	slices.Sort(explained)
	if len(alerts) == 0 || !slices.Equal(alerts, explained) {
		t.Errorf("docs/metrics.md explains the alerts %q, and there are %q", explained, alerts)
	}
}

var countedNoun = regexp.MustCompile(`\{\{ \$value \}\} [a-z]+ *[a-z]*`)

// TestAlertsCountOne: what an alert counts may be one, so that no plural stands behind the number.
func TestAlertsCountOne(t *testing.T) {
	if found := countedNoun.FindAllString(read(t, "deploy/chart/files/rules.yaml"), -1); len(found) > 0 {
		t.Errorf("of one these are wrong: %q", found)
	}
}
