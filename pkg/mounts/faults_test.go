package mounts

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// kubelet made the directory: what takes its place is like it.
func TestRenewKeepsModeAndOwner(t *testing.T) {
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
