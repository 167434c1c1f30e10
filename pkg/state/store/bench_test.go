package store

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
)

// onTmpfs returns a directory as in production.
func onTmpfs(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "csi-node-store-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

func BenchmarkEdit(b *testing.B) {
	for _, writers := range []int{1, 32} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			s := openStore(b, onTmpfs(b), testBoot)
			var next atomic.Int64
			b.SetParallelism(max(1, writers/runtime.GOMAXPROCS(0)))
			b.RunParallel(func(pb *testing.PB) {
				id := fmt.Sprint("v", next.Add(1)%int64(writers))
				for pb.Next() {
					mustEdit(b, s, id, toggled)
				}
			})
		})
	}
}

// A node with five thousand volumes.
func BenchmarkOpen(b *testing.B) {
	dir := onTmpfs(b)
	s := openStore(b, dir, testBoot)
	for i := range 5000 {
		mustEdit(b, s, fmt.Sprint(i), toggled)
	}
	must(b, s.Close())
	for b.Loop() {
		must(b, openStore(b, dir, testBoot).Close())
	}
}
