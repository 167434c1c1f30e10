package deploy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

const mib = 1 << 20

// What a Prometheus adds when it scrapes by deploy/monitoring/podmonitor.yaml: the operator's labels, node and driver.
const target = `namespace="csi-node", pod="csi-node-x", container="csi-node", endpoint="http", job="csi-node/csi-node", instance="10.0.0.1:9810", node="node-1", driver="csi-node.local"`

// node is a plugin on the real kernel, and what it told whenever it was scraped. A scrape is made when a test wants one;
// for Prometheus there is a minute between two.
type node struct {
	*harness.Plugin
	t       *testing.T
	address string
	from    time.Time // of the first scrape
	scrapes []map[string]string
	cause   int    // scrapes before the cause
	lock    string // that the plugin leaves of a volume group; empty: it has none
}

// newNode returns one whose plugin is yet to be started.
func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t}
	t.Cleanup(func() { // once the plugin has ended
		if n.lock != "" {
			must(t, os.Remove(n.lock))
		}
	})
	n.Plugin, n.address = harness.New(t), harness.FreeAddress(t)
	return n
}

// start starts the plugin, and scrapes it while it is well.
func (n *node) start(flags ...string) {
	n.t.Helper()
	n.run(flags...)
	n.well()
}

func (n *node) run(flags ...string) {
	n.t.Helper()
	n.Start(harness.Options{Flags: append(flags, "--http-endpoint", n.address)})
}

// well scrapes a plugin that is well. What comes then is the cause of an alert.
func (n *node) well() {
	n.t.Helper()
	for range 5 {
		n.scrape()
	}
	n.cause = len(n.scrapes)
}

// scrape keeps what the plugin tells, by series, and returns it.
func (n *node) scrape() map[string]string {
	n.t.Helper()
	resp, err := http.Get("http://" + n.address + "/metrics")
	must(n.t, err)
	defer func() { _ = resp.Body.Close() }() // only read from
	text, err := io.ReadAll(resp.Body)
	must(n.t, err)
	if resp.StatusCode != http.StatusOK {
		n.t.Fatal(resp.Status)
	}
	if n.from.IsZero() {
		n.from = time.Now()
	}
	told := map[string]string{"up": "1"} // which Prometheus adds
	for line := range strings.Lines(string(text)) {
		if at := strings.LastIndexByte(line, ' '); !strings.HasPrefix(line, "#") {
			told[line[:at]] = strings.TrimSpace(line[at:])
		}
	}
	n.scrapes = append(n.scrapes, told)
	return told
}

// miss scrapes a plugin that does not answer.
func (n *node) miss() {
	n.t.Helper()
	if resp, err := http.Get("http://" + n.address + "/metrics"); err == nil {
		n.t.Fatal("it answers", resp.Status, resp.Body.Close())
	}
	n.scrapes = append(n.scrapes, map[string]string{"up": "0"})
}

// await scrapes until a series is what it is to be. Of what comes before it Prometheus is told nothing.
func (n *node) await(series string, is func(value string) bool) {
	n.t.Helper()
	before := len(n.scrapes)
	harness.Eventually(n.t, "the cause is told: "+series, func() bool {
		n.scrapes = n.scrapes[:before]
		return is(n.scrape()[series])
	})
}

// told is what Prometheus has of the node if it goes on as it was last, for so long.
func (n *node) told(goesOn time.Duration) database {
	n.t.Helper()
	all := map[string]bool{}
	for _, s := range n.scrapes {
		for name := range s {
			all[name] = true
		}
	}
	var text strings.Builder
	for series := range all {
		name, own, _ := strings.Cut(strings.TrimSuffix(series, "}"), "{")
		fmt.Fprintf(&text, "%s{%s}", name, strings.TrimPrefix(own+", "+target, ", "))
		last := "_"
		for _, s := range n.scrapes {
			switch value := s[series]; {
			case value != "":
				last = value
			case last != "_":
				last = "stale"
			}
			text.WriteString(" " + last)
			if last == "stale" { // once: then there are no samples
				last = "_"
			}
		}
		fmt.Fprintf(&text, " %sx%d\n", last, int(goesOn.Minutes()))
	}
	return load(n.t, n.from, text.String())
}

// volume makes a volume of so many MiB.
func (n *node) volume(name string, size int64, provisioning, fsType string) *harness.Volume {
	n.t.Helper()
	v := harness.NewVolume(n.t, n.Plugin, name, harness.Shared(fsType))
	must(n.t, v.Create(n.t.Context(), size*mib, provisioning))
	return v
}

// disk makes a loop device over a new file of so many MiB, until it is pulled or the test ends.
func (n *node) disk(name string, size int64) (device string, pull func()) {
	n.t.Helper()
	file := filepath.Join(n.t.TempDir(), name)
	must(n.t, os.WriteFile(file, nil, 0o600))
	must(n.t, os.Truncate(file, size*mib))
	device = strings.TrimSpace(harness.Command(n.t, "losetup", "--find", "--show", file))
	pulled := false
	pull = func() {
		if !pulled {
			pulled = true
			harness.Command(n.t, "losetup", "--detach", device)
		}
	}
	n.t.Cleanup(pull)
	return device, pull
}

// smallPool gives the plugin a pool on a file system of its own, of 320 MiB.
func (n *node) smallPool() {
	n.t.Helper()
	device, _ := n.disk("pool", 320)
	harness.Command(n.t, "mkfs.ext4", "-q", device)
	must(n.t, os.Mkdir(n.PoolDir, 0o700))
	must(n.t, unix.Mount(device, n.PoolDir, "ext4", 0, ""))
	n.t.Cleanup(func() {
		if err := unix.Unmount(n.PoolDir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			n.t.Error(err)
		}
	})
}

var must = require.NoError
