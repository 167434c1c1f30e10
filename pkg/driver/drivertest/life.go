package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// life is one volume's, with a file system or raw, and the plugin that it is lived with.
type life struct {
	*harness.Plugin
	t       *testing.T
	harness Harness
	raw     bool
	volume  Volume
	kubelet *harness.Volume // calls the plugin for the volume as kubelet does
	staging string
}

// begin makes the volume and the directory where it will be staged.
func (l *life) begin() {
	l.t.Helper()
	l.volume = l.harness.Create(l.t, l.Plugin, "volume")
	l.staging = filepath.Join(l.KubeletDir, "plugins", "stage")
	l.makeDir(filepath.Dir(l.staging))
	if !l.raw {
		l.makeDir(l.staging)
	}
	l.kubelet = &harness.Volume{
		Plugin: l.Plugin, T: l.t, ID: l.volume.ID, Staging: l.staging, Capability: l.capability(),
		Context: l.volume.Context, PublishContext: l.volume.Publish, Secrets: l.volume.Secrets,
	}
}

// end sees that nothing is left of the volume, which is unstaged.
func (l *life) end() {
	l.t.Helper()
	if mounts := l.Mounts(); len(mounts) > 0 {
		l.t.Errorf("mounted after NodeUnstageVolume: %q", mounts)
	}
	if volumes := l.Report().Volumes; len(volumes) > 0 {
		l.t.Errorf("asked for after NodeUnstageVolume: %+v", volumes)
	}
	if l.volume.Delete != nil {
		l.volume.Delete()
	}
}

func (l *life) makeDir(path string) {
	l.t.Helper()
	if err := os.MkdirAll(path, 0o750); err != nil {
		l.t.Fatal(err)
	}
}

// target is where the volume is published for a pod. Its directory is made, as
// kubelet makes it.
func (l *life) target(pod string) string {
	l.t.Helper()
	path := filepath.Join(l.KubeletDir, "pods", pod, "volumes", "kubernetes.io~csi", "volume", "mount")
	l.makeDir(filepath.Dir(path))
	return path
}

func (l *life) capability() *csi.VolumeCapability {
	const mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	if l.raw {
		return harness.BlockAs(mode)
	}
	return harness.MountAs(l.harness.Filesystem, mode)
}

func (l *life) stage(ctx context.Context) error {
	return wrap("NodeStageVolume", l.kubelet.Stage(ctx))
}

func (l *life) publish(ctx context.Context, target string, readOnly bool) error {
	call := l.kubelet.Publish
	if readOnly {
		call = l.kubelet.PublishReadOnly
	}
	return wrap("NodePublishVolume", call(ctx, target))
}

func (l *life) unpublish(ctx context.Context, target string) error {
	return wrap("NodeUnpublishVolume", l.kubelet.Unpublish(ctx, target))
}

func (l *life) unstage(ctx context.Context) error {
	return wrap("NodeUnstageVolume", l.kubelet.Unstage(ctx))
}

// up stages and publishes the volume.
func (l *life) up(ctx context.Context, target string) {
	l.t.Helper()
	l.must(l.stage(ctx))
	l.must(l.publish(ctx, target, false))
}

// down unpublishes and unstages it.
func (l *life) down(ctx context.Context, target string) {
	l.t.Helper()
	l.must(l.unpublish(ctx, target))
	l.must(l.unstage(ctx))
}

// expand calls NodeExpandVolume. later: an ext4 that the kernel lets nobody here grow while
// it is mounted grows when it is staged next.
func (l *life) expand(ctx context.Context, target string) (later bool, err error) {
	req := l.kubelet.ExpandRequest(target, larger)
	req.Secrets = l.volume.Secrets
	resp, err := l.Node.NodeExpandVolume(ctx, req)
	if got := resp.GetCapacityBytes(); err == nil && got < larger-layerTakes {
		err = fmt.Errorf("%d bytes, not %d", got, larger)
	}
	if err != nil && strings.Contains(err.Error(), "CAP_SYS_RESOURCE") {
		return true, nil
	}
	return false, wrap("NodeExpandVolume", err)
}

// grow grows the volume, by calls that do makes.
func (l *life) grow(ctx context.Context, target string, do func(call func() error)) {
	l.t.Helper()
	later := false
	expand := func() (err error) {
		later, err = l.expand(ctx, target)
		return err
	}
	if do(expand); later {
		do(func() error { return l.unpublish(ctx, target) })
		do(func() error { return l.unstage(ctx) })
		do(func() error { return l.stage(ctx) })
		do(func() error { return l.publish(ctx, target, false) })
		do(expand)
	}
	l.mustHave(target, larger-layerTakes)
}

