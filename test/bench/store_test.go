package bench

import (
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/require"
)

// BenchmarkStore: edits of one record, of 32 at a time, and a start with 5,000.
func BenchmarkStore(b *testing.B) {
	dir, err := os.MkdirTemp("/dev/shm", "csi-node-store-") // a tmpfs, as in production
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, os.RemoveAll(dir)) })
	open := func(b *testing.B) *store.Store {
		s, err := store.Open(b.Context(), dir, "boot")
		require.NoError(b, err)
		return s
	}
	edit := func(b *testing.B, s *store.Store, id string) {
		if _, err := s.Edit(id, func(v *state.Volume) error {
			if v.Stage == nil {
				return v.AskStage(&state.Stage{Path: "/var/lib/kubelet/plugins/kubernetes.io/csi/" + v.ID + "/globalmount"}, time.Now())
			}
			v.Stage.Accepted = !v.Stage.Accepted
			return nil
		}); err != nil {
			b.Error(err)
		}
	}
	for _, writers := range []int{1, 32} {
		b.Run(fmt.Sprintf("edit/writers=%d", writers), func(b *testing.B) {
			s, next := open(b), atomic.Int64{}
			b.SetParallelism(writers)
			b.RunParallel(func(pb *testing.PB) {
				for id := fmt.Sprint("v", next.Add(1)%int64(writers)); pb.Next(); {
					edit(b, s, id)
				}
			})
			require.NoError(b, s.Close())
		})
	}
	b.Run("open/records=5000", func(b *testing.B) {
		s := open(b)
		for i := range 5000 {
			edit(b, s, fmt.Sprint("v", i))
		}
		require.NoError(b, s.Close())
		for b.Loop() {
			require.NoError(b, open(b).Close())
		}
	})
}
