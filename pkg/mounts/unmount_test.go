package mounts

import (
	"context"
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

// A file system that somebody froze and left so does not keep its device once it is unmounted.
// The unmount of a bind leaves it frozen.
func TestUnmountOfWhatIsFrozen(t *testing.T) {
	const fiFreeze = 0xc0045877 // FIFREEZE of linux/fs.h
	freeze := func(path string, request uint) error {
		dir, err := os.Open(path)
		must(t, err)
		defer dir.Close()
		return unix.IoctlSetInt(int(dir.Fd()), request, 0)
	}
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			h, root := newHost(t)
			stage, target := filepath.Join(root, "stage"), filepath.Join(root, "target")
			d := mountedAs(t, h, stage, fsType)
			must(t, h.BindMount(t.Context(), stage, d.Number, target, state.Flags{}))
			must(t, freeze(stage, fiFreeze))
			must(t, h.Unmount(t.Context(), target))
			if err := freeze(stage, fiFreeze); err != unix.EBUSY {
				t.Errorf("it is not frozen any more: %v", err)
			}
			must(t, h.UnmountDevice(t.Context(), stage))
			if wantFree(t, d); t.Failed() { // so that it does not outlive the test
				must(t, h.MountDevice(t.Context(), d, stage, fsType, state.Flags{}, false))
				must(t, freeze(stage, fiThaw))
			}
		})
	}
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
			cmd := start(t, program...)
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

// A loop device over a file in the volume has no process; a process that has only
// the node of the volume's device open keeps no mount.
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
			node, err := os.Open(d.Path)
			must(t, err)
			user := "a loop device over it, " + over
			wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by "+user)
			found, self := Holders(ctx, d.Number), strings.Replace(process.Name(os.Getpid()), "process", "pid", 1)
			if !slices.Contains(found, user) || !slices.Contains(found, self) {
				t.Errorf("holders %q", found)
			}
			must(t, node.Close())
		})
	}
}

// Of the loop devices over a raw device only one by the path of its bind keeps that: the plugin's own
// view is another.
func TestBusyUnmountOfANodeNamesWhatKeepsIt(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, path := t.Context(), filepath.Join(root, "target")
		d := newDevice(t, root, "")
		must(t, h.BindDevice(ctx, d, path))
		attach(t, root, d.Path, "--read-only")
		cmd := start(t, "sh", "-c", "exec 5<"+path+"; exec "+waiting(t))
		wantClass(t, h.Unmount(ctx, path), state.Unavailable, fmt.Sprintf("in use by pid %d (tail): end that first", cmd.Process.Pid))
		stop(cmd)
		over := attach(t, root, path)
		wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by a loop device over it, "+over.Path+": end that first")
		machine.Command(t, "losetup", "--detach", over.Path)
		must(t, h.Unmount(ctx, path))
	})
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
	time.AfterFunc(busyLimit/20, func() { closed <- f.Close() })
	must(t, h.Unmount(t.Context(), path))
	must(t, <-closed)
}
