package driver

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/require"
)

// A client that asks again and again, such as a monitor, keeps no connection open,
// neither in the plugin nor in itself.
func TestStatusLeavesNoConnection(t *testing.T) {
	dir := filepath.Dir(strings.TrimPrefix(testConfig(t).Endpoint, "unix://"))
	listener, err := net.Listen("unix", filepath.Join(dir, statusSocket))
	require.NoError(t, err)
	closed := make(chan struct{}, 1)
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"running":true}`)) }),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed {
				closed <- struct{}{}
			}
		},
	}
	go func() { _ = server.Serve(listener) }() // ends when it is closed
	defer server.Close()
	if report, err := ReadReport(t.Context(), dir, Options{}); err != nil || !report.Running {
		t.Fatalf("%+v (%v)", report, err)
	}
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Error("the connection stays open")
	}
}

func TestStatusWithoutPlugin(t *testing.T) {
	p := openPlugin(t)
	askStage(t, p.store, "v1")
	// A plugin that has the store and serves no status, because it starts or ends.
	if _, err := ReadReport(t.Context(), p.StateDir, testOptions()); !errors.Is(err, store.ErrLocked) || !strings.Contains(err.Error(), "try again soon") || strings.Contains(err.Error(), "no plugin runs") {
		t.Errorf("while it is locked: %v", err)
	}
	require.NoError(t, p.release())
	node, err := ReadReport(t.Context(), p.StateDir, testOptions())
	require.NoError(t, err)
	if node.Running || len(node.Volumes) != 1 || node.Volumes[0].Volume != "v1" || node.Volumes[0].Device != "absent" {
		t.Fatalf("reports %+v", node)
	}
	if parts := node.Volumes[0].Parts; len(parts) != 1 || parts[0].Is != report.Failing || !strings.Contains(parts[0].Error, "no such volume") || !strings.Contains(parts[0].Asked, "/kubelet/v1") {
		t.Errorf("reports %+v", parts)
	}
	// The pool may be away, too.
	require.NoError(t, os.Rename(p.poolDir(), p.poolDir()+".away"))
	away, err := ReadReport(t.Context(), p.StateDir, testOptions())
	if err != nil || len(away.Volumes) != 1 || len(away.StorageProblems) != 1 || away.StorageProblems[0].Reason != report.PoolUnusable || !strings.Contains(away.StorageProblems[0].Message, p.poolDir()) {
		t.Errorf("without the pool: %+v (%v)", away, err)
	}
	require.NoError(t, os.Rename(p.poolDir()+".away", p.poolDir()))
	// A socket that a killed plugin left behind.
	l, err := listenUnix(filepath.Join(p.StateDir, statusSocket))
	require.NoError(t, err)
	leaveSocket(t, l)
	if again, err := ReadReport(t.Context(), p.StateDir, testOptions()); err != nil || again.Running || len(again.Volumes) != 1 {
		t.Errorf("with a stale socket: %+v (%v)", again, err)
	}
}

func TestStatusWhereNoPluginEverRan(t *testing.T) {
	dir := t.TempDir()
	report, err := ReadReport(t.Context(), dir, Options{})
	if err == nil {
		t.Fatalf("reports %+v", report)
	}
	for _, words := range []string{filepath.Join(dir, statusSocket), filepath.Join(dir, settingsFile), "--state-dir"} {
		if !strings.Contains(err.Error(), words) {
			t.Errorf("no %q in: %v", words, err)
		}
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Errorf("reading made %v (%v)", names, err)
	}
}

// A plugin that does not answer delays the reader no longer than its context.
func TestStatusOfAHungPlugin(t *testing.T) {
	dir := t.TempDir()
	l, err := listenUnix(filepath.Join(dir, statusSocket))
	require.NoError(t, err)
	defer l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		conn, err := l.Accept()
		cancel() // the call is under way, and nobody answers
		if err == nil {
			<-t.Context().Done()
			conn.Close()
		}
	}()
	if _, err := ReadReport(ctx, dir, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("the reader is told %v", err)
	}
}

func TestRetryThroughTheSocket(t *testing.T) {
	c := testConfig(t)
	conn, _ := serving(t, c)
	createVolume(t, c, csi.NewControllerClient(conn), "vol")
	node := csi.NewNodeClient(conn)
	target := filepath.Join(c.KubeletDir, "not-there", "target")
	if _, err := node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target}); err != nil {
		t.Fatal(err)
	}
	stage := &csi.NodeStageVolumeRequest{VolumeId: "vol", StagingTargetPath: filepath.Join(c.KubeletDir, "stage"), VolumeCapability: rawCapability()}
	if _, err := node.NodeStageVolume(t.Context(), stage); err != nil {
		t.Fatal(err)
	}
	report, err := Retry(t.Context(), c.StateDir, "vol")
	if err != nil || !report.Running || len(report.Volumes) != 1 || len(report.Unsettled()) > 0 {
		t.Errorf("reports %+v (%v)", report, err)
	}
	if _, err := node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol", StagingTargetPath: stage.StagingTargetPath}); err != nil {
		t.Fatal(err)
	}
}

// Only root may use the status socket. It knows its methods, and bounds what it reads.
// While no plugin runs and a disk hangs, who asks is answered when the time is up.
func TestOfflineLookThatHangs(t *testing.T) {
	release, ended := make(chan struct{}), make(chan struct{})
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	o := testOptions()
	open := o.Backends[0].Open
	o.Backends[0].Open = func(ctx context.Context, env devices.Environment) (devices.Backend, error) {
		defer close(ended)
		giveUp()
		<-release
		return open(ctx, env)
	}
	p := openPlugin(t)
	require.NoError(t, p.release())
	if _, err := ReadReport(ctx, p.StateDir, o); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "no plugin runs on") || !strings.Contains(err.Error(), "a disk does not answer") {
		t.Error(err)
	}
	close(release)
	<-ended
}

func TestStatusSocket(t *testing.T) {
	c := testConfig(t)
	serving(t, c)
	socket := filepath.Join(c.StateDir, statusSocket)
	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket has the mode %v (%v)", info.Mode(), err)
	}
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	for _, row := range []struct {
		method, path, header string
		code                 int
	}{
		{http.MethodGet, "/status", "", http.StatusOK},
		{http.MethodPost, "/status", "", http.StatusMethodNotAllowed},
		{http.MethodGet, "/volume/retry?id=vol", "", http.StatusMethodNotAllowed},
		{http.MethodPost, "/volume/retry?id=vol", "", http.StatusNotFound},
		{http.MethodGet, "/volume/clear-device?id=vol", "", http.StatusNotFound},
		{http.MethodPost, "/volume/clear-device?id=vol", "", http.StatusNotFound},
		{http.MethodDelete, "/volume/clear-device?id=vol", "", http.StatusMethodNotAllowed},
		{http.MethodPost, "/volume/clear-device?id=..%2Fvol", "", http.StatusBadRequest},
		{http.MethodPost, "/volume/retry?id=" + strings.Repeat("x", 200), "", http.StatusBadRequest},
		{http.MethodPost, "/volume/retry", "", http.StatusBadRequest},
		{http.MethodGet, "/other", "", http.StatusNotFound},
		{http.MethodGet, "/status", strings.Repeat("x", 1<<20), http.StatusRequestHeaderFieldsTooLarge},
	} {
		req, err := http.NewRequestWithContext(t.Context(), row.method, "http://csi-node"+row.path, nil)
		require.NoError(t, err)
		if row.header != "" {
			req.Header.Set("X-Long", row.header)
		}
		resp, err := client.Do(req)
		if err != nil {
			if row.header == "" { // the server may hang up on a header that is too long
				t.Errorf("%s %s: %v", row.method, row.path, err)
			}
			continue
		}
		require.NoError(t, resp.Body.Close())
		if resp.StatusCode != row.code {
			t.Errorf("%s %.40s answers %s, want %d", row.method, row.path, resp.Status, row.code)
		}
	}
}

// A client that waits for a busy volume gets the reason in time.
func TestBusyVolume(t *testing.T) {
	p := openPlugin(t) // no worker runs
	askStage(t, p.store, "vol")
	for _, row := range []struct {
		method, path, timeout string
		code                  int
		word                  string
	}{
		{http.MethodPost, "/volume/retry?id=vol", "1ms", http.StatusGatewayTimeout, "its worker is busy"},
		{http.MethodPost, "/volume/clear-device?id=vol", "1ms", http.StatusGatewayTimeout, "its worker is busy"},
		{http.MethodPost, "/volume/retry?id=vol", "soon", http.StatusBadRequest, "soon"},
	} {
		w := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(t.Context(), row.method, row.path, nil)
		req.Header.Set(timeoutHeader, row.timeout)
		p.statusHandler().ServeHTTP(w, req)
		if w.Code != row.code || !strings.Contains(w.Body.String(), row.word) {
			t.Errorf("%s within %s answers %d %q", row.path, row.timeout, w.Code, w.Body)
		}
	}
}
