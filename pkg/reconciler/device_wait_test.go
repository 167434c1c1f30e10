package reconciler

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// away adds a volume whose device has not come to the node.
func (h *harness) away(id string) *fakeVolume {
	v := h.volume(id)
	v.away = true
	return v
}

func (h *harness) come(v *fakeVolume) { h.k.with(func() { v.away = false }) }

// A caller waits for a device that is not there until there is news of one, and
// nothing is done meanwhile.
func TestDeviceIsAwaited(t *testing.T) {
	for title, tell := range map[string]func(h *harness){
		"a device appeared": func(h *harness) { h.p.r.DeviceAppeared() },
		"events were lost":  func(h *harness) { h.p.r.AllChanged() },
		"a backend tells":   func(h *harness) { h.p.r.VolumeChanged("v") },
	} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.away("v")
				answer := h.begin(stage("v"))
				h.sleep(4 * time.Second)
				looks := h.k.count(opAttach, "v")
				h.sleep(2 * time.Second)
				h.come(v)
				h.sleep(2 * time.Second)
				h.pending(answer)
				if n := h.k.count(opAttach, "v") - looks; n > 0 {
					t.Errorf("%d looks without news", n)
				}
				tell(h)
				require.NoError(h.t, h.got(answer))
				h.atRest("v")
			})
		})
	}
}

// The links to a device are made after the kernel has told of it.
func TestDeviceAppearsAMomentAfterTheNews(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.away("v")
		answer := h.begin(stage("v"))
		h.sleep(6 * time.Second)
		h.p.r.DeviceAppeared()
		h.sleep(500 * time.Millisecond)
		h.come(v)
		h.sleep(time.Second)
		require.NoError(h.t, h.got(answer))
	})
}

// A caller is told in the end, and a worker that waits for a device does what is
// asked of the volume instead.
func TestWaitForADeviceEnds(t *testing.T) {
	bubble(t, func(h *harness) {
		h.away("v")
		began := time.Now()
		h.refuse(h.do(stage("v")), state.Unavailable, "volume v", "waited for 10s", "no such device")
		if took := time.Since(began); took != deviceWait {
			t.Errorf("refused after %s", took)
		}
		began = time.Now()
		for i := range 20 { // at whatever moment of the wait
			h.p.r.DeviceAppeared()
			h.refuse(h.within(time.Duration(i+1)*10*time.Millisecond, stage("v")), state.DeadlineExceeded, "attach", "waiting for the device", "no such device")
		}
		h.refuse(h.within(2500*time.Millisecond, stage("v")), state.DeadlineExceeded, "attach", "waiting for the device", "no such device")
		h.ok(unstage("v"))
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("ended after %s", took)
		}
		h.noRecord("v")
	})
}

// A stage that backs off because its device is not there is tried when there is news of a
// device, and other volumes are not even looked at.
func TestDeviceAppearsDuringBackOff(t *testing.T) {
	bubble(t, func(h *harness) {
		h.random = func() float64 { return 1 } // the longest back-off
		h.restart()
		v := h.away("v")
		h.volume("w")
		h.ok(stage("w"))
		h.k.fail(opAttach, "x", -1, errors.New("broken"))
		h.volume("x")
		for _, id := range []string{"v", "x"} {
			if err := h.do(stage(id)); err == nil {
				t.Fatal("staged ", id)
			}
		}
		h.sleep(5 * time.Minute)
		h.come(v)
		h.sleep(time.Minute)
		if h.store.Get("v").Stage.Accepted {
			t.Fatal("the back-off is shorter than this test takes it for")
		}
		w, x := h.k.count(opFind, "w"), h.k.count(opFind, "x")
		h.p.r.DeviceAppeared()
		h.atRest("v")
		if h.k.count(opFind, "w") != w || h.k.count(opFind, "x") != x {
			t.Error("volumes were looked at that wait for no device")
		}
		h.k.mend()
		h.ok(stage("x"))
	})
}

// The device comes, and is told of, between an attempt and the note that it failed.
func TestNewsOfADeviceAreNotMissed(t *testing.T) {
	bubble(t, func(h *harness) {
		v, late := h.away("v"), false
		h.plant = func(p *process, k Kernel) Kernel {
			k.Devices = tellingDevices{fakeDevices{p}, func() {
				if late {
					h.come(v)
					p.r.DeviceAppeared()
				}
			}}
			return k
		}
		h.restart()
		if err := h.do(stage("v")); err == nil {
			t.Fatal("staged")
		}
		h.sleep(5 * time.Minute)
		late = true
		attempts := h.k.count(opAttach, "v")
		for h.k.count(opAttach, "v") == attempts {
			h.sleep(time.Second)
		}
		h.sleep(time.Second)
		h.atRest("v")
	})
}

