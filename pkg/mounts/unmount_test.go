package mounts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func TestUnmount(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, path := t.Context(), filepath.Join(root, "stage")
		wantClass(t, h.Unmount(ctx, path), state.Unavailable, "not a mount point")
		wantClass(t, h.Unmount(ctx, filepath.Join(path, "x")), state.Unavailable, "not a mount point")
		d := mounted(t, h, path)
		mountTmpfs(t, "over", path, 0)
		must(t, h.Unmount(ctx, path))
		wantMount(t, h, path, d.Number)
		must(t, h.Unmount(ctx, path))
		wantFile(t, h, path, state.Directory)
		wantClass(t, h.Unmount(ctx, path), state.Unavailable, "not a mount point")
		wantFree(t, d)
	})
}

func TestEndedContextKeepsChangesFromStarting(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	d := mounted(t, h, path)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	target := filepath.Join(root, "target")
	for name, err := range map[string]error{
		"MountDevice":   h.MountDevice(ctx, d, target, "ext4", state.Flags{}, false),
		"BindMount":     h.BindMount(ctx, path, d.Number, target, state.Flags{}),
		"BindDevice":    h.BindDevice(ctx, d, target),
		"SetAttributes": h.SetAttributes(ctx, path, state.Flags{Set: state.ReadOnly}),
		"Unmount":       h.Unmount(ctx, path),
		"Remove":        h.Remove(ctx, target),
		"Renew":         h.Renew(ctx, target),
	} {
		if state.ClassOf(err) != state.Canceled {
			t.Errorf("%s: %v", name, err)
		}
	}
	mustBe(t, "attributes", wantMount(t, h, path, d.Number).Attributes, 0)
	wantFile(t, h, target, state.NoFile)
}

// Whatever way a process uses a file system, a busy unmount names it.
func TestBusyUnmountNamesTheProcess(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	mountTmpfs(t, "shared", root, 0)
	must(t, unix.Mount("", root, "", unix.MS_SHARED, ""))
	d := mounted(t, h, path)
	must(t, os.WriteFile(filepath.Join(path, "file"), []byte("some bytes"), 0o600))
	wait := "; exec " + waiting(t)
	for name, program := range map[string][]string{
		"a working directory": {"sh", "-c", "cd " + path + wait},
		"an open file":        {"sh", "-c", "exec 5<" + path + "/file" + wait},
		"a mount namespace that receives from ours":  machine.InNamespace("slave", root, "cd "+path+wait),
		"a mount namespace in which it was replaced": machine.InNamespace("slave", root, "cd "+path+"; mount -t tmpfs x "+root+wait),
	} {
		t.Run(name, func(t *testing.T) {
			cmd := start(t, "", program...)
			wantClass(t, h.Unmount(ctx, path), state.Unavailable, path, "in use by", fmt.Sprintf("pid %d (tail)", cmd.Process.Pid))
			wantMount(t, h, path, d.Number)
			stop(cmd)
		})
	}
	below := filepath.Join(path, "sub")
	mountTmpfs(t, "below", below, 0)
	wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by the mount at "+below)
	must(t, h.Unmount(ctx, below))
	must(t, h.Unmount(ctx, path))
	wantFree(t, d)
}

func TestBusyUnmountNamesAMapping(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d := mounted(t, h, path)
	must(t, os.WriteFile(filepath.Join(path, "file"), []byte("some bytes"), 0o600))
	f, err := os.Open(filepath.Join(path, "file"))
	must(t, err)
	memory, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	must(t, err)
	must(t, f.Close())
	self, mount := strings.Replace(process.Name(os.Getpid()), "process", "pid", 1), "the mount at "+path
	wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by", self)
	if found := Holders(ctx, d.Number); !slices.Contains(found, self) || !slices.Contains(found, mount) {
		t.Errorf("holders %q", found)
	}
	must(t, unix.Munmap(memory))
	must(t, h.Unmount(ctx, path))
	// Others may look at any device, losetup does.
	if found := Holders(ctx, d.Number); slices.Contains(found, self) || slices.Contains(found, mount) {
		t.Errorf("holders of a free device: %q", found)
	}
}

