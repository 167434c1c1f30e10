package node

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

// Whoever looks at a volume does not disturb who works on it.
func TestLooksDisturbNothing(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Flags: []string{"--v", "0"}})
	rounds := 20
	if testing.Short() {
		rounds = 3
	}
	for i := range rounds {
		v := create(t, p, fmt.Sprintf("volume-%d", i), 32*mib, mountAs("ext4", multiWriter))
		done, stop := context.WithCancel(t.Context())
		var lookers sync.WaitGroup
		for range 3 {
			lookers.Go(func() {
				for done.Err() == nil {
					_, err := p.Node.NodeGetVolumeHealth(context.Background(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		for range 3 {
			must(t, v.Stage(t.Context()))
			must(t, v.Unstage(t.Context()))
		}
		stop()
		lookers.Wait()
		must(t, v.Delete(t.Context()))
	}
}

// A volume that cannot be staged is not healthy, one that grows is.
func TestHealthTellsOfFailingSteps(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=before:mount=fail"}})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	if err := v.Stage(t.Context()); err == nil {
		t.Fatal("the fault is not at work")
	}
	resp, err := p.Node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
	must(t, err)
	if entries := resp.GetVolumeHealth().GetHealthStatuses(); len(entries) != 1 || entries[0].GetReason() != "StageUnusable" {
		t.Errorf("its health is %v", entries)
	}
	must(t, v.Unstage(t.Context()))
	must(t, v.Delete(t.Context()))
}
