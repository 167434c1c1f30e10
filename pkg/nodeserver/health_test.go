package nodeserver

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// What is wrong is told in the words of CSI; what that is pkg/report judges, see TestHealth there.
func TestVolumeHealth(t *testing.T) {
	s, f := newServer()
	health := func(want ...string) { // "STATUS reason: words of the message"
		t.Helper()
		resp, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		require.NoError(t, err)
		entries := resp.GetVolumeHealth().GetHealthStatuses()
		if len(entries) != len(want) || resp.GetVolumeHealth().GetVolumeId() != id {
			t.Fatalf("answers %v, not %q", resp, want)
		}
		for i, e := range entries {
			head, words, _ := strings.Cut(want[i], ": ")
			if got := e.GetStatus().String() + " " + e.GetReason(); got != head || !strings.Contains(e.GetMessage(), words) {
				t.Errorf("answers %s: %s, not %s", got, e.GetMessage(), want[i])
			}
		}
	}
	health()
	f.staged(asExt4).Targets = map[string]*state.Target{target: {Path: target, Capability: asExt4}}
	f.mounts[staging] = state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{Device: device, Root: "/", FSType: "ext4"}}}
	f.mounts[target] = state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{Device: other, Root: "/", Source: "/dev/sdz1"}}}
	health("DEGRADED TargetUnusable: " + target)
	delete(f.mounts, staging)
	s.Reconciler = lossy{f}
	health("DATA_LOSS FilesystemLost: formatted as ext4", "INACCESSIBLE StageUnusable: not formatted again")
	f.wantAsked(t)
}

// lossy has lost the file systems of its volumes.
type lossy struct{ *fakeNode }

func (l lossy) Observe(ctx context.Context, want *state.Volume) (state.Actual, error) {
	have, err := l.fakeNode.Observe(ctx, want)
	have.Device.Formatted, have.Contents.Kind = "ext4", state.ContentsBlank
	return have, err
}

func TestVolumeHealthOfUnknownVolumes(t *testing.T) {
	s, f := emptyServer()
	_, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	check(t, err, state.NotFound, "no such volume")
	f.blind = state.Errorf(state.DeadlineExceeded, "hangs")
	_, err = s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	check(t, err, state.DeadlineExceeded, "hangs")
}

// A volume of which something is asked, and that cannot be looked at, is inaccessible: an error
// would be no information. What says nothing of the volume stays an error.
func TestVolumeHealthOfStorageThatIsAway(t *testing.T) {
	s, f := newServer()
	f.staged(asExt4)
	for _, class := range []state.Class{state.Unavailable, state.Internal, state.NotFound} {
		f.blind = fmt.Errorf("volume %s: observe: %w", id, state.Errorf(class, "the pool is away"))
		resp, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		require.NoError(t, err)
		e := resp.GetVolumeHealth().GetHealthStatuses()
		if len(e) != 1 || e[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE || e[0].GetReason() != "StorageUnusable" || e[0].GetMessage() != "volume pvc-1: observe: the pool is away" {
			t.Errorf("%s: its health is %v", class, e)
		}
	}
	f.blind = context.Canceled
	_, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	check(t, err, state.Canceled, "volume pvc-1: ")
	f.blind = state.Errorf(state.Unavailable, "volume %s: the pool is away", id)
	_, err = s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	if check(t, err, state.Unavailable, ""); err.Error() != "volume pvc-1: usage of "+target+": the pool is away" {
		t.Errorf("the stats say %v", err)
	}
	delete(f.records, id)
	_, err = s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	check(t, err, state.Unavailable, "the pool is away")
}

// The paths are not needed, but one that is given must be absolute.
func TestVolumeHealthPaths(t *testing.T) {
	s, _ := newServer()
	for field, asks := range map[string]func(path string) *csi.NodeGetVolumeHealthRequest{
		"volume_publish_path": func(path string) *csi.NodeGetVolumeHealthRequest {
			return &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: path}
		},
		"staging_target_path": func(path string) *csi.NodeGetVolumeHealthRequest {
			return &csi.NodeGetVolumeHealthRequest{VolumeId: id, StagingTargetPath: path}
		},
	} {
		_, err := s.NodeGetVolumeHealth(t.Context(), asks("kubelet/pods/1"))
		check(t, err, state.InvalidArgument, field)
		if _, err := s.NodeGetVolumeHealth(t.Context(), asks("/kubelet/pods/1")); err != nil {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestStorageHealth(t *testing.T) {
	for title, test := range map[string]struct {
		found []report.Finding
		want  string // "STATUS reason message"
	}{
		"healthy": {},
		"missing": {[]report.Finding{{Kind: report.Inaccessible, Reason: "PoolUnusable", Message: "no disk"}}, "STORAGE_UNREACHABLE PoolUnusable no disk"},
		"full":    {[]report.Finding{{Kind: report.Degraded, Reason: "PoolFull", Message: "no room"}}, "STORAGE_DEGRADED PoolFull no room"},
		"two missing": {[]report.Finding{
			{Kind: report.Inaccessible, Reason: "PoolUnusable", Message: "no disk"}, {Kind: report.Inaccessible, Reason: "PoolUnusable", Message: "no group"},
		}, "STORAGE_UNREACHABLE PoolUnusable no disk; no group"},
	} {
		t.Run(title, func(t *testing.T) {
			s, _ := newServer()
			s.Storage = func(context.Context) []report.Finding { return test.found }
			resp, err := s.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
			require.NoError(t, err)
			got := ""
			for _, h := range resp.GetBackendHealth() {
				got += h.GetStatus().String() + " " + h.GetReason() + " " + h.GetMessage()
			}
			if got != test.want {
				t.Errorf("answers %q, not %q", got, test.want)
			}
		})
	}
}
