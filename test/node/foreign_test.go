package node

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// What the plugin did not make it neither hides nor removes: it says so.
func TestForeignAtTarget(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, row := range []struct {
		name  string
		block bool
		make  func(t *testing.T, target string)
		code  codes.Code
		told  string
	}{
		{"mount", false, mountTmpfs, codes.FailedPrecondition, "tmpfs"},
		{"mount-for-block", true, func(t *testing.T, target string) {
			write(t, target, "")
			must(t, unix.Mount("/dev/null", target, "", unix.MS_BIND, ""))
			t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
		}, codes.FailedPrecondition, "mounted"},
		{"files", false, func(t *testing.T, target string) {
			makeDir(t, target)
			write(t, filepath.Join(target, "file"), "theirs")
		}, codes.FailedPrecondition, "holds"},
		{"a-file", false, func(t *testing.T, target string) { write(t, target, "theirs") }, codes.FailedPrecondition, "a file"},
		{"a-full-file-for-block", true, func(t *testing.T, target string) { write(t, target, "theirs") }, codes.FailedPrecondition, "holds"},
		{"a-directory-for-block", true, func(t *testing.T, target string) { makeDir(t, target) }, codes.FailedPrecondition, "a directory"},
		{"symlink", false, func(t *testing.T, target string) {
			makeDir(t, filepath.Join(p.Dir, "elsewhere"))
			must(t, os.Symlink(filepath.Join(p.Dir, "elsewhere"), target))
		}, codes.InvalidArgument, "symbolic link"},
		{"symlink-above", false, func(t *testing.T, target string) {
			must(t, os.Remove(filepath.Dir(target)))
			makeDir(t, filepath.Join(p.KubeletDir, "elsewhere"))
			must(t, os.Symlink(filepath.Join(p.KubeletDir, "elsewhere"), filepath.Dir(target)))
		}, codes.InvalidArgument, "symbolic link"},
	} {
		t.Run(row.name, func(t *testing.T) {
			ctx := t.Context()
			v := create(t, p, row.name, 32*mib, mountAs("ext4", multiWriter))
			if row.block {
				v.Capability = blockAs(multiWriter)
			}
			target, other := v.Target("pod-1"), v.Target("pod-2")
			if row.name == "symlink-above" {
				other = filepath.Join(p.KubeletDir, "pods/pod-2/other")
			}
			row.make(t, target)
			must(t, v.Stage(ctx))
			must(t, v.Publish(ctx, other))
			before := snapshot(t, p)
			mustRefuse(t, v.Publish(ctx, target), row.code, row.told, strings.TrimSuffix(target, "/mount"))
			mustEqual(t, before, snapshot(t, p))
			must(t, v.Unpublish(ctx, other))
			must(t, v.Unstage(ctx)) // the refused target is no longer asked for
			must(t, v.Delete(ctx))
		})
	}
}

func TestForeignAtStage(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for name, make := range map[string]func(t *testing.T, path string){
		"mount": mountTmpfs,
		"files": func(t *testing.T, path string) {
			makeDir(t, path)
			write(t, filepath.Join(path, "file"), "theirs")
		},
		"a file": func(t *testing.T, path string) { write(t, path, "theirs") },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			v := create(t, p, strings.ReplaceAll(name, " ", "-"), 32*mib, mountAs("ext4", multiWriter))
			make(t, v.Staging)
			before := p.Mounts()
			mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.Staging)
			if !slices.Equal(before, p.Mounts()) || len(p.Loops()) > 0 {
				t.Errorf("mounts %q, were %q; loop devices %+v", p.Mounts(), before, p.Loops())
			}
			mustHaveNoRecord(t, p)
			must(t, v.Delete(ctx))
		})
	}
}

// A foreign mount over a target, and files that appear beneath it, outlive the
// unpublish, which says so.
func TestUnpublishSparesForeign(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	target := v.Target("pod")
	must(t, v.Stage(ctx))
	must(t, v.Publish(ctx, target))
	must(t, unix.Mount("theirs", target, "tmpfs", 0, "size=1m"))
	write(t, filepath.Join(target, "file"), "theirs")
	mustRefuse(t, v.Unpublish(ctx, target), codes.FailedPrecondition, target, "tmpfs")
	mustRead(t, filepath.Join(target, "file"), "theirs")
	must(t, unix.Unmount(target, 0))
	must(t, v.Unpublish(ctx, target))

	must(t, v.Publish(ctx, target))
	p.Kill()
	must(t, unix.Unmount(target, 0))
	write(t, filepath.Join(target, "file"), "theirs")
	p.Start(harness.Options{})
	mustRefuse(t, v.Unpublish(ctx, target), codes.FailedPrecondition, target)
	mustRead(t, filepath.Join(target, "file"), "theirs")
	must(t, os.RemoveAll(target))
	must(t, v.Unpublish(ctx, target))
	v.End()
}

// Paths may hold whatever a file name may hold.
func TestOddPaths(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for i, name := range []string{"with spaces ", "new\nline", "tab\tand \"quotes\" 'both'", "#hash # tag", `back\slash\040`, "ümlaut ☃", "%s,$HOME;&|*?", "-o", "...", strings.Repeat("ü", 127)} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			v := create(t, p, "volume-"+string(rune('a'+i)), 32*mib, mountAs("ext4", multiWriter))
			v.Staging = v.Path("staging", name, name)
			target := v.Path("pods", name, name)
			makeDir(t, filepath.Dir(v.Staging))
			makeDir(t, filepath.Dir(target))
			must(t, v.Stage(ctx))
			must(t, v.Publish(ctx, target))
			must(t, v.Publish(ctx, target))
			write(t, filepath.Join(target, "file"), name)
			mustRead(t, filepath.Join(v.Staging, "file"), name)
			v.Total(target)
			if mountsAt(p, v.Staging) != 1 || mountsAt(p, target) != 1 {
				t.Errorf("mounts: %q", p.Mounts())
			}
			p.Kill()
			p.Start(harness.Options{})
			must(t, v.Publish(ctx, target))
			v.End(target)

			v = create(t, p, "block-"+string(rune('a'+i)), 32*mib, blockAs(multiWriter))
			must(t, v.Stage(ctx))
			must(t, v.Publish(ctx, target))
			must(t, v.Publish(ctx, target))
			if mountsAt(p, target) != 1 {
				t.Errorf("mounts: %q", p.Mounts())
			}
			v.End(target)
		})
	}
}

// mountTmpfs mounts something of another owner.
func mountTmpfs(t *testing.T, path string) {
	t.Helper()
	makeDir(t, path)
	must(t, unix.Mount("theirs", path, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	write(t, filepath.Join(path, "file"), "theirs")
}
