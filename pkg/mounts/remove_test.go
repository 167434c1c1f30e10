package mounts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func TestRemove(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "x")
	must(t, h.Remove(ctx, path))
	must(t, h.Remove(ctx, filepath.Join(path, "y")))
	must(t, os.Mkdir(path, 0o750))
	must(t, h.Remove(ctx, path))
	wantFile(t, h, path, state.NoFile)
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, h.Remove(ctx, filepath.Join(path, "y")))
	must(t, h.Remove(ctx, path))
	wantFile(t, h, path, state.NoFile)

	keep := func(kind state.FileType, word string) {
		t.Helper()
		wantClass(t, h.Remove(ctx, path), state.FailedPrecondition, path, word, "not removed")
		m, err := h.Look(ctx, path, hang.NoLimit)
		must(t, err)
		mustBe(t, "what stayed", m.File, kind)
	}
	must(t, os.WriteFile(path, []byte("data"), 0o600))
	keep(state.RegularFile, "holds 4 bytes")
	must(t, os.Remove(path))
	must(t, os.MkdirAll(filepath.Join(path, "y"), 0o750))
	keep(state.Directory, "not empty")
	must(t, os.Remove(filepath.Join(path, "y")))
	mountTmpfs(t, "t", path, 0)
	keep(state.Directory, "mount point")
	must(t, h.Unmount(ctx, path))
	must(t, os.Remove(path))
	must(t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0))))
	keep(state.BlockDevice, "block device")
	must(t, os.Remove(path))
	must(t, unix.Mkfifo(path, 0o600))
	keep(state.OtherFile, "special file")
}

// kubelet made the directory: what takes its place is like it.
func TestRenewKeepsModeAndOwner(t *testing.T) {
	machine.Kernel(t)
	h, root := newHost(t)
	path := filepath.Join(root, "driver", "volume", "globalmount")
	must(t, os.MkdirAll(path, 0o700))
	must(t, os.Chown(path, 1234, 5678))
	must(t, os.Chmod(path, 0o751|os.ModeSetgid))
	killed := spare(root, path) // what a process has left that was killed
	must(t, os.Mkdir(killed, 0o700))
	var before, after unix.Stat_t
	must(t, unix.Stat(path, &before))
	must(t, h.Renew(t.Context(), path))
	must(t, unix.Stat(path, &after))
	wantFile(t, h, killed, state.NoFile)
	if after.Mode != before.Mode || after.Uid != 1234 || after.Gid != 5678 {
		t.Errorf("mode %o and owner %d:%d, want %o and 1234:5678", after.Mode, after.Uid, after.Gid, before.Mode)
	}
}

// A copy of the stage in a private mount namespace outlives the stage and keeps
// the device, until the directory is renewed.
func TestRenewFreesCopiesInOtherNamespaces(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d := mounted(t, h, path)
	cmd := start(t, machine.InNamespace("private", root, "exec "+waiting(t))...)
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
	taken := spare(root, path)
	wantFile(t, h, taken, state.NoFile)
	must(t, os.Rename(path, taken))
	must(t, os.Mkdir(path, 0o750))
	wantClass(t, h.Renew(ctx, path), state.FailedPrecondition, taken, "not empty")
	wantFile(t, h, filepath.Join(taken, "y"), state.Directory)
	if err := h.Sweep(); err == nil {
		t.Error("what is not empty was swept")
	}
	must(t, os.Remove(filepath.Join(taken, "y")))
	must(t, h.Sweep())
	wantFile(t, h, taken, state.NoFile)
}

// A file system that is mounted between the root and the path keeps the new directory from
// being made in the root; so does a root that is read-only.
func TestRenewBelowAMount(t *testing.T) {
	_, dir := newHost(t)
	for name, flags := range map[string]uintptr{"writable": 0, "read-only": unix.MS_RDONLY} {
		root := filepath.Join(dir, name)
		volumes := filepath.Join(root, "plugins")
		must(t, os.Mkdir(root, 0o750))
		mountTmpfs(t, "root", root, 0)
		must(t, os.Mkdir(volumes, 0o750))
		mountTmpfs(t, "volumes", volumes, 0)
		must(t, unix.Mount("", root, "", unix.MS_REMOUNT|flags, ""))
		h, err := New(root)
		must(t, err)
		path := filepath.Join(volumes, "volume", "globalmount")
		must(t, os.MkdirAll(path, 0o750))
		must(t, h.Renew(t.Context(), path))
		wantFile(t, h, path, state.Directory)
		wantFile(t, h, spare(root, path), state.NoFile)
		wantFile(t, h, spare(filepath.Dir(path), path), state.NoFile)
	}
}

// A process that is killed in the renewal leaves a directory: who asks for the volume again expects kubelet's.
func TestRenewIsNeverWithoutADirectory(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	must(t, os.Mkdir(path, 0o700))
	ctx, stop := context.WithCancel(t.Context())
	looked := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Lstat(path); err != nil {
				looked <- err
				return
			}
		}
		looked <- nil
	}()
	for range 2000 {
		must(t, h.Renew(t.Context(), path))
	}
	stop()
	must(t, <-looked)
}
