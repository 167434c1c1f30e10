package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func noBackend(context.Context, devices.Environment) (devices.Backend, error) {
	return nil, errors.New("there is none")
}

// The Options of a driver are checked before anything is done.
func TestOptionsCheck(t *testing.T) {
	for title, test := range map[string]struct {
		kinds []devices.Kind
		words string
	}{
		"no backend": {nil, "without a backend"},
		"no name":    {[]devices.Kind{{Open: noBackend}}, `a backend ""`},
		"no Open":    {[]devices.Kind{{Name: "disk"}}, `a backend "disk"`},
		"twice":      {[]devices.Kind{{Name: "disk", Open: noBackend}, {Name: "disk", Open: noBackend}}, "two backends of the name disk"},
		"differ":     {[]devices.Kind{pool.Kind(), {Name: "san", Open: noBackend, Properties: devices.Properties{AttachRequired: true}}}, "pool and san cannot be of one driver"},
		"a list": {[]devices.Kind{{Name: "disk", Open: noBackend, Flags: func(f *pflag.FlagSet) { f.StringSlice("disks", nil, "") }}},
			"--disks that holds a list"},
		"a short name": {[]devices.Kind{{Name: "disk", Open: noBackend, Flags: func(f *pflag.FlagSet) { f.StringP("disks", "d", "", "") }}},
			"--disks that is -d"},
		"the engine's": {[]devices.Kind{{Name: "disk", Open: noBackend, Flags: func(f *pflag.FlagSet) { f.String("state-dir", "", "") }}},
			"--state-dir of the backend disk, and the engine has one"},
		"another's": {[]devices.Kind{pool.Kind(), {Name: "disk", Open: noBackend, Flags: func(f *pflag.FlagSet) { f.String("pool-dir", "", "") }}},
			"--pool-dir of the backend disk, and the backend pool has one"},
		"no policy":       {[]devices.Kind{{Name: "disk", Open: noBackend, Properties: devices.Properties{FSGroupPolicy: "file"}}}, `FSGroupPolicy "file": there are File`},
		"a limit below 0": {[]devices.Kind{{Name: "disk", Open: noBackend, Properties: devices.Properties{VolumeLimit: -1}}}, "VolumeLimit -1"},
		"not attached":    {[]devices.Kind{{Name: "disk", Open: noBackend, Properties: devices.Properties{AttachRequired: true}}}, "needs ControllerPublishVolume"},
	} {
		Command(Options{Name: "x", Backends: test.kinds}) // does not panic
		err := Run(t.Context(), goodConfig(), Options{Name: "x", Backends: test.kinds})
		if err == nil || !strings.Contains(err.Error(), test.words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", title, err)
		}
	}
}

func TestOptionsCheckNames(t *testing.T) {
	second := func(b devices.Backend, inline bool) func(*Options) {
		return func(o *Options) {
			san := devices.Kind{Name: "san", Properties: o.Backends[0].Properties, Open: func(context.Context, devices.Environment) (devices.Backend, error) { return b, nil }}
			san.Properties.Inline = inline
			o.Backends = append(o.Backends, san)
		}
	}
	for words, change := range map[string]func(*Options){
		`the name ""`:       func(o *Options) { o.Name = "" },
		`the name "Acme"`:   func(o *Options) { o.Name = "Acme" },
		`the program "a/b"`: func(o *Options) { o.Program = "a/b" },
		"opens as nothing": func(o *Options) {
			o.Backends[0].Open = func(context.Context, devices.Environment) (devices.Backend, error) { return nil, nil }
		},
		"san that makes volumes, is not the first one, and is no devices.Owner": second(struct {
			devices.Backend
			devices.Provisioner
		}{}, false),
		"san that says Properties.Inline, and is no devices.Inliner": second(struct{ devices.Backend }{}, true),
		"a Node that is nil": func(o *Options) { o.Node = func(csi.NodeServer) csi.NodeServer { return nil } },
	} {
		o := testOptions()
		change(&o)
		if err := Run(t.Context(), testConfig(t), o); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
	if got, want := (Options{}).program(), filepath.Base(os.Args[0]); got != want {
		t.Errorf("without a name the program is called %q, want %q, which says who complains", got, want)
	}
	var out bytes.Buffer
	cmd := Command(testOptions())
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"csidriver", "--driver-name", "a_B"})
	if err := cmd.Execute(); err == nil || out.Len() > 0 || !strings.Contains(err.Error(), `--driver-name "a_B": must be`) {
		t.Errorf("csidriver of a bad name: %v\n%s", err, &out)
	}
}

