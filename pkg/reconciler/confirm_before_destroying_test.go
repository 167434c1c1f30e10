package reconciler

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// What destroys, or takes away, looks again before it acts: what came between the
// worker's look and the step keeps the step from acting, whatever the plan says.
func TestDestructiveStepsLookAgain(t *testing.T) {
	const at = "/k/elsewhere/v"
	others := map[string]struct {
		do, undo func(k *fakeKernel, v *fakeVolume)
	}{
		"held": {func(_ *fakeKernel, v *fakeVolume) { v.held = true }, func(_ *fakeKernel, v *fakeVolume) { v.held = false }},
		"another device": {
			func(k *fakeKernel, v *fakeVolume) { v.device.number = k.number() }, func(*fakeKernel, *fakeVolume) {},
		},
		"another identity": {
			func(_ *fakeKernel, v *fakeVolume) { v.identity = "another" }, func(_ *fakeKernel, v *fakeVolume) { v.identity = "" },
		},
		"raw": {func(_ *fakeKernel, v *fakeVolume) { v.raw = true }, func(_ *fakeKernel, v *fakeVolume) { v.raw = false }},
		"a view": {
			func(k *fakeKernel, v *fakeVolume) { v.view = &fakeDevice{number: k.number(), readOnly: true} },
			func(_ *fakeKernel, v *fakeVolume) { v.view = nil },
		},
		"a bound node": {
			func(k *fakeKernel, v *fakeVolume) {
				k.push(at, fakeMount{Mount: state.Mount{Device: v.device.number, Node: true, FSType: "devtmpfs", Root: "/loop"}})
			},
			func(k *fakeKernel, _ *fakeVolume) { delete(k.mounts, at) },
		},
	}
	for action, call := range map[Action]op{BeginFormat: opBeginFormat, Erase: opErase, Format: opFormat, Detach: opDetach} {
		for name, other := range others {
			t.Run(string(action)+"/"+name, func(t *testing.T) {
				bubble(t, func(h *harness) {
					v, came := h.volume("v"), false
					h.k.with(func() { v.formatting = action == Erase })
					if action == Erase {
						h.k.with(func() { v.contents = state.Contents{Kind: state.ContentsOther, Found: "half of ext4"} })
					}
					h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
						if step.Action != action || moment != Before || came {
							return nil
						}
						came = true
						h.k.with(func() {
							other.do(h.k, v)
							h.k.drift("v")
						})
						return nil
					}
					h.restart()
					if action == Detach {
						h.ok(stage("v"))
						answer := h.begin(unstage("v"))
						if err := h.got(answer); err == nil {
							t.Fatal("unstaged beneath somebody")
						}
					} else if err := h.do(stage("v")); err == nil {
						t.Fatal("staged beneath somebody")
					}
					if !came {
						t.Fatalf("no step %s", action)
					}
					h.wantCalls(0, call, "v")
					h.k.with(func() {
						other.undo(h.k, v)
						h.k.drift("v")
					})
				})
			})
		}
	}
}

// A disk that reads as zeros for a while has its data again later, which is neither
// formatted over nor erased, whenever it comes back: the mark that was set for the zeros
// says nothing of it.
func TestDataThatComesBackIsKept(t *testing.T) {
	data := state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", UUID: "somebody's", Found: "ext4 file system"}
	for name, row := range map[string]struct {
		at     Action
		moment Moment
	}{
		"before it is proved blank":   {BeginFormat, Before},
		"once it is marked":           {BeginFormat, After},
		"before mkfs":                 {Format, Before},
		"after mkfs wrote to nothing": {},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				v.noted = true
				back := func() {
					h.k.with(func() {
						v.contents = data
						h.k.drift("v")
					})
				}
				done := false
				h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
					if !done && step.Action == row.at && moment == row.moment {
						done = true
						back()
						time.Sleep(2 * takeOver) // the disk is slow: all of it is observed again
					}
					if step.Action == Erase {
						t.Error("it is erased")
					}
					return nil
				}
				if row.at == "" {
					h.k.fail(opFormat, "v", 1, &state.Unwritten{Err: errBoom})
				}
				h.restart()
				h.refuse(h.do(stage("v")), state.Unavailable)
				if v.formatting {
					t.Error("it bears the mark")
				}
				if row.at == "" {
					back()
				}
				h.ok(stage("v"))
				if v.contents.UUID != "somebody's" {
					t.Errorf("the device holds %+v", v.contents)
				}
				h.atRest("v")
			})
		})
	}
}

