package mounts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

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
		m, err := h.Look(t.Context(), path)
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
		mustBe(t, "a lost call", h.usages.find(path) != nil, true)

		// That keeps nobody from looking.
		wantMountpoint(t, h, path)

		// Once the server has ended, so do the lost call and the waiting.
		must(t, server.Close())
		_, _, err = h.Usage(t.Context(), path)
		if !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("usage of a file system without a server: %v", err)
		}
		mustBe(t, "a lost call", h.usages.find(path) != nil, false)
		wantMountpoint(t, h, path)
		must(t, h.Unmount(t.Context(), path))
		wantFile(t, h, path, state.Directory)
	})
}

// wantMountpoint fails the test unless Look sees one mount, broken or not.
func wantMountpoint(t *testing.T, h *Host, path string) {
	t.Helper()
	m, err := h.Look(t.Context(), path)
	must(t, err)
	mustBe(t, "mounts", len(m.Mounts), 1)
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c calls
		ctx, cancel := context.WithCancel(t.Context())
		release, made := make(chan struct{}), 0
		hang := func() (int, error) { made++; <-release; return 1, nil }
		errs := make(chan error)
		go func() { _, err := wait(ctx, &c, "path", hang); errs <- err }()
		synctest.Wait()
		cancel()
		wantClass(t, <-errs, state.Canceled)

		// Another path is served, this one waits without a call of its own.
		v, err := wait(t.Context(), &c, "other", func() (int, error) { return 2, nil })
		must(t, err)
		mustBe(t, "other", v, 2)
		_, err = wait(ctx, &c, "path", hang)
		wantClass(t, err, state.Canceled, "earlier")
		mustBe(t, "calls", made, 1)

		// The one that waits goes on by itself, with a fresh call.
		values := make(chan int)
		go func() {
			v, err := wait(t.Context(), &c, "path", func() (int, error) { return 3, nil })
			if err != nil {
				t.Error(err)
			}
			values <- v
		}()
		synctest.Wait()
		close(release)
		mustBe(t, "fresh", <-values, 3)
		synctest.Wait()
		mustBe(t, "a lost call", c.find("path") != nil, false)
	})
}
