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

// inline makes a volume an inline one of the publish at podA.
func inline(made, ended bool) asker {
	return func(v *state.Volume) {
		v.Stage.Inline = &state.Inline{PodUID: "a", Target: podA, Made: made, Ended: ended}
	}
}

// unrecorded makes the end of a stage that of a volume whose record was lost.
func unrecorded(v *state.Volume) { v.Stage.Provisional = true }

func owned(s state.OwnerState) fact {
	return func(have *state.Actual) { have.Owner = state.Owner{State: s} }
}

func ownerIs(err error) fact {
	return func(have *state.Actual) { have.Owner = state.Owner{Err: err} }
}

var (
	errAway   = errors.New("the pool is away")
	errSilent = context.DeadlineExceeded
)

func TestPlanInline(t *testing.T) {
	ending := func(changes ...asker) *state.Volume {
		return volume(append([]asker{unstaged(), inline(true, true), unpublished(podA)}, changes...)...)
	}
	none := device(state.DeviceAbsent, missing)
	for _, tt := range []struct {
		name string
		want *state.Volume
		have state.Actual
		plan []string
	}{
		// On the way up.
		{"it is made first", volume(staged(), inline(false, false), published(podA)), actual(none, owned(state.OwnerNone)),
			[]string{"create-volume for stage", "stage: under way", "A: waits for stage"}},
		{"or found", volume(staged(), inline(false, false)), actual(attached(), ext4(), stageIs(mounted(rw)), owned(state.OwnerSame)),
			[]string{"create-volume for stage", "stage: under way"}},
		{"another's is left alone", volume(staged(), inline(false, false)), actual(attached(), owned(state.OwnerOther)),
			[]string{"stage: stuck, AlreadyExists: not that of the pod"}},
		{"and one of which nothing is known", volume(staged(), inline(false, false)), actual(ownerIs(errAway)),
			[]string{"stage: stuck, Unavailable: the pool is away"}},
		{"or nobody asked", volume(staged(), inline(false, false)), actual(),
			[]string{"stage: stuck, Unavailable: not looked at"}},
		{"then it is a volume as any other", volume(staged(), inline(true, false)), actual(),
			[]string{"attach for stage", "stage: under way"}},

		// On the way down.
		{"the target goes first", ending(), actual(attached(), stageIs(mounted()), targetIs(podA, mounted())),
			[]string{"unbind for A", "A: under way", "stage: waits for A"}},
		{"then the stage, without a question", ending(), actual(attached(), stageIs(mounted())),
			[]string{"unmount for stage", "A: waits for stage", "stage: under way"}},
		{"the device", ending(), actual(attached(), stageIs(emptyDir())),
			[]string{"detach for stage", "A: waits for stage", "stage: under way"}},
		{"the directory", ending(), actual(stageIs(emptyDir())),
			[]string{"remove-stage for stage", "A: waits for stage", "stage: under way"}},
		{"unless it holds files", ending(), actual(stageIs(fullDir())),
			[]string{"A: waits for stage", "stage: stuck, FailedPrecondition: move it away"}},
		{"and the volume", ending(), actual(owned(state.OwnerSame)),
			[]string{"delete-volume for stage", "A: waits for stage", "stage: under way"}},
		{"also what half a deletion left", ending(), actual(none, owned(state.OwnerNone)),
			[]string{"delete-volume for stage", "A: waits for stage", "stage: under way"}},
		{"also if its facts are damaged: the record names the owner", ending(), actual(device(state.DeviceAbsent, unread), ownerIs(errAway)),
			[]string{"delete-volume for stage", "A: waits for stage", "stage: under way"}},
		{"not another's", ending(), actual(owned(state.OwnerOther)),
			[]string{"A: settled", "stage: settled"}},
		{"not while the backend hangs", ending(), actual(ownerIs(errSilent)),
			[]string{"leave-volume for stage", "A: waits for stage", "stage: under way"}},
		{"not before the owner was looked at", ending(), actual(),
			[]string{"A: waits for stage", "stage: stuck, Unavailable: not looked at"}},
		{"not twice", volume(unstaged(), inline(false, true), unpublished(podA)), actual(),
			[]string{"A: settled", "stage: settled"}},
		{"not by an unstage", volume(unstaged(), inline(true, false)), actual(owned(state.OwnerSame), stageIs(emptyDir())),
			[]string{"stage: settled"}},

		// Without a record.
		{"what is lost is the record's again", ending(unrecorded), actual(attached(), stageIs(mounted()), owned(state.OwnerSame)),
			[]string{"adopt-inline for stage", "A: waits for stage", "stage: under way"}},
		{"a claim's is left alone", ending(unrecorded), actual(attached(), owned(state.OwnerOther)),
			[]string{"A: settled", "stage: settled"}},
		{"so is nothing", ending(unrecorded), actual(none, owned(state.OwnerNone)),
			[]string{"A: settled", "stage: settled"}},
		{"so is what nobody knows", ending(unrecorded), actual(attached(), ownerIs(errAway)),
			[]string{"leave-volume for stage", "A: waits for stage", "stage: under way"}},
		{"and then it was left", volume(unstaged(), inline(false, true), unpublished(podA), unrecorded), actual(attached(), ownerIs(errAway)),
			[]string{"A: settled", "stage: settled"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if told := tellPlan(tt.want, reconciler.MakePlan(tt.want, tt.have)); !slices.EqualFunc(told, sorted(tt.want, tt.plan), matches) {
				t.Errorf("plan\n\t%s\nwant\n\t%s", strings.Join(told, "\n\t"), strings.Join(tt.plan, "\n\t"))
			}
		})
	}
}

