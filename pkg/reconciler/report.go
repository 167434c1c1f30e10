package reconciler

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// Reports returns the reports of all volumes with a record, in the order of their
// ids. It reads only memory.
func (r *Reconciler) Reports() []report.Volume {
	records := r.store.List()
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]report.Volume, 0, len(records))
	for _, record := range records {
		all = append(all, report.Make(r.facts(record), time.Now()))
	}
	return all
}

// explainTimeout bounds the observation by Explain.
const explainTimeout = 3 * time.Second

// Explain observes a volume and reports on it. It changes nothing. If the observation
// does not end in time, the report is of the last one. NotFound: nothing is asked of
// the volume, and there is no such volume.
func (r *Reconciler) Explain(ctx context.Context, id string) (report.Volume, error) {
	want := r.store.Get(id)
	if want == nil {
		want = &state.Volume{ID: id}
	}
	ctx, cancel := context.WithTimeout(ctx, explainTimeout)
	defer cancel()
	have, err := r.Observe(ctx, want)
	switch {
	case err != nil && want.Empty():
		return report.Volume{}, err
	case err != nil:
		r.mu.Lock()
		defer r.mu.Unlock()
		facts := r.facts(want)
		facts.LookErr = err
		return report.Make(facts, time.Now()), nil
	case want.Empty() && have.Device.Missing && !slices.ContainsFunc(have.Stack(), func(e state.Element) bool { return presentOrStray(e.Device) }):
		return report.Volume{}, state.Errorf(state.NotFound, "volume %s: nothing is asked of it on this node, and there is no such volume", id)
	}
	return r.Report(want, have), nil
}

// Report reports on a volume that Observe has just seen as have. Who holds what, which
// only the worker may ask, is taken from the worker's last observation.
func (r *Reconciler) Report(want *state.Volume, have state.Actual) report.Volume {
	r.mu.Lock()
	defer r.mu.Unlock()
	facts := r.facts(want)
	if v := r.volumes[want.ID]; v != nil {
		have.Lower = slices.Clone(have.Lower)
		have.Keepers = v.have.Keepers
		for _, d := range devicesOf(&have) {
			for _, was := range devicesOf(v.have) {
				if was.Number == d.Number && d.Present() {
					d.Held, d.Holder = was.Held, cmp.Or(d.Holder, was.Holder)
				}
			}
		}
	}
	facts.Have, facts.Looked = have, true
	plan := MakePlan(want, have)
	facts.Planned = r.volumes[want.ID].planned(plan)
	for part, p := range facts.Parts {
		p.Verdict, p.Outdated = verdictOf(plan, part), false
		facts.Parts[part] = p
	}
	return report.Make(facts, time.Now())
}

// facts returns what is in memory about a volume, for a report. The caller holds mu.
func (r *Reconciler) facts(want *state.Volume) report.Facts {
	v := r.volumes[want.ID]
	f := report.Facts{Want: want, Parts: map[state.Part]report.PartFacts{}}
	var plan Plan
	if v != nil {
		plan = v.lastPlan()
		f.Have, f.Seen, f.Planned = *v.have, !v.unseen, v.planned(plan)
		if !v.since.IsZero() {
			running := v.step()
			f.Running = &running
		}
	}
	for _, part := range want.Parts() {
		if v == nil {
			f.Parts[part] = report.PartFacts{}
			continue
		}
		looked := v.want.Intent(part)
		p := report.PartFacts{Verdict: verdictOf(plan, part), Outdated: looked == nil || looked.Revision != want.Intent(part).Revision}
		if a := v.attempts[part]; a != nil && a.err != nil {
			p.Failure, p.NextTry = a.err, a.next
		}
		if lost := v.repairs[part]; lost != nil {
			p.Losses, p.Lost = lost.losses, lost.met
			switch lost.state {
			case repairPutOff:
				p.Repair, p.NextRepair = report.RepairPutOff, lost.next
			case repairOff:
				p.Repair = report.RepairOff
			}
		}
		f.Parts[part] = p
	}
	if v != nil && want.Size == nil {
		if a := v.attempts[state.SizePart()]; a != nil && a.err != nil { // a growth that nobody has asked for
			f.Parts[state.SizePart()] = report.PartFacts{Failure: a.err, NextTry: a.next}
		}
	}
	return f
}

func verdictOf(plan Plan, part state.Part) report.Verdict {
	verdict := plan.Verdicts.Of(part)
	return report.Verdict{Settled: verdict.Settled, Problem: verdict.Problem.Text, Needs: verdict.Needs}
}

// planned returns the steps of a plan except the one that runs.
func (v *volume) planned(plan Plan) []report.Planned {
	var all []report.Planned
	for _, step := range plan.Steps {
		if v == nil || v.since.IsZero() || step != v.running {
			all = append(all, report.Planned{Step: step.String(), Part: step.Part})
		}
	}
	return all
}

// step returns the step that runs.
func (v *volume) step() report.Running {
	return report.Running{Step: v.running.String(), Since: v.since, Progress: v.progress}
}