// What must outlive the plugin's pod is on the node where it is deployed.
func TestDirectoriesAreOnTheNode(t *testing.T) {
	manifest, err := os.ReadFile("../../deploy/base/daemonset.yaml")
	require.NoError(t, err)
	for _, dir := range []string{testOptions().stateDir(), testOptions().libDir()} {
		for _, words := range []string{"mountPath: " + dir, "hostPath: {path: " + dir + ","} {
			if !strings.Contains(string(manifest), words) {
				t.Errorf("deploy/base/daemonset.yaml has no %q", words)
			}
		}
	}
}

// Messages name commands of this program, not of csi-node.
func TestMessagesNameTheProgram(t *testing.T) {
	o := Options{Name: "csi.acme.example", Program: "acme"}
	text := "run csi-node volume clear-device v, or `csi-node orphans --clean`; not /var/lib/csi-node"
	want := "run acme volume clear-device v, or `acme orphans --clean`; not /var/lib/csi-node"
	_, err := o.ownNameInErrors(t.Context(), nil, nil, answering(state.Errorf(state.FailedPrecondition, "%s", text)))
	if err == nil || err.Error() != want || state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("a call says %v", err)
	}
	if _, err = o.ownNameInErrors(t.Context(), nil, nil, answering(fmt.Errorf("%s: %w", text, status.Error(codes.NotFound, "no LUN")))); !strings.HasPrefix(err.Error(), want) {
		t.Errorf("a call that an array's API has failed says %v", err)
	}
	w := httptest.NewRecorder()
	if n, err := (ownAnswer{w, o}).Write([]byte(text)); err != nil || n != len(text) || w.Body.String() != want {
		t.Errorf("the status socket says %q (%d bytes, %v)", w.Body, n, err)
	}
	long := Options{Name: "csi.acme.example", Program: "acme-csi-node"}
	for _, text := range []string{"csi-node volume list, csi-node volume retry v", "acme-csi-node volume list, csi-node volume retry v"} {
		if got := long.inOwnName(text); got != "acme-csi-node volume list, acme-csi-node volume retry v" {
			t.Errorf("%q becomes %q", text, got)
		}
	}
	root := Command(o)
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"volume", "create", "--help"})
	if err := root.ExecuteContext(t.Context()); err != nil || strings.Contains(out.String(), "csi-node's") {
		t.Errorf("the help says %q (%v)", out.String(), err)
	}
	out.Reset()
	orphans, _, err := root.Find([]string{"orphans"})
	require.NoError(t, err)
	orphans.SetOut(&out)
	orphans.SetContext(t.Context())
	require.NoError(t, orphans.Flags().Set("state-dir", t.TempDir()))
	require.Words(t, orphans.RunE(orphans, nil), "no plugin runs")
	printOrphans(orphans.OutOrStdout(), []reconciler.Orphan{{Device: "loop0"}})
	if !strings.Contains(out.String(), "`acme orphans --clean`") {
		t.Errorf("orphans says %q", out.String())
	}
	if got := testOptions().inOwnName(text); got != text {
		t.Errorf("the engine's own program says %q", got)
	}
}

// A driver whose Controller is served elsewhere returns none.
func TestOptionsControllerElsewhere(t *testing.T) {
	o := testOptions()
	o.Backends[0].Properties.AttachRequired = true
	o.Controller = func(csi.ControllerServer) csi.ControllerServer { return nil }
	conn, _ := servingWith(t, testConfig(t), o)
	able, err := csi.NewIdentityClient(conn).GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	if err != nil || strings.Contains(able.String(), "CONTROLLER_SERVICE") {
		t.Errorf("told is %v (%v)", able, err)
	}
}

// A driver offers what its backends, and its builder, can do.
func TestOffersFollowTheBackends(t *testing.T) {
	const grows, checks = "EXPAND_VOLUME VolumeExpansion ", "GET_STORAGE_HEALTH "
	expansion := &csi.PluginCapability{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_OFFLINE}}}
	for title, test := range map[string]struct {
		backend devices.Backend
		adds    []*csi.PluginCapability
		want    string
	}{
		"a backend alone":       {struct{ devices.Backend }{}, nil, ""},
		"one that grows":        {fakeBackend{}, nil, grows},
		"one that checks":       {checked{nil, func(context.Context) error { return nil }}, nil, checks},
		"a Controller's growth": {struct{ devices.Backend }{}, []*csi.PluginCapability{expansion}, grows},
	} {
		t.Run(title, func(t *testing.T) {
			o := testOptions()
			o.Capabilities = test.adds
			o.Backends = []devices.Kind{{Name: "b", Open: func(context.Context, devices.Environment) (devices.Backend, error) { return test.backend, nil }}}
			c := testConfig(t)
			c.BackendFlags = nil
			conn, _ := servingWith(t, c, o)
			node, err := csi.NewNodeClient(conn).NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
			require.NoError(t, err)
			got := ""
			for _, c := range node.GetCapabilities() {
				if name := c.GetRpc().GetType().String(); strings.Contains(grows+checks, name) {
					got += name + " "
				}
			}
			plugin, err := csi.NewIdentityClient(conn).GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
			require.NoError(t, err)
			for _, c := range plugin.GetCapabilities() {
				if c.GetVolumeExpansion() != nil {
					got += "VolumeExpansion "
				}
			}
			if got != test.want {
				t.Errorf("it offers %q, not %q", got, test.want)
			}
		})
	}
}

