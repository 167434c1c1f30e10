package node

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// place is what may be at a path already.
type place struct {
	name  string
	make  func(t *testing.T, path string)
	mount codes.Code // of a stage or a publish with mount access
	block codes.Code // of a publish of a raw block device
	gone  codes.Code // of an unpublish
}

const (
	okay    = codes.OK
	denied  = codes.FailedPrecondition
	illegal = codes.InvalidArgument
)

var places = []place{
	{"a file", func(t *testing.T, path string) { write(t, path, "theirs") }, denied, denied, denied},
	{"an empty file", func(t *testing.T, path string) { write(t, path, "") }, denied, okay, okay},
	{"an empty directory", func(t *testing.T, path string) { makeDir(t, path) }, okay, denied, okay},
	{"files", func(t *testing.T, path string) { makeDir(t, path); write(t, filepath.Join(path, "file"), "theirs") }, denied, denied, denied},
	{"a link", func(t *testing.T, path string) { must(t, os.Symlink(filepath.Dir(path), path)) }, illegal, illegal, illegal},
	{"a link to nothing", func(t *testing.T, path string) { must(t, os.Symlink("none", path)) }, illegal, illegal, illegal},
	{"a pipe", func(t *testing.T, path string) { must(t, unix.Mkfifo(path, 0o600)) }, denied, denied, denied},
	{"a socket", func(t *testing.T, path string) { listenAt(t, path) }, denied, denied, denied},
	{"a device node", func(t *testing.T, path string) { must(t, unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))) }, denied, denied, denied},
	{"a mount", func(t *testing.T, path string) { mountTmpfs(t, path) }, denied, denied, denied},
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

// clearPlace removes what a place has made.
func clearPlace(t *testing.T, path string) {
	t.Helper()
	if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		t.Errorf("unmount %s: %v", path, err)
	}
	must(t, os.RemoveAll(path))
}

// mustChangeNothing fails unless a call is answered with the code and changes
// nothing that can be seen.
func mustChangeNothing(t *testing.T, p *harness.Plugin, code codes.Code, call func() error) {
	t.Helper()
	before := snapshot(t, p)
	mustRefuse(t, call(), code)
	mustEqual(t, before, snapshot(t, p))
}

// What is in the way at a staging path is seen before anything is done to the
// volume, which is blank here and stays so.
func TestStageWhereSomethingIs(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	for _, place := range places {
		if place.mount == okay {
			continue
		}
		t.Run(place.name, func(t *testing.T) {
			place.make(t, v.staging)
			defer clearPlace(t, v.staging)
			mustChangeNothing(t, p, place.mount, func() error { return v.stage(t.Context()) })
			mustHaveNoRecord(t, p)
			mustChangeNothing(t, p, codes.NotFound, func() error { return v.stats(t, v.staging) })
			if code := place.mount; code == illegal {
				mustChangeNothing(t, p, code, func() error { return v.unstage(t.Context()) })
			} else {
				mustChangeNothing(t, p, okay, func() error { return v.unstage(t.Context()) })
			}
			mustHaveNoRecord(t, p)
		})
	}
	must(t, v.stage(t.Context()))
	v.end()
}

func TestPublishWhereSomethingIs(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for access, c := range map[string]*csi.VolumeCapability{"mount": mountAs("ext4", multiWriter), "block": blockAs(multiWriter)} {
		ctx := t.Context()
		v := create(t, p, access, 32*mib, c)
		must(t, v.stage(ctx))
		for _, place := range places {
			t.Run(access+" at "+place.name, func(t *testing.T) {
				target := v.target(strings.ReplaceAll(place.name, " ", "-"))
				want := place.mount
				if access == "block" {
					want = place.block
				}
				place.make(t, target)
				defer clearPlace(t, target)
				if want == okay { // the CO may have made it
					must(t, v.publish(ctx, target))
					must(t, v.unpublish(ctx, target))
					mustBeGone(t, target)
					return
				}
				mustChangeNothing(t, p, want, func() error { return v.publish(ctx, target) })
				mustChangeNothing(t, p, codes.NotFound, func() error { return v.stats(t, target) })
				if place.gone == okay {
					must(t, v.unpublish(ctx, target))
					mustBeGone(t, target)
					return
				}
				mustChangeNothing(t, p, place.gone, func() error { return v.unpublish(ctx, target) })
				clearPlace(t, target)
				must(t, v.unpublish(ctx, target))
			})
		}
		v.end()
	}
}

func (v *volume) stats(t *testing.T, path string) error {
	_, err := v.Node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: path})
	return err
}

