package reconciler_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

var (
	errAway   = errors.New("the pool is away")
	errSilent = context.DeadlineExceeded
)

// inlineWorld is a state of an inline volume: what its record says, and what is there.
type inlineWorld struct {
	gone, ended, made, provisional, kubelet bool
	owner                                   state.OwnerState
	err                                     error // of an unknown owner
	device                                  deviceCondition
	staged, bound                           int // nothing, an empty directory, the volume, somebody else's files
}

func (w inlineWorld) look() (*state.Volume, state.Actual) {
	places := append(placesOf(fileEmptyDirectory, [2]mountWorld{}, [2]mountWorld{mountedHere}), placeWorld{file: fileFullDirectory})
	places = slices.Insert(places, 0, placeWorld{})
	wish := wantThere
	if w.gone {
		wish = wantGone
	}
	world := planWorld{
		stage: stageWorld{want: wish}, at: places[w.staged], targets: [2]targetWorld{{want: wish, at: places[w.bound]}},
		device: deviceWorld{state: w.device}, contents: contentsWorld{kind: holdsExt4},
	}
	c := world.look()
	c.want.Stage.Inline = &state.Inline{PodUID: "a", Target: planPathA, Made: w.made, Ended: w.ended}
	c.want.Stage.Provisional = w.provisional
	if w.kubelet {
		c.want.ID = "csi-" + strings.Repeat("0a", 32)
	}
	c.have.Device.Missing = w.owner == state.OwnerNone && w.device == isAbsent
	c.have.Owner = state.Owner{State: w.owner, Err: w.err}
	return c.want, c.have
}

// after is what a step makes of a world, as the worker does it.
func (w inlineWorld) after(step reconciler.Step) inlineWorld {
	switch step.Action {
	case reconciler.CreateVolume:
		w.made, w.owner = true, state.OwnerSame
	case reconciler.Attach:
		w.device = isAttached
	case reconciler.Mount:
		w.staged = 2
	case reconciler.Bind:
		w.bound = 2
	case reconciler.Unbind:
		w.bound = 1
	case reconciler.RemoveTarget:
		w.bound = 0
	case reconciler.Unmount:
		w.staged = 1
	case reconciler.Detach:
		w.device = isAbsent
	case reconciler.RemoveStage:
		w.staged = 0
	case reconciler.AdoptInline:
		w.provisional = false
	case reconciler.DeleteVolume:
		w.made, w.owner, w.err = false, state.OwnerNone, nil
	case reconciler.LeaveVolume:
		w.made, w.provisional = false, w.provisional && !w.kubelet
	}
	return w
}

// why tells which rule a step breaks.
func (w inlineWorld) why(step reconciler.Step) string {
	shown := w.device == isAttached || w.staged == 2 || w.bound == 2
	switch step.Action {
	case reconciler.DeleteVolume:
		switch {
		case !w.gone || !w.ended || !w.made || w.provisional:
			return "the record does not say that it is to be deleted"
		case w.owner == state.OwnerOther:
			return "it is another's"
		case w.owner == state.OwnerUnknown && (w.err == nil || errors.Is(w.err, errSilent)):
			return "nothing is known of its owner"
		case shown || w.staged != 0 || w.device != isAbsent:
			return "something of it is left"
		}
	case reconciler.CreateVolume:
		if w.gone || w.made || w.owner != state.OwnerNone && w.owner != state.OwnerSame {
			return "it is made, or not this pod's to make"
		}
	case reconciler.RemoveStage:
		if !w.ended || w.staged != 1 || w.device == isAttached {
			return "the volume is not down, or the directory is not empty"
		}
	case reconciler.LeaveVolume, reconciler.AdoptInline:
		switch {
		case !w.gone || !w.ended || w.bound == 2:
			return "it is still published"
		case step.Action == reconciler.AdoptInline && (!w.provisional || w.owner != state.OwnerSame && (w.owner != state.OwnerNone || w.staged != 2)):
			return "it is not known to be this publish's"
		case step.Action == reconciler.LeaveVolume && w.owner != state.OwnerUnknown:
			return "its owner is known"
		}
	case reconciler.Unbind, reconciler.RemoveTarget:
	default:
		if !w.gone && !w.made {
			return "the volume is not made"
		}
		if w.provisional {
			return "whose it is was not told"
		}
	}
	return ""
}

