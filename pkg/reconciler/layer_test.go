package reconciler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// layered is a reconciler on the real kernel for the volume of a realNode, which
// wants the layer devicestest.Offset.
type layered struct {
	t     *testing.T
	n     *realNode
	store *fakeStore
	layer devicestest.Offset
	r     *Reconciler
	stop  func() // ends the reconciler, and waits until it has ended
	hook  hook

	mu    sync.Mutex
	steps []Step // that were done, under mu
}

// hook meets the steps of a reconciler.
type hook = func(ctx context.Context, volume string, step Step, moment Moment) error

func newLayered(t *testing.T) *layered {
	l := &layered{t: t, n: newRealNode(t), store: newFakeStore(), layer: devicestest.Offset{Owner: strconv.FormatUint(rand.Uint64(), 36)}}
	l.n.parts.Layers = []devices.Layer{l.layer}
	t.Cleanup(func() { // before the node's own, which knows of no layer
		if l.stop != nil {
			l.stop()
		}
		for i := range 3 {
			for l.n.umount(2-i) == nil {
			}
		}
		if err := l.layer.Close(context.WithoutCancel(t.Context()), state.Device{}, devices.Volume{ID: "v"}); err != nil {
			t.Error(err)
		}
	})
	l.start()
	return l
}

func (l *layered) start() {
	ctx, cancel := context.WithCancel(klog.NewContext(context.WithoutCancel(l.t.Context()), klog.Logger{}))
	l.r = New(Config{Store: l.store, Kernel: l.n.parts, Hook: func(ctx context.Context, volume string, step Step, moment Moment) error {
		if moment == Before {
			l.mu.Lock()
			l.steps = append(l.steps, step)
			l.mu.Unlock()
		}
		if l.hook != nil {
			return l.hook(ctx, volume, step, moment)
		}
		return nil
	}})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.r.Run(ctx)
	}()
	l.stop = func() {
		cancel()
		<-ended
	}
}

// restart ends the reconciler and starts the next one, with that hook and no step done.
func (l *layered) restart(meets hook) {
	l.stop()
	l.hook = meets
	l.forget()
	l.start()
}

// did checks which steps were done since the last forget.
func (l *layered) did(want ...string) {
	l.t.Helper()
	if got := actions(l.done()); !slices.Equal(got, want) {
		l.t.Errorf("steps %q, want %q", got, want)
	}
}

// done returns the steps that were done since the last forget.
func (l *layered) done() []Step {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.steps)
}

func (l *layered) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps = nil
}

func (l *layered) ask(part state.Part, edit func(*state.Volume) error) error {
	ctx, cancel := context.WithTimeout(l.t.Context(), time.Minute)
	defer cancel()
	return l.r.Ensure(ctx, "v", part, edit)
}

func (l *layered) stage(change ...func(*state.Stage)) error {
	return l.ask(state.StagePart(), func(v *state.Volume) error {
		s := &state.Stage{Path: l.n.path(0), Capability: mountCapability(), Context: devicestest.OffsetVolume()}
		for _, c := range change {
			c(s)
		}
		return v.AskStage(s, time.Now())
	})
}

func (l *layered) publish(change ...func(*state.Target)) error {
	return l.ask(state.TargetPart(l.n.path(1)), func(v *state.Volume) error {
		t := &state.Target{Path: l.n.path(1), Capability: mountCapability(), Context: devicestest.OffsetVolume()}
		for _, c := range change {
			c(t)
		}
		return v.AskPublish(t, l.n.path(0), time.Now())
	})
}

func (l *layered) unpublish() error {
	return l.ask(state.TargetPart(l.n.path(1)), func(v *state.Volume) error { return v.AskUnpublish(l.n.path(1), time.Now()) })
}

func (l *layered) unstage() error {
	return l.ask(state.StagePart(), func(v *state.Volume) error { return v.AskUnstage(l.n.path(0), time.Now()) })
}

func (l *layered) ok(err error) {
	l.t.Helper()
	require.NoError(l.t, err)
}

// look is what the worker sees.
func (l *layered) look() state.Actual {
	l.t.Helper()
	have, err := l.r.observeAlone(klog.NewContext(l.t.Context(), klog.Logger{}), l.store.Get("v"))
	l.ok(err)
	return *have
}

// gone checks that nothing stands of the volume.
func (l *layered) gone() {
	l.t.Helper()
	if left := l.n.devices(l.n.data); len(left) > 0 {
		l.t.Errorf("still attached: %v", left)
	}
	d, err := l.layer.Find(l.t.Context(), state.Device{}, devices.Volume{ID: "v"})
	if err != nil || d.State != state.DeviceAbsent {
		l.t.Errorf("the layer is %s: %v", d.State, err)
	}
}

// actions returns those of the steps.
func actions(steps []Step) (all []string) {
	for _, s := range steps {
		name := string(s.Action)
		if s.Layer != "" {
			name += " " + s.Layer
		}
		all = append(all, name)
	}
	return all
}

