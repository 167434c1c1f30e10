package node

import (
	"fmt"
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

// Paths of one volume must lie apart, and those of another are not its own.
func TestPathsOfVolumesMustLieApart(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v, other := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "other", 32*mib, mountAs("ext4", multiWriter))
	pod, others := v.Target("pod"), other.Target("other-pod")
	for v, target := range map[*volume]string{v: pod, other: others} {
		must(t, v.Up(ctx, target))
		makeDir(t, filepath.Join(v.Staging, "directory"))
	}
	for _, row := range []struct {
		name string
		call func() error
		code codes.Code
	}{
		{"publish at the staging path", func() error { return v.Publish(ctx, v.Staging) }, illegal},
		{"publish in the staging path", func() error { return v.Publish(ctx, v.Staging+"/directory") }, illegal},
		{"publish anew in the staging path", func() error { return v.Publish(ctx, v.Staging+"/new") }, illegal},
		{"publish over the staging path", func() error { return v.Publish(ctx, filepath.Dir(v.Staging)) }, illegal},
		{"publish in a target", func() error { return v.Publish(ctx, pod+"/directory") }, illegal},
		{"publish over a target", func() error { return v.Publish(ctx, filepath.Dir(pod)) }, illegal},
		{"publish at another's target", func() error { return v.Publish(ctx, others) }, denied},
		{"publish at another's staging path", func() error { return v.Publish(ctx, other.Staging) }, denied},
		{"publish from another's staging path", func() error {
			req := v.PublishRequest(v.Target("pod-2"))
			req.StagingTargetPath = other.Staging
			_, err := p.Node.NodePublishVolume(ctx, req)
			return err
		}, denied},
		{"stage at another's staging path", func() error {
			req := v.StageRequest()
			req.StagingTargetPath = other.Staging
			_, err := p.Node.NodeStageVolume(ctx, req)
			return err
		}, codes.AlreadyExists},
		{"unstage at another's staging path", func() error {
			_, err := p.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: other.Staging})
			return err
		}, okay},
		{"unstage at a target", func() error {
			_, err := p.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: pod})
			return err
		}, okay},
		{"unpublish the staging path", func() error { return v.Unpublish(ctx, v.Staging) }, okay},
		{"unpublish in the staging path", func() error { return v.Unpublish(ctx, v.Staging+"/directory") }, okay},
		{"unpublish in a target", func() error { return v.Unpublish(ctx, pod+"/directory") }, okay},
		{"stats at another's target", func() error { return v.Stats(t.Context(), others) }, codes.NotFound},
		{"stats in the volume", func() error { return v.Stats(t.Context(), pod+"/directory") }, codes.NotFound},
		{"expand by another's path", func() error {
			_, err := p.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: others, StagingTargetPath: other.Staging})
			return err
		}, codes.NotFound},
	} {
		t.Run(row.name, func(t *testing.T) {
			v.Target("pod-2") // its directories
			asked := askedOf(p)
			mustChangeNothing(t, p, row.code, row.call)
			if now := askedOf(p); !slices.Equal(now, asked) {
				t.Errorf("asked for %q, it was %q", now, asked)
			}
		})
	}

	third := create(t, p, "third", 32*mib, mountAs("ext4", multiWriter))
	own := third.Staging
	makeDir(t, filepath.Join(pod, "directory"))
	for path, whose := range map[string]string{
		v.Staging:                       v.ID,
		v.Staging + "/directory":        v.ID,
		v.Staging + "/new":              v.ID,
		filepath.Dir(v.Staging):         v.ID,
		pod:                             v.ID,
		pod + "/directory":              v.ID,
		filepath.Dir(pod):               v.ID,
		filepath.Dir(filepath.Dir(pod)): "volume",
	} {
		third.Staging = path
		mustChangeNothing(t, p, denied, func() error { return third.Stage(ctx) })
		mustRefuse(t, third.Stage(ctx), denied, third.ID, path, whose)
	}
	third.Staging = own
	must(t, third.Stage(ctx))
	for _, path := range []string{v.Staging + "/directory", pod + "/directory", filepath.Dir(pod), filepath.Dir(v.Staging)} {
		mustChangeNothing(t, p, denied, func() error { return third.Publish(ctx, path) })
		mustRefuse(t, third.Publish(ctx, path), denied, third.ID, path, v.ID)
	}
	must(t, third.Unstage(ctx))
	must(t, third.Delete(ctx))
	mustRefuse(t, other.Unpublish(ctx, pod), denied) // asked to go, it would stay asked
	if mountsAt(p, pod) != 1 {
		t.Error("another volume's unpublish has unmounted it")
	}
	must(t, v.Unpublish(ctx, pod))
	must(t, other.Unpublish(ctx, pod))
	must(t, v.Unstage(ctx))
	must(t, v.Delete(ctx))
	other.End(others)
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
func TestPathsMayBeAsLongAsPathMax(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for access, c := range map[string]*csi.VolumeCapability{"mount": mountAs("ext4", multiWriter), "block": blockAs(multiWriter)} {
		v := create(t, p, access, 32*mib, c)
		long := func(name string) string {
			path := v.Path(name)
			for len(path) < unix.PathMax-1-202 {
				path += "/" + strings.Repeat("n", 200)
			}
			return path + "/" + strings.Repeat("x", unix.PathMax-2-len(path))
		}
		v.Staging = long("staging")
		target := long("target")
		makeDir(t, filepath.Dir(v.Staging))
		makeDir(t, filepath.Dir(target))
		must(t, v.Up(t.Context(), target))
		must(t, v.Stats(t.Context(), target))
		_, err := v.Expand(t.Context(), 40*mib)
		if access == "block" || mayResize(t) {
			must(t, err)
		}
		v.End(target)
	}
}

