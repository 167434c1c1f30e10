package reconciler

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// fakeInliner makes inline volumes of a fakeKernel, and keeps their owners.
type fakeInliner struct {
	k       *fakeKernel
	mu      sync.Mutex
	owners  map[string]*devices.InlineOwner // nil: a claim's
	away    error                           // of questions
	makes   error
	deletes error
	during  func()        // a deletion
	hang    chan struct{} // that questions hang on
	asked   int
	sweeps  int
	tries   int // to delete
	last    devices.InlineRequest
}

func (f *fakeInliner) with(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

func (f *fakeInliner) MakeInline(_ context.Context, r devices.InlineRequest) (devices.InlineVolume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = r
	if r.Attributes["size"] == "bad" {
		return devices.InlineVolume{}, state.Errorf(state.InvalidArgument, "size")
	}
	if f.makes != nil {
		return devices.InlineVolume{}, f.makes
	}
	if have, is := f.owners[r.ID]; is && (have == nil || *have != r.Owner) {
		return devices.InlineVolume{}, state.Errorf(state.AlreadyExists, "it is another's")
	}
	fsType, _ := r.Filesystem(gib)
	f.owners[r.ID] = &r.Owner
	made := devices.InlineVolume{FSType: fsType}
	f.k.with(func() {
		v := f.k.volumes[r.ID]
		if v == nil {
			blank := state.Contents{Kind: state.ContentsBlank}
			v = &fakeVolume{capacity: gib, size: gib, created: fsType, fakeData: fakeData{contents: blank, beneath: blank}}
			f.k.volumes[r.ID] = v
		}
		made.Used = v.formatted != ""
	})
	return made, nil
}

func (f *fakeInliner) InlineOwner(_ context.Context, id string) (*devices.InlineOwner, error) {
	f.mu.Lock()
	f.asked++
	hang := f.hang
	f.mu.Unlock()
	if hang != nil {
		<-hang
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	owner, is := f.owners[id]
	switch {
	case f.away != nil:
		return nil, f.away
	case !is:
		return nil, state.Errorf(state.NotFound, "no volume")
	}
	return owner, nil
}

func (f *fakeInliner) ListInline(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweeps++
	return slices.Sorted(maps.Keys(f.owners)), f.away
}

func (f *fakeInliner) DeleteVolume(_ context.Context, v devices.Volume) error {
	if f.during != nil {
		f.during()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tries++; f.deletes != nil {
		return f.deletes
	}
	f.k.with(func() {
		if have := f.k.volumes[v.ID]; have != nil && have.device != nil {
			_ = f.k.violate("%s: deleted while it is attached", v.ID)
		}
		if owner, is := f.owners[v.ID]; is && owner == nil {
			_ = f.k.violate("%s: a claim's volume was deleted", v.ID)
		}
		delete(f.k.volumes, v.ID)
	})
	delete(f.owners, v.ID)
	return nil
}

// inlineHarness is a harness with a backend of inline volumes, which notes the steps.
type inlineHarness struct {
	*harness
	in    *fakeInliner
	mu    sync.Mutex
	steps []Action
	meet  func(step Step, moment Moment) error // called at each step, if set
}

func inlineBubble(t *testing.T, test func(h *inlineHarness)) {
	t.Helper()
	bubble(t, func(h *harness) {
		i := &inlineHarness{harness: h, in: &fakeInliner{k: h.k, owners: map[string]*devices.InlineOwner{}}}
		h.plant = func(_ *process, k Kernel) Kernel {
			k.Inline = &Inline{Inliner: i.in, Backend: "inline", StagingDir: "/k/stage", Spell: func(_ context.Context, path string) (string, error) {
				return strings.Replace(path, "/link/", "/k/", 1), nil
			}}
			return k
		}
		h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
			i.mu.Lock()
			defer i.mu.Unlock()
			if moment == After {
				i.steps = append(i.steps, step.Action)
			}
			if i.meet != nil {
				return i.meet(step, moment)
			}
			return nil
		}
		h.restart()
		test(i)
	})
}

// did returns the steps since it was last called.
func (h *inlineHarness) did() []Action {
	h.mu.Lock()
	defer h.mu.Unlock()
	did := h.steps
	h.steps = nil
	return did
}

// mustHaveDone checks the steps since did was last called.
func (h *inlineHarness) mustHaveDone(want ...Action) {
	h.t.Helper()
	if did := h.did(); !slices.Equal(did, want) {
		h.t.Errorf("did %v, want %v", did, want)
	}
}

// killWithStore kills the plugin, whose store is lost, and starts the next one.
func (h *inlineHarness) killWithStore() {
	h.kill()
	h.store.lose()
	h.k.orphan()
	h.start()
}

// at has a function called at each step from now on.
func (h *inlineHarness) at(meet func(step Step, moment Moment) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.meet = meet
}

// inlineID is an id as kubelet gives it.
var inlineID = "csi-" + strings.Repeat("0a", 32)

func inlinePublish(id string, n int, changes ...func(*state.Stage, *state.Target)) request {
	path := targetPath(id, n)
	return request{id, state.TargetPart(path), func(v *state.Volume) error {
		c := mountCapability()
		c.FSType = ""
		s := &state.Stage{Path: stagePath(id), Capability: c, Backend: "inline", Inline: &state.Inline{PodUID: "pod", Target: path}}
		t := &state.Target{Path: path, Capability: c}
		for _, change := range changes {
			change(s, t)
		}
		return v.AskInline(s, t, time.Now())
	}}
}

func inlineXFS(s *state.Stage, t *state.Target) {
	s.Capability.FSType, t.Capability.FSType = "xfs", "xfs"
}

func inlineEnd(id string, n int) request {
	path := targetPath(id, n)
	return request{id, state.TargetPart(path), func(v *state.Volume) error { return v.AskEnd(path, stagePath(id), time.Now()) }}
}

// gone checks that nothing is left of a volume.
func (h *inlineHarness) gone(id string) {
	h.t.Helper()
	h.left(id, false)
	if record := h.store.Get(id); record != nil {
		h.t.Errorf("there is a record: %+v", record)
	}
	h.k.with(func() {
		for _, path := range []string{stagePath(id), targetPath(id, 1)} {
			if len(h.k.mounts[path]) > 0 {
				h.t.Errorf("mounted at %s", path)
			}
		}
		if h.k.files[stagePath(id)] != nil {
			h.t.Errorf("the staging directory of %s is left", id)
		}
	})
}

// left checks whether the data of a volume is there.
func (h *inlineHarness) left(id string, want bool) {
	h.t.Helper()
	h.k.with(func() {
		if h.k.volumes[id] != nil != want {
			h.t.Errorf("the volume %s is there: %t", id, !want)
		}
	})
}

func TestInlineLife(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		with := func(s *state.Stage, _ *state.Target) { s.Inline.Attributes = map[string]string{"size": "1Gi"} }
		h.p.r.Remember("v", map[string]string{"key": "s3cret"})
		h.ok(inlinePublish("v", 1, with), inlinePublish("v", 1, with))
		h.mustHaveDone(CreateVolume, Choose, Attach, BeginFormat, Format, Mount, Bind)
		if r := h.in.last; r.Attributes["size"] != "1Gi" || r.Secrets.Get("key") != "s3cret" || r.Owner != (devices.InlineOwner{PodUID: "pod", Target: targetPath("v", 1)}) {
			t.Errorf("the backend was asked for %+v", r)
		}
		if record := h.store.Get("v"); record.Backend != "inline" || record.Stage.Capability.FSType != "xfs" || !record.Stage.Inline.Used {
			t.Errorf("the record is %+v with %+v", record, record.Stage)
		}
		h.atRest("v")
		h.refuse(h.do(inlinePublish("v", 2, with)), state.AlreadyExists)
		h.refuse(h.do(inlinePublish("v", 1)), state.AlreadyExists)
		asked := h.in.asked
		h.ok(inlineEnd("v", 2))
		if h.in.asked != asked {
			t.Error("the backend was asked about a volume of which the record tells")
		}
		h.atRest("v")
		h.did()
		h.ok(inlineEnd("v", 1))
		h.mustHaveDone(Unbind, RemoveTarget, Unmount, Detach, RemoveStage, DeleteVolume)
		h.gone("v")
		h.atRest("v")
		h.ok(inlineEnd("v", 1), inlinePublish("v", 1), inlineEnd("v", 1))
		h.gone("v")
	})
}

