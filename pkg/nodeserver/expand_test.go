package nodeserver

import (
	"cmp"
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// A range that no volume can meet is refused before any volume is looked at.
func TestImpossibleRanges(t *testing.T) {
	for title, test := range map[string]struct {
		required, limit int64
		class           state.Class
	}{
		"more than can be":          {1<<62 + 1, 0, state.OutOfRange},
		"more than an int64 rounds": {1<<63 - 1, 0, state.OutOfRange},
		"negative":                  {-1, 0, state.InvalidArgument},
		"negative limit":            {0, -1, state.InvalidArgument},
		"contradiction":             {3 * gib, 2 * gib, state.InvalidArgument},
	} {
		t.Run(title, func(t *testing.T) {
			check(t, checkRange(&csi.CapacityRange{RequiredBytes: test.required, LimitBytes: test.limit}), test.class, "")
		})
	}
	for _, r := range []*csi.CapacityRange{nil, {}, {RequiredBytes: 1 << 62}, {RequiredBytes: gib, LimitBytes: gib}} {
		if err := checkRange(r); err != nil {
			t.Errorf("%v: %v", r, err)
		}
	}
}

func TestExpand(t *testing.T) {
	path := func(volume, staging string) expandChange {
		return func(r *csi.NodeExpandVolumeRequest) { r.VolumePath, r.StagingTargetPath = volume, staging }
	}
	size := func(required, limit int64) expandChange {
		return func(r *csi.NodeExpandVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
		}
	}
	all := func(changes ...expandChange) []expandChange { return changes }
	for title, test := range map[string]struct {
		changes []expandChange
		node    func(*fakeNode)
		asked   int64 // 0: as much as answered
		want    int64 // answered
		class   state.Class
		words   string
	}{
		"by the staging path":      {want: 2 * gib},
		"by a target":              {changes: all(path(target, "")), want: 2 * gib},
		"by a target that is gone": {changes: all(path("/kubelet/gone", staging)), want: 2 * gib},
		"a capability":             {changes: all(func(r *csi.NodeExpandVolumeRequest) { r.VolumeCapability = mount(writer, "ext4") }), want: 2 * gib},
		"no range":                 {changes: all(func(r *csi.NodeExpandVolumeRequest) { r.CapacityRange = nil }), asked: 1, want: gib},
		"as large already":         {changes: all(size(mib, 0)), asked: mib, want: gib},
		"within a limit":           {changes: all(size(2*gib, 3*gib)), want: 2 * gib},
		"no relation":              {changes: all(path("/kubelet/x", "")), class: state.NotFound, words: "neither staged nor published at /kubelet/x"},
		"no relation, 2":           {changes: all(path("/kubelet/x", "/kubelet/y")), class: state.NotFound, words: "/kubelet/x"},
		"relative":                 {changes: all(path("kubelet/stage", staging)), class: state.NotFound, words: "relative"},
		"malformed":                {changes: all(path("/kubelet//stage", staging)), class: state.InvalidArgument, words: "volume_path"},
		"malformed, 2":             {changes: all(path(staging, "stage")), class: state.InvalidArgument, words: "staging_target_path"},
		"negative size":            {changes: all(size(-1, 0)), node: func(f *fakeNode) { clear(f.devices) }, class: state.InvalidArgument, words: "negative"},
		"contradiction":            {changes: all(size(3*gib, 2*gib)), node: func(f *fakeNode) { clear(f.devices) }, class: state.InvalidArgument, words: "limits"},
		"no path":                  {changes: all(path("", staging)), class: state.InvalidArgument, words: "volume_path"},
		"limit below":              {changes: all(size(0, mib)), class: state.OutOfRange, words: "never shrinks"},
		"unknown, staged":          {node: func(f *fakeNode) { clear(f.devices); f.err = state.Errorf(state.NotFound, "its backing is gone") }, class: state.NotFound, words: "its backing is gone"},
		"being unstaged":           {node: func(f *fakeNode) { f.records[id].Stage.Gone = true }, class: state.Aborted, words: "being unstaged"},
		"the stage is refused":     {node: func(f *fakeNode) { f.err = state.Errorf(state.AlreadyExists, "there is a volume of that id") }, class: state.FailedPrecondition, words: "there is a volume of that id"},
		"full pool":                {node: func(f *fakeNode) { f.err = state.Errorf(state.ResourceExhausted, "full") }, class: state.ResourceExhausted, words: "full"},
	} {
		t.Run(title, func(t *testing.T) {
			s, f := newServer()
			f.staged(asExt4).Targets = map[string]*state.Target{target: {Path: target, Capability: asExt4}}
			if test.node != nil {
				test.node(f)
			}
			resp, err := s.NodeExpandVolume(t.Context(), expandRequest(test.changes...))
			if test.words != "" {
				check(t, err, test.class, test.words)
				return
			}
			require.NoError(t, err)
			f.wantAsked(t, state.SizePart())
			if asked := f.records[id].Size.Bytes; asked != cmp.Or(test.asked, test.want) || resp.GetCapacityBytes() != test.want {
				t.Errorf("asked for %d bytes and answered %d, not %d", asked, resp.GetCapacityBytes(), test.want)
			}
		})
	}
}

// wide is a layer that takes a MiB of its element.
type wide struct{ devices.ClassLayer }

func (wide) ContextKey() string            { return "layer" }
func (wide) Validate(devices.Volume) error { return nil }
func (wide) Wanted(v devices.Volume) bool  { return v.Context["layer"] == "wide" }
func (wide) Overhead() int64               { return mib }

// What the layers of a volume take is asked of its backend in addition.
func TestExpandWithLayers(t *testing.T) {
	s, f := newServer()
	s.Backends.(*devices.Set).KeepLayers([]devices.Layer{wide{}})
	f.staged(asExt4).Stage.Context = map[string]string{"layer": "wide"}
	for asked, want := range map[[2]int64][2]int64{
		{2 * gib, 0}:         {2*gib + mib, 0},
		{2 * gib, 3 * gib}:   {2*gib + mib, 3*gib + mib},
		{2 * gib, 1<<63 - 1}: {2*gib + mib, devices.LargestBytes + mib},
		{0, 3 * gib}:         {1, 3*gib + mib},
	} {
		f.records[id].Size = nil
		_, err := s.NodeExpandVolume(t.Context(), expandRequest(func(r *csi.NodeExpandVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: asked[0], LimitBytes: asked[1]}
		}))
		require.NoError(t, err)
		if size := f.records[id].Size; size.Bytes != want[0] || size.Limit != want[1] {
			t.Errorf("%d bytes with a limit of %d are asked for as %+v", asked[0], asked[1], size)
		}
	}
}

// overtaken is a node on which a larger expansion comes in between.
type overtaken struct{ *fakeNode }

func (o overtaken) EnsureSize(ctx context.Context, id string, edit func(*state.Volume) error) (int64, error) {
	_, err := o.fakeNode.EnsureSize(ctx, id, edit)
	return 4 * gib, err
}

func TestExpandBeyondTheLimit(t *testing.T) {
	s, f := newServer()
	f.staged(asExt4)
	s.Reconciler = overtaken{f}
	_, err := s.NodeExpandVolume(t.Context(), expandRequest(func(r *csi.NodeExpandVolumeRequest) { r.CapacityRange.LimitBytes = 3 * gib }))
	check(t, err, state.OutOfRange, "more than the limit")
}
