package driver

import (
	"bytes"
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
)

const testVolumeBytes = 8 << 20

// createVolume makes a volume and returns the path of its data.
func createVolume(t *testing.T, c Config, controller csi.ControllerClient, name string) string {
	t.Helper()
	_, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: testVolumeBytes},
		VolumeCapabilities: []*csi.VolumeCapability{rawCapability()},
	})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(c.poolDir(), "volumes", name, "data")
}

func rawCapability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

func wantWords(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one of %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("no %q in: %v", word, err)
		}
	}
}

func TestClearDevice(t *testing.T) {
	c := testConfig(t)
	conn, stop := serving(t, c)
	controller, node := csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	data := createVolume(t, c, controller, "vol")
	ctx := t.Context()

	junk := bytes.Repeat([]byte("junk"), testVolumeBytes/4)
	if err := os.WriteFile(data, junk, 0o600); err != nil {
		t.Fatal(err)
	}
	found, err := InspectDevice(ctx, c.StateDir, "vol")
	want := Clearance{Volume: "vol", Backing: data, Bytes: testVolumeBytes, Found: "data at byte 0"}
	if err != nil || found != want {
		t.Errorf("found %+v (%v), not %+v", found, err, want)
	}
	if now, err := os.ReadFile(data); err != nil || !bytes.Equal(now, junk) {
		t.Errorf("looking has changed the data (%v)", err)
	}

	// In use.
	stage := &csi.NodeStageVolumeRequest{VolumeId: "vol", StagingTargetPath: filepath.Join(c.KubeletDir, "stage"), VolumeCapability: rawCapability()}
	if _, err := node.NodeStageVolume(ctx, stage); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // of a test that fails in between
		_, _ = node.NodeUnstageVolume(context.Background(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol", StagingTargetPath: stage.StagingTargetPath})
	})
	for _, act := range []func(context.Context, string, string) (Clearance, error){InspectDevice, ClearDevice} {
		_, err := act(ctx, c.StateDir, "vol")
		wantWords(t, err, "vol", "in use", stage.StagingTargetPath, "unstage")
	}
	if _, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: "vol", StagingTargetPath: stage.StagingTargetPath}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(data)
	if err != nil {
		t.Fatal(err)
	}
	_, err = ClearDevice(ctx, c.StateDir, "vol")
	wantWords(t, err, data, "open")
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile(data); err != nil || !bytes.Equal(now, junk) {
		t.Errorf("a refusal has changed the data (%v)", err)
	}

	want.Cleared = true
	if done, err := ClearDevice(ctx, c.StateDir, "vol"); err != nil || done != want {
		t.Errorf("answers %+v (%v), not %+v", done, err, want)
	}
	if now, err := os.ReadFile(data); err != nil || !bytes.Equal(now, make([]byte, testVolumeBytes)) {
		t.Errorf("the data is not zero (%v)", err)
	}
	if again, err := ClearDevice(ctx, c.StateDir, "vol"); err != nil || !again.Blank || !again.Cleared {
		t.Errorf("once more: %+v (%v)", again, err)
	}
	if err := os.Truncate(data, 4096); err != nil {
		t.Fatal(err)
	}
	_, err = ClearDevice(ctx, c.StateDir, "vol")
	wantWords(t, err, data, "fewer")

	_, err = ClearDevice(ctx, c.StateDir, "other")
	wantWords(t, err, "other", "no such volume")
	_, err = ClearDevice(ctx, c.StateDir, "../vol")
	wantWords(t, err, "volume id")
	_, err = Retry(ctx, c.StateDir, "vol")
	wantWords(t, err, "vol", "nothing is asked")
	if err := stop(); err != nil {
		t.Error(err)
	}
	for _, act := range []func() error{
		func() error { _, err := ClearDevice(ctx, c.StateDir, "vol"); return err },
		func() error { _, err := Retry(ctx, c.StateDir, "vol"); return err },
	} {
		err := act()
		wantWords(t, err, "no plugin runs", c.StateDir, "--state-dir")
		if !errors.Is(err, errNotRunning) {
			t.Errorf("%v is not errNotRunning", err)
		}
	}
}

func TestRetryByTheSocket(t *testing.T) {
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

// The status socket is root's, knows its methods, and reads no more than it must.
func TestStatusSocket(t *testing.T) {
	c := testConfig(t)
	serving(t, c)
	socket := filepath.Join(c.StateDir, StatusSocket)
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
		{http.MethodGet, "/volumes/vol/retry", "", http.StatusMethodNotAllowed},
		{http.MethodPost, "/volumes/vol/retry", "", http.StatusNotFound},
		{http.MethodGet, "/volumes/vol/clear-device", "", http.StatusNotFound},
		{http.MethodPost, "/volumes/vol/clear-device", "", http.StatusNotFound},
		{http.MethodDelete, "/volumes/vol/clear-device", "", http.StatusMethodNotAllowed},
		{http.MethodPost, "/volumes/..%2Fvol/clear-device", "", http.StatusBadRequest},
		{http.MethodPost, "/volumes/" + strings.Repeat("x", 200) + "/retry", "", http.StatusBadRequest},
		{http.MethodGet, "/other", "", http.StatusNotFound},
		{http.MethodGet, "/status", strings.Repeat("x", 1<<20), http.StatusRequestHeaderFieldsTooLarge},
	} {
		req, err := http.NewRequestWithContext(t.Context(), row.method, "http://csi-node"+row.path, nil)
		if err != nil {
			t.Fatal(err)
		}
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
		if err := resp.Body.Close(); err != nil {
			t.Error(err)
		}
		if resp.StatusCode != row.code {
			t.Errorf("%s %.40s answers %s, want %d", row.method, row.path, resp.Status, row.code)
		}
	}
}

// Who waits for a busy volume is told what keeps it, in time.
func TestBusyVolume(t *testing.T) {
	p := openPlugin(t) // no worker runs
	askStage(t, p.store, "vol")
	for _, row := range []struct {
		method, path, timeout string
		code                  int
		word                  string
	}{
		{http.MethodPost, "/volumes/vol/retry", "1ms", http.StatusGatewayTimeout, "its worker is busy"},
		{http.MethodPost, "/volumes/vol/clear-device", "1ms", http.StatusGatewayTimeout, "its worker is busy"},
		{http.MethodPost, "/volumes/vol/retry", "soon", http.StatusBadRequest, "soon"},
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
