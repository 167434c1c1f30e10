package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
)

// exhaust fills a file system until not even a directory can be made.
func exhaust(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "filler"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	must(t, err)
	for _, size := range []int{1 << 20, 1 << 12, 1 << 9} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	must(t, f.Close())
	for i := 0; err == nil || i == 0; i++ {
		err = os.Mkdir(filepath.Join(dir, fmt.Sprintf("%d-%d", i, unix.Getpid())), 0o700)
		if errors.Is(err, os.ErrExist) {
			err = nil
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// Without a free block in the pool everything that gives
// space back goes on, and so does what needs none.
func TestFullPoolIsEmptied(t *testing.T) {
	t.Parallel()
	for _, mkfs := range [][]string{{"mkfs.ext4", "-q"}, {"mkfs.xfs", "-q"}} {
		t.Run(mkfs[0], func(t *testing.T) {
			t.Parallel()
			p := harness.New(t)
			mountPool(t, p, 320*mib, mkfs...)
			p.Start(harness.Options{})
			used := createAs(t, p, "used", 64*mib, mountAs("ext4", singleWriter), "thick")
			fresh := createAs(t, p, "fresh", 32*mib, mountAs("ext4", singleWriter), "thick")
			thin := create(t, p, "thin", 32*mib, blockAs(singleWriter))
			thick := createAs(t, p, "thick", 32*mib, blockAs(singleWriter), "thick")
			doomed := create(t, p, "doomed", 16*mib, blockAs(singleWriter))
			short := newInline(t, p, "csi-inline", mountAs("ext4", singleWriter), map[string]string{"size": "32Mi"})
			pod := used.Target("1")
			must(t, used.Up(t.Context(), pod))
			must(t, short.publishInline(t.Context()))
			for _, v := range []*volume{thin, thick, doomed} {
				write(t, v.Data()+".copy", "x") // a file that a delete takes along
				f, err := os.OpenFile(v.Data(), os.O_WRONLY, 0)
				must(t, err)
				_, err = f.WriteAt(make([]byte, 8*mib), 4*mib)
				must(t, err)
				_, err = f.WriteAt([]byte("data"), 8*mib)
				must(t, err)
				must(t, f.Close())
			}
			free := func(by string, do func()) {
				t.Helper()
				exhaust(t, p.PoolDir)
				t.Log(by)
				do()
			}
			free("a format", func() { must(t, fresh.Stage(t.Context())); must(t, fresh.Unstage(t.Context())) })
			for _, v := range []*volume{thin, thick} {
				free("clear-device of a "+v.ID+" volume", func() {
					var c struct{ Cleared bool }
					line := "csi-node volume clear-device " + v.ID + " --i-understand-this-destroys-data"
					typed(t, p, line, &c)
					if !c.Cleared {
						t.Error("it is not cleared")
					}
				})
			}
			free("the end of an inline volume", func() { must(t, short.Unpublish(t.Context(), short.pod)) })
			mustBeGone(t, filepath.Dir(short.Data()))
			free("a start", func() { p.Kill(); p.Start(harness.Options{}) })
			free("volume delete", func() {
				if r := shell(t, p, "csi-node volume delete doomed"); r.Code != 0 {
					t.Errorf("%s%s", r.Stdout, r.Stderr)
				}
			})
			mustBeGone(t, filepath.Dir(doomed.Data()))
			for _, v := range []*volume{thin, thick, fresh} {
				free("DeleteVolume of "+v.ID, func() { must(t, v.Delete(t.Context())) })
				mustBeGone(t, filepath.Dir(v.Data()))
			}
			free("the end of a volume", func() { used.End(pod) })
		})
	}
}
