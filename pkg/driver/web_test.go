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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// testConfig returns the Config of a plugin with directories of its own.
func testConfig(t *testing.T) Config {
	t.Helper()
	dir := machine.ShortDir(t)
	c := goodConfig()
	c.Endpoint = "unix://" + filepath.Join(dir, "csi.sock")
	c.StateDir, c.KubeletDir, c.LibDir = filepath.Join(dir, "state"), filepath.Join(dir, "kubelet"), filepath.Join(dir, "lib")
	c.BackendFlags = map[string]string{"pool-dir": filepath.Join(dir, "pool")}
	require.NoError(t, os.Mkdir(c.KubeletDir, 0o750))
	return c
}

func (c Config) poolDir() string { return c.BackendFlags["pool-dir"] }

// openPlugin returns a plugin that is open, and does not run.
func openPlugin(t *testing.T) *plugin {
	t.Helper()
	machine.Kernel(t)
	p := &plugin{Config: testConfig(t), options: testOptions(), metrics: newMetrics("v1")}
	var err error
	if p.properties, err = p.options.check(); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, p.open(t.Context()))
	t.Cleanup(func() {
		if err := p.release(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// askStage writes the intent of a stage into the store.
func askStage(t *testing.T, s *store.Store, id string) {
	t.Helper()
	_, err := s.Edit(id, func(v *state.Volume) error {
		return v.AskStage(&state.Stage{Path: "/kubelet/" + id, Capability: state.Capability{Access: state.BlockAccess, Mode: "SINGLE_NODE_WRITER"}}, time.Now())
	})
	require.NoError(t, err)
}

// get asks the HTTP endpoint.
func (p *plugin) get(t *testing.T, path string) (int, string) {
	t.Helper()
	return get(t, p.httpHandler(), path)
}

func get(t *testing.T, from http.Handler, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	from.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

// serveCSI serves a listener of the CSI socket until the test ends.
func (p *plugin) serveCSI(t *testing.T, listener net.Listener) {
	t.Helper()
	server, err := p.grpcServer()
	require.NoError(t, err)
	ended := make(chan error)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestHealthEndpoints(t *testing.T) {
	p := openPlugin(t)
	// Who may use the status socket is told why, and anyone else is not.
	status := p.statusHandler()
	if code, body := get(t, status, "/probes/live"); code == http.StatusOK || !strings.Contains(body, strings.TrimPrefix(p.Endpoint, "unix://")) {
		t.Errorf("nobody serves the CSI socket: %d %q", code, body)
	}
	program := p.options.program()
	if code, body := p.get(t, "/healthz"); code != http.StatusServiceUnavailable || body != "not alive: `"+program+" probe live` says why\n" {
		t.Errorf("nobody serves the CSI socket: %d %q", code, body)
	}
	listener, err := listen(p.Endpoint)
	require.NoError(t, err)
	soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := p.socketAnswers(soon); err == nil {
		t.Error("a socket that accepts and does not answer is alive")
	}
	p.serveCSI(t, listener)
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := p.get(t, path); code != http.StatusOK || body != "ok\n" {
			t.Errorf("%s answers %d %q", path, code, body)
		}
	}
	if _, body := p.get(t, "/metrics"); !strings.Contains(body, "\ncsi_node_ready 1\n") {
		t.Errorf("with a pool: %s", body)
	}
	if s := p.storage(t.Context()); len(s) > 0 {
		t.Errorf("the pool: %v", s)
	}

	require.NoError(t, os.Rename(p.poolDir(), p.poolDir()+".away"))
	if code, body := p.get(t, "/healthz"); code != http.StatusOK {
		t.Errorf("without a pool the process is to be killed: %d %q", code, body)
	}
	if code, body := get(t, status, "/probes/ready"); code == http.StatusOK || !strings.Contains(body, p.poolDir()) {
		t.Errorf("without a pool: %d %q", code, body)
	}
	if code, body := p.get(t, "/readyz"); code != http.StatusServiceUnavailable || body != "not ready: `"+program+" probe ready` says why\n" {
		t.Errorf("without a pool: %d %q", code, body)
	}
	if _, body := p.get(t, "/metrics"); !strings.Contains(body, "\ncsi_node_ready 0\n") {
		t.Errorf("without a pool: %s", body)
	}
	if s := p.storage(t.Context()); len(s) != 1 || s[0].Reason != "PoolUnusable" {
		t.Errorf("without a pool the storage is %v", s)
	}
	if _, body := get(t, status, "/status"); !strings.Contains(body, `"storageProblems":[{"reason":"PoolUnusable","message":"`) || !strings.Contains(body, p.poolDir()) {
		t.Errorf("without a pool the status is %s", body)
	}
	if code, _ := p.get(t, "/other"); code != http.StatusNotFound {
		t.Errorf("another path answers %d", code)
	}
}

// What a backend measures wrongly does not take the other metrics away.
func TestMetricsThatCannotBe(t *testing.T) {
	p := openPlugin(t)
	p.metrics.addBackend("odd", func() ([]devices.Measurement, error) {
		return []devices.Measurement{{Name: "free_bytes", Help: "Free."}, {Name: "free_bytes", Help: "Free."}}, nil
	})
	if code, body := p.get(t, "/metrics"); code != http.StatusOK || !strings.Contains(body, "csi_node_backoffs_total 0") || !strings.Contains(body, "csi_node_pool_free_bytes") {
		t.Errorf("answers %d: %s", code, body)
	}
}

func TestMetrics(t *testing.T) {
	p := openPlugin(t)
	call := func(err error) {
		if _, got := p.metrics.intercept(t.Context(), nil, stageCall, answering(err)); got != err {
			t.Errorf("the error becomes %v", got)
		}
	}
	call(nil)
	call(nil)
	call(status.Error(codes.NotFound, "none"))
	p.metrics.Step(reconciler.Format, time.Minute, nil)
	p.metrics.Step(reconciler.Format, time.Second, errors.New("failed"))
	p.metrics.BackOff()
	p.metrics.BackOff()
	askStage(t, p.store, "v1")
	askStage(t, p.store, "v2")

	code, body := p.get(t, "/metrics")
	if code != http.StatusOK {
		t.Fatalf("answers %d", code)
	}
	lines := map[string]bool{}
	for line := range strings.Lines(body) {
		lines[strings.TrimSpace(line)] = true
	}
	for _, want := range []string{
		`csi_node_rpc_duration_seconds_count{code="OK",method="NodeStageVolume"} 2`,
		`csi_node_rpc_duration_seconds_count{code="NotFound",method="NodeStageVolume"} 1`,
		`csi_node_step_duration_seconds_count{outcome="done",step="format"} 1`,
		`csi_node_step_duration_seconds_sum{outcome="done",step="format"} 60`,
		`csi_node_step_duration_seconds_count{outcome="failed",step="format"} 1`,
		`csi_node_backoffs_total 2`,
		`csi_node_build_info{version="v1"} 1`,
		`csi_node_volumes{state="settled"} 0`,
		`csi_node_volumes{state="waiting"} 0`,
		`csi_node_volumes{state="under way"} 0`,
		`csi_node_volumes{state="unseen"} 2`,
		`csi_node_volumes{state="failing"} 0`,
		`csi_node_pool_volumes{provisioning="thin"} 0`,
		`csi_node_pool_allocated_bytes 0`,
	} {
		if !lines[want] {
			t.Errorf("no line %s", want)
		}
	}
}

// A client that does not send the body of its request is not waited for, and keeps
// nobody out.
func TestRequestBodiesAreNotAwaited(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w := newWeb(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), listener, 4).forAnyone()
	served := make(chan error, 1)
	go func() { served <- w.serve() }()
	defer func() {
		if err := errors.Join(w.close(), <-served); err != nil {
			t.Error(err)
		}
	}()
	for _, length := range []string{"Content-Length: 4000", "Content-Length: 400000", "Transfer-Encoding: chunked", "Expect: 100-continue\r\nContent-Length: 1"} {
		conn, err := net.Dial("tcp", listener.Addr().String())
		require.NoError(t, err)
		defer conn.Close()
		begun := time.Now()
		if _, err := conn.Write([]byte("POST / HTTP/1.1\r\nHost: x\r\n" + length + "\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		require.NoError(t, conn.SetDeadline(begun.Add(time.Minute)))
		_, _ = conn.Read(make([]byte, 1)) // until it is closed
		if took := time.Since(begun); took > w.server.ReadTimeout/2 {
			t.Errorf("%s: the connection was kept for %s", length, took)
		}
	}
	resp, err := http.Get("http://" + listener.Addr().String())
	require.NoError(t, err)
	resp.Body.Close()
}