// Maps and strings of any length are taken whole or not at all.
func TestLongContextsAreTakenWholeOrRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	ctx, pod := t.Context(), v.Target("pod")
	stage, publish := v.StageRequest(), v.PublishRequest(pod)
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
	v.End(pod)
}

// Of two volumes that are staged at once, one at a path within the other's, one
// is refused, and nothing is done to it. While the other is unstaged, the first
// has to wait.
func TestStageWithinAnotherStageIsRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	outer, inner := create(t, p, "outer", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "inner", 32*mib, mountAs("ext4", multiWriter))
	for round := range 10 {
		outer.Staging = outer.Path("stage", fmt.Sprint(round))
		inner.Staging = filepath.Join(outer.Staging, "inner")
		makeDir(t, outer.Staging)
		errs := make([]error, 2)
		var group sync.WaitGroup
		for i, v := range []*volume{outer, inner} {
			group.Go(func() { errs[i] = v.Stage(ctx) })
		}
		group.Wait()
		won, lost := outer, inner
		if errs[0] != nil {
			won, lost = inner, outer
			errs[0], errs[1] = errs[1], errs[0]
		}
		must(t, errs[0])
		mustRefuse(t, errs[1], denied, lost.ID, lost.Staging, won.ID, won.Staging)
		if loops := p.Loops(); len(loops) != 1 {
			t.Errorf("attached: %+v", loops)
		}
		must(t, won.Unstage(ctx))
		must(t, os.RemoveAll(outer.Staging))
	}

	makeDir(t, outer.Staging)
	must(t, outer.Stage(ctx))
	busy, err := os.Create(filepath.Join(outer.Staging, "busy"))
	must(t, err)
	defer func() { _ = busy.Close() }() // is closed below
	if err := outer.Unstage(ctx); status.Code(err) == okay {
		t.Fatal("unstaged while a file is open")
	}
	mustRefuse(t, inner.Stage(ctx), codes.Aborted, inner.ID, outer.ID, "still being unstaged")
	must(t, busy.Close())
	must(t, outer.Unstage(ctx))
	must(t, inner.Stage(ctx))
	inner.End()
	must(t, outer.Delete(ctx))
}

// The loss of the store does not lose what is mounted: nothing is staged or
// published in it.
func TestPathsInAVolumeWithoutARecord(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v, other := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "other", 32*mib, mountAs("ext4", multiWriter))
	pod, own := v.Target("pod"), other.Staging
	must(t, v.Up(ctx, pod))
	makeDir(t, filepath.Join(pod, "directory"))
	p.Terminate()
	loseStore(t, p)
	p.Start(harness.Options{})
	for _, path := range []string{v.Staging + "/directory", v.Staging + "/new/deep", pod + "/directory", filepath.Dir(pod), pod} {
		other.Staging = path
		mustChangeNothing(t, p, denied, func() error { return other.Stage(ctx) })
		mustRefuse(t, other.Stage(ctx), denied, path)
	}
	other.Staging = own
	must(t, other.Stage(ctx))
	mustChangeNothing(t, p, denied, func() error { return other.Publish(ctx, v.Staging+"/directory") })
	must(t, other.Unstage(ctx))
	must(t, other.Delete(ctx))
	must(t, v.Publish(ctx, pod))
	v.End(pod)
}

// Paths may hold whatever a file name may hold.
func TestPathsMayHoldAnyCharacter(t *testing.T) {
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
			must(t, v.Up(ctx, target, target))
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
			must(t, v.Up(ctx, target, target))
			if mountsAt(p, target) != 1 {
				t.Errorf("mounts: %q", p.Mounts())
			}
			v.End(target)
		})
	}
}
