package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// exhaust fills a file system until not even a directory can be made.
func exhaust(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "filler"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	must(t, err)
	for _, size := range []int{1 << 20, 1 << 12, 1 << 9} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	must(t, f.Close())
	for i := 0; err == nil || i == 0; i++ {
		err = os.Mkdir(filepath.Join(dir, fmt.Sprintf("%d-%d", i, unix.Getpid())), 0o700)
		if errors.Is(err, os.ErrExist) {
			err = nil
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// Without a free block in the pool everything that gives
// space back goes on, and so does what needs none.
func TestFullPoolIsEmptied(t *testing.T) {
	t.Parallel()
	for _, mkfs := range [][]string{{"mkfs.ext4", "-q"}, {"mkfs.xfs", "-q"}} {
		t.Run(mkfs[0], func(t *testing.T) {
			t.Parallel()
			p := harness.New(t)
			mountPool(t, p, 320*mib, mkfs...)
			p.Start(harness.Options{})
			used := createAs(t, p, "used", 64*mib, mountAs("ext4", singleWriter), "thick")
			fresh := createAs(t, p, "fresh", 32*mib, mountAs("ext4", singleWriter), "thick")
			thin := create(t, p, "thin", 32*mib, blockAs(singleWriter))
			thick := createAs(t, p, "thick", 32*mib, blockAs(singleWriter), "thick")
			doomed := create(t, p, "doomed", 16*mib, blockAs(singleWriter))
			short := newInline(t, p, "csi-inline", mountAs("ext4", singleWriter), map[string]string{"size": "32Mi"})
			pod := used.Target("1")
			must(t, used.Up(t.Context(), pod))
			must(t, short.publishInline(t.Context()))
			for _, v := range []*volume{thin, thick, doomed} {
				write(t, v.Data()+".copy", "x") // a file that a delete takes along
				f, err := os.OpenFile(v.Data(), os.O_WRONLY, 0)
				must(t, err)
				_, err = f.WriteAt(make([]byte, 8*mib), 4*mib)
				must(t, err)
				_, err = f.WriteAt([]byte("data"), 8*mib)
				must(t, err)
				must(t, f.Close())
			}
			free := func(by string, do func()) {
				t.Helper()
				exhaust(t, p.PoolDir)
				t.Log(by)
				do()
			}
			free("a format", func() { must(t, fresh.Stage(t.Context())); must(t, fresh.Unstage(t.Context())) })
			for _, v := range []*volume{thin, thick} {
				free("clear-device of a "+v.ID+" volume", func() {
					var c struct{ Cleared bool }
					line := "csi-node volume clear-device " + v.ID + " --i-understand-this-destroys-data"
					typed(t, p, line, &c)
					if !c.Cleared {
						t.Error("it is not cleared")
					}
				})
			}
			free("the end of an inline volume", func() { must(t, short.Unpublish(t.Context(), short.pod)) })
			mustBeGone(t, filepath.Dir(short.Data()))
			free("a start", func() { p.Kill(); p.Start(harness.Options{}) })
			free("volume delete", func() {
				if r := shell(t, p, "csi-node volume delete doomed"); r.Code != 0 {
					t.Errorf("%s%s", r.Stdout, r.Stderr)
				}
			})
			mustBeGone(t, filepath.Dir(doomed.Data()))
			for _, v := range []*volume{thin, thick, fresh} {
				free("DeleteVolume of "+v.ID, func() { must(t, v.Delete(t.Context())) })
				mustBeGone(t, filepath.Dir(v.Data()))
			}
			free("the end of a volume", func() { used.End(pod) })
		})
	}
}

// What is kept of the pool is promised to nobody, and inline
// volumes have bounds of their own.
func TestReserveAndInlineLimitsOfThePool(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	mountPool(t, p, 2048*mib, "mkfs.ext4", "-q")
	limits := harness.Options{Flags: []string{"--pool-reserve=1Gi,5%", "--inline-max-size=64Mi", "--inline-max-total=5%"}}
	p.Start(limits)
	room := func() int64 {
		t.Helper()
		resp, err := p.Controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		must(t, err)
		return resp.GetAvailableCapacity()
	}
	if got := room(); got > 1024*mib || got < 700*mib {
		t.Errorf("%d MiB are available of 2048, less 1024", got/mib)
	}
	_, err := p.Controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 1024 * mib}, VolumeCapabilities: []*csi.VolumeCapability{blockAs(singleWriter)}})
	mustRefuse(t, err, codes.ResourceExhausted, "--pool-reserve")
	inlineOf := func(name, size string) *inline {
		return newInline(t, p, name, mountAs("ext4", singleWriter), map[string]string{"size": size})
	}
	mustRefuse(t, inlineOf("csi-large", "65Mi").publishInline(t.Context()), codes.InvalidArgument, "--inline-max-size")
	first, second := inlineOf("csi-first", "64Mi"), inlineOf("csi-second", "64Mi")
	must(t, first.publishInline(t.Context()))
	mustRefuse(t, second.publishInline(t.Context()), codes.ResourceExhausted, "--inline-max-total")
	mustBeGone(t, filepath.Dir(second.Data()))
	limits.Flags[1] = "--inline-max-size=1Mi"
	p.Restart(limits)
	must(t, first.publishInline(t.Context())) // kubelet asks again and again for what stands
	p.Restart(harness.Options{})
	if got := room(); got < 1500*mib {
		t.Errorf("%d MiB are available of 2048, with nothing kept", got/mib)
	}
	must(t, second.publishInline(t.Context()))
	for _, v := range []*inline{first, second} {
		must(t, v.Unpublish(t.Context(), v.pod))
	}
	second.gone()
}

// mountSmallPool gives a plugin that has yet to start a pool of 96 MiB.
func mountSmallPool(t *testing.T, p *harness.Plugin) {
	t.Helper()
	makeDir(t, p.PoolDir)
	must(t, unix.Mount("pool", p.PoolDir, "tmpfs", 0, "size=96m"))
	t.Cleanup(func() {
		if err := unix.Unmount(p.PoolDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// A pool that is full now is no end of the growth: it goes on once there is room.
func TestGrowthGoesOnOnceThePoolHasRoom(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	mountSmallPool(t, p)
	p.Start(harness.Options{})
	t.Cleanup(p.Kill)
	for _, provisioning := range []string{"thin", "thick"} {
		t.Run(provisioning, func(t *testing.T) {
			ctx := t.Context()
			other := createAs(t, p, "other", 48*mib, blockAs(multiWriter), provisioning)
			v := createAs(t, p, "volume", 32*mib, blockAs(multiWriter), provisioning)
			_, err := p.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
				Name: "third", CapacityRange: &csi.CapacityRange{RequiredBytes: 64 * mib}, VolumeCapabilities: []*csi.VolumeCapability{v.Capability},
				Parameters: map[string]string{"provisioning": provisioning},
			})
			mustRefuse(t, err, codes.ResourceExhausted)
			must(t, v.Stage(ctx))
			_, err = v.Expand(ctx, 64*mib)
			mustRefuse(t, err, codes.ResourceExhausted, v.ID)
			must(t, other.Delete(ctx))
			got, err := v.Expand(ctx, 64*mib)
			must(t, err)
			if got != 64*mib {
				t.Errorf("%d bytes after growth", got)
			}
			v.End()
		})
	}
}
