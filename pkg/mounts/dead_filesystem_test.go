package mounts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// mountDead mounts a FUSE whose server does not answer; the server ends with
// the file that is returned.
func mountDead(t *testing.T, path string) *os.File {
	t.Helper()
	machine.Kernel(t)
	must(t, os.MkdirAll(path, 0o750))
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	server := os.NewFile(uintptr(fd), "fuse")
	t.Cleanup(func() { server.Close() })
	must(t, unix.Mount("dead", path, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	return server
}

func TestDeadFilesystem(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		path := filepath.Join(root, "dead")
		server := mountDead(t, path)

		// A look asks no server.
		m, err := h.Look(t.Context(), path, hang.NoLimit)
		must(t, err)
		if len(m.Mounts) != 1 || m.Mounts[0].FSType != "fuse" || m.Mounts[0].Corrupt {
			t.Errorf("%+v", m)
		}
		must(t, h.Check(path))

		// Usage does, and is given up.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, _, err = h.Usage(ctx, path)
		wantClass(t, err, state.Canceled, "does not answer", path)
		_, _, err = h.Usage(ctx, path)
		wantClass(t, err, state.Canceled, "earlier", path)

		// That keeps nobody from looking.
		wantMountpoint(t, h, path)

		// Once the server has ended, so do the lost call and the waiting.
		must(t, server.Close())
		_, _, err = h.Usage(t.Context(), path)
		if !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("usage of a file system without a server: %v", err)
		}
		wantMountpoint(t, h, path)
		must(t, h.Unmount(t.Context(), path))
		wantFile(t, h, path, state.Directory)
	})
}

// A mount whose root fails is lost if it cannot work again by itself.
func TestLostMount(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "dead")
	mountDead(t, path)
	p, err := h.open(path)
	must(t, err)
	defer p.close()
	for errno, lost := range map[unix.Errno]bool{unix.ESTALE: true, unix.ENOTCONN: true, unix.EIO: false, unix.EACCES: false, unix.EHOSTDOWN: false} {
		m, err := lookCorrupt(p, errno)
		if err != nil || len(m.Mounts) != 1 || !m.Mounts[0].Corrupt || m.Mounts[0].Lost != lost {
			t.Errorf("%v: %+v, %v", errno, m, err)
		}
	}
}

// wantMountpoint fails the test unless Look sees one mount, broken or not.
func wantMountpoint(t *testing.T, h *Host, path string) {
	t.Helper()
	m, err := h.Look(t.Context(), path, hang.NoLimit)
	must(t, err)
	mustBe(t, "mounts", len(m.Mounts), 1)
}
