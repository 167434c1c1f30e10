package client

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "1073741824": 1 << 30, "1Gi": 1 << 30, "1.5Gi": 3 << 29, "500M": 500e6, "64Ki": 64 << 10, "2k": 2000, "1e9": 1e9, "1E": 1e18,
		"2T": 2e12, "3Pi": 3 << 50, "7Ei": 7 << 60, "0.5": 1, "0.0001Ki": 1, "9223372036854775807": 1<<63 - 1,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%s is %d (%v), not %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "-1", "1KiB", "1KB", "1ki", "Gi", "1 Gi", "1e3Gi", "1e99", "1e999999999", "8Ei", "9223372036854775808", "1.", ".5", "1,5Gi", "0x10", "NaN", "1Gi\n", strings.Repeat("9", 100)} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, text := range []string{"1Gi", "1.5G", "1e9", "x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, err := ParseSize(text); err == nil && n <= 0 {
			t.Errorf("%q is %d", text, n)
		}
	})
}

func TestSocketPath(t *testing.T) {
	for _, endpoint := range []string{"unix:///run/csi.sock", "unix:/run/csi.sock", "/run/csi.sock"} {
		if path, err := SocketPath(endpoint); err != nil || path != "/run/csi.sock" {
			t.Errorf("%s names %q (%v)", endpoint, path, err)
		}
	}
	for _, endpoint := range []string{"", "run/csi.sock", "unix:csi.sock", "unix://csi.sock", "tcp://127.0.0.1:1", "//run/csi.sock"} {
		if path, err := SocketPath(endpoint); err == nil {
			t.Errorf("%q names %q", endpoint, path)
		}
	}
}

// A path is no URL.
func TestPathsThatURLsHaveNot(t *testing.T) {
	for _, name := range []string{"a%41b", "a#b", "a?b", "a%zz", "a b"} {
		path := filepath.Join(t.TempDir(), name)
		listener, err := net.Listen("unix", path)
		require.NoError(t, err)
		server := grpc.NewServer()
		go func() { _ = server.Serve(listener) }()
		c, err := Connect(path)
		require.NoError(t, err)
		if _, err := c.Identity.Probe(t.Context(), &csi.ProbeRequest{}); status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v", path, err)
		}
		require.NoError(t, c.Close())
		server.Stop()
	}
}

func TestDial(t *testing.T) {
	path := filepath.Join(machine.ShortDir(t), "csi.sock")
	_, err := Dial(t.Context(), "unix://"+path)
	require.Words(t, err, path, "is the plugin running", "--endpoint", "CSI_ENDPOINT")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	c, err := Dial(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	_, err = Dial(t.Context(), path)
	require.Words(t, err, path, "not running")
	_, err = Dial(t.Context(), "tcp://127.0.0.1:1")
	require.Words(t, err, "tcp://127.0.0.1:1", "unix://")
}

func TestExplain(t *testing.T) {
	require.NoError(t, explain(nil, "stage volume %s", "v"))
	late := status.Error(codes.DeadlineExceeded, "it takes long")
	err := explain(late, "stage volume %s", "v")
	require.Words(t, err, "stage volume v: DeadlineExceeded: it takes long", "the plugin goes on; repeat the command to join")
	if !errors.Is(err, late) || status.Code(err) != codes.DeadlineExceeded {
		t.Error("the error within is lost")
	}
	require.Words(t, explain(status.Error(codes.DataLoss, "oh"), "x"), "DataLoss: oh", "the plugin's log")
	if err := explain(context.Canceled, "x"); !errors.Is(err, context.Canceled) {
		t.Error("an error that is none of gRPC is lost")
	}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		kubelet := map[codes.Code]bool{codes.Canceled: true, codes.DeadlineExceeded: true, codes.Aborted: true, codes.Unavailable: true, codes.ResourceExhausted: true}
		if got := underWay(explain(status.Error(code, "x"), "y")); got != kubelet[code] {
			t.Errorf("%s: under way %t", code, got)
		}
	}
}

func TestPaths(t *testing.T) {
	dir := t.TempDir()
	p := DefaultPaths(dir, "drv.example", "vol")
	// sha256 of "vol", as kubelet's makeDeviceMountPath has it.
	own := filepath.Join(dir, "plugins/kubernetes.io/csi/drv.example/b9f6da279ec59af95d121d1e1e502ecf056504e267f2f7dfc747ebd0f3f74298")
	if p.Staging != own+"/globalmount" || p.Target != own+"/by-hand/mount" {
		t.Errorf("the paths are %+v", p)
	}
	if p.Shown() != p.Staging {
		t.Errorf("nothing is published, and %s is shown", p.Shown())
	}
	made, err := makeDirs(filepath.Dir(p.Target))
	if err != nil || len(made) != 6 || made[5] != filepath.Dir(p.Target) {
		t.Errorf("made %q (%v)", made, err)
	}
	if made, err := makeDirs(p.Staging); err != nil || len(made) != 1 {
		t.Errorf("made %q (%v)", made, err)
	}
	if made, err := makeDirs(p.Staging); err != nil || len(made) != 0 {
		t.Errorf("made %q (%v)", made, err)
	}
	require.NoError(t, p.tidyTarget())
	if _, err := os.Stat(filepath.Dir(p.Target)); !os.IsNotExist(err) {
		t.Errorf("the target's parent is left (%v)", err)
	}
	require.NoError(t, os.WriteFile(filepath.Join(p.Staging, "file"), nil, 0o600))
	require.NoError(t, p.tidyStaging())
	if _, err := os.Stat(filepath.Join(p.Staging, "file")); err != nil {
		t.Errorf("what is not empty was removed: %v", err)
	}
	elsewhere := p
	elsewhere.Staging = filepath.Join(dir, "elsewhere")
	if _, err := makeDirs(elsewhere.Staging); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, elsewhere.tidyStaging())
	if _, err := os.Stat(elsewhere.Staging); err != nil {
		t.Errorf("a path that was given was removed: %v", err)
	}
	require.NoError(t, removeEmpty(made))
	if _, err := makeDirs(filepath.Join(p.Staging, "file", "below")); err == nil {
		t.Error("a directory was made in a file")
	}
}
