package node

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// A step that fails is told at once, with its name and cause, and by the volume's
// health. Each new call tries again; what was begun can be taken down meanwhile.
func TestFailingStepIsToldAndTriedAgain(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=after:attach=fail,before:mount=fail"}})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	mustRefuse(t, v.Stage(ctx), codes.Unavailable, v.ID, "step attach", "fault after attach")
	for range 3 { // attach has done its work; it is not tried again
		mustRefuse(t, v.Stage(ctx), codes.Unavailable, v.ID, "step mount", "fault before mount")
	}
	resp, err := p.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
	must(t, err)
	if entries := resp.GetVolumeHealth().GetHealthStatuses(); len(entries) != 1 || entries[0].GetReason() != "StageUnusable" {
		t.Errorf("its health is %v", entries)
	}
	must(t, v.Unstage(ctx))
	mustRefuse(t, v.Stage(ctx), codes.Unavailable, "fault after attach")
	p.Restart(harness.Options{})
	must(t, v.Stage(ctx))
	v.End()
}

// A step that hangs holds up its own volume only, is named to those who wait,
// and does not keep the plugin from being ready or from ending.
func TestHangingStepHoldsUpItsVolumeOnly(t *testing.T) {
	t.Parallel()
	hanging := harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=before:mount=hang"}}
	p := harness.Start(t, hanging)
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	for range 2 {
		harness.Eventually(t, "the step hangs", func() bool { // on a slow machine formatting comes first for a while
			short, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			return strings.Contains(status.Convert(v.Stage(short)).Message(), "step mount")
		})
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		mustRefuse(t, v.Stage(short), codes.DeadlineExceeded, v.ID, "step mount", "running since")
		cancel()
		block := create(t, p, "block", 32*mib, blockAs(multiWriter))
		pod := block.Target("pod")
		must(t, block.Up(ctx, pod))
		must(t, block.Down(ctx, pod))
		must(t, block.Delete(ctx))
		p.Restart(hanging)
	}
	p.Restart(harness.Options{})
	must(t, v.Stage(ctx))
	v.End()
}