// What the builder adds is served beside the engine's, behind the same interceptors.
func TestOptionsExtendTheServices(t *testing.T) {
	o := testOptions()
	o.Topology = func(context.Context) (map[string]string, error) { return map[string]string{"zone": "north"}, nil }
	o.Capabilities = []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE}}}}
	o.Services = func(r grpc.ServiceRegistrar) {
		csi.RegisterGroupControllerServer(r, groups{})
		csi.RegisterSnapshotMetadataServer(r, blocks{})
	}
	o.Identity = func(s csi.IdentityServer) csi.IdentityServer { return renamed{s} }
	o.Controller = func(s csi.ControllerServer) csi.ControllerServer { return attaching{s} }
	o.Node = func(s csi.NodeServer) csi.NodeServer { return sitting{s} }
	conn, _ := servingWith(t, testConfig(t), o)
	identity, node := csi.NewIdentityClient(conn), csi.NewNodeClient(conn)

	info, err := identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "renamed" {
		t.Errorf("the identity is %v (%v)", info, err)
	}
	able, err := identity.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	for _, want := range []string{"GROUP_CONTROLLER_SERVICE", "CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS", "ONLINE"} {
		if err != nil || !strings.Contains(able.String(), want) {
			t.Errorf("no %s: %v (%v)", want, able, err)
		}
	}
	place, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	want := map[string]string{"zone": "north", "topology.csi-node.local/node": "node-1"}
	if got := place.GetAccessibleTopology().GetSegments(); err != nil || !maps.Equal(got, want) || place.GetMaxVolumesPerNode() != 7 {
		t.Errorf("the place is %v, %v (%v)", got, place, err)
	}
	resp, err := csi.NewControllerClient(conn).ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{})
	if err != nil || resp.GetPublishContext()["by"] != "attaching" {
		t.Errorf("ControllerPublishVolume answers %v (%v)", resp, err)
	}
	_, err = csi.NewGroupControllerClient(conn).GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the class of an error of a service that was added becomes %v", err)
	}
	stream, err := csi.NewSnapshotMetadataClient(conn).GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{})
	require.NoError(t, err)
	if one, err := stream.Recv(); err != nil || one.GetVolumeCapacityBytes() != 1 {
		t.Errorf("the stream begins with %v (%v)", one, err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.NotFound {
		t.Errorf("the error of a stream becomes %v", err)
	}
}

type blocks struct {
	csi.UnimplementedSnapshotMetadataServer
}

func (blocks) GetMetadataAllocated(_ *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	return errors.Join(stream.Send(&csi.GetMetadataAllocatedResponse{VolumeCapacityBytes: 1}), state.Errorf(state.NotFound, "see `csi-node volume list`"))
}

type renamed struct{ csi.IdentityServer }

func (renamed) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "renamed"}, nil
}

type attaching struct{ csi.ControllerServer }

func (attaching) ControllerPublishVolume(context.Context, *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"by": "attaching"}}, nil
}

type sitting struct{ csi.NodeServer }

func (s sitting) NodeGetInfo(ctx context.Context, req *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	resp, err := s.NodeServer.NodeGetInfo(ctx, req)
	resp.MaxVolumesPerNode = 7
	return resp, err
}

type groups struct {
	csi.UnimplementedGroupControllerServer
}

func (groups) GetVolumeGroupSnapshot(context.Context, *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	return nil, state.Errorf(state.FailedPrecondition, "no group")
}

