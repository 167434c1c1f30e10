package mounts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func TestBindMount(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, stage, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
		d := mounted(t, h, stage)
		must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{Set: state.ReadOnly | state.NoAtime, Clear: state.AtimeMask}))
		mustBe(t, "attributes", wantMount(t, h, target, d.Number).Attributes, state.ReadOnly|state.NoAtime)
		mustBe(t, "attributes of the stage", wantMount(t, h, stage, d.Number).Attributes, 0)
		if err := os.WriteFile(filepath.Join(target, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing through a read-only bind: %v", err)
		}
		must(t, os.WriteFile(filepath.Join(stage, "file"), nil, 0o600))

		wantClass(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{}), state.FailedPrecondition, "binding twice stacks two mounts")
		wantMount(t, h, target, d.Number)

		// A bind of a bind, with an attribute taken away.
		again := filepath.Join(root, "again")
		must(t, h.BindMount(ctx, target, d.Number, again, state.Flags{Clear: state.ReadOnly}))
		mustBe(t, "attributes", wantMount(t, h, again, d.Number).Attributes, state.NoAtime)

		for _, path := range []string{again, target} {
			must(t, h.Unmount(ctx, path))
			must(t, h.Remove(ctx, path))
			wantFile(t, h, path, state.NoFile)
		}
	})
}

func TestBindMountRefusals(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, stage := t.Context(), filepath.Join(root, "stage")
		d := mounted(t, h, stage)
		must(t, os.Mkdir(filepath.Join(stage, "sub"), 0o750))
		must(t, os.Mkdir(filepath.Join(root, "part"), 0o750))
		must(t, unix.Mount(filepath.Join(stage, "sub"), filepath.Join(root, "part"), "", unix.MS_BIND, ""))
		mountTmpfs(t, "foreign", filepath.Join(root, "foreign"), 0)
		for source, word := range map[string]string{
			"none": "no such file", "none/none": "no such file", "stage/sub": "no mount point", "part": "/sub", "foreign": "foreign", "": "",
		} {
			if source == "" { // the right source of another device
				wantClass(t, h.BindMount(ctx, stage, state.DeviceNumber{Major: 7, Minor: 1 << 19}, filepath.Join(root, "target"), state.Flags{}),
					state.FailedPrecondition, "is not mounted with the volume's device")
				continue
			}
			wantClass(t, h.BindMount(ctx, filepath.Join(root, source), d.Number, filepath.Join(root, "target"), state.Flags{}),
				state.FailedPrecondition, "is not mounted with the volume's device", word)
		}
		wantFile(t, h, filepath.Join(root, "target"), state.NoFile)
		wantClass(t, h.BindMount(ctx, stage, d.Number, filepath.Join(root, "no/target"), state.Flags{}), state.FailedPrecondition, "above the target is missing", "no")
		wantFile(t, h, filepath.Join(root, "no"), state.NoFile)
		file := filepath.Join(root, "file")
		must(t, os.WriteFile(file, nil, 0o600))
		wantClass(t, h.BindMount(ctx, stage, d.Number, file, state.Flags{}), state.FailedPrecondition, "is a file, not a directory")
		wantFile(t, h, file, state.RegularFile)
		wantClass(t, h.BindDevice(ctx, d, stage), state.FailedPrecondition, "mount point already")
		wantClass(t, h.BindMount(ctx, stage, d.Number, filepath.Join(root, "target"), state.Flags{Set: 1 << 40}), state.Unavailable)
		wantFile(t, h, filepath.Join(root, "target"), state.NoFile)
		must(t, h.Unmount(ctx, filepath.Join(root, "part")))
		must(t, h.Unmount(ctx, stage)) // no refusal left a descriptor on it
	})
}