// What cannot be had leaves nothing; what may hold a pod's data stays, and so does
// another's.
func TestInlineRefused(t *testing.T) {
	inTheWay := func(h *inlineHarness) { h.k.with(func() { h.k.litter(targetPath("v", 1)) }) }
	there := func(h *inlineHarness, owner *devices.InlineOwner) {
		h.formatted("v", "xfs")
		h.in.owners["v"] = owner
	}
	mine := &devices.InlineOwner{PodUID: "pod", Target: targetPath("v", 1)}
	for title, test := range map[string]struct {
		before func(h *inlineHarness)
		class  state.Class
		left   bool
		record bool
		did    bool
	}{
		"a file is in the way":              {inTheWay, state.FailedPrecondition, false, false, true},
		"no room":                           {func(h *inlineHarness) { h.in.makes = state.Errorf(state.ResourceExhausted, "full") }, state.ResourceExhausted, false, false, false},
		"the backend is away":               {func(h *inlineHarness) { h.in.away = errors.New("away") }, state.Unavailable, false, false, false},
		"it was used before the store went": {func(h *inlineHarness) { there(h, mine); inTheWay(h) }, state.FailedPrecondition, true, true, true},
		"it is a claim's":                   {func(h *inlineHarness) { there(h, nil) }, state.AlreadyExists, true, false, false},
		"it is another pod's":               {func(h *inlineHarness) { there(h, &devices.InlineOwner{PodUID: "2", Target: mine.Target}) }, state.AlreadyExists, true, false, false},
		"it is another target's":            {func(h *inlineHarness) { there(h, &devices.InlineOwner{PodUID: "pod", Target: "/k/pods/2/v"}) }, state.AlreadyExists, true, false, false},
		"it was made otherwise, and unused": {func(h *inlineHarness) { h.in.makes = state.Errorf(state.AlreadyExists, "otherwise"); there(h, mine) }, state.AlreadyExists, true, false, false},
		"its device cannot be had, it is new": {func(h *inlineHarness) {
			h.at(func(step Step, moment Moment) error {
				if step.Action == Attach && moment == Before {
					return state.Errorf(state.FailedPrecondition, "no")
				}
				return nil
			})
		}, state.FailedPrecondition, false, false, true},
	} {
		t.Run(title, func(t *testing.T) {
			inlineBubble(t, func(h *inlineHarness) {
				test.before(h)
				h.refuse(h.do(inlinePublish("v", 1)), test.class)
				if record := h.store.Get("v"); (record != nil) != test.record {
					t.Errorf("the record is %+v", record)
				}
				h.left("v", test.left)
				if did := h.did(); (len(did) > 0) != test.did {
					t.Errorf("did %v", did)
				}
				if !test.left {
					h.gone("v")
				}
			})
		})
	}
}