// A vendor's program has its own name, directories and commands.
func TestCommandOfAVendor(t *testing.T) {
	t.Setenv("CSI_NODE_STATE_DIR", "")
	o := Options{
		Name: "csi.acme.example", Version: "v7",
		Backends: []devices.Kind{{Name: "array", Open: noBackend, Flags: func(f *pflag.FlagSet) { f.String("array-address", "array.example:1", "where the array is") }}},
		Commands: func(root *cobra.Command) { root.AddCommand(&cobra.Command{Use: "lights"}) },
	}
	run := func(args ...string) string {
		var out bytes.Buffer
		root := Command(o)
		root.SetArgs(args)
		root.SetOut(&out)
		if err := root.ExecuteContext(t.Context()); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		return out.String()
	}
	help := run("--help")
	for _, words := range []string{"csi.acme.example status", "--array-address", "/run/csi.acme.example", "/var/lib/csi.acme.example", "lights", "orphans"} {
		if !strings.Contains(help, words) {
			t.Errorf("no %q in\n%s", words, help)
		}
	}
	for _, args := range [][]string{{"--help"}, {"serve", "--help"}, {"volume", "--help"}, {"volume", "stage", "--help"}, {"completion", "--help"}, {"explain", "--help"}} {
		for line := range strings.Lines(run(args...)) {
			if strings.Contains(line, "csi-node") {
				t.Errorf("%q names another program: %s", args, line)
			}
		}
	}
	if got := run("version"); got != "v7\n" {
		t.Errorf("the version is %q", got)
	}
}

// The CSIDriver object of the manifest has the properties of the backends.
func TestCSIDriverObject(t *testing.T) {
	o := testOptions()
	var out bytes.Buffer
	root := Command(o)
	root.SetArgs([]string{"csidriver"})
	root.SetOut(&out)
	require.NoError(t, root.ExecuteContext(t.Context()))
	manifest, err := os.ReadFile("../../deploy/base/csidriver.yaml")
	require.NoError(t, err)
	plain := func(text string) (lines []string) {
		for line := range strings.Lines(text) {
			line, _, _ = strings.Cut(line, " #")
			lines = append(lines, strings.TrimRight(line, " \n"))
		}
		return lines
	}
	if got, want := strings.Join(plain(out.String()), "\n"), strings.Join(plain(string(manifest)), "\n"); got != want {
		t.Errorf("prints\n%s\nand the manifest has\n%s", got, want)
	}
	o.Backends[0].Properties = devices.Properties{AttachRequired: true, FSGroupPolicy: "None"}
	o.Controller = func(s csi.ControllerServer) csi.ControllerServer { return attaching{s} }
	out.Reset()
	root = Command(o)
	root.SetArgs([]string{"csidriver", "--driver-name", "other"})
	root.SetOut(&out)
	require.NoError(t, root.ExecuteContext(t.Context()))
	for _, line := range []string{"name: other", "attachRequired: true", "fsGroupPolicy: None", "storageCapacity: false", "volumeLifecycleModes: [Persistent]"} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("no %q in\n%s", line, out.String())
		}
	}
}

// A full backend is ready, because only serving can empty it. So is a plugin that lacks
// another backend than the default one. The health of the storage tells of each.
func TestReadyWhileItServes(t *testing.T) {
	full, away := state.Errorf(state.ResourceExhausted, "full"), errors.New("away")
	for title, test := range map[string]struct {
		backends []error
		ready    error
		health   string
	}{
		"well":          {[]error{nil, nil}, nil, ""},
		"full":          {[]error{nil, full}, nil, "PoolFull "},
		"away":          {[]error{away}, away, "PoolUnusable "},
		"full and away": {[]error{full, away}, nil, "PoolFull PoolUnusable "},
		"away and full": {[]error{away, full}, away, "PoolUnusable PoolFull "},
	} {
		p := &plugin{}
		for i, err := range test.backends {
			p.backends = append(p.backends, backend{fmt.Sprint("b", i), checked{fakeBackend{}, func(context.Context) error { return err }}})
		}
		health := ""
		for _, f := range p.storage(t.Context()) {
			health += f.Reason + " "
		}
		if ready := p.newNeeds().checks[0](t.Context()); ready != test.ready || health != test.health {
			t.Errorf("%s: ready %v, storage %v", title, ready, health)
		}
	}
}

type checked struct {
	devices.Backend
	check func(ctx context.Context) error
}

func (c checked) Check(ctx context.Context) error { return c.check(ctx) }

