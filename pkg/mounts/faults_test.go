package mounts

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// kubelet made the directory: what takes its place is like it.
func TestRenewKeepsModeAndOwner(t *testing.T) {
	machine.Kernel(t)
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	must(t, os.Mkdir(path, 0o700))
	must(t, os.Chown(path, 1234, 5678))
	must(t, os.Chmod(path, 0o751|os.ModeSetgid))
	var before, after unix.Stat_t
	must(t, unix.Stat(path, &before))
	must(t, h.Renew(t.Context(), path))
	must(t, unix.Stat(path, &after))
	if after.Mode != before.Mode || after.Uid != 1234 || after.Gid != 5678 {
		t.Errorf("mode %o and owner %d:%d, want %o and 1234:5678", after.Mode, after.Uid, after.Gid, before.Mode)
	}
}

// Since Linux 6.15 an ext4 tells by an option alone that it refuses writes.
func TestEmergencyReadOnly(t *testing.T) {
	e := entry{options: "rw,emergency_ro"}
	if !e.mount().SuperReadOnly {
		t.Error("a superblock that refuses writes counts as writable")
	}
	if e = (entry{options: "rw,errors=remount-ro"}); e.mount().SuperReadOnly {
		t.Error("a writable superblock counts as read-only")
	}
}

// To mount is to write: the device is judged before.
func TestWrongNodeIsNotWrittenTo(t *testing.T) {
	h, root := newHost(t)
	d := newDevice(t, root, "ext4")
	before, err := os.ReadFile(d.Path)
	must(t, err)
	d.Number.Minor += 1000
	err = h.MountDevice(t.Context(), d, filepath.Join(root, "stage"), "ext4", state.Flags{}, false)
	wantClass(t, err, state.Unavailable, d.Path)
	after, err := os.ReadFile(d.Path)
	must(t, err)
	if !bytes.Equal(before, after) {
		t.Error("the device was written to")
	}
}

func TestRootIsNoPath(t *testing.T) {
	h, err := New("/")
	must(t, err)
	wantClass(t, h.Check("/"), state.InvalidArgument, "not below")
}

// mkfs.ext4 keeps some blocks for root, unless it is told otherwise.
func TestUsageLeavesOutWhatIsRoots(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	mounted(t, h, path)
	_, u, err := h.Usage(t.Context(), path)
	must(t, err)
	if free := u.Bytes.Total - u.Bytes.Used; u.Bytes.Available >= free {
		t.Errorf("%d bytes are available, of %d free", u.Bytes.Available, free)
	}
}
