package reconciler

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// askedDevices says that the view is held, and that nothing else is.
type askedDevices struct{ fakeDevices }

func (askedDevices) Held(_ context.Context, d state.Device) (bool, error) { return d.ReadOnly, nil }

// askedFilesystems remembers where probes were told that the volume is mounted.
type askedFilesystems struct {
	fakeFilesystems
	mountpoints *[]string
}

func (f askedFilesystems) Probe(ctx context.Context, d state.Device, mountpoint string) (state.Contents, error) {
	*f.mountpoints = append(*f.mountpoints, mountpoint)
	return f.fakeFilesystems.Probe(ctx, d, mountpoint)
}

// unaskedDevices cannot say whether anything is held.
type unaskedDevices struct{ fakeDevices }

func (unaskedDevices) Held(context.Context, state.Device) (bool, error) {
	return false, errors.New("no such device")
}

// Whose device it is that cannot be asked is in the error.
func TestUnansweredHeldNamesTheDevice(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock))
		k := h.p.kernel()
		k.Views = unaskedDevices{fakeDevices{h.p}}
		r := New(Config{Store: newFakeStore(), Kernel: k})
		defer r.queue.ShutDown()
		_, err := r.observeAlone(context.Background(), h.store.Get("v"))
		require.Class(t, err, state.Unavailable, "volume v: observe: whether ", v.device.number.String(), "is in use: no such device")
	})
}

// What a look asks of the kernel, and what it does not.
func TestLookAsksWhatThePlanNeeds(t *testing.T) {
	ctx := context.Background()
	look := func(k Kernel, want *state.Volume) state.Actual {
		r := New(Config{Store: newFakeStore(), Kernel: k})
		defer r.queue.ShutDown()
		have, err := r.observeAlone(ctx, want)
		require.NoError(t, err)
		return *have
	}
	t.Run("block", func(t *testing.T) {
		bubble(t, func(h *harness) {
			v := h.volume("v")
			h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly))
			h.wantCalls(0, opProbe, "v")
			k := h.p.kernel()
			asked := askedDevices{fakeDevices{h.p}}
			k.Devices, k.Views = asked, asked
			if have := look(k, h.store.Get("v")); !have.View.Held || have.Device.Held {
				t.Errorf("held: view %t, device %t", have.View.Held, have.Device.Held)
			}
			h.k.with(func() { v.device.detaching = true })
			if have := look(k, h.store.Get("v")); have.View.State != state.DeviceAttached {
				t.Errorf("the view of a device on its way out is %s", have.View.State)
			}
			h.k.with(func() { v.device.detaching = false })
		})
	})
	t.Run("mount", func(t *testing.T) {
		bubble(t, func(h *harness) {
			v := h.volume("v")
			h.ok(stage("v"))
			record := h.store.Get("v")
			var mountpoints []string
			k := h.p.kernel()
			k.Filesystems = askedFilesystems{fakeFilesystems{h.p}, &mountpoints}
			look(k, record)
			h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
			look(k, record)
			if len(mountpoints) != 2 || mountpoints[0] != stagePath("v") || mountpoints[1] != "" {
				t.Errorf("probed with the mount points %q", mountpoints)
			}
			record.Stage.Gone = true
			h.k.with(func() { v.held = true })
			if have := look(k, record); have.Device.Holder != "pid 7 (holder)" {
				t.Errorf("the holder of a device that is to go is %q", have.Device.Holder)
			}
			h.k.with(func() { v.held = false })
		})
	})
}