// The kernel tells of a device that the plugin attaches, as of any other: nobody looks at
// the volume once more for that.
func TestOwnAttachIsNoNews(t *testing.T) {
	bubble(t, func(h *harness) {
		looks := map[bool]int{}
		for _, told := range []bool{false, true} {
			h.plant = func(p *process, k Kernel) Kernel {
				k.Devices = attachingDevices{fakeDevices{p}, func() {
					if told {
						p.r.DeviceAppeared()
					}
				}}
				return k
			}
			h.restart()
			id := map[bool]string{false: "v", true: "w"}[told]
			h.volume(id)
			h.ok(stage(id))
			h.sleep(time.Second)
			looks[told] = h.k.count(opFind, id)
		}
		if looks[true] != looks[false] {
			t.Errorf("%d looks at the device, and %d without news", looks[true], looks[false])
		}
	})
}

// attachingDevices calls attached after each attach.
type attachingDevices struct {
	fakeDevices
	attached func()
}

func (d attachingDevices) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	err := d.fakeDevices.Attach(ctx, v, readOnly)
	d.attached()
	return err
}

// tellingDevices calls missed after each attempt that met no device.
type tellingDevices struct {
	fakeDevices
	missed func()
}

func (d tellingDevices) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	err := d.fakeDevices.Attach(ctx, v, readOnly)
	if errors.Is(err, devices.ErrNoDevice) {
		d.missed()
	}
	return err
}

// On a node where devices come and go all the time, one that never comes costs
// little, with a caller and without.
func TestStormOfNewsIsSurvived(t *testing.T) {
	bubble(t, func(h *harness) {
		h.away("v")
		storm := func(seconds int) (attempts int) {
			before := h.k.count(opAttach, "v")
			for range seconds * 1000 {
				h.p.r.DeviceAppeared()
				time.Sleep(time.Millisecond)
			}
			return h.k.count(opAttach, "v") - before
		}
		answer := h.begin(stage("v"))
		if n := storm(5); n > 51 {
			t.Errorf("%d attempts in 5 s while a caller waits", n)
		}
		h.sleep(5 * time.Second)
		h.refuse(h.got(answer), state.Unavailable)
		if n := storm(10); n > 51 {
			t.Errorf("%d attempts in 10 s", n)
		}
	})
}

// Where nobody tells of devices, they are looked for while a caller waits.
func TestDeviceIsLookedForWithoutNews(t *testing.T) {
	for title, when := range map[string]time.Duration{"from the start": 0, "from then on": 5 * time.Second} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.away("v")
				var answer <-chan error
				if when > 0 {
					answer = h.begin(stage("v"))
					h.sleep(when)
				}
				h.p.r.DeviceEventsEnded()
				if when == 0 {
					answer = h.begin(stage("v"))
				}
				h.sleep(6*time.Second - when)
				h.come(v)
				synctest.Wait()
				h.pending(answer)
				h.sleep(lastPause)
				require.NoError(h.t, h.got(answer))
			})
		})
	}
}

// The type of a file system that nobody names is chosen when the device is there: only then its
// size is known, and what others have made there.
func TestTypeIsChosenWhenTheDeviceIsThere(t *testing.T) {
	for title, test := range map[string]struct{ holds, want string }{
		"a blank one":         {"", "xfs"},
		"another file system": {"ext4", "ext4"},
		"the default":         {"xfs", "xfs"},
	} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				h.k.with(func() {
					v.away = true
					if test.holds != "" {
						v.contents = state.Contents{Kind: state.ContentsFilesystem, FSType: test.holds, Size: gib}
					}
				})
				h.refuse(h.within(time.Second, stage("v", stageOpen)), state.DeadlineExceeded)
				h.k.with(func() { v.away = false })
				h.ok(stage("v", stageOpen))
				h.k.with(func() {
					if at := h.k.mounts[stagePath("v")]; len(at) != 1 || at[0].FSType != test.want {
						t.Errorf("mounted is %+v", at)
					}
				})
			})
		})
	}
}

// A mount flag is judged as soon as the type of the file system is chosen, and before anything is
// written.
func TestFlagsAreJudgedWhenTheTypeIsChosen(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.refuse(h.do(stage("v", stageOpen, func(s *state.Stage) { s.Capability.Flags = []string{"bad-for-xfs"} })), state.InvalidArgument, "does not know the option")
		h.noRecord("v")
		h.k.with(func() {
			if v.contents.Kind != state.ContentsBlank || v.formatted != "" || v.device != nil {
				t.Errorf("it holds %+v, and is attached: %t", v.contents, v.device != nil)
			}
		})
		h.ok(stage("v", func(s *state.Stage) { s.Capability.Flags = []string{"bad-for-xfs"} }))
	})
}

// What this node has made of a disk is not what another node has made of it since.
func TestDiskIsMadeAnewElsewhere(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.noted = true })
		h.ok(stage("v", stageOpen), unstage("v"))
		h.k.with(func() { v.contents.FSType, v.contents.UUID = "ext4", "another" })
		h.ok(stage("v", stageOpen))
	})
}
