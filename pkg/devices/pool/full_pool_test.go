package pool

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/test/machine"
)

// mountImage mounts a new file system of that many bytes.
func mountImage(t testing.TB, dir string, bytes int64, mkfs ...string) {
	t.Helper()
	machine.Kernel(t)
	memory := t.TempDir()
	mountSmall(t, memory, "-t", "tmpfs", "tmpfs")
	image := filepath.Join(memory, "image")
	ok(t, os.WriteFile(image, nil, 0o600))
	ok(t, os.Truncate(image, bytes))
	run(t, mkfs[0], append(mkfs[1:], image)...)
	mountSmall(t, dir, "-o", "loop", image)
}

func mountSmall(t testing.TB, dir string, arguments ...string) {
	t.Helper()
	machine.Kernel(t)
	ok(t, os.MkdirAll(dir, 0o700))
	run(t, "mount", append(arguments, dir)...)
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
			ok(t, rawfile.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, mib, mib))
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

// slots returns the places of a volume's facts to come.
func slots(t testing.TB, p *Pool, id string) []string {
	t.Helper()
	found, err := filepath.Glob(p.path(volumesDir, id, slotFile+"*"))
	ok(t, err)
	return found
}

// withoutSlot makes a volume as an older version made it.
func withoutSlot(t testing.TB, p *Pool, id string) {
	t.Helper()
	path := p.path(volumesDir, id, volumeFile)
	raw, err := os.ReadFile(path)
	ok(t, err)
	for _, slot := range slots(t, p, id) {
		ok(t, os.Remove(slot))
	}
	ok(t, os.WriteFile(path, bytes.TrimRight(raw, " "), 0o600))
}

// TestFactsOfAnOlderVersion: a volume without a slot gets one, if there is room.
func TestFactsOfAnOlderVersion(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thin)
	withoutSlot(t, p, "v")
	ok(t, p.BeginFormat(t.Context(), "v"))
	if got := slots(t, p, "v"); len(got) != 1 || !facts(t, p, "v").Formatting {
		t.Errorf("%q, %+v", got, facts(t, p, "v"))
	}
}

// TestOlderVersionWithoutABlock: a full pool in which an older version made the
// volumes takes facts and is emptied, too.
func TestOlderVersionWithoutABlock(t *testing.T) {
	for name, mkfs := range map[string][]string{"ext4": {"mkfs.ext4", "-q", "-b", "1024"}, "xfs": {"mkfs.xfs", "-q"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := newDir(t)
			mountImage(t, dir, 300*mib, mkfs...)
			p := open(t, dir)
			for id, how := range map[string]Provisioning{"thick": Thick, "thin": Thin} {
				create(t, p, id, 8*mib, how)
				fill(t, p, id)
				withoutSlot(t, p, id)
			}
			p = open(t, dir)
			for _, id := range []string{"thick", "thin"} {
				exhaust(t, dir)
				ok(t, p.BeginRaw(t.Context(), id))
				if !facts(t, p, id).Raw {
					t.Errorf("%+v", facts(t, p, id))
				}
				ok(t, p.Clear(t.Context(), id))
				if v := facts(t, p, id); v.Raw || v.Formatting || !zero(t, p, id) {
					t.Errorf("it is not clear: %+v", v)
				}
			}
		})
	}
}

// TestLateExchange: a process that was killed in the exchange of slot and facts
// may carry it out when its successor has written others.
func TestLateExchange(t *testing.T) {
	dir := newDir(t)
	p := open(t, dir)
	create(t, p, "v", mib, Thin)
	ok(t, p.BeginFormat(t.Context(), "v"))
	late, path := slots(t, p, "v"), p.path(volumesDir, "v", volumeFile)
	if len(late) != 1 {
		t.Fatalf("slots %q", late)
	}
	p = open(t, dir)
	ok(t, p.EndFormat(t.Context(), "v", "ext4"))
	if err := exchange(path, late[0]); !errors.Is(err, unix.ENOENT) {
		t.Errorf("the late exchange: %v", err)
	}
	if v := facts(t, p, "v"); v.Formatting || v.Formatted != "ext4" {
		t.Errorf("the facts are of before: %+v", v)
	}
	if got := slots(t, p, "v"); len(got) != 1 {
		t.Errorf("slots %q", got)
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