// A failure after the target was made takes it away again, but never what was
// there before.
func TestAttachTakesBackWhatItMade(t *testing.T) {
	h, root := newHost(t)
	for _, kind := range []state.FileType{state.Directory, state.RegularFile} {
		path := filepath.Join(root, fmt.Sprint(kind))
		p, err := h.open(path)
		must(t, err)
		if err := h.attach(p, p.dir, kind, create); err == nil { // that is no detached mount
			t.Fatal("no error")
		}
		wantFile(t, h, path, state.NoFile)
		_, err = p.make(kind)
		must(t, err)
		if err := h.attach(p, p.dir, kind, create); err == nil {
			t.Fatal("no error")
		}
		wantFile(t, h, path, kind)
		p.close()
	}
}

// While a writer tries all the time, no file ever reaches the volume through a
// read-only bind, from its first instant on.
func TestReadOnlyBindIsNeverWritable(t *testing.T) {
	h, root := newHost(t)
	ctx, stage, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
	d := mounted(t, h, stage)
	beneath := 0
	for range 100 {
		must(t, os.Mkdir(target, 0o750))
		refused, started, done := make(chan struct{}), make(chan struct{}), make(chan int)
		go func() {
			count := 0
			for {
				err := os.WriteFile(filepath.Join(target, fmt.Sprint(count)), nil, 0o600)
				if count++; count == 2 {
					close(started)
				}
				if errors.Is(err, unix.EROFS) {
					close(refused)
					break
				}
			}
			done <- count - 1
		}()
		<-started
		must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{Set: state.ReadOnly}))
		<-refused
		beneath += <-done
		files, err := os.ReadDir(stage)
		must(t, err)
		if len(files) != 1 || files[0].Name() != "lost+found" {
			t.Fatalf("a write got through: %v", files)
		}
		must(t, h.Unmount(ctx, target))
		must(t, os.RemoveAll(target))
	}
	if beneath == 0 {
		t.Error("the writer never wrote, so it proved nothing")
	}
}

func TestBindDevice(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, target := t.Context(), filepath.Join(root, "target")
		d, other := newDevice(t, root, ""), newDevice(t, root, "")
		must(t, h.BindDevice(ctx, d, target))
		wantLook(t, h, target, onFile(state.BlockDevice, node(t, d)))
		wantMount(t, h, target, d.Number)
		wantClass(t, h.BindDevice(ctx, d, target), state.FailedPrecondition, "binding twice")
		f, err := os.OpenFile(target, os.O_RDWR, 0)
		must(t, err)
		_, err = f.WriteAt([]byte("data"), 4096)
		must(t, err)
		wantClass(t, h.Unmount(ctx, target), state.Unavailable, "in use by", fmt.Sprintf("pid %d ", os.Getpid()))
		must(t, f.Close())
		must(t, h.Unmount(ctx, target))
		wantLook(t, h, target, state.Mountpoint{File: state.RegularFile, Empty: true})
		must(t, h.Remove(ctx, target))

		d.Path = other.Path
		wantClass(t, h.BindDevice(ctx, d, target), state.Unavailable, other.Number.String())
		d.Path = "/proc/version"
		wantClass(t, h.BindDevice(ctx, d, target), state.Unavailable, "is a file")
		d.Path = filepath.Join(root, "none")
		wantClass(t, h.BindDevice(ctx, d, target), state.Unavailable, "no such file")
		wantClass(t, h.BindDevice(ctx, other, filepath.Join(root, "no/target")), state.FailedPrecondition, "above the target is missing")
		wantFile(t, h, target, state.NoFile)
		must(t, os.Mkdir(target, 0o750))
		wantClass(t, h.BindDevice(ctx, other, target), state.FailedPrecondition, "is a directory, not a file")
		wantFile(t, h, target, state.Directory)
	})
}