// A publish that stands, or stood, is no less another's data when a repeat is refused.
func TestInlineRefusedRepeat(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		h.ok(inlinePublish("v", 1))
		h.refuse(h.do(inlinePublish("v", 1, func(_ *state.Stage, t *state.Target) { t.ReadOnly = true })), state.AlreadyExists)
		h.left("v", true)
		h.atRest("v")
		h.ok(unpublish("v", 1)) // alone, as the publish of a pod that is gone retires
		h.k.with(func() { h.k.litter(targetPath("v", 1)) })
		h.refuse(h.do(inlinePublish("v", 1)), state.FailedPrecondition)
		h.left("v", true)
	})
}

// Until what was begun is undone, a refusal is not final.
func TestInlineRefusalWaitsForItsUndo(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		h.k.with(func() { h.k.litter(targetPath("v", 1)) })
		h.in.with(func() { h.in.deletes = errors.New("away") })
		h.refuse(h.do(inlinePublish("v", 1)), state.Unavailable, "taking back", "holds data")
		h.in.with(func() { h.in.deletes = nil })
		h.sleep(10 * time.Minute)
		h.gone("v")
	})
}

// A backend that cannot say whose a volume is keeps its data, and nothing else.
func TestInlineEndWithoutTheBackend(t *testing.T) {
	for title, test := range map[string]struct {
		err     error
		store   bool // has the record
		deletes error
		class   state.Class
		last    Action
		left    bool
	}{
		"damaged facts":              {state.Errorf(state.Internal, "damaged"), true, nil, 0, DeleteVolume, false},
		"facts that are gone":        {state.Errorf(state.NotFound, "no volume"), true, nil, 0, DeleteVolume, false},
		"gone, and the pool away":    {state.Errorf(state.NotFound, "no volume"), true, errors.New("away"), 0, DeleteVolume, true},
		"away":                       {errors.New("away"), true, errors.New("away"), 0, DeleteVolume, true},
		"in use":                     {errors.New("away"), true, state.Errorf(state.FailedPrecondition, "in use"), state.FailedPrecondition, RemoveStage, true},
		"known, and not deleted":     {nil, true, errors.New("away"), state.Unavailable, RemoveStage, true},
		"silent":                     {context.DeadlineExceeded, true, nil, 0, LeaveVolume, true},
		"damaged facts, store lost":  {state.Errorf(state.Internal, "damaged"), false, nil, 0, RemoveStage, true},
		"away, and the store lost":   {errors.New("away"), false, nil, 0, RemoveStage, true},
		"silent, and the store lost": {context.DeadlineExceeded, false, nil, 0, RemoveStage, true},
	} {
		t.Run(title, func(t *testing.T) {
			inlineBubble(t, func(h *inlineHarness) {
				h.ok(inlinePublish(inlineID, 1))
				h.in.away, h.in.deletes = test.err, test.deletes
				if test.err == context.DeadlineExceeded {
					h.in.hang, h.in.away = make(chan struct{}), nil
					defer close(h.in.hang)
				}
				if !test.store {
					h.killWithStore()
				}
				h.did()
				began := time.Now()
				err := h.do(inlineEnd(inlineID, 1))
				if test.class != 0 || test.deletes != nil && test.err == nil {
					h.refuse(err, test.class)
				} else if err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took > 3*ownerTimeout {
					t.Errorf("it took %s", took)
				}
				if did := h.did(); len(did) == 0 || did[len(did)-1] != test.last || slices.Contains(did, Detach) != true {
					t.Errorf("did %v", did)
				}
				h.left(inlineID, test.left)
				if record := h.store.Get(inlineID); err == nil && record != nil {
					t.Errorf("the record is %+v", record)
				}
			})
		})
	}
}

