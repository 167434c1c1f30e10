package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
)

// fullState gives the plugin a small tmpfs for its state. What it returns fills
// the file system, to the last byte and the last inode.
func fullState(t *testing.T, p *harness.Plugin) (fill func()) {
	t.Helper()
	makeDir(t, p.StateDir)
	must(t, unix.Mount("tmpfs", p.StateDir, "tmpfs", 0, "size=1m,nr_inodes=64"))
	t.Cleanup(func() { must(t, unix.Unmount(p.StateDir, unix.MNT_DETACH)) })
	return func() {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(p.StateDir, "full"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		for err == nil {
			_, err = f.Write(make([]byte, 4096))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		must(t, f.Close())
		for i := 0; ; i++ {
			err := os.Symlink("x", filepath.Join(p.StateDir, fmt.Sprint("full", i)))
			if errors.Is(err, syscall.ENOSPC) {
				return
			} else if !errors.Is(err, os.ErrExist) {
				must(t, err)
			}
		}
	}
}

// A plugin starts on a full state directory, takes over what stands, and lets it
// go; what has gone does not come back when the plugin dies.
func TestFullStateDirectoryLetsVolumesGo(t *testing.T) {
	t.Parallel()
	for title, end := range map[string]func(*harness.Plugin){"after SIGTERM": (*harness.Plugin).Terminate, "after SIGKILL": (*harness.Plugin).Kill} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			p := harness.New(t)
			fill := fullState(t, p)
			p.Start(harness.Options{})
			ctx := t.Context()
			stays := create(t, p, "stays", 32*mib, mountAs("ext4", multiWriter))
			goes := create(t, p, "goes", 32*mib, mountAs("ext4", multiWriter))
			for _, v := range []*volume{stays, goes} {
				must(t, v.Stage(ctx))
				for _, pod := range []string{"one", "two"} {
					must(t, v.Publish(ctx, v.Target(pod)))
				}
			}
			write(t, filepath.Join(stays.Target("one"), "file"), "kept")
			end(p)
			fill()
			p.Start(harness.Options{})
			fill()

			for _, pod := range []string{"one", "two"} {
				must(t, goes.Unpublish(ctx, goes.Target(pod)))
				mustBeGone(t, goes.Target(pod))
			}
			must(t, goes.Unstage(ctx))
			must(t, stays.Unpublish(ctx, stays.Target("two")))
			mustBeGone(t, stays.Target("two"))
			if device := goes.Devices(); len(device) > 0 {
				t.Errorf("%+v is attached after NodeUnstageVolume", device)
			}
			p.Kill()
			p.Start(harness.Options{}) // with what is written
			mustRead(t, filepath.Join(stays.Target("one"), "file"), "kept")
			volumes := p.Status().Volumes
			if len(volumes) != 1 || len(volumes[0].Parts) != 2 {
				t.Errorf("the store has %+v", volumes)
			}
			if n := mountsAt(p, stays.Target("two")) + mountsAt(p, goes.Staging); n > 0 {
				t.Errorf("%d mounts are back", n)
			}
			must(t, goes.Delete(ctx))
			stays.End(stays.Target("one"))
		})
	}
}
