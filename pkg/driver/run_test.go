package driver

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/devices/disk"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// leaveSocket closes a listener as a kill would: its file stays.
func leaveSocket(t *testing.T, l net.Listener) {
	t.Helper()
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
}

// serving runs a plugin until stop, which returns what Run does.
func serving(t *testing.T, c Config) (conn *grpc.ClientConn, stop func() error) {
	t.Helper()
	return servingWith(t, c, testOptions())
}

func servingWith(t *testing.T, c Config, o Options) (conn *grpc.ClientConn, stop func() error) {
	t.Helper()
	machine.Kernel(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	var runErr error
	go func() {
		defer close(ended)
		runErr = Run(ctx, c, o)
	}()
	stop = func() error {
		cancel()
		<-ended
		return runErr
	}
	t.Cleanup(func() { _ = stop() }) // a test that cares has asked
	conn, err := grpc.NewClient(c.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	waiting, done := context.WithCancel(t.Context())
	defer done()
	go func() { // a plugin that ends will never answer
		select {
		case <-ended:
			done()
		case <-waiting.Done():
		}
	}()
	if _, err := csi.NewIdentityClient(conn).Probe(waiting, &csi.ProbeRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatalf("%v; the plugin says %v", err, stop())
	}
	return conn, stop
}

func TestRun(t *testing.T) {
	c := testConfig(t)
	c.DriverName, c.MaxVolumes = "run.test", 5
	conn, stop := serving(t, c)
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "run.test" || info.GetVendorVersion() != "v1" {
		t.Errorf("GetPluginInfo answers %v (%v)", info, err)
	}
	able, err := csi.NewIdentityClient(conn).GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	for _, want := range []string{"CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS", "ONLINE"} {
		if err != nil || !strings.Contains(able.String(), want) {
			t.Errorf("GetPluginCapabilities has no %s: %v (%v)", want, able, err)
		}
	}
	node := csi.NewNodeClient(conn)
	place, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || place.GetNodeId() != "node-1" || place.GetMaxVolumesPerNode() != 5 || place.GetAccessibleTopology().GetSegments()["topology.run.test/node"] != "node-1" {
		t.Errorf("NodeGetInfo answers %v (%v)", place, err)
	}
	if _, err := node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a bad request: %v", err)
	}
	if _, err := csi.NewControllerClient(conn).ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("an RPC that is not there: %v", err)
	}
	report, err := ReadReport(t.Context(), c.StateDir, Options{})
	if err != nil || !report.Running || report.Driver != "run.test" || report.Version != "v1" || report.Volumes == nil || len(report.Volumes) > 0 {
		t.Errorf("reports %+v (%v)", report, err)
	}
	if err := stop(); err != nil {
		t.Errorf("Run ends with %v", err)
	}
	if _, err := os.Lstat(strings.TrimPrefix(c.Endpoint, "unix://")); !os.IsNotExist(err) {
		t.Errorf("its socket is left (%v)", err)
	}
}

// One that waits for another to end takes away nothing that the other is making.
func TestRunBesideAnother(t *testing.T) {
	p := openPlugin(t)
	spare := filepath.Join(p.KubeletDir, ".csi-node-spare-0123456789abcdef")
	require.NoError(t, os.Mkdir(spare, 0o700))
	ctx, giveUp := context.WithCancel(t.Context())
	giveUp()
	if err := Run(ctx, p.Config, testOptions()); !errors.Is(err, context.Canceled) {
		t.Errorf("it ends with %v", err)
	}
	if _, err := os.Stat(spare); err != nil {
		t.Error(err)
	}
}

// The id of a disk may be one that the default backend refuses. An unstage that is asked for
// again finds neither a record nor a note of it.
func TestUnstageOfADiskTwice(t *testing.T) {
	c, o := testConfig(t), testOptions()
	o.Backends = append(o.Backends, disk.Kind())
	conn, _ := servingWith(t, c, o)
	node := csi.NewNodeClient(conn)
	const id = "/dev/disk/by-id/none"
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: id, StagingTargetPath: c.KubeletDir + "/stage", VolumeCapability: rawCapability(),
		VolumeContext: map[string]string{"backend": "disk", "path": id},
	})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("a disk that is not there: %v", err)
	}
	for range 2 {
		_, err := node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: c.KubeletDir + "/stage"})
		require.NoError(t, err)
	}
	_, err = node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: c.KubeletDir + "/target"})
	require.NoError(t, err)
	if _, err := node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: c.KubeletDir + "/stage"}); status.Code(err) != codes.NotFound {
		t.Errorf("its stats: %v", err)
	}
}

func TestHTTPEndpoint(t *testing.T) {
	p := openPlugin(t)
	p.HTTPEndpoint = "127.0.0.1:0"
	all, err := p.webServers(t.Context(), limits{status: 4, http: 4})
	if err != nil || len(all) != 2 {
		t.Fatalf("%d servers (%v)", len(all), err)
	}
	ended := make(chan error, len(all))
	for _, w := range all {
		go func() { ended <- w.serve() }()
	}
	address := all[1].listener.Addr().String()
	resp, err := http.Get("http://" + address + "/readyz")
	require.NoError(t, err)
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("answers %s", resp.Status)
	}
	// A second plugin fails at once, because the address is taken.
	c := testConfig(t)
	c.HTTPEndpoint = address
	if err := Run(t.Context(), c, testOptions()); err == nil || !strings.Contains(err.Error(), "--http-endpoint "+address) {
		t.Errorf("with a taken address: %v", err)
	}
	for _, w := range all {
		require.NoError(t, w.close())
		if err := <-ended; err != nil {
			t.Errorf("serving ends with %v", err)
		}
	}
}

