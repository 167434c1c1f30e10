package node

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/harness"
)

// linked makes the kubelet directory one that two symbolic links lead to, and
// returns what each spelling makes of a path below it. The plugin is told of the
// first link; the directory itself, and the second link, which is above it, it
// has to find out.
func linked(t *testing.T, p *harness.Plugin) (spellings map[string]func(string) string) {
	t.Helper()
	real := filepath.Join(p.Dir, "data", "kubelet")
	makeDir(t, real)
	must(t, os.Remove(p.KubeletDir))
	must(t, os.Symlink(real, p.KubeletDir))
	must(t, os.Symlink("data", filepath.Join(p.Dir, "lib")))
	given, other := p.KubeletDir, filepath.Join(p.Dir, "lib", "kubelet")
	as := func(root string) func(string) string {
		return func(path string) string { return root + strings.TrimPrefix(path, given) }
	}
	return map[string]func(string) string{"given": as(given), "real": as(real), "other": as(other)}
}

// A file has as many paths as symbolic links lead to it. Whatever spelling a call
// uses, it speaks of the same stage and of the same target.
func TestPathSpellingsMeanTheSame(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	spellings := linked(t, p)
	p.Start(harness.Options{})
	for access, c := range map[string]*csi.VolumeCapability{"mount": mountAs("ext4", multiWriter), "block": blockAs(multiWriter)} {
		for first, one := range spellings {
			for second, two := range spellings {
				t.Run(access+" "+first+" "+second, func(t *testing.T) {
					ctx := t.Context()
					v := create(t, p, strings.Join([]string{access, first, second}, "-"), 32*mib, c)
					staging, pod := v.Staging, v.Target("pod")
					real := spellings["real"]

					v.Staging = one(staging)
					must(t, v.Up(ctx, one(pod)))
					v.Staging = two(staging)
					must(t, v.Up(ctx, two(pod)))
					must(t, v.Stats(t.Context(), two(pod)))
					must(t, v.Stats(t.Context(), two(staging)))
					grown, err := p.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: two(pod)})
					must(t, err)
					if grown.GetCapacityBytes() != 32*mib {
						t.Errorf("%d bytes", grown.GetCapacityBytes())
					}
					if n := mountsAt(p, real(pod)); n != 1 {
						t.Errorf("%d mounts at the target", n)
					}
					var asked []string
					for _, part := range p.Status().Volumes[0].Parts {
						asked = append(asked, part.Path)
					}
					if want := []string{real(pod), real(staging), ""}; !slices.Equal(asked, want) {
						t.Errorf("status has it at %q, want %q", asked, want)
					}
					var orphans []driver.Orphan
					typed(t, p, "csi-node orphans", &orphans)
					if len(orphans) > 0 {
						t.Errorf("taken for orphans: %+v", orphans)
					}

					mustRefuse(t, v.Unstage(ctx), denied, real(pod))
					must(t, v.Unpublish(ctx, two(pod)))
					mustBeGone(t, pod)
					must(t, v.Unstage(ctx))
					for _, path := range []string{pod, staging} {
						if n := mountsAt(p, real(path)); n != 0 {
							t.Errorf("%d mounts at %s", n, path)
						}
					}
					mustHaveNoRecord(t, p)
					mustHaveNoLoop(t, p)
					must(t, v.Delete(ctx))
				})
			}
		}
	}
}

// respell gives the records of a plugin that does not run another spelling, as
// that of a version which kept paths as they were asked.
func respell(t *testing.T, p *harness.Plugin, as func(string) string) {
	t.Helper()
	records := openStore(t, p)
	given := func(path string) string {
		return p.KubeletDir + strings.TrimPrefix(path, filepath.Join(p.Dir, "data", "kubelet"))
	}
	for _, record := range records.List() {
		_, err := records.Edit(record.ID, func(v *state.Volume) error {
			v.Stage.Path = as(given(v.Stage.Path))
			for path, target := range v.Targets {
				delete(v.Targets, path)
				target.Path = as(given(path))
				v.Targets[target.Path] = target
			}
			return nil
		})
		must(t, err)
	}
	must(t, records.Close())
}

// The plugin that takes over may be told of the kubelet directory by another of
// its names than the one before, which may have kept what it was asked as it was spelled.
func TestPathSpellingsAcrossRestarts(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	spellings := linked(t, p)
	for first := range spellings {
		for second, two := range spellings {
			t.Run(first+" "+second, func(t *testing.T) {
				ctx := t.Context()
				root := func(name string) harness.Options {
					return harness.Options{Flags: []string{"--kubelet-dir", strings.TrimSuffix(spellings[name](p.KubeletDir+"/"), "/")}}
				}
				p.Start(root(first))
				v := create(t, p, first+"-"+second, 32*mib, mountAs("ext4", multiWriter))
				pod, staging := v.Target("pod"), v.Staging
				must(t, v.Up(ctx, pod))
				p.Terminate()
				respell(t, p, spellings[first])
				p.Start(root(second))
				v.Staging = two(staging)
				must(t, v.Publish(ctx, two(pod)))
				must(t, v.Down(ctx, two(pod)))
				mustHaveNoRecord(t, p)
				if left := p.Mounts(); len(left) > 0 {
					t.Errorf("still mounted: %q", left)
				}
				must(t, v.Delete(ctx))
				p.Terminate()
			})
		}
	}
}
