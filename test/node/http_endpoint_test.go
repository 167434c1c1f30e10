package node

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

// rss returns the memory of a process that is resident, in bytes.
func rss(t testing.TB, p *harness.Plugin) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.PID()), "status"))
	must(t, err)
	_, line, _ := strings.Cut(string(text), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(line)[0])
	must(t, err)
	return kib << 10
}

func openFiles(t testing.TB, p *harness.Plugin) int {
	t.Helper()
	names, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(p.PID()), "fd"))
	must(t, err)
	return len(names)
}

// Whoever can reach the HTTP endpoint may hold as many connections as it likes,
// say nothing, or never come to the end of a request: that costs the plugin
// neither memory nor files, and keeps no call, no probe and no scrape from its answer.
func TestFloodOfTheHTTPEndpoint(t *testing.T) {
	t.Parallel()
	const strangers, files = 4000, 256
	address := harness.FreeAddress(t)
	p := harness.Start(t, harness.Options{Flags: []string{"--http-endpoint", address, "--v", "0"}, Files: files})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	pod := v.Target("pod")
	must(t, v.Stage(ctx))
	before := harness.Metrics(t, address)
	memory, open := rss(t, p), openFiles(t, p)

	for i := range strangers {
		conn, err := net.DialTimeout("tcp", address, harness.Patience)
		if errors.Is(err, syscall.ECONNRESET) {
			continue // so fast
		}
		must(t, err)
		defer conn.Close()
		if i%2 == 0 {
			_, _ = conn.Write([]byte("GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")) // it may have been closed already
		}
		if i%(strangers/4) != 0 {
			continue
		}
		call, cancel := context.WithTimeout(ctx, 20*time.Second)
		must(t, v.Publish(call, pod))
		must(t, v.Unpublish(call, pod))
		cancel()
		for _, probe := range []string{"live", "ready"} {
			if res := harness.Run(t, nil, harness.Binary(t), "probe", probe, "--state-dir", p.StateDir, "--timeout", "20s"); res.Code != 0 || res.Stdout != "ok\n" {
				t.Errorf("probe %s: %+v", probe, res)
			}
		}
	}
	if now := openFiles(t, p); now > open+files/16+8 {
		t.Errorf("%d files are open, %d were before", now, open)
	}
	if now := rss(t, p); now > memory+64*mib { // the race detector has a share in it
		t.Errorf("%d MiB are resident, %d were before", now/mib, memory/mib)
	}
	// It answers beside them. Those whose connections were closed just now end when they are next run.
	harness.Eventually(t, "the goroutines are few", func() bool {
		return harness.Metrics(t, address)["go_goroutines"] <= before["go_goroutines"]+2*files/16+20
	})

	// One request a connection.
	conn, err := net.Dial("tcp", address)
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(harness.Patience)))
	_, err = conn.Write([]byte("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
	must(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !resp.Close {
		t.Errorf("answers %s, and keeps the connection: %v", resp.Status, !resp.Close)
	}
	v.End()
}

// A probe says in one line what is wrong.
func TestProbeSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	probe := func(which string) harness.Result {
		return harness.Run(t, nil, harness.Binary(t), "probe", which, "--state-dir", p.StateDir)
	}
	must(t, os.Rename(p.PoolDir, p.PoolDir+".away"))
	if res := probe("live"); res.Code != 0 || res.Stdout != "ok\n" {
		t.Errorf("without a pool it does not live: %+v", res)
	}
	if res := probe("ready"); res.Code != 1 || !strings.Contains(res.Stderr, p.PoolDir) || strings.Count(res.Stderr, "\n") != 1 {
		t.Errorf("without a pool it is ready: %+v", res)
	}
	must(t, os.Rename(p.PoolDir+".away", p.PoolDir))
	p.Terminate()
	if res := probe("live"); res.Code != 1 || !strings.Contains(res.Stderr, p.StateDir) {
		t.Errorf("without a plugin: %+v", res)
	}
	if res := probe("nonsense"); res.Code != 2 || !strings.Contains(res.Stderr, "live") {
		t.Errorf("a probe that is none: %+v", res)
	}
}
