package driver

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/pkg/uevents"
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

// scripted is what a kernel, or a backend, tells.
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

// Volumes are looked at when the kernel tells of their device, when a backend
// tells of them, and all when events were lost.
func TestEventsWakeVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := &fakeNode{volumes: map[string]*fakeVolume{}, mounts: map[string][]state.Mount{}, files: map[string]state.FileType{}}
		seen := &watched{fakeBackend: fakeBackend{node}}
		store, err := state.Open(t.Context(), filepath.Join(t.TempDir(), StoreFile), "boot")
		if err != nil {
			t.Fatal(err)
		}
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
			"a device": {func() { p.hear(working, scripted{event: uevents.Event{Number: first, Gone: true}}) }, all[:1]},
			"another's": {func() {
				p.hear(working, scripted{event: uevents.Event{Number: state.DeviceNumber{Major: 9}, Gone: true}})
			}, nil},
			"lost events":        {func() { p.hear(working, scripted{}) }, all},
			"a backend":          {func() { p.hearBackend(working, "pool", scripted{id: "v2"}) }, all[1:]},
			"a backend, of all":  {func() { p.hearBackend(working, "pool", scripted{}) }, all},
			"a backend, of none": {func() { p.hearBackend(working, "pool", scripted{id: "v3"}) }, nil},
		} {
			test.tell()
			if got := seen.looks(); !slices.Equal(got, test.want) {
				t.Errorf("%s: %q were looked at, not %q", title, got, test.want)
			}
		}
		stop()
		group.Wait()
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
}