// A loop device over a file in the volume has no process.
func TestBusyUnmountNamesALoopDevice(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			h, root := newHost(t)
			ctx, path := t.Context(), filepath.Join(root, "stage")
			d := newDevice(t, root, fsType)
			must(t, h.MountDevice(ctx, d, path, fsType, state.Flags{}, false))
			image := filepath.Join(path, "image")
			must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
			over := attach(t, root, image).Path
			wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by the loop device "+over+" over "+image)
			if found := Holders(ctx, d.Number); !slices.Contains(found, "the loop device "+over+" over "+image) {
				t.Errorf("holders %q", found)
			}
		})
	}
}

// A copy of the stage in a private mount namespace outlives the stage and keeps
// the device, until the directory is renewed.
func TestRenewFreesCopiesInOtherNamespaces(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d := mounted(t, h, path)
	cmd := start(t, "", machine.InNamespace("private", root, "exec "+waiting(t))...)
	wantClass(t, h.Renew(ctx, path), state.FailedPrecondition, "is a mount point")
	must(t, h.Unmount(ctx, path))
	if err := claim(d); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("the copy does not hold the device: %v", err)
	}
	want := fmt.Sprintf("pid %d (tail) with a mount at %s in its own mount namespace", cmd.Process.Pid, path)
	if found := Holders(ctx, d.Number); !slices.Contains(found, want) {
		t.Errorf("holders %q, want %q", found, want)
	}

	// What is to be the same afterwards. The label needs no policy to be kept.
	must(t, os.Chown(path, 12, 34))
	must(t, os.Chmod(path, 0o2751|os.ModeSetgid))
	label := []byte("system_u:object_r:container_file_t:s0\x00")
	if err := unix.Setxattr(path, labelName, label, 0); err != nil {
		t.Logf("no SELinux label here: %v", err)
		label = nil
	}
	var before, after unix.Stat_t
	must(t, unix.Stat(path, &before))
	must(t, h.Renew(ctx, path))
	must(t, unix.Stat(path, &after))
	if before.Ino == after.Ino && before.Ctim == after.Ctim {
		t.Error("it is the same directory still")
	}
	mustBe(t, "mode", after.Mode, before.Mode)
	mustBe(t, "uid", after.Uid, 12)
	mustBe(t, "gid", after.Gid, 34)
	if label != nil {
		got := make([]byte, len(label))
		_, err := unix.Getxattr(path, labelName, got)
		must(t, err)
		mustBe(t, "label", string(got), string(label))
	}
	wantFree(t, d)
	if found := Holders(ctx, d.Number); slices.Contains(found, want) {
		t.Errorf("holders %q", found)
	}
}

func TestRenewRefusals(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "x")
	wantClass(t, h.Renew(ctx, path), state.Unavailable, "no such file")
	must(t, os.WriteFile(path, nil, 0o600))
	wantClass(t, h.Renew(ctx, path), state.FailedPrecondition, "no directory")
	must(t, os.Remove(path))
	must(t, os.MkdirAll(filepath.Join(path, "y"), 0o750))
	wantClass(t, h.Renew(ctx, path), state.FailedPrecondition, "not empty")
	wantFile(t, h, filepath.Join(path, "y"), state.Directory)
}

func TestHoldersIsBounded(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	d := mounted(t, h, path)
	for i := range process.NameLimit + 4 {
		must(t, h.BindMount(t.Context(), path, d.Number, filepath.Join(root, fmt.Sprint(i)), state.Flags{}))
	}
	mustBe(t, "names", len(Holders(t.Context(), d.Number)), process.NameLimit)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	mustBe(t, "names once ctx has ended", len(Holders(ctx, d.Number)), 0)
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
	cmd := start(t, "", machine.InNamespace("private", root, "mount --bind "+target+" "+other+"; exec "+waiting(t))...)
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
	if paths, err := h.BoundAt(ctx, d.Number); err != nil || len(paths) > 0 {
		t.Errorf("bound at %q (%v) at the end", paths, err)
	}
}

// What is busy for a moment is unmounted a moment later: a child that a process
// forks while it has a file open has that too, until it becomes the program.
func TestUnmountOfWhatIsBusyForAMoment(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	mountTmpfs(t, "busy", path, 0)
	must(t, os.WriteFile(filepath.Join(path, "file"), []byte("some bytes"), 0o600))
	f, err := os.Open(filepath.Join(path, "file"))
	must(t, err)
	closed := make(chan error, 1)
	time.AfterFunc(busyLimit/5, func() { closed <- f.Close() })
	must(t, h.Unmount(t.Context(), path))
	must(t, <-closed)
}
