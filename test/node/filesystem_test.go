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

// copyTo gives the file of another volume the bytes of this one's, as they are now.
func (v *volume) copyTo(other *volume) {
	v.t.Helper()
	harness.Command(v.t, "cp", "--sparse=always", v.data(), other.data())
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
func TestRestoredCopy(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		t.Run(fsType, func(t *testing.T) {
			ctx := t.Context()
			first := create(t, p, fsType+"-first", smallest(fsType), mountAs(fsType, multiWriter))
			second := create(t, p, fsType+"-second", smallest(fsType), mountAs(fsType, multiWriter))
			pod1, pod2 := first.target("pod-1"), second.target("pod-2")
			must(t, first.stage(ctx))
			must(t, first.publish(ctx, pod1))
			syncIn(t, filepath.Join(pod1, "file"), "both")
			first.copyTo(second)
			if _, err := os.Stat("/sys/fs/btrfs/features/temp_fsid"); fsType == "btrfs" && err != nil {
				// Before Linux 6.7 the copy waits until the other is unstaged.
				mustRefuse(t, second.stage(ctx), codes.Unavailable, second.id, "a copy of the file system mounted", "before 6.7")
				must(t, first.unpublish(ctx, pod1))
				must(t, first.unstage(ctx))
				must(t, second.stage(ctx))
				must(t, second.publish(ctx, pod2))
				mustRead(t, filepath.Join(pod2, "file"), "both")
				must(t, second.unpublish(ctx, pod2))
				must(t, second.unstage(ctx))
				must(t, first.delete(ctx))
				must(t, second.delete(ctx))
				return
			}
			must(t, second.stage(ctx))
			must(t, second.publish(ctx, pod2))
			mustRead(t, filepath.Join(pod2, "file"), "both")
			write(t, filepath.Join(pod2, "file"), "the copy's own")
			p.Restart(harness.Options{})
			p.AwaitRest()
			must(t, first.publish(ctx, pod1))
			must(t, second.publish(ctx, pod2))
			mustRead(t, filepath.Join(pod1, "file"), "both")
			mustRead(t, filepath.Join(pod2, "file"), "the copy's own")
			if fsType != "ext4" || mayResize(t) {
				_, err := second.expand(ctx, 2*smallest(fsType))
				must(t, err)
				if one, two := first.total(pod1), second.total(pod2); two <= one {
					t.Errorf("the grown copy has %d bytes, the other %d", two, one)
				}
			}
			must(t, first.unpublish(ctx, pod1))
			must(t, first.unstage(ctx))
			mustRead(t, filepath.Join(pod2, "file"), "the copy's own")
			second.end(pod2)
			must(t, first.stage(ctx))
			mustRead(t, filepath.Join(first.staging, "file"), "both")
			first.end()
		})
	}
}

// A read-only stage writes nothing: what needs its log replayed is refused with
// both ways out, and each of them works.
func TestReadOnlyStageWithALog(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		t.Run(fsType, func(t *testing.T) {
			ctx, flag := t.Context(), logFlags[fsType]
			source := create(t, p, fsType+"-source", smallest(fsType), mountAs(fsType, multiWriter))
			v := create(t, p, fsType, smallest(fsType), mountAs(fsType, multiWriter))
			must(t, source.stage(ctx))
			write(t, filepath.Join(source.staging, "older"), "settled")
			must(t, source.unstage(ctx))
			must(t, source.stage(ctx))
			syncIn(t, filepath.Join(source.staging, "file"), "in the log")
			source.copyTo(v)
			must(t, source.unstage(ctx))
			must(t, source.delete(ctx))
			before := sum(t, v.data())
			untouched := func() {
				t.Helper()
				if loops := p.Loops(); len(loops) > 0 {
					t.Errorf("loop devices: %+v", loops)
				}
				if sum(t, v.data()) != before {
					t.Fatal("the volume's bytes have changed")
				}
			}

			v.capability = mountAs(fsType, readerOnly)
			mustRefuse(t, v.stage(ctx), codes.FailedPrecondition, v.id, "log must be replayed", "stage the volume once for writing", `"`+flag+`"`)
			untouched()
			v.capability = mountAs(fsType, readerOnly, flag)
			pod := v.target("pod")
			must(t, v.stage(ctx))
			must(t, v.publish(ctx, pod))
			mustRead(t, filepath.Join(pod, "older"), "settled")
			if err := os.WriteFile(filepath.Join(pod, "new"), nil, 0o640); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing: %v", err)
			}
			must(t, v.unpublish(ctx, pod))
			must(t, v.unstage(ctx))
			untouched()
			v.capability = mountAs(fsType, multiWriter, flag)
			mustRefuse(t, v.stage(ctx), codes.InvalidArgument, v.id, `"`+flag+`"`, "the kernel refuses the mount option")
			mustHaveNoRecord(t, p)

			v.capability = mountAs(fsType, multiWriter)
			must(t, v.stage(ctx))
			mustRead(t, filepath.Join(v.staging, "file"), "in the log")
			must(t, v.unstage(ctx))
			v.capability = mountAs(fsType, readerOnly)
			must(t, v.stage(ctx))
			mustRead(t, filepath.Join(v.staging, "file"), "in the log")
			v.end()
		})
	}
}

// A volume is never mounted, nor formatted, as what it does not hold.
func TestWrongType(t *testing.T) {
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
				machine.Mkfs(t, holds, "-q", v.data())
				before := sum(t, v.data())
				for _, mode := range []accessMode{multiWriter, readerOnly} {
					v.capability = mountAs(asked, mode)
					mustRefuse(t, v.stage(ctx), codes.FailedPrecondition, v.id, "holds a file system of type "+holds, asked+" was asked for")
				}
				mustHaveNoRecord(t, p)
				if sum(t, v.data()) != before {
					t.Error("the volume's bytes have changed")
				}
				v.capability = mountAs(holds, multiWriter)
				must(t, v.stage(ctx))
				v.end()
			})
		}
	}
}

// Growing a btrfs by less than a sector, or twice, or after a restart, is no error.
func TestBtrfsInSmallSteps(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx, bytes := t.Context(), smallest("btrfs")
	v := create(t, p, "volume", bytes, mountAs("btrfs", multiWriter))
	must(t, v.stage(ctx))
	for _, more := range []int64{4096, 8192, 8192, 1 * mib, 512 * mib} {
		got, err := v.expand(ctx, bytes+more)
		must(t, err)
		if total := v.total(v.staging); got != bytes+more || total != got {
			t.Errorf("%d bytes more: answered %d, and %d are there", more, got, total)
		}
	}
	p.Restart(harness.Options{})
	got, err := v.expand(ctx, bytes+512*mib)
	must(t, err)
	if got != bytes+512*mib {
		t.Errorf("after a restart: %d bytes", got)
	}
	v.end()
}
