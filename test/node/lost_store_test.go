package node

import (
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
