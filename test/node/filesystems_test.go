package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// logFlags are the mount flags with which a read-only mount leaves the log alone.
var logFlags = map[string]string{"ext4": "noload", "xfs": "norecovery", "btrfs": "rescue=nologreplay"}

// copyData gives the file of another volume the bytes of one, as they are now.
func copyData(v, other *volume) {
	v.T.Helper()
	harness.Command(v.T, "cp", "--sparse=always", v.Data(), other.Data())
}

// syncIn writes a file through to the disk: into the log, where there is one.
func syncIn(t testing.TB, path, text string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	_, err = f.WriteString(text)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

// A volume restored from a copy of another is staged while the other is.
func TestRestoredCopyIsStagedBesideItsSource(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		t.Run(fsType, func(t *testing.T) {
			ctx := t.Context()
			first := create(t, p, fsType+"-first", smallest(fsType), mountAs(fsType, multiWriter))
			second := create(t, p, fsType+"-second", smallest(fsType), mountAs(fsType, multiWriter))
			pod1, pod2 := first.Target("pod-1"), second.Target("pod-2")
			must(t, first.Up(ctx, pod1))
			syncIn(t, filepath.Join(pod1, "file"), "both")
			copyData(first, second)
			if _, err := os.Stat("/sys/fs/btrfs/features/temp_fsid"); fsType == "btrfs" && err != nil {
				// Before Linux 6.7 the copy waits until the other is unstaged.
				mustRefuse(t, second.Stage(ctx), codes.Unavailable, second.ID, "a copy of the file system mounted", "before 6.7")
				must(t, first.Down(ctx, pod1))
				must(t, second.Up(ctx, pod2))
				mustRead(t, filepath.Join(pod2, "file"), "both")
				must(t, second.Down(ctx, pod2))
				must(t, first.Delete(ctx))
				must(t, second.Delete(ctx))
				return
			}
			must(t, second.Up(ctx, pod2))
			mustRead(t, filepath.Join(pod2, "file"), "both")
			write(t, filepath.Join(pod2, "file"), "the copy's own")
			p.Restart(harness.Options{})
			p.AwaitRest()
			must(t, first.Publish(ctx, pod1))
			must(t, second.Publish(ctx, pod2))
			mustRead(t, filepath.Join(pod1, "file"), "both")
			mustRead(t, filepath.Join(pod2, "file"), "the copy's own")
			if fsType != "ext4" || mayResize(t) {
				_, err := second.Expand(ctx, 2*smallest(fsType))
				must(t, err)
				if one, two := first.Total(pod1), second.Total(pod2); two <= one {
					t.Errorf("the grown copy has %d bytes, the other %d", two, one)
				}
			}
			must(t, first.Down(ctx, pod1))
			mustRead(t, filepath.Join(pod2, "file"), "the copy's own")
			second.End(pod2)
			must(t, first.Stage(ctx))
			mustRead(t, filepath.Join(first.Staging, "file"), "both")
			first.End()
		})
	}
}

// A read-only stage writes nothing: what needs its log replayed is refused with
// both ways out, and each of them works.
func TestReadOnlyStageLeavesTheLogAlone(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		t.Run(fsType, func(t *testing.T) {
			ctx, flag := t.Context(), logFlags[fsType]
			source := create(t, p, fsType+"-source", smallest(fsType), mountAs(fsType, multiWriter))
			v := create(t, p, fsType, smallest(fsType), mountAs(fsType, multiWriter))
			must(t, source.Stage(ctx))
			write(t, filepath.Join(source.Staging, "older"), "settled")
			must(t, source.Unstage(ctx))
			must(t, source.Stage(ctx))
			syncIn(t, filepath.Join(source.Staging, "file"), "in the log")
			copyData(source, v)
			must(t, source.Unstage(ctx))
			must(t, source.Delete(ctx))
			before := sum(t, v.Data())
			untouched := func() {
				t.Helper()
				mustHaveNoLoop(t, p)
				mustHoldAsBefore(t, v.Data(), before)
			}

			v.Capability = mountAs(fsType, readerOnly)
			mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, "log must be replayed", "stage the volume once for writing", `"`+flag+`"`)
			untouched()
			v.Capability = mountAs(fsType, readerOnly, flag)
			pod := v.Target("pod")
			must(t, v.Up(ctx, pod))
			mustRead(t, filepath.Join(pod, "older"), "settled")
			if err := os.WriteFile(filepath.Join(pod, "new"), nil, 0o640); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing: %v", err)
			}
			must(t, v.Down(ctx, pod))
			untouched()
			v.Capability = mountAs(fsType, multiWriter, flag)
			mustRefuse(t, v.Stage(ctx), codes.InvalidArgument, v.ID, `"`+flag+`"`, "the kernel refuses the mount option")
			mustHaveNoRecord(t, p)

			v.Capability = mountAs(fsType, multiWriter)
			must(t, v.Stage(ctx))
			mustRead(t, filepath.Join(v.Staging, "file"), "in the log")
			must(t, v.Unstage(ctx))
			v.Capability = mountAs(fsType, readerOnly)
			must(t, v.Stage(ctx))
			mustRead(t, filepath.Join(v.Staging, "file"), "in the log")
			v.End()
		})
	}
}

// A volume is never mounted, nor formatted, as what it does not hold.
func TestVolumeIsNotMountedAsWhatItDoesNotHold(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, holds := range fsTypes {
		for _, asked := range fsTypes {
			if holds == asked {
				continue
			}
			t.Run(holds+" as "+asked, func(t *testing.T) {
				ctx := t.Context()
				v := create(t, p, holds+"-as-"+asked, smallest("xfs"), mountAs(asked, multiWriter))
				machine.Mkfs(t, holds, "-q", v.Data())
				before := sum(t, v.Data())
				for _, mode := range []accessMode{multiWriter, readerOnly} {
					v.Capability = mountAs(asked, mode)
					mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, "holds a file system of type "+holds, asked+" was asked for")
				}
				mustHaveNoRecord(t, p)
				mustHoldAsBefore(t, v.Data(), before)
				v.Capability = mountAs(holds, multiWriter)
				must(t, v.Stage(ctx))
				v.End()
			})
		}
	}
}

// Growing a btrfs by less than a sector, or twice, or after a restart, is no error.
func TestBtrfsGrowsInSmallSteps(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx, bytes := t.Context(), smallest("btrfs")
	v := create(t, p, "volume", bytes, mountAs("btrfs", multiWriter))
	must(t, v.Stage(ctx))
	for _, more := range []int64{4096, 8192, 8192, 1 * mib, 512 * mib} {
		got, err := v.Expand(ctx, bytes+more)
		must(t, err)
		if total := v.Total(v.Staging); got != bytes+more || total != got {
			t.Errorf("%d bytes more: answered %d, and %d are there", more, got, total)
		}
	}
	p.Restart(harness.Options{})
	got, err := v.Expand(ctx, bytes+512*mib)
	must(t, err)
	if got != bytes+512*mib {
		t.Errorf("after a restart: %d bytes", got)
	}
	v.End()
}
