package nodeserver

import (
	"context"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// The usage of what is mounted over the volume is not the volume's.
func TestStatsOfWhatIsNotTheVolume(t *testing.T) {
	s, f := newServer()
	f.mounts[target] = state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{Device: other, Root: "/"}, {Device: device, Root: "/"}}}
	_, err := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	check(t, err, state.NotFound, "not mounted")
}

// overtaken is a node on which a larger growth comes in between.
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

// A look may find nothing wrong while each attempt to go on fails.
func TestVolumeHealthTellsFailures(t *testing.T) {
	s, f := newServer()
	f.staged(asBlock)
	f.failures = []reconciler.PartProblem{{Part: state.StagePart(), Problem: reconciler.Problem{Text: "mkfs fails"}}}
	resp, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	if err != nil {
		t.Fatal(err)
	}
	entries := resp.GetVolumeHealth().GetHealthStatuses()
	if len(entries) != 1 || entries[0].GetReason() != "StageUnusable" || !strings.Contains(entries[0].GetMessage(), "mkfs fails") {
		t.Errorf("answers %v", entries)
	}
}