// Paths of one volume must lie apart, and those of another are not its own.
func TestPathsInTheWay(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v, other := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "other", 32*mib, mountAs("ext4", multiWriter))
	pod, others := v.target("pod"), other.target("other-pod")
	for v, target := range map[*volume]string{v: pod, other: others} {
		must(t, v.stage(ctx))
		must(t, v.publish(ctx, target))
		makeDir(t, filepath.Join(v.staging, "directory"))
	}
	for _, row := range []struct {
		name string
		call func() error
		code codes.Code
	}{
		{"publish at the staging path", func() error { return v.publish(ctx, v.staging) }, illegal},
		{"publish in the staging path", func() error { return v.publish(ctx, v.staging+"/directory") }, illegal},
		{"publish anew in the staging path", func() error { return v.publish(ctx, v.staging+"/new") }, illegal},
		{"publish over the staging path", func() error { return v.publish(ctx, filepath.Dir(v.staging)) }, illegal},
		{"publish in a target", func() error { return v.publish(ctx, pod+"/directory") }, illegal},
		{"publish over a target", func() error { return v.publish(ctx, filepath.Dir(pod)) }, illegal},
		{"publish at another's target", func() error { return v.publish(ctx, others) }, denied},
		{"publish at another's staging path", func() error { return v.publish(ctx, other.staging) }, denied},
		{"publish from another's staging path", func() error {
			req := v.publishRequest(v.target("pod-2"))
			req.StagingTargetPath = other.staging
			_, err := p.Node.NodePublishVolume(ctx, req)
			return err
		}, denied},
		{"stage at another's staging path", func() error {
			req := v.stageRequest()
			req.StagingTargetPath = other.staging
			_, err := p.Node.NodeStageVolume(ctx, req)
			return err
		}, codes.AlreadyExists},
		{"unstage at another's staging path", func() error {
			_, err := p.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: other.staging})
			return err
		}, okay},
		{"unstage at a target", func() error {
			_, err := p.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: pod})
			return err
		}, okay},
		{"unpublish the staging path", func() error { return v.unpublish(ctx, v.staging) }, okay},
		{"unpublish in the staging path", func() error { return v.unpublish(ctx, v.staging+"/directory") }, okay},
		{"unpublish in a target", func() error { return v.unpublish(ctx, pod+"/directory") }, okay},
		{"stats at another's target", func() error { return v.stats(t, others) }, codes.NotFound},
		{"stats in the volume", func() error { return v.stats(t, pod+"/directory") }, codes.NotFound},
		{"expand by another's path", func() error {
			_, err := p.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: others, StagingTargetPath: other.staging})
			return err
		}, codes.NotFound},
	} {
		t.Run(row.name, func(t *testing.T) {
			v.target("pod-2") // its directories
			asked := askedOf(p)
			mustChangeNothing(t, p, row.code, row.call)
			if now := askedOf(p); !slices.Equal(now, asked) {
				t.Errorf("asked for %q, it was %q", now, asked)
			}
		})
	}

	third := create(t, p, "third", 32*mib, mountAs("ext4", multiWriter))
	own := third.staging
	makeDir(t, filepath.Join(pod, "directory"))
	for path, whose := range map[string]string{
		v.staging:                       v.id,
		v.staging + "/directory":        v.id,
		v.staging + "/new":              v.id,
		filepath.Dir(v.staging):         v.id,
		pod:                             v.id,
		pod + "/directory":              v.id,
		filepath.Dir(pod):               v.id,
		filepath.Dir(filepath.Dir(pod)): "volume",
	} {
		third.staging = path
		mustChangeNothing(t, p, denied, func() error { return third.stage(ctx) })
		mustRefuse(t, third.stage(ctx), denied, third.id, path, whose)
	}
	third.staging = own
	must(t, third.stage(ctx))
	for _, path := range []string{v.staging + "/directory", pod + "/directory", filepath.Dir(pod), filepath.Dir(v.staging)} {
		mustChangeNothing(t, p, denied, func() error { return third.publish(ctx, path) })
		mustRefuse(t, third.publish(ctx, path), denied, third.id, path, v.id)
	}
	must(t, third.unstage(ctx))
	must(t, third.delete(ctx))
	mustRefuse(t, other.unpublish(ctx, pod), denied) // asked to go, it would stay asked
	if mountsAt(p, pod) != 1 {
		t.Error("another volume's unpublish has unmounted it")
	}
	must(t, v.unpublish(ctx, pod))
	must(t, other.unpublish(ctx, pod))
	must(t, v.unstage(ctx))
	must(t, v.delete(ctx))
	other.end(others)
}

// askedOf is what is asked of each part of each volume.
func askedOf(p *harness.Plugin) (all []string) {
	for _, v := range p.Status().Volumes {
		for _, part := range v.Parts {
			all = append(all, fmt.Sprintf("%s %s %s since %s", v.Volume, part.Part, part.Asked, part.Since))
		}
	}
	return all
}

