package reconciler

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// Mount options that the kernel refuses are told before anything is done to the
// volume, whether the type of file system was asked for or chosen.
func TestRefusedOptions(t *testing.T) {
	for title, open := range map[string]bool{"asked for": false, "chosen": true} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				v.created = "ext4"
				before := h.k.changes()
				h.refuse(h.do(stage("v", func(s *state.Stage) {
					s.Capability.Flags = []string{"bad-for-ext4"}
					if open {
						s.Capability.FSType = ""
					}
				})), state.InvalidArgument, "volume v", "does not know the option")
				if h.store.Get("v") != nil || h.k.changes() != before {
					t.Errorf("left is %s after %d changes", marshal(h.store.Get("v")), h.k.changes()-before)
				}
				h.ok(stage("v"))
			})
		})
	}
}

// Nothing is staged or published in a volume whose record is lost; where there
// is a record, the store decides.
func TestPathsInAVolumeWithoutARecord(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("a")
		h.volume("b")
		h.ok(stage("a"), publish("a", 1))
		h.lose()
		inside := func(path string) func(*state.Stage) { return func(s *state.Stage) { s.Path = path + "/sub" } }
		in := func(path string) func(*state.Target) { return func(t *state.Target) { t.Path = path + "/sub" } }
		publishIn := func(id, path string) request {
			r := publish(id, 9, in(path))
			r.part = state.TargetPart(path + "/sub")
			return r
		}
		for _, place := range []string{stagePath("a"), targetPath("a", 1)} {
			before := h.k.changes()
			h.refuse(h.do(stage("b", inside(place))), state.FailedPrecondition, "lies in volume a, which is mounted at "+place)
			if h.store.Get("b") != nil || h.k.changes() != before {
				t.Errorf("left is %s after %d changes", marshal(h.store.Get("b")), h.k.changes()-before)
			}
		}
		h.ok(stage("b"))
		h.refuse(h.do(publishIn("b", targetPath("a", 1))), state.FailedPrecondition, "lies in volume a")
		h.refuse(h.do(publishIn("a", targetPath("a", 1))), state.FailedPrecondition, "lies in volume a")
		if v := h.store.Get("b"); len(v.Targets) > 0 {
			t.Errorf("left is %s", marshal(v))
		}
		h.ok(publish("a", 1), publish("b", 1))
		h.atRest("a")
		h.atRest("b")
	})
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
			if v.Secrets["key"] != "s3cret" {
				t.Errorf("the backend was told %v", v)
			}
		}
		if s := h.p.r.spec(h.store.Get("v")).Secrets; s["key"] != "s3cret" || s["other"] != "1" {
			t.Errorf("remembered are %v", s)
		}
		h.ok(unstage("v"))
		h.sleep(time.Second)
		if s := h.p.r.secrets.get("v"); s != nil {
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

// The backend of an adopted stage is found out once, and remembered.
func TestAdoptedStageRemembersItsBackend(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.lose()
		h.p.r.kernel.Devices = devices.NewSet("pool", map[string]devices.Backend{"pool": fakeDevices{h.p}})
		h.ok(publish("v", 1))
		if v := h.store.Get("v"); v.Backend != "pool" {
			t.Errorf("the record is %s", marshal(v))
		}
	})
}
