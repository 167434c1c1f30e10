package store

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
)

// benchDirs are where stores are timed: on disk, and on a tmpfs as in production.
func benchDirs(b *testing.B) map[string]string {
	b.Helper()
	shm, err := os.MkdirTemp("/dev/shm", "csi-node-bench-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := os.RemoveAll(shm); err != nil {
			b.Error(err)
		}
	})
	return map[string]string{"disk": b.TempDir(), "tmpfs": shm}
}

func BenchmarkEdit(b *testing.B) {
	for kind, dir := range benchDirs(b) {
		for _, writers := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/writers=%d", kind, writers), func(b *testing.B) {
				s := openStore(b, filepath.Join(dir, fmt.Sprint(writers)), testBoot)
				var next atomic.Int64
				b.SetParallelism(writers / runtime.GOMAXPROCS(0))
				if writers == 1 {
					for b.Loop() {
						mustEdit(b, s, "v", toggled)
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					id := fmt.Sprint("v", next.Add(1))
					for pb.Next() {
						if _, err := s.Edit(id, toggled); err != nil {
							b.Error(err)
							return
						}
					}
				})
			})
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	for kind, dir := range benchDirs(b) {
		b.Run(kind, func(b *testing.B) {
			s := openStore(b, dir, testBoot)
			for i := range 5000 {
				mustEdit(b, s, fmt.Sprint(i), toggled)
			}
			closeStore(b, s)
			for b.Loop() {
				crash(b, openStore(b, dir, testBoot))
			}
		})
	}
}
