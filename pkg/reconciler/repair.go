package reconciler

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// repair counts the losses of one part. A part is lost when it was seen to hold and
// then does not, though nobody asked for that.
type repair struct {
	losses int       // in a row
	met    time.Time // when the last one was noticed
	next   time.Time // before then, another one is repaired only if a caller asks
	state  repairState
}

type repairState int

const (
	intact       repairState = iota // the part holds
	repairing                       // steps are made for it
	repairPutOff                    // backs off until next, because something undoes the repairs
	repairOff                       // stays lost, because repair is switched off (Config.DetectOnly)
)

// lossReset is how long after a loss the count of losses starts again.
const lossReset = 10 * time.Minute

// mayRepair reports whether a step may be made. It may not if it restores what was
// accepted, nobody waits, and repair is switched off or was undone a moment ago.
// Each change of the repair's state is logged once.
func (p *pass) mayRepair(ctx context.Context, want *state.Volume, plan Plan, step Step, parts []state.Part) bool {
	intent := want.Intent(step.Part)
	if intent == nil || intent.Gone || !intent.Accepted || plan.Verdicts.Of(step.Part).Settled || step.Action == MarkRaw || step.Action == GrowLayer { // neither is a repair
		return true
	}
	lost, turned := p.r.loss(p.id, parts, len(p.waiters) > 0)
	for _, part := range turned {
		logger := klog.FromContext(ctx).WithValues("part", part, "losses", lost.losses)
		switch lost.state {
		case repairing:
			logger.Info("Repairing what was lost")
			if p.r.metrics != nil {
				p.r.metrics.Repair(part.Kind)
			}
		case repairPutOff:
			logger.Info("Something keeps undoing what is repaired; it is left for a while", "next", lost.next)
		case repairOff:
			logger.Info("Lost, and not repaired: repair is switched off")
		}
	}
	return lost.state == repairing
}

// together returns the parts that a step is for. A broken file system is mounted anew once all
// its binds are gone, so none is taken down before all may be, and the stage be mounted: a target
// that fails is better than one that shows an empty directory.
func together(want *state.Volume, plan Plan, step Step) []state.Part {
	parts := []state.Part{step.Part}
	if step.Action != Unbind || !takesDown(want, step) || plan.Verdicts.Of(state.StagePart()).Settled {
		return parts
	}
	for _, other := range plan.Steps {
		if other.Action == Unbind && other.Part != step.Part && !want.Intent(other.Part).Gone {
			parts = append(parts, other.Part)
		}
	}
	return append(parts, state.StagePart())
}

// loss notes that parts do not hold, which are repaired together or not at all. It returns the
// repair of the first one, and the parts whose repair's state has changed to that.
func (r *Reconciler) loss(id string, parts []state.Part, asked bool) (now repair, turned []state.Part) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, at := r.volume(id), time.Now()
	if v.repairs == nil {
		v.repairs = map[state.Part]*repair{}
	}
	begun, next := true, time.Time{}
	for _, part := range parts {
		if v.repairs[part] == nil {
			v.repairs[part] = &repair{}
		}
		if lost := v.repairs[part]; lost.state != repairing {
			begun = false
			if lost.next.After(next) {
				next = lost.next
			}
		}
	}
	put := func(off repairState) { // all of them, so that Retry repairs all
		for _, part := range parts {
			lost := v.repairs[part]
			if lost.state != off {
				turned = append(turned, part)
			}
			lost.state, lost.next = off, next
		}
	}
	switch {
	case begun:
	case !asked && !r.repairs:
		put(repairOff)
	case !asked && at.Before(next):
		put(repairPutOff)
	default:
		for _, part := range parts {
			lost := v.repairs[part]
			if lost.state == repairing {
				continue
			}
			if at.Sub(lost.met) > lossReset {
				lost.losses = 0
			}
			lost.losses++
			lost.state, lost.met = repairing, at
			lost.next = at.Add(r.jitter(backOff(lost.losses)))
			turned = append(turned, part)
		}
	}
	return *v.repairs[parts[0]], turned
}

// endRepairs notes of what was lost that it is there, or is not asked for any more. The caller
// holds mu.
func (v *volume) endRepairs() {
	for part, lost := range v.repairs {
		if intent := v.want.Intent(part); intent == nil || intent.Gone {
			delete(v.repairs, part)
		} else if v.plan.Verdicts.Of(part).Settled {
			lost.state = intact
		}
	}
}
