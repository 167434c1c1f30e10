package harness

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/require"
)

// Status returns what `csi-node status --output json` says.
func (p *Plugin) Status() report.Node {
	p.t.Helper()
	result := Run(p.t, nil, Binary(p.t), "status", "--state-dir", p.StateDir, "--output", "json")
	if result.Code != 0 {
		p.t.Fatalf("csi-node status: %s", result.Stderr)
	}
	var node report.Node
	if err := json.Unmarshal([]byte(result.Stdout), &node); err != nil {
		p.t.Fatalf("csi-node status: %v in %s", err, result.Stdout)
	}
	return node
}

// Report asks the plugin, or its store, for what Status shows, without a process
// of its own for that.
func (p *Plugin) Report() report.Node {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	report, err := driver.ReadReport(ctx, p.StateDir, driver.Options{Backends: []devices.Kind{pool.Kind()}})
	require.NoError(p.t, err)
	return report
}

// Retry is `csi-node volume retry`, and returns how the volume stands then.
func (p *Plugin) Retry(volume string) report.Node {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	report, err := driver.Retry(ctx, p.StateDir, volume)
	require.NoError(p.t, err)
	return report
}

// AwaitRest blocks until every part of every volume is settled, or stuck, and
// no step runs.
func (p *Plugin) AwaitRest() {
	p.t.Helper()
	Eventually(p.t, "the plugin is at rest", func() bool {
		for _, v := range p.Report().Volumes {
			for _, part := range v.Parts {
				if v.Step != nil || part.Is == report.UnderWay || part.Is == report.Unseen {
					return false
				}
			}
		}
		return true
	})
}

// Eventually looks until what is asked for is true, for things that nobody
// tells of; it fails the test after Patience.
func Eventually(t testing.TB, what string, true func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(Patience); !true(); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("not within %s: %s", Patience, what)
		}
	}
}

// FreeAddress returns a TCP address of this host that was free a moment ago.
func FreeAddress(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	return listener.Addr().String()
}

// Metrics returns the sums of the samples at an HTTP endpoint by metric name,
// whatever their labels.
func Metrics(t testing.TB, address string) map[string]float64 {
	t.Helper()
	resp, err := http.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }() // only read from
	if resp.StatusCode != http.StatusOK {
		t.Fatal(fmt.Errorf("/metrics answers %s", resp.Status))
	}
	sums := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line := lines.Text()
		name, _, _ := strings.Cut(strings.Fields(line + " ")[0], "{")
		if strings.HasPrefix(line, "#") {
			continue
		}
		value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		if err != nil {
			t.Fatalf("metric %q: %v", line, err)
		}
		sums[name] += value
	}
	require.NoError(t, lines.Err())
	return sums
}
