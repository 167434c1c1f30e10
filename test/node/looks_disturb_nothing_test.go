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
