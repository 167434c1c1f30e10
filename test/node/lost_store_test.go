package node

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/harness"
)

// damages are what may befall the store while the plugin is down.
// Each tells whether there is a record to set aside.
var damages = map[string]func(t *testing.T, dir, file string) (aside bool){
	"deleted": func(t *testing.T, dir, _ string) bool { must(t, os.RemoveAll(dir)); return false },
	"garbage": func(t *testing.T, _, file string) bool {
		must(t, os.WriteFile(file, bytes.Repeat([]byte("garbage\n"), 4096), 0o600))
		return true
	},
	"cut": func(t *testing.T, _, file string) bool { must(t, os.Truncate(file, 500)); return true },
}

// A lost store loses no mount: kubelet's next calls adopt what stands.
func TestLostStoreLosesNoMount(t *testing.T) {
	t.Parallel()
	for damage, inflict := range damages {
		for _, access := range []string{"mount", "block", "read-only"} {
			t.Run(damage+" "+access, func(t *testing.T) {
				p := harness.Start(t, harness.Options{})
				ctx := t.Context()
				v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
				if access == "block" {
					v.Capability = blockAs(multiWriter)
				}
				if access == "read-only" {
					must(t, v.Stage(ctx))
					must(t, v.Unstage(ctx))
					v.Capability = mountAs("ext4", readerOnly)
				}
				pod1, pod2 := v.Target("pod-1"), v.Target("pod-2")
				must(t, v.Stage(ctx))
				if access != "read-only" { // which allows one target
					must(t, v.Publish(ctx, pod1))
				}
				p.Kill()
				dir := filepath.Join(p.StateDir, store.Directory)
				file, err := filepath.Glob(filepath.Join(dir, "*.json"))
				if err != nil || len(file) != 1 {
					t.Fatalf("records: %q (%v)", file, err)
				}
				lost := inflict(t, dir, file[0])
				p.Start(harness.Options{})
				if aside, err := filepath.Glob(filepath.Join(dir, "*.corrupt-*")); err != nil || (len(aside) == 1) != lost {
					t.Errorf("set aside: %q (%v)", aside, err)
				}

				must(t, v.Publish(ctx, pod2))
				must(t, v.Stage(ctx)) // kubelet may repeat it
				for _, pod := range []string{pod2, pod1} {
					must(t, v.Unpublish(ctx, pod))
					mustBeGone(t, pod)
				}
				v.End()
			})
		}
	}
}

// A stage whose mount went with the store shows the superblock that a pod keeps,
// with whatever options that has: it is judged like one that stands.
func TestLostStageOfAKeptSuperblockIsJudgedByItsOptions(t *testing.T) {
	t.Parallel()
	for flags, others := range map[string][]string{"": {"sync", "data=journal", "commit=7"}, "dirsync": {"", "sync"}} {
		t.Run(flags, func(t *testing.T) {
			p := harness.Start(t, harness.Options{})
			ctx := t.Context()
			as := func(flags string) *csi.VolumeCapability {
				return mountAs("ext4", multiWriter, strings.Fields(flags)...)
			}
			v := create(t, p, "volume", 32*mib, as(flags))
			pod := v.Target("pod")
			must(t, v.Up(ctx, pod))
			p.Kill()
			must(t, os.RemoveAll(p.StateDir))
			harness.Command(t, "umount", v.Staging)
			p.Start(harness.Options{})
			for _, other := range others {
				v.Capability = as(other)
				mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, pod, "makes the difference")
			}
			v.Capability = as(flags)
			must(t, v.Up(ctx, pod))
			v.End(pod)
		})
	}
}

// An unstage that meets a target which no record names ends only with that target.
func TestUnstageAfterLostStoreWaitsForTargets(t *testing.T) {
	t.Parallel()
	for _, access := range []string{"mount", "block"} {
		t.Run(access, func(t *testing.T) {
			p := harness.Start(t, harness.Options{})
			ctx := t.Context()
			v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
			if access == "block" {
				v.Capability = blockAs(multiWriter)
			}
			pod := v.Target("pod")
			must(t, v.Up(ctx, pod))
			var open *os.File
			if access == "mount" {
				write(t, filepath.Join(pod, "file"), "kept")
			} else { // a bound device node holds nothing; a pod that has it open does
				var err error
				open, err = os.OpenFile(pod, os.O_RDWR|os.O_EXCL, 0)
				must(t, err)
			}
			p.Kill()
			loseStore(t, p)
			p.Start(harness.Options{})

			short, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			if err := v.Unstage(short); status.Code(err) == codes.OK {
				t.Fatal("NodeUnstageVolume answers OK while a pod has the volume")
			}
			if access == "mount" {
				mustRead(t, filepath.Join(pod, "file"), "kept")
			} else {
				must(t, open.Close())
			}
			must(t, v.Unpublish(ctx, pod))
			v.End()
		})
	}
}

// openStore opens the store of a plugin that does not run.
func openStore(t *testing.T, p *harness.Plugin) *store.Store {
	t.Helper()
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	records, err := store.Open(t.Context(), p.StateDir, strings.TrimSpace(string(bootID)))
	must(t, err)
	return records
}
