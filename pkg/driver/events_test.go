package driver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/pkg/uevents"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// watched is a fake node that notes which volumes are looked at.
type watched struct {
	fakeBackend
	mu   sync.Mutex
	seen []string
}

func (w *watched) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	w.mu.Lock()
	w.seen = append(w.seen, v.ID)
	w.mu.Unlock()
	return w.fakeBackend.Find(ctx, v)
}

// looks returns the volumes that were looked at since it was last asked.
func (w *watched) looks() []string {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := slices.Compact(slices.Sorted(slices.Values(w.seen)))
	w.seen = nil
	return seen
}

// scripted is one event of the kernel or of a backend.
type scripted struct {
	event uevents.Event // the zero value: events were lost
	id    string
}

func (s scripted) Run(_ context.Context, changed func(uevents.Event), all func()) error {
	if s.event == (uevents.Event{}) {
		all()
	} else {
		changed(s.event)
	}
	return nil
}

func (s scripted) Watch(_ context.Context, changed func(id string)) error {
	changed(s.id)
	return nil
}

// A volume is looked at after an event of its device or of its backend, and all
// volumes when events were lost.
func TestEventsWakeVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newFakeNode(nil)
		seen := &watched{fakeBackend: fakeBackend{node}}
		store, err := store.Open(t.Context(), t.TempDir(), "boot")
		require.NoError(t, err)
		for _, id := range []string{"v1", "v2"} {
			if _, err := node.Create(t.Context(), pool.Volume{ID: id, Bytes: 1 << 20}); err != nil {
				t.Fatal(err)
			}
			askStage(t, store, id)
		}
		p := &plugin{store: store, reconciler: reconciler.New(reconciler.Config{Store: store, Kernel: reconciler.Kernel{
			Devices: seen, Views: node, Filesystems: fakeFilesystems{node}, Mounts: node, Directories: node,
		}})}
		working, stop := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() { p.reconciler.Run(working) })
		all := []string{"v1", "v2"}
		if got := seen.looks(); !slices.Equal(got, all) {
			t.Errorf("at the start %q were looked at", got)
		}
		first := node.volumes["v1"].device.Number
		for title, test := range map[string]struct {
			tell func()
			want []string
		}{
			"a device": {func() { p.watchDevices(working, scripted{event: uevents.Event{Number: first, Gone: true}}) }, all[:1]},
			"another's": {func() {
				p.watchDevices(working, scripted{event: uevents.Event{Number: state.DeviceNumber{Major: 9}, Gone: true}})
			}, nil},
			"a device that no volume waits for": {func() { p.watchDevices(working, scripted{event: uevents.Event{Number: first, Appeared: true}}) }, nil},
			"lost events":                       {func() { p.watchDevices(working, scripted{}) }, all},
			"a backend":                         {func() { p.watchBackend(working, "pool", scripted{id: "v2"}) }, all[1:]},
			"a backend, of all":                 {func() { p.watchBackend(working, "pool", scripted{}) }, all},
			"a backend, of none":                {func() { p.watchBackend(working, "pool", scripted{id: "v3"}) }, nil},
		} {
			test.tell()
			if got := seen.looks(); !slices.Equal(got, test.want) {
				t.Errorf("%s: %q were looked at, not %q", title, got, test.want)
			}
		}
		stop()
		group.Wait()
		require.NoError(t, store.Close())
	})
}

// plugged is a backend whose volumes are a loop device, once a file is attached to it.
type plugged struct {
	fakeBackend
	node string
}

func (b plugged) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	if _, err := os.Stat("/sys/block/" + filepath.Base(b.node) + "/loop/backing_file"); err != nil {
		return fmt.Errorf("%s: %w", b.node, devices.ErrNoDevice)
	}
	return b.fakeBackend.Attach(ctx, v, readOnly)
}

// kernelEvents are the kernel's events of one device. Others come and go while tests
// run.
type kernelEvents struct {
	*uevents.Listener
	number state.DeviceNumber
}

func (k kernelEvents) Run(ctx context.Context, changed func(uevents.Event), all func()) error {
	return k.Listener.Run(ctx, func(e uevents.Event) {
		if e.Number == k.number {
			changed(e)
		}
	}, all)
}

// A device that appears on the node ends the back-off of the volume that waits for it.
func TestDeviceThatComesIsAttached(t *testing.T) {
	machine.Kernel(t)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	// There is no such device yet: a free one would be given to whoever asks for any.
	number := machine.FreeLoop(t)
	node := fmt.Sprint("/dev/loop", number.Minor)
	losetup := func(args ...string) {
		if out, err := exec.Command("losetup", args...).CombinedOutput(); err != nil {
			t.Fatalf("losetup %q: %v: %s", args, err, out)
		}
	}

	fake := newFakeNode(nil)
	if _, err := fake.Create(t.Context(), pool.Volume{ID: "v", Bytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	store, err := store.Open(t.Context(), t.TempDir(), "boot")
	require.NoError(t, err)
	askStage(t, store, "v")
	p := &plugin{store: store, reconciler: reconciler.New(reconciler.Config{Store: store, Kernel: reconciler.Kernel{
		Devices: plugged{fakeBackend{fake}, node}, Views: fake, Filesystems: fakeFilesystems{fake}, Mounts: fake, Directories: fake,
	}})}
	events, err := uevents.Listen()
	require.NoError(t, err)
	working, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { p.reconciler.Run(working) })
	group.Go(func() {
		p.watchDevices(working, kernelEvents{events, number})
	})
	defer func() {
		stop()
		group.Wait()
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	}()

	await := func(is func(report.PartStatus) bool) report.PartStatus {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for until := time.Now().Add(3 * time.Minute); ; <-tick.C {
			if time.Now().After(until) {
				t.Fatalf("it stays %+v", report.Statuses(p.reconciler.Reports())[0].Parts[0])
			}
			if part := report.Statuses(p.reconciler.Reports())[0].Parts[0]; is(part) {
				return part
			}
		}
	}
	backsOff := await(func(part report.PartStatus) bool {
		return part.NextTry != nil && time.Until(*part.NextTry) > 2*time.Second
	})
	losetup(node, file)
	defer losetup("--detach", node)
	await(func(part report.PartStatus) bool { return part.Is == report.Settled })
	if late := time.Since(*backsOff.NextTry); late > 0 {
		t.Errorf("attached only when it was tried again anyhow, %s ago", late)
	}
}
