package registration

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// start runs a Registrar for a directory; its end is part of the test.
func start(t *testing.T, dir string) (r *Registrar, stop func()) {
	t.Helper()
	r = New(Config{Dir: dir, DriverName: "csi.test", Endpoint: "/plugins/csi.sock"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); r.Run(ctx) }()
	stop = func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Error("does not end")
		}
	}
	return r, stop
}

// asKubelet calls GetInfo on the socket, as soon as there is one.
func asKubelet(t *testing.T, socket string) (registerapi.RegistrationClient, *registerapi.PluginInfo) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	require.NoError(t, err)
	return client, info
}

func directory(t *testing.T) string { return filepath.Join(machine.ShortDir(t), "plugins_registry") }

func TestRegistration(t *testing.T) {
	dir := directory(t)
	r, stop := start(t, dir)
	socket := filepath.Join(dir, "csi.test-reg.sock")
	kubelet, info := asKubelet(t, socket)
	if info.GetType() != "CSIPlugin" || info.GetName() != "csi.test" || info.GetEndpoint() != "/plugins/csi.sock" || len(info.GetSupportedVersions()) != 1 || info.GetSupportedVersions()[0] != "1.0.0" {
		t.Errorf("tells %v", info)
	}
	if s := r.Status(); s.Registered || !s.Since.IsZero() || s.Socket != socket {
		t.Errorf("before kubelet has spoken: %+v", s)
	}
	for _, told := range []*registerapi.RegistrationStatus{{Error: "the socket does not answer"}, {PluginRegistered: true}} {
		if _, err := kubelet.NotifyRegistrationStatus(t.Context(), told); err != nil {
			t.Fatal(err)
		}
		if s := r.Status(); s.Registered != told.GetPluginRegistered() || s.Error != told.GetError() || s.Since.IsZero() {
			t.Errorf("told %v: %+v", told, s)
		}
	}
	stop()
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Errorf("left %v (%v)", names, err)
	}
}

