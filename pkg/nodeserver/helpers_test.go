package nodeserver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

const (
	gib     = 1 << 30
	mib     = 1 << 20
	id      = "pvc-1"
	staging = "/kubelet/stage"
	target  = "/kubelet/pods/1/mount"
	writer  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

var (
	device = state.DeviceNumber{Major: 7, Minor: 1}
	view   = state.DeviceNumber{Major: 7, Minor: 2}
	other  = state.DeviceNumber{Major: 8, Minor: 1}
)

// fakeNode keeps records and the state of the node in memory. It carries out every
// intent at once, unless err is set.
type fakeNode struct {
	records map[string]*state.Volume
	devices map[string]state.Device
	mounts  map[string]state.Mountpoint
	err     error // of Ensure, once the edit was made
	blind   error // of Observe
	source  *state.Source

	asked   []state.Part // by Ensure
	looks   atomic.Int64 // of Observe
	secrets map[string]map[string]string

	mu      sync.Mutex
	changed []string // by Changed
}

func (f *fakeNode) Changed(path string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed = append(f.changed, path)
}

func (f *fakeNode) IsAt(id, path string) bool {
	v := f.records[id]
	return v != nil && (v.Targets[path] != nil || v.Stage != nil && v.Stage.Path == path)
}

func (f *fakeNode) Get(id string) *state.Volume {
	if v := f.records[id]; v != nil {
		return v.Clone()
	}
	return nil
}

func (f *fakeNode) Ensure(_ context.Context, id string, part state.Part, edit func(*state.Volume) error) error {
	f.asked = append(f.asked, part)
	v := f.edited(id)
	switch err := edit(v); {
	case err == state.ErrNothingThere:
		return nil
	case err != nil:
		return fmt.Errorf("volume %s: %w", id, err)
	}
	f.records[id] = v
	if d := f.devices[id]; part.Kind == state.SizeKind && d.Size < v.Size.Bytes && f.err == nil {
		d.Size = v.Size.Bytes
		f.devices[id] = d
	}
	return f.err
}

func (f *fakeNode) Remember(id string, secrets map[string]string) {
	if f.secrets == nil {
		f.secrets = map[string]map[string]string{}
	}
	f.secrets[id] = secrets
}

func (f *fakeNode) EnsureSize(ctx context.Context, id string, edit func(*state.Volume) error) (bytes int64, err error) {
	err = f.Ensure(ctx, id, state.SizePart(), edit)
	return f.devices[id].Size, err
}

func (f *fakeNode) edited(id string) *state.Volume {
	v := f.Get(id)
	if v == nil {
		v = &state.Volume{ID: id}
	}
	v.Revision++
	return v
}

func (f *fakeNode) Report(want *state.Volume, have state.Actual) report.Volume {
	parts := map[state.Part]report.PartFacts{}
	for part, v := range reconciler.MakePlan(want, have).Verdicts.All() {
		parts[part] = report.PartFacts{Verdict: report.Verdict{Settled: v.Settled, Problem: v.Problem.Text, Needs: v.Needs}}
	}
	return report.Make(report.Facts{Want: want, Have: have, Looked: true, Parts: parts}, time.Now())
}

func (f *fakeNode) Observe(_ context.Context, want *state.Volume) (state.Actual, error) {
	f.looks.Add(1)
	d, ok := f.devices[want.ID]
	have := state.Actual{Device: d, Source: f.source, View: state.Device{State: state.DeviceAbsent}}
	if have.Device.Missing = !ok; !ok {
		have.Device.State = state.DeviceAbsent
	}
	if ok {
		have.View.Number = view
	}
	if want.Stage != nil {
		have.Stage = f.at(want.Stage.Path)
	}
	for path := range want.Targets {
		have.Targets.Set(path, f.at(path))
	}
	return have, f.blind
}

// at is what a look at a path sees.
func (f *fakeNode) at(path string) state.Mountpoint {
	m := f.mounts[path]
	if m.File == state.UnknownFile && m.Err == nil {
		m.File = state.NoFile
	}
	return m
}

type fakePaths struct {
	node  *fakeNode
	usage func(ctx context.Context, path string) (state.Usage, error)
}

// Spell knows /link for /kubelet, and nothing behind /hung.
func (fakePaths) Spell(ctx context.Context, path string) (string, error) {
	if strings.HasPrefix(path, "/hung/") {
		<-ctx.Done()
		return "", ctx.Err()
	}
	if rel, linked := strings.CutPrefix(path, "/link/"); linked {
		return "/kubelet/" + rel, nil
	}
	return path, nil
}

func (fakePaths) Check(path string) error {
	if !strings.HasPrefix(path, "/kubelet/") {
		return state.Errorf(state.InvalidArgument, "%s does not lie under /kubelet", path)
	}
	return nil
}

func (f fakePaths) Usage(ctx context.Context, path string) (state.Mount, state.Usage, error) {
	m := f.node.mounts[path]
	switch {
	case m.Err != nil:
		return state.Mount{}, state.Usage{}, m.Err
	case len(m.Mounts) == 0:
		return state.Mount{}, state.Usage{}, state.Errorf(state.NotFound, "nothing is mounted there")
	}
	usage, err := f.usage(ctx, path)
	return m.Mounts[0], usage, err
}

// fakeBackend has volumes whose ids hold no slash.
type fakeBackend struct{ devices.Backend }

func (fakeBackend) Validate(v devices.Volume) error {
	if strings.Contains(v.ID, "/") {
		return state.Errorf(state.InvalidArgument, "volume_id %q holds a slash", v.ID)
	}
	return nil
}

// fakeDisk has volumes whose ids begin with disk/. A stage must name the path of one.
type fakeDisk struct{ devices.Backend }

func (fakeDisk) Validate(v devices.Volume) error {
	switch {
	case !strings.HasPrefix(v.ID, "disk/"):
		return state.Errorf(state.InvalidArgument, "volume_id %q is no disk's", v.ID)
	case v.Context != nil && v.Context["path"] == "":
		return state.Errorf(state.InvalidArgument, "volume_context: path is missing")
	}
	return nil
}

func (fakeDisk) PublishIdentity(_ devices.Volume, key string) bool { return key != "portal" }

type fakeFilesystems struct{}

func (fakeFilesystems) Types() []string { return []string{"ext4", "xfs"} }

// newServer returns a server of a node that has the volume id, a GiB in size,
// attached and with nothing asked of it.
func newServer() (*Server, *fakeNode) {
	f := &fakeNode{
		records: map[string]*state.Volume{},
		devices: map[string]state.Device{id: {State: state.DeviceAttached, Path: "/dev/loop1", Number: device, Size: gib, Capacity: gib}},
		mounts:  map[string]state.Mountpoint{},
	}
	return New(Config{
		NodeID: "node-1", Topology: map[string]string{"node": "segment-1"}, MaxVolumes: 7,
		Backends:   devices.NewSet("usual", map[string]devices.Backend{"usual": fakeBackend{}, "disk": fakeDisk{}, "inline": fakeBackend{}}),
		Reconciler: f, Records: f, Filesystems: fakeFilesystems{},
		Paths: fakePaths{f, func(context.Context, string) (state.Usage, error) {
			return state.Usage{Bytes: state.Amount{Total: 10, Used: 7, Available: 2}, Inodes: state.Amount{Total: 6, Used: 1, Available: 5}}, nil
		}},
		Expands: true,
		Inline:  &reconciler.Inline{Backend: "inline", StagingDir: "/kubelet/plugins/ephemeral"},
		Storage: func(context.Context) []report.Finding { return nil },
	}), f
}

// staged gives the volume an accepted stage.
func (f *fakeNode) staged(c state.Capability) *state.Volume {
	v := &state.Volume{ID: id, Revision: 5, Stage: &state.Stage{Path: staging, Capability: c, Intent: state.Intent{Revision: 3, Accepted: true, Since: now}}}
	f.records[id] = v
	return v
}

var (
	asExt4  = state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"}
	asBlock = state.Capability{Access: state.BlockAccess, Mode: "SINGLE_NODE_MULTI_WRITER"}
)

type mode = csi.VolumeCapability_AccessMode_Mode

func mount(m mode, fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

func block(m mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

type (
	stageChange   = func(*csi.NodeStageVolumeRequest)
	publishChange = func(*csi.NodePublishVolumeRequest)
	expandChange  = func(*csi.NodeExpandVolumeRequest)
)

// stageRequest returns a valid request with changes; the functions below do likewise.
func stageRequest(changes ...stageChange) *csi.NodeStageVolumeRequest {
	r := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: mount(writer, "ext4")}
	for _, change := range changes {
		change(r)
	}
	return r
}

func publishRequest(changes ...publishChange) *csi.NodePublishVolumeRequest {
	r := &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: mount(writer, "ext4")}
	for _, change := range changes {
		change(r)
	}
	return r
}

func expandRequest(changes ...expandChange) *csi.NodeExpandVolumeRequest {
	r := &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: staging, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * gib}}
	for _, change := range changes {
		change(r)
	}
	return r
}

// check fails unless err is of the class and its text holds the words.
var check = require.Class

// wantAsked checks which parts were asked for, in order.
func (f *fakeNode) wantAsked(t *testing.T, parts ...state.Part) {
	t.Helper()
	if !slices.Equal(f.asked, parts) {
		t.Errorf("asked for %v, not %v", f.asked, parts)
	}
}