// Of volumes of other kinds nothing is done, and with a record nothing is asked.
func TestInlineEndOfOthers(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		h.volume("v")
		h.in.owners["v"] = nil
		elsewhere := func(s *state.Stage) { s.Path = "/k/claims/v" }
		h.ok(stage("v", elsewhere), request{"v", state.TargetPart(targetPath("v", 1)), func(v *state.Volume) error {
			return v.AskPublish(&state.Target{Path: targetPath("v", 1), Capability: mountCapability()}, "/k/claims/v", time.Now())
		}}, inlineEnd("v", 1), inlineEnd("v", 1))
		if record := h.store.Get("v"); h.in.asked > 0 || record.Stage.Gone {
			t.Errorf("the backend was asked %d times, the stage is %+v", h.in.asked, record.Stage)
		}
		h.ok(inlineEnd("stranger", 1))
		h.killWithStore()
		h.did()
		for _, err := range []error{nil, errors.New("away"), context.DeadlineExceeded} {
			if h.in.with(func() { h.in.away = err }); err == context.DeadlineExceeded {
				h.in.hang, h.in.away = make(chan struct{}), nil
				defer close(h.in.hang)
			}
			if err := h.do(inlineEnd("v", 1)); err != nil {
				t.Error(err)
			}
			if did := h.did(); len(slices.DeleteFunc(did, func(a Action) bool { return a == LeaveVolume })) > 0 {
				t.Errorf("did %v", did)
			}
		}
		h.left("v", true)
	})
}

