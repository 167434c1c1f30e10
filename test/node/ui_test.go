package node

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// The page of a real plugin, as a browser meets it: with the token that is printed, live, and until it is interrupted.
func TestPage(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	page := exec.Command(harness.Binary(t), "ui", "--state-dir", p.StateDir)
	told, err := page.StdoutPipe()
	must(t, err)
	must(t, page.Start())
	t.Cleanup(func() { _ = page.Process.Kill() }) // it has ended, unless the test failed
	line, err := bufio.NewReader(told).ReadString('\n')
	must(t, err)
	address := strings.TrimSpace(strings.TrimPrefix(line, "The page is at "))
	jar, err := cookiejar.New(nil)
	must(t, err)
	browser := &http.Client{Jar: jar}
	base, _, _ := strings.Cut(address, "?")
	fetch := func(target string, code int) string {
		t.Helper()
		resp, err := browser.Get(target)
		must(t, err)
		text, err := io.ReadAll(resp.Body)
		must(t, err)
		must(t, resp.Body.Close())
		if resp.StatusCode != code {
			t.Errorf("%s is answered %s: %s", target, resp.Status, text)
		}
		return string(text)
	}
	fetch(base, http.StatusUnauthorized)
	fetch(address, http.StatusOK)

	events, err := browser.Get(base + "events")
	must(t, err)
	defer events.Body.Close()
	lines := bufio.NewScanner(events.Body)
	lines.Buffer(nil, 1<<20)
	next := func() (shown struct {
		Nodes []struct {
			Name, Driver string
			Fills        []struct{ Name string }
			Volumes      []struct{ Volume, Is string }
		}
	}) {
		t.Helper()
		for lines.Scan() {
			if data, is := strings.CutPrefix(lines.Text(), "data: "); is {
				must(t, json.Unmarshal([]byte(data), &shown))
				return shown
			}
		}
		t.Fatalf("no more events: %v", lines.Err())
		return shown
	}
	shown := next()
	if n := shown.Nodes[0]; n.Name != "node-1" || n.Driver != "csi-node.local" || len(n.Volumes) != 0 || len(n.Fills) != 1 || n.Fills[0].Name != "pool" {
		t.Errorf("the page shows %+v", shown)
	}
	must(t, v.Stage(t.Context()))
	for len(shown.Nodes[0].Volumes) == 0 || shown.Nodes[0].Volumes[0].Is != "settled" {
		shown = next()
	}
	if text := fetch(base+"explain?"+url.Values{"node": {"node-1"}, "volume": {"volume"}}.Encode(), http.StatusOK); !strings.Contains(text, "NodeStageVolume asked") || !strings.Contains(text, "Nothing is left to do.") {
		t.Errorf("explained is %s", text)
	}
	must(t, page.Process.Signal(syscall.SIGINT))
	if err := page.Wait(); err != nil {
		t.Errorf("interrupted, it ends with %v", err)
	}
	v.End()
}
