package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

// What the plugin says of itself, and of a volume that is well.
func TestIdentityAndHealthOfAVolumeThatIsWell(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	info, err := p.Identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if must(t, err); info.GetName() != "csi-node.local" || info.GetVendorVersion() == "" {
		t.Errorf("GetPluginInfo: %v", info)
	}
	node, err := p.Node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if must(t, err); node.GetNodeId() != "node-1" || len(node.GetAccessibleTopology().GetSegments()) != 1 {
		t.Errorf("NodeGetInfo: %v", node)
	}
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	must(t, v.Stage(ctx))
	health, err := p.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
	if must(t, err); len(health.GetVolumeHealth().GetHealthStatuses()) > 0 {
		t.Errorf("NodeGetVolumeHealth: %v", health)
	}
	storage, err := p.Node.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{})
	if must(t, err); len(storage.GetBackendHealth()) > 0 {
		t.Errorf("NodeGetStorageHealth: %v", storage)
	}
	v.End()

	marker := filepath.Join(p.PoolDir, ".csi-node-pool")
	must(t, os.Rename(marker, marker+".away"))
	storage, err = p.Node.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{})
	if must(t, err); len(storage.GetBackendHealth()) != 1 {
		t.Errorf("NodeGetStorageHealth without the pool's marker: %v", storage)
	}
	_, err = p.Identity.Probe(ctx, &csi.ProbeRequest{})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("Probe without the pool's marker: %v", err)
	}
	must(t, os.Rename(marker+".away", marker))
	_, err = p.Identity.Probe(ctx, &csi.ProbeRequest{})
	must(t, err)
}