// mustHave fails the test unless a target shows a device of that many bytes, or a file
// system that fills one.
func (l *life) mustHave(target string, bytes int64) {
	l.t.Helper()
	got := l.bytes(target)
	if !l.raw {
		got = got * 5 / 4 // what is left of the metadata's part
	}
	if got < bytes {
		l.t.Errorf("%s has %d bytes, not %d", target, got, bytes)
	}
}

// mustLack fails the test if a target shows that many bytes already: then it would not be
// seen whether the volume grows.
func (l *life) mustLack(target string, bytes int64) {
	l.t.Helper()
	if got := l.bytes(target); got >= bytes {
		l.t.Errorf("%s has %d bytes before it grows to %d: Create is to make it with Size bytes", target, got, bytes)
	}
}

// bytes returns how many bytes a target shows: of the device, or of the file system.
func (l *life) bytes(target string) (got int64) {
	l.t.Helper()
	l.must(l.within("a look at "+target, func() error {
		if !l.raw {
			var st unix.Statfs_t
			err := unix.Statfs(target, &st)
			got = int64(st.Blocks) * st.Bsize
			return err
		}
		f, err := os.Open(target)
		if err != nil {
			return err
		}
		got, err = f.Seek(0, io.SeekEnd)
		return errors.Join(err, f.Close())
	}))
	return got
}

func wrap(method string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	return nil
}

func (l *life) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// ioTime bounds one read or write of a test: a device that hangs fails it.
const ioTime = time.Minute

// within runs what may hang on a device.
func (l *life) within(what string, do func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- do() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(ioTime):
		return fmt.Errorf("%s does not end within %s", what, ioTime)
	}
}

// block is how much is written to a raw device: direct I/O, so that what another
// device over the same bytes shows is what was written.
const block = 4096

// write leaves a text in the volume, through a target.
func (l *life) write(target, text string) error {
	return l.within("a write to "+target, func() error {
		if !l.raw {
			f, err := os.OpenFile(filepath.Join(target, "file"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o640)
			if err != nil {
				return err
			}
			_, err = f.WriteString(text)
			return errors.Join(err, f.Sync(), f.Close())
		}
		f, err := os.OpenFile(target, os.O_WRONLY|unix.O_DIRECT, 0)
		if err != nil {
			return err
		}
		data, err := aligned()
		if err != nil {
			return errors.Join(err, f.Close())
		}
		copy(data, text)
		_, err = f.WriteAt(data, 1<<20)
		return errors.Join(err, f.Sync(), f.Close(), unix.Munmap(data))
	})
}

// read returns the text that a target shows.
func (l *life) read(target string) (text string, err error) {
	err = l.within("a read of "+target, func() error {
		if !l.raw {
			raw, err := os.ReadFile(filepath.Join(target, "file"))
			text = string(raw)
			return err
		}
		f, err := os.OpenFile(target, os.O_RDONLY|unix.O_DIRECT, 0)
		if err != nil {
			return err
		}
		data, err := aligned()
		if err != nil {
			return errors.Join(err, f.Close())
		}
		_, err = f.ReadAt(data, 1<<20)
		text = string(bytes.TrimRight(data, "\x00"))
		return errors.Join(err, f.Close(), unix.Munmap(data))
	})
	return text, err
}

// aligned returns a page, as direct I/O needs it.
func aligned() ([]byte, error) {
	return unix.Mmap(-1, 0, block, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

// mustRead fails the test unless a target shows the text.
func (l *life) mustRead(target, want string) {
	l.t.Helper()
	if got, err := l.read(target); err != nil || got != want {
		l.t.Errorf("%s holds %q, not %q (%v)", target, got, want, err)
	}
}

// mustBeGone fails the test if anything is at a path.
func (l *life) mustBeGone(path string) {
	l.t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		l.t.Errorf("%s is still there (%v)", path, err)
	}
}

// both runs a test for a volume with a file system and for a raw one, which must be
// refused where no volume has a device. The volume is there then, and nothing of it is to
// be left.
func both(t *testing.T, fresh func(*testing.T, bool) *life, test func(*life)) {
	for name, raw := range map[string]bool{"filesystem": false, "raw": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := fresh(t, raw)
			l.Start(harness.Options{})
			l.begin()
			if raw && l.harness.Mounted {
				l.refusesRaw()
			} else {
				test(l)
			}
			l.end()
		})
	}
}

// refusesRaw: a volume without a device is no block device.
func (l *life) refusesRaw() {
	l.t.Helper()
	ctx := l.t.Context()
	if err := errors.Unwrap(l.stage(ctx)); status.Code(err) != codes.InvalidArgument {
		l.t.Errorf("a volume that is mounted from a source is staged as a block device: %v", err)
	}
	l.must(l.unstage(ctx))
}
