//go:build vm

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func testKind() devices.Kind { return shareKind() }

func flagsOf(t *testing.T, shares string) []string {
	t.Helper()
	serve(t)
	return []string{"--nfs-server", "127.0.0.1", "--nfs-export", strings.TrimPrefix(shares, os.TempDir())}
}

func makeShare(t *testing.T, shares, id string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Join(shares, id), 0o755))
}

// turns guards the kernel's server, of which there is one.
var turns sync.Mutex

// serve lets the kernel's server export the directory of all tests. It goes with the machine.
func serve(t *testing.T) {
	t.Helper()
	turns.Lock()
	defer turns.Unlock()
	if _, err := os.Stat("/proc/fs/nfsd/threads"); err == nil {
		return
	}
	machine.Command(t, "modprobe", "-a", "nfsd", "nfsv4")
	require.NoError(t, unix.Mount("nfsd", "/proc/fs/nfsd", "nfsd", 0, ""))
	require.NoError(t, os.MkdirAll("/var/lib/nfs/v4recovery", 0o755))
	for _, file := range []string{"etab", "rmtab"} {
		require.NoError(t, os.WriteFile("/var/lib/nfs/"+file, nil, 0o600))
	}
	machine.Command(t, "exportfs", "-i", "-o", "rw,fsid=0,insecure,no_root_squash,no_subtree_check", "127.0.0.1:"+os.TempDir())
	machine.Command(t, "rpc.mountd", "--no-nfs-version", "3")
	startServer(t)
}

func startServer(t *testing.T) {
	t.Helper()
	machine.Command(t, "rpc.nfsd", "--no-nfs-version", "3", "4")
	require.NoError(t, os.WriteFile("/proc/fs/nfsd/v4_end_grace", []byte("Y"), 0)) // no client comes from before
}

// While the server is away no call waits longer than its caller, and the plugin answers and
// starts. When the server is back all goes on, with the data.
func TestServerIsAway(t *testing.T) {
	p := harness.New(t)
	shares := filepath.Join(p.Dir, "shares")
	own, err := os.Executable()
	require.NoError(t, err)
	p.Driver = drivertest.Driver(own, flagsOf(t, shares)...)
	makeShare(t, shares, "volume")
	p.Start(harness.Options{})
	v := harness.NewVolume(t, p, "volume", harness.Shared("nfs4"))
	one, two := v.Target("one"), v.Target("two")
	require.NoError(t, v.Stage(t.Context()))
	require.NoError(t, v.Publish(t.Context(), one))
	require.NoError(t, os.WriteFile(filepath.Join(one, "file"), []byte("kept"), 0o600))

	machine.Command(t, "rpc.nfsd", "0")
	waits := func(what string, call func(context.Context, string) error, target string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began, err := time.Now(), call(ctx, target)
		t.Logf("%s after %s: %v", what, time.Since(began), err)
		if status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%s without a server: %v", what, err)
		}
		if took := time.Since(began); took > 30*time.Second { // on an emulated machine
			t.Errorf("%s: a caller who had 5s waited for %s", what, took)
		}
		if got := p.Report().Volumes; len(got) != 1 {
			t.Errorf("the plugin tells of %+v", got)
		}
	}
	waits("publish", v.Publish, two)
	waits("stats", v.Stats, one)
	p.Kill()
	p.Start(harness.Options{})
	waits("publish", v.Publish, two)
	waits("unpublish", v.Unpublish, one)

	startServer(t)
	require.NoError(t, v.Publish(t.Context(), two))
	got, err := os.ReadFile(filepath.Join(two, "file"))
	if err != nil || string(got) != "kept" {
		t.Errorf("the file holds %q (%v)", got, err)
	}
	require.NoError(t, v.Unpublish(t.Context(), one))
	require.NoError(t, v.Unpublish(t.Context(), two))
	require.NoError(t, v.Unstage(t.Context()))
	if mounts := p.Mounts(); len(mounts) > 0 {
		t.Errorf("mounted in the end: %q", mounts)
	}
}
