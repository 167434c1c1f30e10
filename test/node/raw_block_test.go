package node

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// createWithSectors makes a volume of bytes whose device has sectors of a size.
func createWithSectors(t *testing.T, p *harness.Plugin, id string, c *csi.VolumeCapability, bytes, sector int64, how pool.Provisioning) *volume {
	t.Helper()
	made, err := pool.Open(p.PoolDir)
	must(t, err)
	_, err = made.Create(t.Context(), pool.Volume{ID: id, Name: id, Bytes: bytes, Provisioning: how, SectorBytes: sector})
	must(t, err)
	return harness.NewVolume(t, p, id, c)
}

// aligned returns memory that O_DIRECT takes, until the test ends.
func aligned(t *testing.T, bytes int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Munmap(b)) })
	return b
}

// sectorsOf is the size of the sectors of a device.
func sectorsOf(t *testing.T, path string) int {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKSSZGET)
	must(t, err)
	must(t, f.Close())
	return n
}

// openDevice opens a device until the test ends, if it is not closed before: an
// open device at a target keeps that from being unmounted.
func openDevice(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0)
	must(t, err)
	t.Cleanup(func() {
		if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return f
}

func sumOf(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}

// sumCached is the SHA-256 of a file or a device, by way of its page cache.
func sumCached(t *testing.T, path string) string {
	t.Helper()
	f := openDevice(t, path, os.O_RDONLY)
	h := sha256.New()
	_, err := io.Copy(h, f)
	must(t, err)
	must(t, f.Close())
	return hex.EncodeToString(h.Sum(nil))
}

// sumDirect is the SHA-256 of a device, past its page cache.
func sumDirect(t *testing.T, path string, buffer []byte) string {
	t.Helper()
	f := openDevice(t, path, os.O_RDONLY|unix.O_DIRECT)
	h := sha256.New()
	for {
		n, err := f.Read(buffer)
		h.Write(buffer[:n])
		if errors.Is(err, io.EOF) {
			must(t, f.Close())
			return hex.EncodeToString(h.Sum(nil))
		}
		must(t, err)
	}
}

// Pods share a raw block volume, each with its part of the bytes; those that
// may only read see all of it and change nothing, whatever way they try.
func TestBlockSharedByPods(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, how := range []pool.Provisioning{pool.Thin, pool.Thick} {
		for _, sector := range []int64{512, 4096} {
			t.Run(fmt.Sprint(how, " ", sector), func(t *testing.T) {
				ctx, size := t.Context(), int64(8*mib)
				v := createWithSectors(t, p, fmt.Sprint("shared-", how, sector), blockAs(multiWriter), size, sector, how)
				writers := []string{v.Target("pod-1"), v.Target("pod-2")}
				readers := []string{v.Target("pod-3"), v.Target("pod-4")}
				must(t, v.Stage(ctx))
				for _, target := range writers {
					must(t, v.Publish(ctx, target))
				}
				for _, target := range readers {
					must(t, v.PublishReadOnly(ctx, target))
				}
				all := append(writers[:2:2], readers...)
				for _, target := range all {
					if got := sectorsOf(t, target); got != int(sector) {
						t.Errorf("%s has sectors of %d bytes, want %d", target, got, sector)
					}
				}

				data := aligned(t, int(size))
				_, err := rand.Read(data)
				must(t, err)
				var group sync.WaitGroup
				for i, flags := range []int{unix.O_DIRECT, 0} { // one pod past its page cache, the other through it
					f, half := openDevice(t, writers[i], os.O_RDWR|flags), size/2
					group.Go(func() {
						_, err := f.WriteAt(data[int64(i)*half:][:half], int64(i)*half)
						if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
							t.Error(err)
						}
					})
				}
				group.Wait()
				buffer, want := aligned(t, mib), sumOf(data)
				for _, target := range all {
					if got := sumDirect(t, target, buffer); got != want {
						t.Errorf("%s reads otherwise than written", target)
					}
				}
				for _, target := range readers {
					refuseEveryWrite(t, target, buffer)
				}
				for _, target := range all {
					if got := sumDirect(t, target, buffer); got != want {
						t.Errorf("%s has changed", target)
					}
				}
				for _, target := range all {
					must(t, v.Unpublish(ctx, target))
					mustBeGone(t, target)
				}
				must(t, v.Unstage(ctx))
				if got := sumCached(t, v.Data()); got != want {
					t.Error("the pool's file holds other bytes than were written")
				}
				v.End()
			})
		}
	}
}

// refuseEveryWrite tries what a root in a pod can.
func refuseEveryWrite(t *testing.T, path string, buffer []byte) {
	t.Helper()
	refuseWrite(t, path)
	for name, try := range map[string]func() error{
		"O_DIRECT": func() error {
			f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt(buffer, 0)
			return errors.Join(err, f.Close())
		},
		"mmap": func() error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			b, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return errors.Join(err, f.Close())
			}
			b[0]++
			return errors.Join(unix.Msync(b, unix.MS_SYNC), unix.Munmap(b), f.Sync(), f.Close())
		},
		"discard":  func() error { return exec.Command("blkdiscard", "--force", path).Run() },
		"zero out": func() error { return exec.Command("blkdiscard", "--force", "--zeroout", path).Run() },
	} {
		if err := try(); err == nil {
			t.Errorf("%s: the read-only device at %s took it", name, path)
		}
	}
}

