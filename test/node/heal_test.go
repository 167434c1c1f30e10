package node

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

// What is unmounted behind the plugin's back comes back by itself, with its
// data and its flags; nobody calls.
func TestLostMountsComeBack(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			p := harness.Start(t, harness.Options{})
			v := create(t, p, "volume", smallest(fsType), mountAs(fsType, multiWriter, "noatime"))
			must(t, v.stage(t.Context()))
			one, two := v.target("one"), v.target("two")
			must(t, v.publish(t.Context(), one))
			must(t, v.publishReadOnly(t.Context(), two))
			write(t, filepath.Join(one, "file"), "kept")
			for _, torn := range [][]string{{one}, {two}, {v.staging}, {v.staging, one, two}} {
				before := p.Mounts()
				for _, path := range torn {
					harness.Command(t, "umount", "--lazy", path)
				}
				harness.Eventually(t, "the mounts are back", func() bool { return len(p.Mounts()) == len(before) })
				mustRead(t, filepath.Join(one, "file"), "kept")
				mustRead(t, filepath.Join(two, "file"), "kept")
				if flags := harness.Command(t, "findmnt", "--noheadings", "--output", "VFS-OPTIONS", two); !strings.Contains(flags, "ro") || !strings.Contains(flags, "noatime") {
					t.Errorf("the read-only target has the flags %s", flags)
				}
			}
			v.end(one, two)
		})
	}
}

func TestHealSwitchedOff(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Flags: []string{"--heal=false"}})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	must(t, v.stage(t.Context()))
	target := v.target("pod")
	must(t, v.publish(t.Context(), target))
	harness.Command(t, "umount", target)
	harness.Eventually(t, "the loss is told", func() bool {
		for _, part := range p.Status().Volumes[0].Parts {
			if strings.Contains(part.Error, "--heal") {
				return true
			}
		}
		return false
	})
	if mountsAt(p, target) != 0 {
		t.Error("restored")
	}
	must(t, v.publish(t.Context(), target))
	v.end(target)
}

// A pod that is gone does not come back to be unpublished.
func TestPublishOfAPodThatIsGoneRetires(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, blockAs(multiWriter))
	must(t, v.stage(t.Context()))
	dead, alive := v.target("dead"), v.target("alive")
	must(t, v.publish(t.Context(), dead))
	must(t, os.Remove(v.path("pods/dead")))
	must(t, v.publish(t.Context(), alive)) // the volume is looked at; a minute later it is looked at again
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	must(t, p.Log.Await(ctx, "Retired the publish"))
	must(t, v.publish(t.Context(), alive))
	p.AwaitRest()
	mustBeGone(t, dead)
	v.end(alive)
}
