package nodeserver

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
)

// Every call resolves its paths, whatever their spelling, and does not change the
// request.
func TestRequestsAreSpelled(t *testing.T) {
	p := fakePaths{}
	stage := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: "/link/stage", VolumeContext: map[string]string{"key": "/link/stage"}}
	spelled, err := spell(t.Context(), p, stage)
	if err != nil || spelled.StagingTargetPath != "/kubelet/stage" || spelled.VolumeId != id || spelled.VolumeContext["key"] != "/link/stage" || stage.StagingTargetPath != "/link/stage" {
		t.Errorf("%v from %v (%v)", spelled, stage, err)
	}
	publish, err := spell(t.Context(), p, &csi.NodePublishVolumeRequest{StagingTargetPath: "/link/stage", TargetPath: "/link/pod"})
	if err != nil || publish.StagingTargetPath != "/kubelet/stage" || publish.TargetPath != "/kubelet/pod" {
		t.Errorf("%v (%v)", publish, err)
	}
	stats, err := spell(t.Context(), p, &csi.NodeGetVolumeStatsRequest{VolumePath: "/link/pod", StagingTargetPath: "/link/stage"})
	if err != nil || stats.VolumePath != "/kubelet/pod" || stats.StagingTargetPath != "/kubelet/stage" {
		t.Errorf("%v (%v)", stats, err)
	}
	if same, err := spell(t.Context(), p, publish); err != nil || same != publish {
		t.Errorf("a request that needs no other spelling is copied (%v)", err)
	}
}

// A path that cannot be resolved in time gets an answer that is not final, a little
// before the deadline.
func TestPathsThatDoNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := spell(ctx, fakePaths{}, &csi.NodeUnstageVolumeRequest{StagingTargetPath: "/hung/x"})
		if class := state.ClassOf(err); class.Final() || ctx.Err() != nil || !strings.Contains(err.Error(), "staging_target_path") {
			t.Errorf("%v, after the deadline: %v", err, ctx.Err())
		}
	})
}