// Paths up to PATH_MAX are accepted, by every call.
func TestLongestPaths(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for access, c := range map[string]*csi.VolumeCapability{"mount": mountAs("ext4", multiWriter), "block": blockAs(multiWriter)} {
		v := create(t, p, access, 32*mib, c)
		long := func(name string) string {
			path := v.path(name)
			for len(path) < unix.PathMax-1-202 {
				path += "/" + strings.Repeat("n", 200)
			}
			return path + "/" + strings.Repeat("x", unix.PathMax-2-len(path))
		}
		v.staging = long("staging")
		target := long("target")
		makeDir(t, filepath.Dir(v.staging))
		makeDir(t, filepath.Dir(target))
		must(t, v.stage(t.Context()))
		must(t, v.publish(t.Context(), target))
		must(t, v.stats(t, target))
		_, err := v.expand(t.Context(), 40*mib)
		if access == "block" || mayResize(t) {
			must(t, err)
		}
		v.end(target)
	}
}

// Maps and strings of any length are taken whole or not at all.
func TestLongContexts(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	ctx, pod := t.Context(), v.target("pod")
	stage, publish := v.stageRequest(), v.publishRequest(pod)
	long := map[string]string{"key": strings.Repeat("v", 200)}
	for i := range 100 {
		long[fmt.Sprintf("key-%d-%s", i, strings.Repeat("k", 100))] = strings.Repeat("v", 100)
	}
	stage.VolumeContext, publish.VolumeContext = long, long
	for range 2 {
		_, err := p.Node.NodeStageVolume(ctx, stage)
		must(t, err)
		_, err = p.Node.NodePublishVolume(ctx, publish)
		must(t, err)
	}
	long["key"] = long["key"][1:] + "w"
	_, err := p.Node.NodeStageVolume(ctx, stage)
	mustRefuse(t, err, codes.AlreadyExists)
	_, err = p.Node.NodePublishVolume(ctx, publish)
	mustRefuse(t, err, codes.AlreadyExists)
	v.end(pod)
}

// Of two volumes that are staged at once, one at a path within the other's, one
// is refused, and nothing is done to it. While the other is unstaged, the first
// has to wait.
func TestStagesInEachOther(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	outer, inner := create(t, p, "outer", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "inner", 32*mib, mountAs("ext4", multiWriter))
	for round := range 10 {
		outer.staging = outer.path("stage", fmt.Sprint(round))
		inner.staging = filepath.Join(outer.staging, "inner")
		makeDir(t, outer.staging)
		errs := make([]error, 2)
		var group sync.WaitGroup
		for i, v := range []*volume{outer, inner} {
			group.Go(func() { errs[i] = v.stage(ctx) })
		}
		group.Wait()
		won, lost := outer, inner
		if errs[0] != nil {
			won, lost = inner, outer
			errs[0], errs[1] = errs[1], errs[0]
		}
		must(t, errs[0])
		mustRefuse(t, errs[1], denied, lost.id, lost.staging, won.id, won.staging)
		if loops := p.Loops(); len(loops) != 1 {
			t.Errorf("attached: %+v", loops)
		}
		must(t, won.unstage(ctx))
		must(t, os.RemoveAll(outer.staging))
	}

	makeDir(t, outer.staging)
	must(t, outer.stage(ctx))
	busy, err := os.Create(filepath.Join(outer.staging, "busy"))
	must(t, err)
	defer func() { _ = busy.Close() }() // is closed below
	if err := outer.unstage(ctx); status.Code(err) == okay {
		t.Fatal("unstaged while a file is open")
	}
	mustRefuse(t, inner.stage(ctx), codes.Aborted, inner.id, outer.id, "still being unstaged")
	must(t, busy.Close())
	must(t, outer.unstage(ctx))
	must(t, inner.stage(ctx))
	inner.end()
	must(t, outer.delete(ctx))
}

// The loss of the store does not lose what is mounted: nothing is staged or
// published in it.
func TestPathsInAVolumeWithoutARecord(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v, other := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "other", 32*mib, mountAs("ext4", multiWriter))
	pod, own := v.target("pod"), other.staging
	must(t, v.stage(ctx))
	must(t, v.publish(ctx, pod))
	makeDir(t, filepath.Join(pod, "directory"))
	p.Terminate()
	loseStore(t, p)
	p.Start(harness.Options{})
	for _, path := range []string{v.staging + "/directory", v.staging + "/new/deep", pod + "/directory", filepath.Dir(pod), pod} {
		other.staging = path
		mustChangeNothing(t, p, denied, func() error { return other.stage(ctx) })
		mustRefuse(t, other.stage(ctx), denied, path)
	}
	other.staging = own
	must(t, other.stage(ctx))
	mustChangeNothing(t, p, denied, func() error { return other.publish(ctx, v.staging+"/directory") })
	must(t, other.unstage(ctx))
	must(t, other.delete(ctx))
	must(t, v.publish(ctx, pod))
	v.end(pod)
}