// Whether a volume has layers is told by the contexts that the CO gave, be they empty, and
// by the devices where nobody gave any.
func TestContextKnown(t *testing.T) {
	asked := state.Capability{Access: state.MountAccess}
	for name, tt := range map[string]struct {
		stage *state.Stage
		want  bool
	}{
		"no stage":                  {nil, false},
		"asked for":                 {&state.Stage{Capability: asked}, true},
		"asked for with a context":  {&state.Stage{Capability: asked, Context: map[string]string{"k": "v"}}, true},
		"found":                     {&state.Stage{Capability: asked, Adopted: true}, false},
		"found, and named since":    {&state.Stage{Capability: asked, Adopted: true, Context: map[string]string{"k": "v"}}, true},
		"its end, without a record": {&state.Stage{Intent: state.Intent{Gone: true}}, false},
	} {
		if got := contextKnown(tt.stage); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// Of a record whose backend this plugin lacks nothing is known, and so nothing is
// answered for done, and nothing is done.
func TestRecordOfALackingBackend(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.stop()
		k := h.p.kernel()
		set := devices.NewSet("pool", map[string]devices.Backend{"pool": fakeDevices{h.p}})
		if _, err := h.store.Edit("v", func(v *state.Volume) error {
			v.Backend = "lvm"
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		k.Devices = set
		r := New(Config{Store: h.store, Kernel: k})
		ctx, end := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { r.Run(ctx) })
		defer running.Wait()
		defer end()
		before := h.k.changes()
		for _, ask := range []request{publish("v", 1), stage("v"), resize("v", 2*gib), unpublish("v", 1), unstage("v")} {
			within, stop := context.WithTimeout(ctx, time.Minute)
			err := r.Ensure(within, ask.id, ask.part, ask.edit)
			stop()
			h.refuse(err, state.Unavailable, `the backend "lvm"`, "this plugin has pool", "nothing is known")
		}
		if n := h.k.changes() - before; n != 0 || h.store.Get("v") == nil {
			t.Errorf("%d changes, and the record is %s", n, marshal(h.store.Get("v")))
		}
		status := report.Statuses(r.Reports())
		if len(status) != 1 || status[0].Worst() != report.Failing || !strings.Contains(status[0].Parts[0].Error, `the backend "lvm"`) {
			t.Errorf("the status is %+v", status)
		}
	})
}

// toldDevices notes what the backend is told of volumes.
type toldDevices struct {
	fakeDevices
	told *[]devices.Volume
}

func (d toldDevices) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	*d.told = append(*d.told, v)
	return d.fakeDevices.Find(ctx, v)
}

func (d toldDevices) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	*d.told = append(*d.told, v)
	return d.fakeDevices.Attach(ctx, v, readOnly)
}

// Secrets serve each step for as long as anything is asked of the volume.
func TestSecretsServeSteps(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		var told []devices.Volume
		h.p.r.kernel.Devices = toldDevices{fakeDevices{h.p}, &told}
		r := stage("v")
		asked := request{r.id, r.part, func(v *state.Volume) error {
			err := r.edit(v)
			h.p.r.Remember("v", map[string]string{"key": "s3cret"})
			return err
		}}
		h.ok(asked)
		h.p.r.Remember("v", map[string]string{"other": "1"})
		h.p.r.Remember("v", nil)
		for _, v := range told {
			if v.Secrets.Get("key") != "s3cret" {
				t.Errorf("the backend was told %v", v)
			}
		}
		if s := h.p.r.spec(h.store.Get("v")).Secrets; s.Get("key") != "s3cret" || s.Get("other") != "1" {
			t.Errorf("remembered are %v", s)
		}
		h.ok(unstage("v"))
		h.sleep(time.Second)
		if s := h.p.r.secrets.get("v"); s.Keys() != nil {
			t.Errorf("of a volume of which nothing is asked is remembered %v", s)
		}
	})
}

// A question about an id is asked of the volume that the record describes.
func TestQuestionsAreAboutTheRecord(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v", func(s *state.Stage) {
			s.Backend, s.Context = "disk", map[string]string{"path": "/dev/sdz", "publish:lun": "1"}
		}))
		var told []devices.Volume
		h.p.r.kernel.Devices = toldDevices{fakeDevices{h.p}, &told}
		if _, err := h.p.r.Observe(context.Background(), &state.Volume{ID: "v"}); err != nil {
			t.Fatal(err)
		}
		if len(told) != 1 || told[0].Backend != "disk" || told[0].Context["path"] != "/dev/sdz" || told[0].Publish["lun"] != "1" {
			t.Errorf("the backend was told %+v", told)
		}
	})
}
