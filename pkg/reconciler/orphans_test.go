package reconciler

import (
	"cmp"
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestOrphanIsDetachedWhenNobodyUsesIt(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		ask := func(detach, orphan bool, want string) {
			t.Helper()
			is, kept, err := h.p.r.inspectOrphan(context.Background(), "v", detach)
			if err != nil || is != orphan || !strings.Contains(kept, want) || want == "" && kept != "" {
				t.Errorf("an orphan: %t, kept because %q (%v), want %t and %q", is, kept, err, orphan, want)
			}
		}
		ask(true, false, "")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly))
		ask(true, false, "")
		h.lose()
		ask(true, true, "bound at "+targetPath("v", 1))
		h.k.with(func() { delete(h.k.mounts, targetPath("v", 1)); v.held = true })
		ask(true, true, "in use: pid 7")
		h.k.with(func() { v.held = false })
		ask(false, true, "")
		h.k.with(func() {
			if v.device == nil || v.view == nil {
				t.Error("detached without leave")
			}
		})
		ask(true, true, "")
		h.k.with(func() {
			if v.device != nil || v.view != nil {
				t.Error("still attached")
			}
		})
		synctest.Wait()
		h.p.r.mu.Lock()
		defer h.p.r.mu.Unlock()
		if len(h.p.r.volumes) > 0 {
			t.Error("the volume is kept in memory")
		}
	})
}

// An orphan is told by its record and by where it is shown.
func TestWhatIsAnOrphan(t *testing.T) {
	device, view := state.DeviceNumber{Major: 7, Minor: 1}, state.DeviceNumber{Major: 7, Minor: 2}
	const raw = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/v/dev/uid"
	record := &state.Volume{ID: "v", Stage: &state.Stage{Path: "/stage"}, Targets: map[string]*state.Target{"/pod": {Path: "/pod"}}}
	for title, test := range map[string]struct {
		volume string
		path   string // of the device; /dev/loop1 if empty
		shown  map[state.DeviceNumber][]string
		record *state.Volume
		is     bool
		paths  string
		kept   string // words of it; empty: it may go
	}{
		"nobody uses it":               {volume: "v", is: true},
		"it is mounted":                {volume: "v", shown: map[state.DeviceNumber][]string{device: {"/b", "/a"}}, is: true, paths: "/a /b", kept: "NodePublishVolume takes it over"},
		"its view is bound":            {volume: "v", shown: map[state.DeviceNumber][]string{view: {"/a"}}, is: true, paths: "/a", kept: "it is mounted"},
		"its volume is gone":           {is: true, kept: "`losetup -d /dev/loop1`"},
		"the volume of a disk is gone": {path: "/dev/sda", is: true, kept: "detach it by hand"},
		"all is asked for":             {volume: "v", shown: map[state.DeviceNumber][]string{device: {"/stage", "/pod", raw}}, record: record},
		"a mount that nobody asked for": {
			volume: "v", shown: map[state.DeviceNumber][]string{device: {"/stage", "/other"}}, record: record, is: true, paths: "/other", kept: "the volume is in use, and NodeUnpublishVolume ends these mounts",
		},
		"a mount where no call may name it": {
			volume: "v", shown: map[state.DeviceNumber][]string{device: {"/stage", "/outside/a"}}, record: record, is: true, paths: "/outside/a",
			kept: "the volume is in use; no call ends what is mounted outside of kubelet's directory: `umount /outside/a`",
		},
		"mounts there, and elsewhere": {
			volume: "v", shown: map[state.DeviceNumber][]string{device: {"/other"}, view: {"/outside/b", "/outside/a"}}, record: record, is: true, paths: "/other /outside/a /outside/b",
			kept: "NodeUnpublishVolume ends these mounts; no call ends what is mounted outside of kubelet's directory: `umount /outside/a /outside/b`",
		},
		"it is mounted where no call may name it": {
			volume: "v", shown: map[state.DeviceNumber][]string{device: {"/outside/a"}}, is: true, paths: "/outside/a", kept: "it is mounted; no call ends",
		},
	} {
		a := attachment{devices.Attachment{Volume: test.volume, Device: state.Device{Path: cmp.Or(test.path, "/dev/loop1"), Number: device}}, "pool", state.Device{Number: view}}
		o, is := orphanOf(a, test.shown, test.record, func(path string) bool { return !strings.HasPrefix(path, "/outside/") })
		if is != test.is {
			t.Errorf("%s: an orphan: %t", title, is)
		}
		if is && (strings.Join(o.Paths, " ") != test.paths || !strings.Contains(o.Kept, test.kept) || test.kept == "" && o.Kept != "") {
			t.Errorf("%s: %+v", title, o)
		}
	}
}

