package driver

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

func TestBadEndpoints(t *testing.T) {
	for _, endpoint := range []string{"", "tcp://127.0.0.1:1", "unix://", "unix:", "unix://csi.sock", "unix:csi.sock", "/csi/csi.sock"} {
		l, err := listen(endpoint)
		if err == nil {
			t.Errorf("%q: serves at %s", endpoint, l.Addr())
			l.Close()
		} else if !strings.Contains(err.Error(), "--endpoint") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
}

func TestListen(t *testing.T) {
	for _, prefix := range []string{"unix://", "unix:"} {
		path := filepath.Join(t.TempDir(), "csi.sock")
		l, err := listen(prefix + path)
		require.NoError(t, err)
		info, err := os.Lstat(path)
		if err != nil || info.Mode() != os.ModeSocket|0o600 {
			t.Errorf("the socket is %v (%v)", info, err)
		}
		conn, err := net.Dial("unix", path)
		require.NoError(t, err)
		conn.Close()
		require.NoError(t, l.Close())
		if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) > 0 {
			t.Errorf("%v is left beside the socket (%v)", names, err)
		}
	}
}

func TestListenReplacesAStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close())
	l, err := listen("unix://" + path)
	require.NoError(t, err)
	defer l.Close()
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	conn.Close()
}

func TestListenRefuses(t *testing.T) {
	dir := t.TempDir()
	served, file, link := filepath.Join(dir, "served"), filepath.Join(dir, "file"), filepath.Join(dir, "link")
	l, err := net.Listen("unix", served)
	require.NoError(t, err)
	defer l.Close()
	require.NoError(t, os.WriteFile(file, []byte("kept"), 0o600))
	require.NoError(t, os.Symlink(served, link))
	for path, words := range map[string]string{
		served:                        "another process serves it",
		file:                          "not a socket",
		link:                          "not a socket",
		dir:                           "not a socket",
		filepath.Join(dir, "no/sock"): "directory must exist",
	} {
		l, err := listen("unix://" + path)
		if err == nil {
			l.Close()
			t.Errorf("%s: serves", path)
			continue
		}
		if !strings.Contains(err.Error(), words) || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "kept" {
		t.Errorf("the file holds %q (%v)", text, err)
	}
	conn, err := net.Dial("unix", served)
	if err != nil {
		t.Fatalf("the other's socket is lost: %v", err)
	}
	conn.Close()
}