// The loss of the store, a reboot and another spelling change nothing.
func TestInlineAfterALostStore(t *testing.T) {
	for title, reboot := range map[string]bool{"lost store": false, "reboot": true} {
		t.Run(title, func(t *testing.T) {
			inlineBubble(t, func(h *inlineHarness) {
				lose := func() {
					h.kill()
					h.store.lose()
					h.k.with(func() {
						if reboot {
							clear(h.k.mounts)
							h.k.volumes["v"].device = nil
						}
					})
					h.k.orphan()
					h.in.with(func() { h.in.owners["v"].Target = "/link/pods/1/v" }) // as an earlier version wrote it
					h.start()
				}
				h.ok(inlinePublish("v", 1))
				lose()
				h.ok(inlinePublish("v", 1)) // adopts it
				if h.k.formats != 1 {
					t.Errorf("formatted %d times", h.k.formats)
				}
				lose()
				h.ok(inlineEnd("v", 1))
				h.gone("v")
			})
		})
	}
}

// The record of an earlier version tells that a volume is inline by its path.
func TestInlineOfAnEarlierVersion(t *testing.T) {
	for title, again := range map[string]bool{"published again": true, "unpublished": false} {
		t.Run(title, func(t *testing.T) {
			inlineBubble(t, func(h *inlineHarness) {
				h.ok(inlinePublish("v", 1))
				if _, err := h.store.Edit("v", func(v *state.Volume) error { v.Stage.Inline = nil; return nil }); err != nil {
					t.Fatal(err)
				}
				if again {
					h.ok(inlinePublish("v", 1))
				}
				h.ok(inlineEnd("v", 1))
				h.gone("v")
			})
		})
	}
}

// What came between the look and the deletion keeps the volume.
func TestInlineDeletionLooksAgain(t *testing.T) {
	for title, comes := range map[string]func(h *inlineHarness){
		"another owner": func(h *inlineHarness) {
			h.in.with(func() { h.in.owners["v"] = &devices.InlineOwner{PodUID: "2", Target: targetPath("v", 2)} })
		},
		"no owner": func(h *inlineHarness) { h.in.with(func() { h.in.owners["v"] = nil }) },
		"a device": func(h *inlineHarness) {
			h.k.with(func() { h.k.volumes["v"].device = &fakeDevice{number: h.k.number(), size: gib} })
		},
		"a directory": func(h *inlineHarness) { h.k.with(func() { h.k.litter(stagePath("v")) }) },
		"a publish": func(h *inlineHarness) {
			if _, err := h.store.Edit("v", inlinePublish("v", 1, inlineXFS).edit); err != nil {
				h.t.Error(err)
			}
		},
	} {
		t.Run(title, func(t *testing.T) {
			inlineBubble(t, func(h *inlineHarness) {
				h.ok(inlinePublish("v", 1, inlineXFS))
				met := false
				h.at(func(step Step, moment Moment) error {
					if step.Action == DeleteVolume && moment == Before && !met {
						met = true
						comes(h)
						h.k.with(func() { h.k.drift("v") })
					}
					return nil
				})
				h.in.with(func() { h.in.deletes = errors.New("not now") })
				err := h.do(inlineEnd("v", 1))
				h.in.with(func() {
					if !met || h.in.tries > 0 {
						t.Errorf("deleted %d times: %v (met %t)", h.in.tries, err, met)
					}
				})
				h.left("v", true)
			})
		})
	}
}

