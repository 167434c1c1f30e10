package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// mountImage mounts a new file system of that many bytes.
func mountImage(t testing.TB, dir string, bytes int64, mkfs ...string) {
	t.Helper()
	memory := t.TempDir()
	mountSmall(t, memory, "-t", "tmpfs", "tmpfs")
	image := filepath.Join(memory, "image")
	ok(t, os.WriteFile(image, nil, 0o600))
	ok(t, os.Truncate(image, bytes))
	run(t, append(mkfs, image)...)
	mountSmall(t, dir, "-o", "loop", image)
}

func mountSmall(t testing.TB, dir string, arguments ...string) {
	t.Helper()
	ok(t, os.MkdirAll(dir, 0o700))
	run(t, append(append([]string{"mount"}, arguments...), dir)...)
	t.Cleanup(func() { run(t, "umount", "--lazy", dir) }) // a loop device is let go of a moment later
}

// exhaust fills a file system to the last block, and the given directories to
// the last name.
func exhaust(t testing.TB, dir string, names ...string) {
	t.Helper()
	filler := filepath.Join(dir, "filler")
	ok(t, os.MkdirAll(filler, 0o700))
	for i := 0; ; i++ {
		f, err := os.OpenFile(filepath.Join(filler, fmt.Sprint(i)), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			full(t, err)
			break
		}
		var wrote int
		for _, size := range []int{1 << 20, 1 << 16, 1 << 12, 512} {
			for err = nil; err == nil && wrote < 64<<20; {
				var n int
				n, err = f.Write(make([]byte, size))
				wrote += n
			}
		}
		if err != nil {
			full(t, err)
		}
		if err := f.Sync(); err != nil {
			full(t, err)
		}
		ok(t, f.Close())
		if wrote == 0 {
			break
		}
	}
	source := filepath.Join(filler, "0")
	for _, name := range append(names, filler) {
		for _, long := range []int{200, 40, 0} {
			for i, err := 0, error(nil); err == nil; i++ {
				err = os.Link(source, filepath.Join(name, fmt.Sprintf("%d.%s", i, strings.Repeat("x", long))))
				if errors.Is(err, os.ErrExist) {
					err = nil
				} else if err != nil {
					full(t, err)
				}
			}
		}
	}
	if err := os.Mkdir(filepath.Join(filler, "directory"), 0o700); err == nil {
		t.Fatal("a directory can be made still")
	} else {
		full(t, err)
	}
}

func full(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EMLINK) {
		t.Fatalf("filling the pool: %v", err)
	}
}

// TestPoolWithoutABlock: a pool without a free block takes facts, and gives space back.
func TestPoolWithoutABlock(t *testing.T) {
	for name, mount := range map[string]func(t testing.TB, dir string){
		"ext4":       func(t testing.TB, dir string) { mountImage(t, dir, 96*mib, "mkfs.ext4", "-q", "-b", "1024") },
		"ext4 of 4k": func(t testing.TB, dir string) { mountImage(t, dir, 96*mib, "mkfs.ext4", "-q", "-b", "4096") },
		"xfs":        func(t testing.TB, dir string) { mountImage(t, dir, 300*mib, "mkfs.xfs", "-q") },
		"tmpfs": func(t testing.TB, dir string) {
			mountSmall(t, dir, "-t", "tmpfs", "-o", "size=96m,nr_inodes=100", "tmpfs")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := newDir(t)
			mount(t, dir)
			p := open(t, dir)
			names := []string{p.path(trashDir)}
			for _, id := range []string{"thick", "raw"} {
				create(t, p, id, 8*mib, Thick)
				fill(t, p, id)
			}
			create(t, p, "thin", 8*mib, Thin)
			fill(t, p, "thin")
			f := dataOf(t, p, "raw") // which lacks blocks
			ok(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, mib, mib))
			ok(t, f.Close())
			ok(t, p.BeginFormat(t.Context(), "thick"))
			for round := range 2 {
				exhaust(t, dir, names...)
				ok(t, p.EndFormat(t.Context(), "thick", "ext4"))
				for range 5 {
					ok(t, p.BeginFormat(t.Context(), "raw"))
					ok(t, p.EndFormat(t.Context(), "raw", "ext4"))
					ok(t, p.Clear(t.Context(), "raw"))
				}
				for _, id := range []string{"thick", "thin"} {
					ok(t, p.Clear(t.Context(), id))
					if !zero(t, p, id) {
						t.Errorf("round %d: %s is not clear", round, id)
					}
					exhaust(t, dir, names...)
				}
				ok(t, p.BeginFormat(t.Context(), "thick"))
			}
			p = open(t, dir) // a start needs no space either
			for _, id := range []string{"thin", "thick", "raw"} {
				ok(t, p.Delete(t.Context(), id))
				exhaust(t, dir, names...)
			}
			if ids, err := p.IDs(t.Context()); err != nil || len(ids) > 0 {
				t.Errorf("left: %q, %v", ids, err)
			}
		})
	}
}

// TestFactsOfAnOlderVersion: a volume without a slot gets one.
func TestFactsOfAnOlderVersion(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thin)
	slot := p.path(volumesDir, "v", slotFile)
	ok(t, os.Remove(slot))
	ok(t, p.BeginFormat(t.Context(), "v"))
	if _, err := os.Stat(slot); err != nil || !facts(t, p, "v").Formatting {
		t.Errorf("%v, %+v", err, facts(t, p, "v"))
	}
}

// TestFactsAreReadWhole while they are written over and over.
func TestFactsAreReadWhole(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thin)
	done := make(chan error)
	go func() {
		defer close(done)
		for i := range 200 {
			if err := p.update(t.Context(), "v", func(v *Volume) error { v.Name = strings.Repeat("name", i%50); return nil }); err != nil {
				done <- err
				return
			}
		}
	}()
	for {
		select {
		case err := <-done:
			ok(t, err)
			return
		default:
			if name := facts(t, p, "v").Name; name != "v" && strings.ReplaceAll(name, "name", "") != "" {
				t.Fatalf("name %q", name)
			}
		}
	}
}
