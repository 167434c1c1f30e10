package mounts

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// A file system that was shut down is broken at all its mounts, and is one that
// works only when the last of them is gone, in whatever namespace: until then
// who keeps it is named, and it is not mounted once more.
func TestBrokenFilesystem(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			h, root := newHost(t)
			ctx, stage, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
			mountTmpfs(t, "shared", root, 0)
			must(t, unix.Mount("", root, "", unix.MS_SHARED, ""))
			d := mountedAs(t, h, stage, fsType)
			must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{}))
			file := filepath.Join(stage, "file")
			must(t, os.WriteFile(file, []byte("kept"), 0o600))
			run(t, "sync", file)

			wait := "; exec " + waiting(t)
			user := start(t, "sh", "-c", "exec 5<"+file+wait)
			looker := start(t, "sh", "-c", "exec 5<"+d.Path+wait)
			slave := start(t, machine.InNamespace("slave", root, "true"+wait)...)
			private := start(t, machine.InNamespace("private", root, "true"+wait)...)
			machine.ShutDown(t, stage)
			for _, path := range []string{stage, target} {
				told := fsType != "ext4" || !kernelBefore(t, 6, 15) // by then a mount is the first to tell
				if m := wantMount(t, h, path, d.Number); m.Corrupt != told {
					t.Errorf("%s: %+v, want corrupt %t", path, m, told)
				}
			}

			keepers := func(paths ...string) string {
				return strings.Join(h.Keepers(ctx, d.Number, paths), ", ")
			}
			says := func(found string, want bool, words ...string) {
				t.Helper()
				for _, w := range words {
					if strings.Contains(found, w) != want {
						t.Errorf("keepers %q: %q is among them: %t", found, w, !want)
					}
				}
			}
			using := fmt.Sprintf("pid %d (tail)", user.Process.Pid)
			copied := fmt.Sprintf("pid %d (tail) with a mount at ", private.Process.Pid)
			following := fmt.Sprintf("pid %d (tail)", slave.Process.Pid)
			looking := fmt.Sprintf("pid %d (tail)", looker.Process.Pid)
			found := keepers(stage, target)
			says(found, true, using, copied)
			says(found, false, following, looking, "the mount at ")
			stop(looker)
			says(keepers(stage), true, "the mount at "+target)
			wantClass(t, h.Unmount(ctx, stage), state.Unavailable, "in use by", using)
			stop(user)
			says(keepers(stage, target), false, using)
			below := filepath.Join(root, "elsewhere")
			must(t, os.Mkdir(below, 0o700))
			must(t, unix.Mount(target, below, "", unix.MS_BIND, ""))
			says(keepers(stage, target), true, "the mount at "+below)
			must(t, h.Unmount(ctx, below))

			must(t, h.Unmount(ctx, target))
			must(t, h.Unmount(ctx, stage))
			d.Held = true // as the copy holds it
			err := h.MountDevice(ctx, d, stage, fsType, state.Flags{}, false)
			wantClass(t, err, state.Unavailable, "is broken and kept by", copied)
			says(err.Error(), false, fmt.Sprintf("pid %d ", os.Getpid()))
			wantFile(t, h, stage, state.Directory)
			stop(private)
			wantFree(t, d)
			must(t, h.MountDevice(ctx, d, stage, fsType, state.Flags{}, false))
			if data, err := os.ReadFile(file); err != nil || string(data) != "kept" {
				t.Errorf("the file holds %q, %v", data, err)
			}
			must(t, h.Unmount(ctx, stage))
		})
	}
}

// A volume that works and is held elsewhere is mounted all the same.
func TestMountOfAFilesystemThatIsShown(t *testing.T) {
	h, root := newHost(t)
	one, two := filepath.Join(root, "one"), filepath.Join(root, "two")
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		d := mountedAs(t, h, one, fsType)
		d.Held = true
		must(t, h.MountDevice(t.Context(), d, two, fsType, state.Flags{}, false))
		must(t, h.Unmount(t.Context(), two))
		must(t, h.Unmount(t.Context(), one))
		d.Held = false
	}
}