// The plugin is killed at any call while a disk reads as zeros, and the disk has its data
// again: that is neither formatted over nor erased, be it known or not.
func TestDataThatComesBackAfterAKillIsKept(t *testing.T) {
	for _, layered := range []bool{false, true} {
		for name, data := range map[string]state.Contents{
			"known":   {Kind: state.ContentsOther, Found: "somebody's"},
			"unknown": {Kind: state.ContentsOther, Found: "half of something"},
		} {
			for _, at := range slices.Concat(mutators(), trials(), []op{opProve}) {
				for _, mode := range []mode{fails, halfway, crashes} {
					bubble(t, func(h *harness) {
						v, options := h.volume("v"), []func(*state.Stage){}
						v.noted, v.zeros = true, true
						if layered {
							v.layer, options = &fakeLayer{}, append(options, stageLayer)
						}
						*v.lowest() = data
						h.k.fault(&fault{op: at, key: "v", times: 1, mode: mode, err: errBoom})
						if err := h.staged(options...); err == nil {
							t.Errorf("%t %s %s: staged on zeros", layered, name, at)
						}
						h.revive()
						h.k.with(func() {
							v.zeros = false
							h.k.drift("v")
						})
						if err := h.staged(options...); err == nil {
							t.Errorf("%t %s %s: staged on somebody's data", layered, name, at)
						}
						if *v.lowest() != data || v.formatting {
							t.Errorf("%t %s %s: it holds %+v, mark %t", layered, name, at, *v.lowest(), v.formatting)
						}
						h.wantCalls(0, opErase, "v")
					})
				}
			}
		}
	}
}

// What turns up between the worker's look and a step that erases is left as it is: under a mark
// that was just set, and under one that says what its format leaves.
func TestDataThatTurnsUpBeforeAnEraseIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		noted  bool
		at     Action
		moment Moment
	}{
		"just marked":       {false, BeginFormat, After},
		"marked long since": {true, Erase, Before},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v, came := h.volume("v"), false
				if v.noted = c.noted; c.noted {
					v.formatting, v.uuid, v.contents = true, "the format's", state.Contents{Kind: state.ContentsOther, Found: "half of ext4"}
				}
				h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
					if step.Action == c.at && moment == c.moment && !came {
						came = true
						h.k.with(func() {
							v.contents = state.Contents{Kind: state.ContentsOther, Found: "somebody's"}
							h.k.drift("v")
						})
						time.Sleep(2 * takeOver)
					}
					return nil
				}
				h.restart()
				h.refuse(h.do(stage("v")), state.Unavailable, "found somebody's")
				h.wantCalls(0, opErase, "v")
			})
		})
	}
}

// staged stages the volume v, with the secret of a layer.
func (h *harness) staged(options ...func(*state.Stage)) error {
	h.p.r.Remember("v", map[string]string{layerKey: rightKey})
	return h.do(stage("v", options...))
}

// A format of a disk goes on by itself wherever it was cut off, once somebody asks again.
func TestFormatOfADiskIsTakenUp(t *testing.T) {
	for _, layered := range []bool{false, true} {
		for _, at := range append(trials(), opBeginFormat, opCreateLayer, opFormat, opEndFormat) {
			for _, mode := range []mode{fails, halfway, crashes} {
				bubble(t, func(h *harness) {
					v, options := h.volume("v"), []func(*state.Stage){}
					v.noted = true
					if layered {
						v.layer, options = &fakeLayer{}, append(options, stageLayer)
					}
					h.k.fault(&fault{op: at, key: "v", times: 1, mode: mode, err: errBoom})
					err := h.staged(options...)
					if met := layered || at != opCreateLayer; (err != nil) != met {
						t.Errorf("%t %s: %v", layered, at, err)
					}
					h.revive()
					if err := h.staged(options...); err != nil {
						t.Errorf("%t %s: the second time: %v", layered, at, err)
					}
					if v.formatting || v.stamp != "" || v.formatted == "" {
						t.Errorf("%t %s: mark %t, stamp %q, formatted %q", layered, at, v.formatting, v.stamp, v.formatted)
					}
				})
			}
		}
	}
}