// An end that is asked for while a refused publish is undone joins the deletion.
func TestInlineEndDuringTheUndo(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		h.k.fail(opBind, "", 1, state.Errorf(state.InvalidArgument, "refused"))
		h.at(func(step Step, moment Moment) error { // so that the deletion is not seen in what is observed
			if step.Action == RemoveStage && moment == Before {
				h.in.with(func() { h.in.away = errors.New("away") })
				h.k.with(func() { delete(h.k.volumes, "v") })
			}
			return nil
		})
		end := make(chan error, 1)
		h.in.during = func() {
			h.in.during = nil
			go func() { end <- h.do(inlineEnd("v", 1)) }()
			time.Sleep(time.Millisecond)
		}
		h.refuse(h.do(inlinePublish("v", 1, inlineXFS)), state.InvalidArgument, "refused")
		h.sleep(time.Second)
		if err := h.got(end); err != nil {
			t.Errorf("the end: %v", err)
		}
		h.gone("v")
		h.atRest("v")
	})
}

// A process that dies at any step leaves what the next one ends.
func TestInlineSurvivesAKillAtEachStep(t *testing.T) {
	up := []Action{CreateVolume, Choose, Attach, BeginFormat, Format, Mount, Bind}
	down := []Action{Unbind, RemoveTarget, Unmount, Detach, RemoveStage, DeleteVolume}
	for _, action := range append(slices.Clone(up), down...) {
		for _, moment := range []Moment{Before, After} {
			t.Run(string(moment)+" "+string(action), func(t *testing.T) {
				inlineBubble(t, func(h *inlineHarness) {
					died := false
					h.at(func(step Step, m Moment) error {
						if step.Action == action && m == moment && !died {
							died = true
							h.k.with(h.p.die)
							return errDead
						}
						return nil
					})
					for _, r := range []request{inlinePublish("v", 1), inlineEnd("v", 1)} {
						if err := h.do(r); err != nil {
							h.kill()
							h.start()
							h.ok(r)
						}
					}
					if !died {
						t.Error("the step was not made")
					}
					h.gone("v")
				})
			})
		}
	}
}

// Nobody waits for a volume that is not made, and its pod is gone: it is not made.
func TestInlineOfAGonePodIsNotMade(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		pods := &fakePods{gone: map[string]bool{}}
		h.pods, h.resync = pods, 10*time.Minute
		h.restart()
		h.at(func(step Step, _ Moment) error {
			if step.Action == CreateVolume {
				time.Sleep(time.Minute)
				return errors.New("slow, and then away")
			}
			return nil
		})
		if err := h.within(10*time.Second, inlinePublish("v", 1)); err == nil {
			t.Fatal("published")
		}
		pods.set("/pods/1/", true)
		h.sleep(time.Hour)
		h.gone("v")
	})
}

// sweeping has the node look for pods that are gone, until stop.
func (h *inlineHarness) sweeping() (pods *fakePods, stop func()) {
	pods = &fakePods{gone: map[string]bool{}}
	h.pods = pods
	h.restart()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); h.p.r.Sweep(ctx) }()
	return pods, func() { cancel(); <-done }
}

