package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

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
