package node

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// place is what may be at a path already.
type place struct {
	name  string
	make  func(t *testing.T, path string)
	mount codes.Code // of a stage or a publish with mount access
	block codes.Code // of a publish of a raw block device
	gone  codes.Code // of an unpublish
	told  [2]string  // a word of the refusal with mount access, and of a raw block device
}

const (
	okay    = codes.OK
	denied  = codes.FailedPrecondition
	illegal = codes.InvalidArgument
)

var places = []place{
	{"a file", func(t *testing.T, path string) { write(t, path, "theirs") }, denied, denied, denied, [2]string{"a file", "holds"}},
	{"an empty file", func(t *testing.T, path string) { write(t, path, "") }, denied, okay, okay, [2]string{"a file"}},
	{"an empty directory", func(t *testing.T, path string) { makeDir(t, path) }, okay, denied, okay, [2]string{"", "a directory"}},
	{"files", func(t *testing.T, path string) { makeDir(t, path); write(t, filepath.Join(path, "file"), "theirs") }, denied, denied, denied, [2]string{"holds", "a directory"}},
	{"a link", func(t *testing.T, path string) { must(t, os.Symlink(filepath.Dir(path), path)) }, illegal, illegal, illegal, [2]string{"symbolic link", "symbolic link"}},
	{"a link to nothing", func(t *testing.T, path string) { must(t, os.Symlink("none", path)) }, illegal, illegal, illegal, [2]string{"symbolic link", "symbolic link"}},
	{"a pipe", func(t *testing.T, path string) { must(t, unix.Mkfifo(path, 0o600)) }, denied, denied, denied, [2]string{}},
	{"a socket", func(t *testing.T, path string) { listenAt(t, path) }, denied, denied, denied, [2]string{}},
	{"a device node", func(t *testing.T, path string) { must(t, unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))) }, denied, denied, denied, [2]string{}},
	{"a mount", func(t *testing.T, path string) { mountTmpfs(t, path) }, denied, denied, denied, [2]string{"tmpfs", "tmpfs"}},
	{"a bound device node", func(t *testing.T, path string) {
		write(t, path, "")
		must(t, unix.Mount("/dev/null", path, "", unix.MS_BIND, ""))
	}, denied, denied, denied, [2]string{"mounted", "mounted"}},
}

// listenAt makes a socket, at a path that may be too long for one.
func listenAt(t *testing.T, path string) {
	t.Helper()
	short := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	must(t, err)
	l.SetUnlinkOnClose(false)
	must(t, os.Rename(short, path))
	must(t, l.Close())
}

// mountTmpfs mounts something of another owner.
func mountTmpfs(t *testing.T, path string) {
	t.Helper()
	makeDir(t, path)
	must(t, unix.Mount("theirs", path, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	write(t, filepath.Join(path, "file"), "theirs")
}

// clearPlace removes what a place has made.
func clearPlace(t *testing.T, path string) {
	t.Helper()
	if err := machine.Unmount(path); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
	must(t, os.RemoveAll(path))
}

// mustChangeNothing fails unless a call is answered with the code, in a message
// with all of the words, and changes nothing that can be seen.
func mustChangeNothing(t *testing.T, p *harness.Plugin, code codes.Code, call func() error, words ...string) {
	t.Helper()
	before := snapshot(t, p)
	mustRefuse(t, call(), code, words...)
	mustEqual(t, before, snapshot(t, p))
}

// What is in the way at a staging path is seen before anything is done to the
// volume, which is blank here and stays so.
func TestStageAtAnOccupiedPathIsRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	for _, place := range places {
		if place.mount == okay {
			continue
		}
		t.Run(place.name, func(t *testing.T) {
			place.make(t, v.Staging)
			defer clearPlace(t, v.Staging)
			mustChangeNothing(t, p, place.mount, func() error { return v.Stage(t.Context()) }, v.Staging, place.told[0])
			mustHaveNoRecord(t, p)
			mustChangeNothing(t, p, codes.NotFound, func() error { return v.Stats(t.Context(), v.Staging) })
			if code := place.mount; code == illegal {
				mustChangeNothing(t, p, code, func() error { return v.Unstage(t.Context()) })
			} else {
				mustChangeNothing(t, p, okay, func() error { return v.Unstage(t.Context()) })
			}
			mustHaveNoRecord(t, p)
		})
	}
	must(t, v.Stage(t.Context()))
	v.End()
}

// What the plugin did not make it neither hides nor removes: it says what it is and
// where, and asks for nothing there.
func TestPublishAtAnOccupiedPathIsRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for access, c := range map[string]*csi.VolumeCapability{"mount": mountAs("ext4", multiWriter), "block": blockAs(multiWriter)} {
		ctx := t.Context()
		v := create(t, p, access, 32*mib, c)
		must(t, v.Stage(ctx))
		for _, place := range places {
			t.Run(access+" at "+place.name, func(t *testing.T) {
				target := v.Target(strings.ReplaceAll(place.name, " ", "-"))
				want, told := place.mount, place.told[0]
				if access == "block" {
					want, told = place.block, place.told[1]
				}
				place.make(t, target)
				defer clearPlace(t, target)
				if want == okay { // the CO may have made it
					must(t, v.Publish(ctx, target))
					must(t, v.Unpublish(ctx, target))
					mustBeGone(t, target)
					return
				}
				mustChangeNothing(t, p, want, func() error { return v.Publish(ctx, target) }, target, told)
				for _, part := range p.Report().Volumes[0].Parts {
					if strings.Contains(string(part.Part), target) {
						t.Errorf("a refused target is asked for: %+v", part)
					}
				}
				mustChangeNothing(t, p, codes.NotFound, func() error { return v.Stats(t.Context(), target) })
				if place.gone == okay {
					must(t, v.Unpublish(ctx, target))
					mustBeGone(t, target)
					return
				}
				mustChangeNothing(t, p, place.gone, func() error { return v.Unpublish(ctx, target) })
				clearPlace(t, target)
				must(t, v.Unpublish(ctx, target))
			})
		}
		v.End()
	}
}

// A foreign mount over a target, and files that appear beneath it, outlive the
// unpublish, which says so.
func TestUnpublishSparesForeignMountsAndFiles(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	target := v.Target("pod")
	must(t, v.Up(ctx, target))
	must(t, unix.Mount("theirs", target, "tmpfs", 0, "size=1m"))
	write(t, filepath.Join(target, "file"), "theirs")
	mustRefuse(t, v.Unpublish(ctx, target), codes.FailedPrecondition, target, "tmpfs")
	mustRead(t, filepath.Join(target, "file"), "theirs")
	must(t, machine.Unmount(target))
	must(t, v.Unpublish(ctx, target))

	must(t, v.Publish(ctx, target))
	p.Kill()
	must(t, machine.Unmount(target))
	write(t, filepath.Join(target, "file"), "theirs")
	p.Start(harness.Options{})
	mustRefuse(t, v.Unpublish(ctx, target), codes.FailedPrecondition, target)
	mustRead(t, filepath.Join(target, "file"), "theirs")
	must(t, os.RemoveAll(target))
	must(t, v.Unpublish(ctx, target))
	v.End()
}