// listed lists the device of one volume.
type listed struct {
	h  *harness
	id string
}

func (l listed) Attached(ctx context.Context) ([]devices.Attachment, error) {
	d, err := l.h.p.r.kernel.Devices.Find(ctx, devices.Volume{ID: l.id})
	return []devices.Attachment{{Volume: l.id, Device: d}}, err
}

// At the start only the device of a volume that holds a file system is taken for nobody's:
// kubelet may believe that a raw volume is staged, and what is in a layer is not known.
func TestOrphansAtTheStart(t *testing.T) {
	for title, test := range map[string]struct {
		asked request
		layer *fakeLayer
		goes  bool
	}{
		"a file system": {stage("v"), nil, true},
		"raw":           {stage("v", stageBlock), nil, false},
		"in a layer":    {stage("v", stageBlock, stageLayer), &fakeLayer{}, false},
	} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				h.k.with(func() { v.layer = test.layer })
				h.p.r.Remember("v", map[string]string{layerKey: rightKey})
				h.ok(test.asked)
				h.lose()
				h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
				h.p.r.kernel.Listers = []Lister{{Backend: "fake", Lister: listed{h, "v"}}}
				h.p.r.kernel.ShownAt = func(context.Context) (map[state.DeviceNumber][]string, error) { return nil, nil }
				h.p.r.CleanOrphansAtStart(context.Background())
				h.k.with(func() {
					if (v.device == nil) != test.goes {
						t.Errorf("its device is gone: %t", v.device == nil)
					}
				})
			})
		})
	}
}

// Orphans that a call takes over or tears down are not counted any more, without a new search.
func TestOrphansLeft(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		ctx, shown := context.Background(), map[state.DeviceNumber][]string{}
		lose := func() {
			h.ok(stage("v"), publish("v", 1))
			h.lose()
			h.p.r.kernel.Listers = []Lister{{Backend: "fake", Lister: listed{h, "v"}}}
			h.p.r.kernel.ShownAt = func(context.Context) (map[state.DeviceNumber][]string, error) { return shown, nil }
			number := v.device.number
			shown[number] = []string{stagePath("v"), targetPath("v", 1)}
			h.p.r.CleanOrphansAtStart(ctx)
		}
		left := func(title string, want int) {
			t.Helper()
			if n := h.p.r.OrphansLeft(ctx); n != want {
				t.Errorf("%s: %d orphans are left, want %d", title, n, want)
			}
		}
		lose()
		left("at the start", 1)
		h.ok(publish("v", 1))
		left("taken over", 0)
		shown[v.device.number] = []string{targetPath("w", 1)}
		left("taken over, and its number given to another volume", 0)
		h.ok(unpublish("v", 1), unstage("v"))
		left("after its life", 0)
		lose()
		h.ok(unpublish("v", 1), unstage("v"))
		left("torn down", 0)
		lose()
		h.p.r.kernel.ShownAt = func(ctx context.Context) (map[state.DeviceNumber][]string, error) {
			h.ok(unpublish("v", 1), unstage("v")) // after the devices were listed
			h.p.r.kernel.ShownAt = func(context.Context) (map[state.DeviceNumber][]string, error) { return shown, nil }
			return shown, nil
		}
		h.p.r.CleanOrphansAtStart(ctx)
		left("torn down while a search ran", 0)
	})
}
