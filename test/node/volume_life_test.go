package node

import (
	"bytes"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// A volume's whole life with a file system on it.
func TestLifeOfAMountedVolume(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		for _, provisioning := range []string{"thin", "thick"} {
			t.Run(fsType+" "+provisioning, func(t *testing.T) {
				ctx, bytes := t.Context(), smallest(fsType)
				v := createAs(t, p, fsType+"-"+provisioning, bytes, mountAs(fsType, multiWriter), provisioning)
				pod1, pod2, pod3 := v.Target("pod-1"), v.Target("pod-2"), v.Target("pod-3")
				must(t, v.Up(ctx, pod1, pod2))
				must(t, v.PublishReadOnly(ctx, pod3))
				write(t, filepath.Join(pod1, "file"), strings.Repeat(rand.Text(), 100_000)) // 2.6 MB
				data := digest.Of(t, filepath.Join(pod1, "file"))
				unharmed := func(pods ...string) {
					t.Helper()
					for _, pod := range pods {
						if got := digest.Of(t, filepath.Join(pod, "file")); got != data {
							t.Errorf("%s: the data has changed", pod)
						}
					}
				}
				unharmed(pod2, pod3)
				if err := os.WriteFile(filepath.Join(pod3, "file"), nil, 0); !errors.Is(err, unix.EROFS) {
					t.Errorf("writing through the read-only target: %v", err)
				}

				grown := 2 * bytes
				before := v.Total(pod1)
				got, err := v.Expand(ctx, grown)
				if fsType == "ext4" && !mayResize(t) {
					mustRefuse(t, err, codes.FailedPrecondition, "CAP_SYS_RESOURCE", v.ID)
				} else {
					must(t, err)
					if got != grown || v.Total(pod1) <= before {
						t.Errorf("after growth: %d bytes answered, %d in the pod, %d before", got, v.Total(pod1), before)
					}
				}
				unharmed(pod1, pod2, pod3)
				p.Restart(harness.Options{})
				p.AwaitRest()
				must(t, v.Up(ctx, pod1))
				unharmed(pod1, pod2, pod3)
				again := func() {
					for _, pod := range []string{pod1, pod2, pod3} {
						must(t, v.Unpublish(ctx, pod))
						mustBeGone(t, pod)
					}
					must(t, v.Unstage(ctx))
					if mounts, loops := mountsAt(p, v.Staging), p.Loops(); mounts > 0 || len(loops) > 0 {
						t.Errorf("after NodeUnstageVolume: %d mounts, loop devices %v", mounts, loops)
					}
				}
				again()
				must(t, v.Up(ctx, pod1))
				unharmed(pod1)
				if total := v.Total(v.Staging); total <= before {
					t.Errorf("staged again it has %d bytes, %d before it was grown", total, before)
				}
				if provisioning == "thick" {
					must(t, os.Remove(filepath.Join(pod1, "file")))
				}
				again()
				if allocated := machine.Allocated(t, v.Data()); provisioning == "thick" && allocated < grown || provisioning == "thin" && allocated > bytes {
					t.Errorf("%d bytes are allocated", allocated)
				}
				v.End()
				mustRefuse(t, v.Stage(ctx), codes.NotFound, v.ID)
			})
		}
	}
}

// A volume staged under an access mode of readers is read-only down to the device.
func TestStageOfReadersIsReadOnly(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		t.Run(fsType, func(t *testing.T) {
			ctx := t.Context()
			v := create(t, p, fsType+"-reader", smallest(fsType), mountAs(fsType, multiWriter))
			pod := v.Target("pod")
			writing := v.Capability
			v.Capability = mountAs(fsType, readerOnly)
			mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, "blank")

			v.Capability = writing
			must(t, v.Up(ctx, pod))
			write(t, filepath.Join(pod, "file"), "kept")
			must(t, v.Down(ctx, pod))
			before := digest.Of(t, v.Data())

			v.Capability = mountAs(fsType, readerOnly)
			must(t, v.Up(ctx, pod))
			mustRead(t, filepath.Join(pod, "file"), "kept")
			for _, dir := range []string{pod, v.Staging} {
				if err := os.WriteFile(filepath.Join(dir, "new"), nil, 0o640); !errors.Is(err, unix.EROFS) {
					t.Errorf("writing at %s: %v", dir, err)
				}
			}
			if loops := p.Loops(); len(loops) != 1 || !loops[0].ReadOnly {
				t.Errorf("loop devices: %+v, want one that is read-only", loops)
			}
			must(t, v.Down(ctx, pod))
			mustHoldAsBefore(t, v.Data(), before)
			v.End()
		})
	}
	t.Run("block", func(t *testing.T) {
		ctx := t.Context()
		v := create(t, p, "block-reader", 32*mib, blockAs(readerOnly))
		pod := v.Target("pod")
		must(t, v.Up(ctx, pod))
		refuseWrite(t, pod)
		v.End(pod)
	})
}

// writeAt writes to a device through to its backing.
func writeAt(t testing.TB, path string, text []byte, offset int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_SYNC, 0)
	must(t, err)
	_, err = f.WriteAt(text, offset)
	must(t, errors.Join(err, f.Close()))
}

func readAt(t testing.TB, path string, want []byte, offset int64) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	got := make([]byte, len(want))
	_, err = f.ReadAt(got, offset)
	must(t, errors.Join(err, f.Close()))
	if !bytes.Equal(got, want) {
		t.Errorf("%s reads %q at byte %d, want %q", path, got, offset, want)
	}
}

// refuseWrite fails if a device takes a write.
func refuseWrite(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_SYNC, 0)
	if err == nil {
		_, err = f.WriteString("must not be")
		must(t, f.Close())
	}
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to the read-only device at %s: %v", path, err)
	}
}

func deviceSize(t testing.TB, path string) int64 {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	size, err := f.Seek(0, 2)
	must(t, errors.Join(err, f.Close()))
	return size
}