// What somebody mounts at a target stays there, though all is shared.
func TestBindsShareNothingWithTheirSource(t *testing.T) {
	h, root := newHost(t)
	mountTmpfs(t, "shared", root, 0)
	must(t, unix.Mount("", root, "", unix.MS_SHARED, ""))
	ctx, stage, target, file := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target"), filepath.Join(root, "node")
	d := mounted(t, h, stage)
	must(t, os.Mkdir(filepath.Join(stage, "sub"), 0o750))
	must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{}))
	mountTmpfs(t, "nested", filepath.Join(target, "sub"), 0)
	wantFile(t, h, filepath.Join(stage, "sub"), state.Directory)

	// A directory with a node stands in for /dev.
	dev := filepath.Join(root, "dev")
	mountTmpfs(t, "dev", dev, 0)
	fake := state.Device{Path: filepath.Join(dev, "loop"), Number: d.Number}
	must(t, unix.Mknod(fake.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(d.Number.Major, d.Number.Minor))))
	must(t, h.BindDevice(ctx, fake, file))
	must(t, unix.Mount("/dev/null", file, "", unix.MS_BIND, ""))
	wantFile(t, h, fake.Path, state.BlockDevice)
	must(t, h.Unmount(ctx, file))
	wantMount(t, h, file, d.Number)
}

// Where a file system is mounted as a whole is told of the paths below the root only.
func TestMountedAt(t *testing.T) {
	h, root := newHost(t)
	ctx, stage, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
	d := mounted(t, h, stage)
	must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{}))
	part, outside := filepath.Join(root, "part"), t.TempDir()
	must(t, os.Mkdir(part, 0o700))
	must(t, os.Mkdir(filepath.Join(stage, "sub"), 0o700))
	must(t, unix.Mount(filepath.Join(stage, "sub"), part, "", unix.MS_BIND, ""))
	must(t, unix.Mount(stage, outside, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(outside, unix.MNT_DETACH)) })
	mountTmpfs(t, "cover", target, 0)
	if paths, err := h.MountedAt(ctx, d.Number); err != nil || !slices.Equal(paths, []string{stage, target}) {
		t.Errorf("mounted at %q (%v)", paths, err)
	}
}

// What lies over a bound node does not take the number away from it.
func TestBoundAtUnderACover(t *testing.T) {
	h, root := newHost(t)
	ctx, target, cover := t.Context(), filepath.Join(root, "target"), filepath.Join(root, "cover")
	d := newDevice(t, root, "")
	must(t, h.BindDevice(ctx, d, target))
	must(t, os.WriteFile(cover, nil, 0o600))
	must(t, unix.Mount(cover, target, "", unix.MS_BIND, ""))
	if paths, err := h.BoundAt(ctx, d.Number); err != nil || !slices.Equal(paths, []string{target}) {
		t.Errorf("bound at %q (%v)", paths, err)
	}
}

// Whoever has a node bound in a namespace of its own has the number.
func TestBoundInAnotherNamespace(t *testing.T) {
	h, root := newHost(t)
	ctx, target, other := t.Context(), filepath.Join(root, "target"), filepath.Join(t.TempDir(), "node")
	d := newDevice(t, root, "")
	must(t, h.BindDevice(ctx, d, target))
	must(t, os.WriteFile(other, nil, 0o600))
	cmd := start(t, machine.InNamespace("private", root, "mount --bind "+target+" "+other+"; exec "+waiting(t))...)
	if paths, err := h.BoundAt(ctx, d.Number); err != nil || !slices.Equal(paths, []string{target}) {
		t.Errorf("bound at %q (%v)", paths, err)
	}
	must(t, h.Unmount(ctx, target))
	must(t, h.Remove(ctx, target))
	want := fmt.Sprintf("pid %d (tail) with a mount at %s in its own mount namespace", cmd.Process.Pid, other)
	if paths, err := h.BoundAt(ctx, d.Number); err != nil || !slices.Equal(paths, []string{want}) {
		t.Errorf("bound at %q (%v), want %q", paths, err, want)
	}
	stop(cmd)

	// A search that does not end has not shown that there is none.
	release := make(chan struct{})
	process.Collect(ctx, time.Millisecond, fmt.Sprintf("binds of %s", d.Number), func(func(string) bool) { <-release })
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if paths, err := h.BoundAt(short, d.Number); err == nil {
		t.Errorf("bound at %q, by a search that has not ended", paths)
	}
	close(release)
	for {
		if paths, err := h.BoundAt(ctx, d.Number); err == nil {
			if len(paths) > 0 {
				t.Errorf("bound at %q at the end", paths)
			}
			break
		}
	}
}