// A wrong setup is reported in one line that names the flag.
func TestRunWithAWrongSetup(t *testing.T) {
	machine.Kernel(t)
	for title, test := range map[string]struct {
		change func(*Config)
		words  string
		code   int
	}{
		"no kubelet directory": {func(c *Config) { c.KubeletDir += ".none" }, "none: no such file or directory: make it, or set --kubelet-dir", 1},
		"a file for a state":   {func(c *Config) { c.StateDir = c.KubeletDir + "/f"; write(t, c.StateDir) }, "--state-dir", 1},
		"a file for a lib":     {func(c *Config) { c.LibDir = c.KubeletDir + "/f"; write(t, c.LibDir) }, "--lib-dir", 1},
		"a lib below a file":   {func(c *Config) { c.LibDir = c.KubeletDir + "/f/a/b"; write(t, c.KubeletDir+"/f") }, "/f is not a directory", 1},
		"not a pool":           {func(c *Config) { c.BackendFlags["pool-dir"] = c.KubeletDir; write(t, c.KubeletDir+"/f") }, "--pool-dir", 1},
		"no amount":            {func(c *Config) { c.BackendFlags["pool-reserve"] = "200%" }, "--pool-reserve", 2},
		"a relative directory": {func(c *Config) { c.LibDir = "lib" }, "--lib-dir", 2},
		"no such flag":         {func(c *Config) { c.BackendFlags["pond-dir"] = "/pond" }, "--pond-dir", 1},
		"no socket directory":  {func(c *Config) { c.Endpoint = "unix:///no/such/csi.sock" }, "--endpoint", 1},
	} {
		t.Run(title, func(t *testing.T) {
			c := testConfig(t)
			test.change(&c)
			err := Run(t.Context(), c, testOptions())
			if err == nil || !strings.Contains(err.Error(), test.words) || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error is %v; it should be one line with %q", err, test.words)
			}
			if code := command.ExitCode(err); code != test.code {
				t.Errorf("the exit code is %d, not %d, for %v", code, test.code, err)
			}
		})
	}
}

// TestDirectoryOrNone: the directory of notes is made when the first is written, not before.
func TestDirectoryOrNone(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file")
	require.NoError(t, os.Symlink(dir, dir+"/link"))
	require.NoError(t, os.Symlink(dir+"/file", dir+"/wrong"))
	for path, good := range map[string]bool{
		dir: true, dir + "/": true, "/": true, dir + "/none": true, dir + "/none/below": true, dir + "/link": true, dir + "/link/none": true,
		dir + "/file": false, dir + "/file/below": false, dir + "/wrong": false, "/dev/null": false,
	} {
		if err := directoryOrNone(path); (err == nil) != good {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := os.Lstat(dir + "/none"); err == nil {
			t.Errorf("%s was made", path)
		}
	}
}

// What the plugin cannot do without is missed before it serves.
func TestRunWithoutPrograms(t *testing.T) {
	c := testConfig(t)
	t.Setenv("PATH", t.TempDir())
	if err := Run(t.Context(), c, testOptions()); err == nil || !strings.Contains(err.Error(), "mkfs") || strings.Contains(err.Error(), "\n") {
		t.Errorf("the error is %v; it should be one line that names the program", err)
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
}

// The registration socket serves while the CSI socket does.
func TestRunRegisters(t *testing.T) {
	c := testConfig(t)
	c.RegistrationDir = filepath.Join(c.StateDir, "registry")
	_, stop := serving(t, c)
	conn, err := grpc.NewClient("unix://"+filepath.Join(c.RegistrationDir, c.DriverName+"-reg.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	kubelet := registerapi.NewRegistrationClient(conn)
	info, err := kubelet.GetInfo(t.Context(), &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil || "unix://"+info.GetEndpoint() != c.Endpoint || info.GetName() != c.DriverName {
		t.Fatalf("tells kubelet %v (%v)", info, err)
	}
	registered := func() bool {
		report, err := ReadReport(t.Context(), c.StateDir, Options{})
		if err != nil || report.Registration == nil {
			t.Fatalf("reports %+v (%v)", report, err)
		}
		return report.Registration.Registered
	}
	ready := func() error { return askProbe(t.Context(), c.StateDir, readyProbe) }
	if err := ready(); registered() || err == nil || !strings.Contains(err.Error(), "kubelet has not asked at "+c.RegistrationDir) {
		t.Errorf("registered, or ready (%v), before kubelet said so", err)
	}
	require.NoError(t, askProbe(t.Context(), c.StateDir, liveProbe))
	if _, err := kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	if err := ready(); !registered() || err != nil {
		t.Errorf("not registered, or not ready (%v), though kubelet said so", err)
	}
	require.NoError(t, stop())
	if names, err := os.ReadDir(c.RegistrationDir); err != nil || len(names) > 0 {
		t.Errorf("left %v (%v)", names, err)
	}
}