// large has more on each device than a look reads, and tells what is at byte 1 MiB
// of one that it is to format.
type large struct {
	Filesystems
	there *byte
}

func (f large) Probe(ctx context.Context, d state.Device, mountpoint string) (state.Contents, error) {
	c, err := f.Filesystems.Probe(ctx, d, mountpoint)
	if c.Kind == state.ContentsBlank || c.Kind == state.ContentsOther {
		c = state.Contents{Kind: state.ContentsUnproven, Found: "a lot"}
		if d.Fresh {
			c = state.Contents{Kind: state.ContentsBlank}
		}
	}
	return c, err
}

func (f large) Format(ctx context.Context, d state.Device, fsType string, last func(context.Context) (string, error)) error {
	device, err := os.Open(d.Path)
	if err != nil {
		return err
	}
	defer device.Close()
	found := make([]byte, 1)
	if _, err := device.ReadAt(found, 1<<20); err != nil {
		return err
	}
	*f.there = found[0]
	return f.Filesystems.Format(ctx, d, fsType, last)
}

// A layer that is new need not be zero, as no cipher's is: mkfs, which relies on
// that, finds it erased.
func TestNewLayerIsErasedBeforeItIsFormatted(t *testing.T) {
	l := newLayered(t)
	found := byte('?')
	l.n.parts.Filesystems = large{l.n.parts.Filesystems, &found}
	l.restart(func(_ context.Context, _ string, step Step, moment Moment) error {
		if step.Action != OpenLayer || moment != After {
			return nil
		}
		d, err := l.layer.Find(context.WithoutCancel(l.t.Context()), state.Device{}, devices.Volume{ID: "v"})
		if err != nil {
			return err
		}
		f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteAt([]byte("noise"), 1<<20)
		return errors.Join(err, f.Sync(), f.Close())
	})
	l.ok(l.stage())
	if found != 0 {
		t.Errorf("mkfs met %q", found)
	}
	l.hook = nil
	l.ok(l.unstage())
	l.gone()
}

// noisy is a layer on which what was never written reads as noise, and which grows
// without its secret.
type noisy struct{ devicestest.Offset }

func (n noisy) Find(ctx context.Context, lower state.Device, v devices.Volume) (state.Device, error) {
	d, err := n.Offset.Find(ctx, lower, v)
	d.Noise, d.GrowsOpen = true, true
	return d, err
}

func newNoisy(t *testing.T) *layered {
	l := newLayered(t)
	l.n.parts.Layers = []devices.Layer{noisy{l.layer}}
	l.restart(nil)
	return l
}

// A layer that is new is formatted without being erased, be it noise or half of a file
// system; one that is used never is.
func TestNoiseOfALayer(t *testing.T) {
	l := newNoisy(t)
	device := func() string {
		d, err := l.layer.Find(context.WithoutCancel(t.Context()), state.Device{}, devices.Volume{ID: "v"})
		l.ok(err)
		return d.Path
	}
	noise := func(path string, at int64) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		l.ok(err)
		_, err = f.WriteAt(bytes.Repeat([]byte("noise"), 4096), at)
		l.ok(errors.Join(err, f.Sync(), f.Close()))
	}
	l.restart(func(_ context.Context, _ string, step Step, moment Moment) error {
		switch {
		case step.Action == OpenLayer && moment == After:
			noise(device(), 0)
		case step.Action == Format && moment == Before:
			out, err := exec.Command("mkfs.ext4", "-q", "-F", device()).CombinedOutput()
			return fmt.Errorf("killed: %w %s", err, out)
		}
		return nil
	})
	if err := l.stage(); err == nil {
		t.Fatal("staged")
	}
	l.did("attach", "begin-format", "create-layer offset", "open-layer offset", "format offset")
	l.restart(nil)
	l.ok(l.stage())
	l.did("format offset", "mount")
	l.ok(l.unstage())
	noise(l.n.data, 1<<20)
	if err := l.stage(); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("staged though its file system is destroyed: %v", err)
	}
	l.gone()
}

// A layer that grows without its secret does so when nobody has named that.
func TestLayerGrowsWithoutItsSecret(t *testing.T) {
	l := newNoisy(t)
	l.r.Remember("v", map[string]string{"key": "secret"})
	l.ok(l.stage(func(s *state.Stage) { s.Context["locked"] = "true" }))
	l.restart(nil)
	if err := l.ask(state.SizePart(), func(v *state.Volume) error { return v.AskSize(2*small, 0, time.Now()) }); err != nil && !strings.Contains(err.Error(), "CAP_SYS_RESOURCE") {
		t.Errorf("not grown: %v", err)
	}
	if size := l.look().Device.Size; size != 2*small-1<<20 {
		t.Errorf("the top has %d bytes", size)
	}
	l.ok(l.unstage())
	l.gone()
}