func TestInlineSweep(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		pods, stop := h.sweeping()
		looked := func() (n int) {
			h.in.with(func() { n, h.in.sweeps = h.in.sweeps, 0 })
			return n
		}
		h.sleep(24 * time.Hour)
		if n := looked(); n != 1 {
			t.Errorf("looked %d times without a volume", n)
		}
		h.volume("claim")
		h.in.with(func() { h.in.owners["claim"] = nil })
		h.ok(inlinePublish("v", 1), inlinePublish("v", 1), inlinePublish("w", 2))
		h.sleep(time.Hour)
		if n := looked(); n > 2+6 {
			t.Errorf("looked %d times in an hour", n)
		}
		pods.set("/pods/1/", true)
		h.sleep(sweepInterval + time.Second)
		h.left("v", true) // seen once
		pods.set("/pods/1/", false)
		h.sleep(podGoneGrace)
		pods.set("/pods/1/", true)
		h.sleep(sweepInterval - time.Second)
		h.left("v", true) // it was back meanwhile
		h.in.with(func() { h.in.deletes = errors.New("away") })
		h.sleep(podGoneGrace + 2*time.Second)
		h.left("v", true)
		h.in.with(func() { h.in.deletes = nil })
		h.sleep(10 * time.Minute)
		h.gone("v")
		h.left("w", true)
		h.left("claim", true)
		h.ok(inlineEnd("w", 2))
		looked()
		h.sleep(24 * time.Hour)
		if n := looked(); n > 1 {
			t.Errorf("looked %d times after the last one", n)
		}
		h.in.with(func() { h.in.away = errors.New("the backend is away") })
		h.p.r.sweep.lookNow()
		h.sleep(time.Hour)
		if n := looked(); n < 6 {
			t.Errorf("looked %d times while the backend was away", n)
		}
		stop()
		synctest.Wait()
	})
}

// What was left because the backend was away is deleted when its pod is gone, also
// without a record.
func TestInlineSweepOfWhatWasLeft(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		pods, stop := h.sweeping()
		h.ok(inlinePublish(inlineID, 1))
		h.in.with(func() { h.in.away, h.in.deletes = errors.New("away"), errors.New("away") })
		h.ok(inlineEnd(inlineID, 1))
		h.left(inlineID, true)
		h.in.with(func() { h.in.away, h.in.deletes = nil, nil })
		pods.set("/pods/1/", true)
		h.sleep(sweepInterval + 2*podGoneGrace)
		h.gone(inlineID)
		stop()
	})
}

// Who asks again is served at once, however often the end has failed before.
func TestInlineEndIsTriedAtOnce(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		h.ok(inlinePublish("v", 1))
		h.in.with(func() { h.in.deletes = errors.New("away") })
		h.refuse(h.do(inlineEnd("v", 1)), state.Unavailable, "away")
		h.sleep(time.Hour)
		h.in.with(func() { h.in.deletes = nil })
		began := time.Now()
		h.ok(inlineEnd("v", 1))
		if took := time.Since(began); took > time.Second {
			t.Errorf("it took %s", took)
		}
		h.gone("v")
	})
}

// Also of a volume whose data stays, all that was begun is undone before the refusal is told.
func TestInlineRefusalOfUsedWaitsForItsUndo(t *testing.T) {
	inlineBubble(t, func(h *inlineHarness) {
		h.formatted("v", "xfs")
		h.in.owners["v"] = &devices.InlineOwner{PodUID: "pod", Target: targetPath("v", 1)}
		h.at(func(step Step, moment Moment) error {
			switch {
			case step.Action == Mount && moment == Before:
				return state.Errorf(state.FailedPrecondition, "no mount")
			case step.Action == Detach && moment == Before:
				return errors.New("no detach")
			}
			return nil
		})
		h.refuse(h.do(inlinePublish("v", 1)), state.Unavailable, "no mount", "taking back", "no detach")
		h.left("v", true)
	})
}

// Who asks for the end of an inline volume is answered when all of it is gone, also if
// the end of its publish alone was asked for before, and is being seen to right then.
func TestInlineEndTakesInThatOfItsPublish(t *testing.T) {
	for late := range 40 {
		inlineBubble(t, func(h *inlineHarness) {
			h.ok(inlinePublish("v", 1))
			h.k.slow(opFind, "v", -1, 100*time.Millisecond)
			h.k.slow(opDetach, "v", -1, time.Second)
			before := h.begin(unpublish("v", 1))
			h.sleep(time.Duration(late) * 10 * time.Millisecond)
			h.ok(inlineEnd("v", 1))
			h.gone("v")
			if err := h.got(before); err != nil {
				t.Errorf("after %d0 ms: the one before was told: %v", late, err)
			}
		})
	}
}