// A pod that has the device open sees it grow, and so does one that may only read.
func TestBlockGrowthIsSeenByHolders(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, sector := range []int64{512, 4096} {
		t.Run(fmt.Sprint(sector), func(t *testing.T) {
			ctx, size, grown := t.Context(), int64(16*mib), int64(48*mib)
			v := createWithSectors(t, p, fmt.Sprint("grows-", sector), blockAs(multiWriter), size, sector, pool.Thick)
			writer, reader := v.Target("pod-1"), v.Target("pod-2")
			must(t, v.Up(ctx, writer))
			must(t, v.PublishReadOnly(ctx, reader))
			w, r := openDevice(t, writer, os.O_RDWR), openDevice(t, reader, os.O_RDONLY|unix.O_DIRECT)
			data := aligned(t, mib)
			_, err := rand.Read(data)
			must(t, err)
			_, err = w.WriteAt(data, size-mib)
			must(t, errors.Join(err, w.Sync()))

			_, err = v.Expand(ctx, grown)
			must(t, err)
			for _, f := range []*os.File{w, r} {
				if end, err := f.Seek(0, io.SeekEnd); err != nil || end != grown {
					t.Errorf("%s ends at byte %d for who has it open (%v), want %d", f.Name(), end, err, grown)
				}
			}
			_, err = w.WriteAt(data, grown-mib)
			must(t, errors.Join(err, w.Sync()))
			got := aligned(t, mib)
			for _, offset := range []int64{size - mib, grown - mib} {
				if _, err := r.ReadAt(got, offset); err != nil || !bytes.Equal(got, data) {
					t.Errorf("the reader does not read at byte %d what was written: %v", offset, err)
				}
			}
			must(t, errors.Join(w.Close(), r.Close()))
			v.End(writer, reader)
		})
	}
}

// mapped is what kubelet puts over a published device: a bind mount, and a loop
// device over that, which keeps the device from being detached under the pod
// (MapBlockVolume in kubelet's pkg/volume/util/volumepathhandler).
type mapped struct{ bind, loop string }

func kubeletMaps(t *testing.T, v *volume, target, pod string) mapped {
	t.Helper()
	m := mapped{bind: v.Path("plugins/kubernetes.io/csi/volumeDevices", v.ID, "dev", pod)}
	makeDir(t, filepath.Dir(m.bind))
	write(t, m.bind, "")
	must(t, unix.Mount(target, m.bind, "", unix.MS_BIND, ""))
	m.loop = machine.Losetup(t, m.bind)
	return m
}

func (m mapped) end(t *testing.T) {
	t.Helper()
	harness.Command(t, "losetup", "--detach", m.loop)
	must(t, machine.Unmount(m.bind)) // whoever lists loop devices may have it open for a moment more
	must(t, os.Remove(m.bind))
}

// kubelet's own loop device over a published one is none of the plugin's
// business until the volume is to go; then it is named, and waited for.
func TestBlockUnderKubeletsLoop(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, how := range []pool.Provisioning{pool.Thin, pool.Thick} {
		for _, sector := range []int64{512, 4096} {
			for _, readOnly := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %d read-only %t", how, sector, readOnly), func(t *testing.T) {
					ctx, size := t.Context(), int64(16*mib)
					v := createWithSectors(t, p, fmt.Sprintf("lock-%s-%d-%t", how, sector, readOnly), blockAs(multiWriter), size, sector, how)
					target := v.Target("pod")
					publish := func() {
						must(t, v.Stage(ctx))
						if readOnly {
							must(t, v.PublishReadOnly(ctx, target))
						} else {
							must(t, v.Publish(ctx, target))
						}
					}

					// As kubelet does it: what it mapped goes first.
					publish()
					m := kubeletMaps(t, v, target, "pod")
					if !readOnly {
						writeAt(t, target, []byte("kept"), size/2)
					}
					if got := deviceSize(t, m.loop); got != size {
						t.Errorf("kubelet's %s has %d bytes", m.loop, got)
					}
					m.end(t)
					must(t, v.Unpublish(ctx, target))
					mustBeGone(t, target)
					must(t, v.Unstage(ctx))

					// kubelet has forgotten its loop device.
					publish()
					before := sumCached(t, target)
					m = kubeletMaps(t, v, target, "pod")
					must(t, v.Unpublish(ctx, target))
					for range 2 {
						mustRefuse(t, v.Unstage(ctx), codes.Unavailable, v.ID, m.bind)
					}
					if sumCached(t, m.loop) != before {
						t.Errorf("%s does not show the volume any more", m.loop)
					}
					m.end(t)
					must(t, v.Unstage(ctx))
					v.End()
				})
			}
		}
	}
}