// explains reports whether a problem of the stage is one of this state.
func (w inlineWorld) explains(p reconciler.Problem) bool {
	switch p.Class {
	case state.AlreadyExists:
		return !w.gone && !w.made && w.owner == state.OwnerOther
	case state.NotFound:
		return !w.gone && w.made && w.owner == state.OwnerNone && w.device == isAbsent
	case state.FailedPrecondition:
		return w.staged == 3 || w.ended && w.staged == 2 && w.device != isAttached
	}
	return w.owner == state.OwnerUnknown || w.device == isUnlooked
}

// TestPlanForEveryInlineState walks every state of an inline volume, in every order
// of its steps, to its end.
func TestPlanForEveryInlineState(t *testing.T) {
	yes := []bool{false, true}
	owners := []inlineWorld{{owner: state.OwnerNone}, {owner: state.OwnerSame}, {owner: state.OwnerOther}, {}, {err: errAway}, {err: errSilent}}
	seen, worlds := map[inlineWorld]bool{}, 0
	var walk func(w inlineWorld, depth int)
	walk = func(w inlineWorld, depth int) {
		if seen[w] {
			return
		}
		seen[w] = true
		if depth > 20 {
			t.Fatalf("no end: %+v", w)
		}
		want, have := w.look()
		plan := reconciler.MakePlan(want, have)
		for _, step := range plan.Steps {
			if why := w.why(step); why != "" {
				t.Fatalf("%s: %s: %+v", step, why, w)
			}
			walk(w.after(step), depth+1)
		}
		stage := plan.Verdicts.Of(state.StagePart())
		if stage.Problem != (reconciler.Problem{}) && !w.explains(stage.Problem) {
			t.Fatalf("told is %+v: %+v", stage.Problem, w)
		}
		if w.gone && w.ended && !stage.Settled && plan.Verdicts.Of(planFirst).Settled {
			t.Fatalf("the publish ends before its volume: %+v", w)
		}
		if len(plan.Steps) > 0 || !w.gone {
			return
		}
		lost := w.provisional && (!w.made || w.owner != state.OwnerSame && (w.owner != state.OwnerNone || w.staged != 2))
		unknown := w.owner == state.OwnerUnknown && w.err == nil && w.made && w.ended // nobody asked
		switch down := w.device != isAttached && w.staged != 2 && w.bound != 2; {
		case w.device == isUnlooked, unknown:
		case !down && !lost:
			t.Fatalf("at the end something is left: %+v", w)
		case !stage.Settled && w.staged != 3:
			t.Fatalf("at the end the stage is %+v: %+v", stage, w)
		case stage.Settled && !plan.Verdicts.Of(planFirst).Settled:
			t.Fatalf("at the end the target is not settled: %+v", w)
		case stage.Settled && w.ended && w.made && !lost && w.owner != state.OwnerOther:
			t.Fatalf("at the end the volume is there: %+v", w)
		}
	}
	for _, o := range owners {
		for i := range 1 << 5 {
			w := o
			w.gone, w.ended, w.made, w.provisional, w.kubelet = yes[i&1], yes[i>>1&1], yes[i>>2&1], yes[i>>3&1], yes[i>>4&1]
			if (w.ended || w.provisional) && !w.gone || w.provisional && !w.ended {
				continue
			}
			for _, w.device = range []deviceCondition{isUnlooked, isAbsent, isAttached} {
				for w.staged = range 4 {
					for w.bound = range 4 {
						if w.device != isAttached && (w.staged == 2 || w.bound == 2) {
							continue
						}
						worlds++
						walk(w, 0)
					}
				}
			}
		}
	}
	t.Logf("%d states to start from, %d walked", worlds, len(seen))
}