// A backend that hangs is told by name, and hides no other. It is asked once, and a
// report that does not wait so long tells of it only when it has hung for a while.
func TestStorageThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung := make(chan struct{})
		var asked atomic.Int64
		p := &plugin{backends: []backend{
			{"silent", checked{fakeBackend{}, func(context.Context) error { asked.Add(1); <-hung; return nil }}},
			{"away", checked{fakeBackend{}, func(ctx context.Context) error {
				if at, bound := ctx.Deadline(); !bound || time.Until(at) != storageTime {
					t.Errorf("a check may take until %s", at)
				}
				return errors.New("no such disk")
			}}},
		}}
		away := report.StorageProblem{Reason: report.PoolUnusable, Message: "no such disk"}
		begin := time.Now()
		if got := p.storageProblems(); !slices.Equal(got, []report.StorageProblem{away}) || time.Since(begin) != placesWait {
			t.Errorf("after %s a report tells %q", time.Since(begin), got)
		}
		silent := "the backend silent: no answer since " + begin.UTC().Format(time.RFC3339) + ": context deadline exceeded"
		begin = time.Now()
		want := []report.Finding{{Kind: report.Inaccessible, Reason: "PoolUnusable", Message: silent}, {Kind: report.Inaccessible, Reason: "PoolUnusable", Message: "no such disk"}}
		if got := p.storage(t.Context()); !slices.Equal(got, want) || time.Since(begin) != storageTime {
			t.Errorf("after %s the health is %+v", time.Since(begin), got)
		}
		if got := p.storageProblems(); !slices.Equal(got, []report.StorageProblem{{Reason: report.PoolUnusable, Message: silent}, away}) {
			t.Errorf("of one that hangs a report tells %q", got)
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("%d checks hang", n)
		}
		close(hung)
		synctest.Wait()
		if got := p.storageProblems(); !slices.Equal(got, []report.StorageProblem{away}) {
			t.Errorf("once it answers, a report tells %q", got)
		}
	})
}

// Of a default backend that does not answer Probe, which kubelet asks all the time, already
// the first report tells, and since when.
func TestStorageThatHangsForProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung := make(chan struct{})
		defer close(hung)
		p := &plugin{backends: []backend{{"silent", checked{fakeBackend{}, func(context.Context) error { <-hung; return nil }}}}}
		p.needs = &needs{checks: []func(context.Context) error{p.defaultStorage()}}
		begin := time.Now()
		if err := p.needs.missing(t.Context()); err != nil {
			t.Error(err)
		}
		if got := p.storageProblems(); got != nil {
			t.Errorf("after %s a report tells %q", time.Since(begin), got)
		}
		time.Sleep(storageTime - time.Since(begin) - placesWait)
		want := []report.StorageProblem{{Reason: report.PoolUnusable, Message: "the backend silent: no answer since " + begin.UTC().Format(time.RFC3339) + ": context deadline exceeded"}}
		for range 2 {
			if got := p.storageProblems(); !slices.Equal(got, want) {
				t.Errorf("after %s a report tells %q", time.Since(begin), got)
			}
			time.Sleep(time.Hour)
		}
	})
}

// The commands that look at a node without a plugin find the flags of the last one, of
// this version or of the one before.
func TestSettings(t *testing.T) {
	dir := t.TempDir()
	p := &plugin{Config: Config{StateDir: dir, DriverName: "d", NodeID: "n", KubeletDir: "/k", LibDir: "/l", BackendFlags: map[string]string{"pool-dir": "/p", "pool-reserve": "0"}}}
	require.NoError(t, p.writeSettings(t.Context()))
	s, err := readSettings(dir)
	if err != nil || s.DriverName != "d" || s.NodeID != "n" || s.KubeletDir != "/k" || s.LibDir != "/l" || !maps.Equal(s.Flags, p.BackendFlags) {
		t.Errorf("read %+v (%v)", s, err)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, settingsFile), []byte(`{"kubeletDir":"/k","poolDir":"/old"}`), 0o600))
	if s, err = readSettings(dir); err != nil || s.KubeletDir != "/k" || !maps.Equal(s.Flags, map[string]string{"pool-dir": "/old"}) {
		t.Errorf("of the version before: %+v (%v)", s, err)
	}
	// Only the commands need it: what is in its way is no reason not to serve.
	require.NoError(t, os.Remove(filepath.Join(dir, settingsFile)))
	require.NoError(t, os.Mkdir(filepath.Join(dir, settingsFile), 0o700))
	require.NoError(t, p.writeSettings(t.Context()))
	kinds := []devices.Kind{pool.Kind()}
	if err := setFlags(kinds, map[string]string{"pool-dir": "/p", "of-another-version": "x"}, true); err != nil {
		t.Errorf("a flag that was written by another version: %v", err)
	}
	if err := setFlags(kinds, map[string]string{"unknown": "x"}, false); err == nil {
		t.Error("a flag that no backend has is taken")
	}
}