// sorted puts the stage before the target, as tellPlan does.
func sorted(want *state.Volume, lines []string) []string {
	lines = slices.Clone(lines)
	slices.SortStableFunc(lines, func(a, b string) int {
		rank := func(line string) int {
			switch {
			case strings.HasPrefix(line, "stage: "):
				return 1
			case strings.HasPrefix(line, "A: "):
				return 2
			}
			return 0
		}
		return rank(a) - rank(b)
	})
	return lines
}

// inlineWorld is a state of an inline volume: what its record says, and what is there.
type inlineWorld struct {
	gone, ended, made, provisional, kubelet bool
	owner                                   state.OwnerState
	err                                     error // of an unknown owner
	device                                  state.DeviceState
	staged, bound                           int // nothing, an empty directory, the volume, somebody else's files
}

func (w inlineWorld) look() (*state.Volume, state.Actual) {
	places := []state.Mountpoint{nothingThere(), emptyDir(), mounted(rw), fullDir()}
	want := volume(staged(), inline(w.made, w.ended), published(podA))
	if w.gone {
		want = volume(unstaged(), inline(w.made, w.ended), unpublished(podA))
		want.Stage.Provisional = w.provisional
	}
	if w.kubelet {
		want.ID = "csi-" + strings.Repeat("0a", 32)
	}
	have := actual(device(w.device), ext4(), stageIs(places[w.staged]), targetIs(podA, places[w.bound]))
	if w.device == state.DeviceAbsent {
		have.Contents = state.Contents{}
	}
	have.Device.Missing = w.owner == state.OwnerNone && w.device == state.DeviceAbsent
	have.Owner = state.Owner{State: w.owner, Err: w.err}
	return want, have
}

// after is what a step makes of a world, as the worker does it.
func (w inlineWorld) after(step reconciler.Step) inlineWorld {
	switch step.Action {
	case reconciler.CreateVolume:
		w.made, w.owner = true, state.OwnerSame
	case reconciler.Attach:
		w.device = state.DeviceAttached
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
		w.device = state.DeviceAbsent
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
	shown := w.device == state.DeviceAttached || w.staged == 2 || w.bound == 2
	switch step.Action {
	case reconciler.DeleteVolume:
		switch {
		case !w.gone || !w.ended || !w.made || w.provisional:
			return "the record does not say that it is to be deleted"
		case w.owner == state.OwnerOther:
			return "it is another's"
		case w.owner == state.OwnerUnknown && (w.err == nil || errors.Is(w.err, errSilent)):
			return "nothing is known of its owner"
		case shown || w.staged != 0 || w.device != state.DeviceAbsent:
			return "something stands of it"
		}
	case reconciler.CreateVolume:
		if w.gone || w.made || w.owner != state.OwnerNone && w.owner != state.OwnerSame {
			return "it is made, or not this pod's to make"
		}
	case reconciler.RemoveStage:
		if !w.ended || w.staged != 1 || w.device == state.DeviceAttached {
			return "the volume is not down, or the directory is not empty"
		}
	case reconciler.LeaveVolume, reconciler.AdoptInline:
		if !w.gone || !w.ended || w.bound == 2 {
			return "its publish stands"
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
		if len(plan.Steps) > 0 || !w.gone {
			return
		}
		stage := plan.Verdicts[state.StagePart()]
		lost := w.provisional && (w.owner != state.OwnerSame || !w.made)
		unknown := w.owner == state.OwnerUnknown && w.err == nil && w.made && w.ended // nobody asked
		switch down := w.device != state.DeviceAttached && w.staged != 2 && w.bound != 2; {
		case w.device == state.DeviceUnknown, unknown:
		case !down && !lost:
			t.Fatalf("at the end something stands: %+v", w)
		case !stage.Settled && w.staged != 3:
			t.Fatalf("at the end the stage is %+v: %+v", stage, w)
		case stage.Settled && !plan.Verdicts[state.TargetPart(podA)].Settled:
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
			for _, w.device = range []state.DeviceState{state.DeviceUnknown, state.DeviceAbsent, state.DeviceAttached} {
				for w.staged = range 4 {
					for w.bound = range 4 {
						if w.device != state.DeviceAttached && (w.staged == 2 || w.bound == 2) {
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