// What does not bear the UUID of a format that was begun is left as it is, and mounted if it is
// a file system.
func TestMarkIsOnAnothersData(t *testing.T) {
	for name, c := range map[string]struct {
		layered bool
		holds   state.Contents
		staged  bool
		stale   string // noted as formatted in the end
	}{
		"a file system":  {holds: state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", UUID: "somebody's"}, staged: true, stale: "ext4"},
		"something":      {holds: state.Contents{Kind: state.ContentsOther, Found: "swap"}},
		"beneath layers": {layered: true, holds: state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", UUID: "somebody's"}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v, options := h.volume("v"), []func(*state.Stage){}
				v.noted, v.formatting, v.uuid = true, true, "the format's"
				if c.layered {
					v.layer, options = &fakeLayer{}, append(options, stageLayer)
				}
				*v.lowest() = c.holds
				if err := h.staged(options...); (err == nil) != c.staged {
					t.Errorf("staged: %v", err)
				}
				h.wantCalls(0, opErase, "v")
				if v.formatting || v.formatted != c.stale || v.lowest().UUID != c.holds.UUID {
					t.Errorf("mark %t, formatted %q, holds %+v", v.formatting, v.formatted, *v.lowest())
				}
			})
		})
	}
}

// Another device than the one that a stage was first seen with is not used in its
// place, and what stands of the stage is taken down all the same.
func TestAnotherIdentityIsNotUsed(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.identity = "wwid:1" })
		h.ok(stage("v"), publish("v", 1))
		if got := h.store.Get("v").Stage.Identity; got != "wwid:1" {
			t.Fatalf("the stage remembers %q", got)
		}
		h.k.with(func() {
			v.identity = "wwid:2"
			h.k.unmount(targetPath("v", 1))
			h.k.drift("v")
		})
		before := h.k.changes()
		h.wake("v")
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "wwid:1", "wwid:2")
		if n := h.k.changes(); n != before {
			t.Errorf("%d changes", n-before)
		}
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
}

// Where the node of a device is bound is known without a look at the mount tables
// from the first stage of a mounted volume to its end.
func TestMountTablesAreNotRead(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), unpublish("v", 1), unstage("v"), stage("v", stageReadOnly), unstage("v"))
		if h.k.tables != 0 {
			t.Errorf("they were read %d times", h.k.tables)
		}
	})
}

// The node of a raw volume was shown to pods: while a copy of the bind is left in
// another mount namespace, the number is given to nobody else.
func TestCopyOfABindKeepsTheDevice(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock))
		h.k.with(func() { h.k.copies = map[state.DeviceNumber][]string{v.device.number: {"pid 7 with a mount"}} })
		h.ok(unpublish("v", 1))
		h.refuse(h.do(unstage("v")), state.Unavailable, "bound at pid 7")
		if v.device == nil {
			t.Fatal("detached beneath a copy")
		}
		h.k.with(func() {
			h.k.copies = nil
			h.k.tables = 0
		})
		h.ok(unstage("v"))
		h.atRest("v")
		if h.k.tables != 1 {
			t.Errorf("the mount tables were read %d times for one step", h.k.tables)
		}
	})
}

// A view that was attached over what is another's device by then is taken away.
func TestViewOverADeviceThatWentToAnother(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock))
		h.k.slow(opAttachView, "v", 1, time.Second)
		publishing := h.begin(publish("v", 1, publishBlock, publishReadOnly))
		h.sleep(time.Second / 2)
		looking := h.k.hang(opFind, "v", false)
		h.sleep(time.Second)
		h.k.with(func() { v.device.number = h.k.number() }) // somebody detached it, and attached it as another
		looking.open()
		h.refuse(h.got(publishing), state.Unavailable, "not the volume's device any more")
		h.wantCalls(1, opDetachView, "v")
		h.ok(publish("v", 1, publishBlock, publishReadOnly))
		h.atRest("v")
	})
}
