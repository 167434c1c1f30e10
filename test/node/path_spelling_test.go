package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