// The socket and the directory are created again when they are removed or replaced,
// because a kubelet that restarts looks there.
func TestRegistrationComesBack(t *testing.T) {
	dir := directory(t)
	_, stop := start(t, dir)
	defer stop()
	socket := filepath.Join(dir, "csi.test-reg.sock")
	asKubelet(t, socket)
	for name, take := range map[string]func() error{
		"socket": func() error { return os.Remove(socket) },
		"directory": func() error { // at once: it is made again
			return errors.Join(os.Rename(dir, dir+".gone"), os.RemoveAll(dir+".gone"))
		},
		"directory moved": func() error { return os.Rename(dir, dir+".old") },
		"another's file": func() error {
			return os.Rename(func() string {
				if err := os.WriteFile(dir+"-other", nil, 0o600); err != nil {
					t.Error(err)
				}
				return dir + "-other"
			}(), socket)
		},
	} {
		if err := take(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		asKubelet(t, socket)
	}
}

// A socket that a killed plugin left is replaced.
func TestRegistrationTakesOver(t *testing.T) {
	dir := directory(t)
	require.NoError(t, os.MkdirAll(dir, 0o750))
	dead := New(Config{Dir: dir, DriverName: "csi.test"})
	for range 2 {
		l, err := dead.listen()
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
	_, stop := start(t, dir)
	defer stop()
	asKubelet(t, filepath.Join(dir, "csi.test-reg.sock"))
}

// Of two plugins of one name the first one stays registered, and the second one is told. Who loses its
// place all the same does not take it back from somebody who serves.
func TestTwoPluginsOfOneName(t *testing.T) {
	dir := directory(t)
	first, stop := start(t, dir)
	defer stop()
	socket := filepath.Join(dir, "csi.test-reg.sock")
	asKubelet(t, socket)
	before, err := os.Stat(socket)
	require.NoError(t, err)
	second, stopSecond := start(t, dir)
	defer stopSecond()
	if s := failed(second); !strings.Contains(s.Error, "the same driver name") || !strings.Contains(s.Error, strconv.Itoa(os.Getpid())) {
		t.Errorf("the second one tells %+v", s)
	}
	asKubelet(t, socket)
	if now, err := os.Stat(socket); err != nil || !os.SameFile(before, now) || first.Status().Error != "" {
		t.Errorf("the first one tells %+v; its socket: %v", first.Status(), err)
	}

	other, err := net.Listen("unix", filepath.Join(dir, ".other"))
	require.NoError(t, err)
	defer other.Close()
	require.NoError(t, os.Rename(filepath.Join(dir, ".other"), socket))
	if s := failed(first); !strings.Contains(s.Error, "the same driver name") || s.Registered {
		t.Errorf("the first one tells %+v", s)
	}
}

// A directory that cannot be created is reported, and used as soon as it can be.
func TestRegistrationFailsAndGoesOn(t *testing.T) {
	dir := directory(t)
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file in its place
		t.Fatal(err)
	}
	r, stop := start(t, dir)
	defer stop()
	if s := failed(r); s.Error == "" || s.Registered || s.Since.IsZero() {
		t.Errorf("tells %+v", s)
	}
	require.NoError(t, os.Remove(dir))
	asKubelet(t, filepath.Join(dir, "csi.test-reg.sock"))
}

// A lack of inotify instances is reported, and the plugin registers as soon as there is one.
func TestRegistrationWithoutInotify(t *testing.T) {
	dir := directory(t)
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	// Without a file that may be opened the kernel gives the same error.
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	r, stop := start(t, dir)
	s := failed(r)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	defer stop()
	if !strings.Contains(s.Error, unix.EMFILE.Error()) {
		t.Errorf("tells %+v", s)
	}
	asKubelet(t, filepath.Join(dir, "csi.test-reg.sock"))
}

// failed waits for an error, and returns what is told then.
func failed(r *Registrar) Status {
	for deadline := time.Now().Add(time.Minute); r.Status().Error == "" && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	return r.Status()
}

// A directory in which nothing can be made, as its source was removed from under a mount, is
// told, and not tried without a pause.
func TestRegistrationDirectoryWhoseSourceIsGone(t *testing.T) {
	machine.Kernel(t)
	dir, source := directory(t), filepath.Join(t.TempDir(), "source")
	for _, d := range []string{dir, source} {
		require.NoError(t, os.Mkdir(d, 0o750))
	}
	require.NoError(t, unix.Mount(source, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	r, stop := start(t, dir)
	defer stop()
	asKubelet(t, filepath.Join(dir, "csi.test-reg.sock"))
	require.NoError(t, os.RemoveAll(source))
	for until := time.Now().Add(time.Minute); !strings.Contains(r.Status().Error, "restart the pod"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("the status is %+v", r.Status())
		}
	}
}

// The directory is replaced after the watch of it has begun, and before the socket is made in it.
func TestRegistrationDirectoryIsReplacedMeanwhile(t *testing.T) {
	dir := directory(t)
	require.NoError(t, os.MkdirAll(dir, 0o750))
	watcher, err := fsnotify.NewWatcher()
	require.NoError(t, err)
	defer watcher.Close()
	require.NoError(t, errors.Join(watcher.Add(filepath.Dir(dir)), watcher.Add(dir), os.Remove(dir), os.Mkdir(dir, 0o750)))
	r := New(Config{Dir: dir, DriverName: "csi.test"})
	listener, err := r.listen()
	require.NoError(t, err)
	defer listener.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	removed := time.AfterFunc(100*time.Millisecond, func() { _ = os.Remove(listener.path) })
	defer removed.Stop()
	if err := r.awaitLoss(ctx, watcher, listener); err != nil || ctx.Err() != nil {
		t.Errorf("the loss of the socket is not noticed (%v)", err)
	}
}
