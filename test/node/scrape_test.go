package node

import (
	_ "embed"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// recorded is a scrape that test/deploy asks the queries of dashboard and alerts of.
const recorded = "testdata/scrape.txt"

//go:embed testdata/scrape.txt
var recording string // a test program may run elsewhere

var record = flag.Bool("scrape.record", false, "write "+recorded)

// What dashboard and alerts were tested with is what a plugin tells that has staged, published, grown and
// repaired a volume, and refused a call: the same metrics with the same labels.
func TestRecordedScrape(t *testing.T) {
	t.Parallel()
	address := harness.FreeAddress(t)
	p := harness.Start(t, harness.Options{Flags: []string{"--http-endpoint", address, "--registration-dir", t.TempDir()}})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	pod := v.Target("pod")
	must(t, v.Up(ctx, pod))
	for _, path := range []string{pod, v.Staging} {
		before := len(p.Mounts())
		harness.Command(t, "umount", "--lazy", path)
		harness.Eventually(t, "the mount is back", func() bool { return len(p.Mounts()) == before })
	}
	_, err := v.Expand(ctx, -1)
	mustRefuse(t, err, codes.InvalidArgument)
	text := scrape(t, address)
	v.End(pod)
	if *record {
		must(t, os.WriteFile(recorded, []byte(text), 0o644))
		recording = text
	}

	have := series(text)
	for name := range series(recording) {
		if !have[name] {
			t.Errorf("%s has %s, and a plugin of today does not: look at deploy/monitoring, and record it anew: go test -run '^TestRecordedScrape$' ./test/node -scrape.record", recorded, name)
		}
	}
}

// scrape returns what the plugin tells of itself, without what is of Go and of its process but for what is used.
func scrape(t testing.TB, address string) string {
	t.Helper()
	resp, err := http.Get("http://" + address + "/metrics")
	must(t, err)
	defer func() { _ = resp.Body.Close() }() // only read from
	text, err := io.ReadAll(resp.Body)
	must(t, err)
	lines := slices.DeleteFunc(strings.SplitAfter(string(text), "\n"), func(line string) bool {
		return !strings.HasPrefix(line, "csi_node_") && !strings.HasPrefix(line, "process_")
	})
	return strings.Join(lines, "")
}

var label = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)

// series returns the names of metrics with their labels. The bounds of buckets, and versions, are any.
func series(text string) map[string]bool {
	all := map[string]bool{}
	for line := range strings.Lines(text) {
		name, labels, _ := strings.Cut(line[:strings.LastIndexByte(line, ' ')], "{")
		var named []string
		for _, l := range label.FindAllStringSubmatch(labels, -1) {
			if l[1] == "le" || l[1] == "version" {
				l[2] = "any"
			}
			named = append(named, fmt.Sprintf("%s=%q", l[1], l[2]))
		}
		all[name+"{"+strings.Join(named, ", ")+"}"] = true
	}
	return all
}
