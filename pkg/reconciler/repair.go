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
func (p *pass) mayRepair(ctx context.Context, want *state.Volume, plan Plan, step Step) bool {
	part := step.Part
	intent := want.Intent(part)
	if intent == nil || intent.Gone || !intent.Accepted || plan.Verdicts.Of(part).Settled || step.Action == MarkRaw || step.Action == GrowLayer { // neither is a repair
		return true
	}
	lost, turned := p.r.loss(p.id, part, len(p.waiters) > 0)
	if !turned {
		return lost.state == repairing
	}
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
	return lost.state == repairing
}

// loss notes that a part does not hold. It returns the part's repair, and whether the
// repair's state has changed.
func (r *Reconciler) loss(id string, part state.Part, asked bool) (now repair, turned bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	lost := v.repairs[part]
	if lost == nil {
		lost = &repair{}
		if v.repairs == nil {
			v.repairs = map[state.Part]*repair{}
		}
		v.repairs[part] = lost
	}
	before := lost.state
	switch at := time.Now(); {
	case lost.state == repairing:
	case !asked && !r.repairs:
		lost.state = repairOff
	case !asked && at.Before(lost.next):
		lost.state = repairPutOff
	default:
		if at.Sub(lost.met) > lossReset {
			lost.losses = 0
		}
		lost.losses++
		lost.state, lost.met = repairing, at
		lost.next = at.Add(r.jitter(backOff(lost.losses)))
	}
	return *lost, lost.state != before
}

// untilResync returns the time until a volume at rest is observed again. The first resync
// of the volumes that were in the store at the start is spread at random. The caller
// holds mu.
func (r *Reconciler) untilResync(v *volume) time.Duration {
	period := max(r.resync, time.Duration(len(r.volumes))*resyncInterval)
	if v.spread {
		v.spread = false
		return time.Duration(float64(period) * r.random())
	}
	return r.jitter(period)
}

// resyncInterval is the least mean time between two resyncs, whatever the number of
// volumes. It bounds the cost of many volumes at rest.
const resyncInterval = 500 * time.Millisecond
