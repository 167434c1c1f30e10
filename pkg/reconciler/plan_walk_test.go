package reconciler_test

import (
	"flag"
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// TestPlanForEveryState walks every pair of a desired and an actual state
// within the bounds of four walks, and from each of them every order in which the steps of
// the plans can be run on a model of the kernel, until nothing is planned. Each
// plan on the way is held against rules that know nothing of the planner:
//
//	plan_rules_test.go    when a step may be planned, and what a plan must say of a state
//	plan_causes_test.go   what a part may be stuck on, with the class and the words
//	plan_holds_test.go    the conditions of both, judged from the states alone
//	plan_worlds_test.go   the states, and the model of the kernel
//
// A rule that is broken fails as a subtest of its own, with the first state that
// broke it: worlds are listed simplest first. Each step is planned and each cause
// is met in some state. With -failfast all walks end at the first broken rule.
func TestPlanForEveryState(t *testing.T) {
	hasty := flag.Lookup("test.failfast").Value.String() == "true"
	var broken atomic.Bool
	var mu sync.Mutex
	met, walked := map[any]bool{}, 0
	t.Cleanup(func() {
		if t.Failed() || testing.Short() || walked < len(planWalks) {
			return
		}
		for _, action := range planActions() {
			if !met[action] {
				t.Errorf("no state has the step %s", action)
			}
		}
		for _, cause := range slices.Concat(planCauses...) {
			if !met[cause] {
				t.Errorf("no state has the cause %q", cause.words)
			}
		}
	})
	for _, walk := range planWalks {
		t.Run(walk.name, func(t *testing.T) {
			t.Parallel()
			w := newPlanWalk()
			every, starts := 1, 0
			if testing.Short() {
				every = 23 // prime to the lengths of the lists that the worlds are made of
			}
			i := 0
			for world := range walk.worlds {
				if i++; i%every == 0 {
					starts++
					w.longest = max(w.longest, w.from(world))
				}
				if len(w.broken) > 0 {
					broken.Store(true)
				}
				if hasty && broken.Load() {
					break
				}
			}
			mu.Lock()
			maps.Copy(met, w.met)
			walked++
			mu.Unlock()
			t.Logf("%d states to start from, %d walked with those that steps lead to; at most %d steps to the end", starts, len(w.seen), w.longest)
			for _, name := range w.rules {
				t.Run(name, func(t *testing.T) {
					for why, b := range w.broken[name] {
						t.Errorf("broken in %d states: %s, first in this one:\n%s", b.states, why, b.first)
					}
				})
			}
		})
	}
}

var planWalks = []struct {
	name   string
	worlds iter.Seq[planWorld]
}{
	{"device, contents and stage", planDeviceWorlds},
	{"stage and targets", planTargetWorlds},
	{"source and layer", planLayerWorlds},
	{"mount source", planSourceWorlds},
}

// planWalk is one walk through worlds and what was found on it.
type planWalk struct {
	seed    maphash.Seed
	seen    map[uint64]int8 // by hash of the world: most steps to the end, or planOnTheWay
	longest int
	rules   []string
	broken  map[string]map[string]*planBreach // by rule and why
	alone   map[uint64]planOutcome            // by hash of the world: what the first target gets without the second
	met     map[any]bool                      // actions of steps, and causes
}

type planBreach struct {
	states int
	first  string
}

// planOutcome is what a plan says of one target.
type planOutcome struct {
	verdict reconciler.Verdict
	steps   []reconciler.Step
}

const (
	planOnTheWay = -1
	planMaxSteps = 40

	ruleCause  = "what is stuck, or left behind, has a cause, which is told with its class"
	ruleEnds   = "every order of steps ends"
	ruleAtEnd  = "at the end nothing is left under way"
	ruleAlone  = "a target does not depend on the other target"
	rulePurity = "the same input gives the same plan and stays as it is"
)

func newPlanWalk() *planWalk {
	w := &planWalk{seed: maphash.MakeSeed(), seen: map[uint64]int8{}, broken: map[string]map[string]*planBreach{}, alone: map[uint64]planOutcome{}, met: map[any]bool{}}
	for _, action := range planActions() {
		w.rules = append(w.rules, planStepRules[action].name)
	}
	for _, r := range planStateRules {
		w.rules = append(w.rules, r.name)
	}
	w.rules = append(w.rules, ruleCause, ruleEnds, ruleAtEnd, ruleAlone, rulePurity)
	return w
}

// key is a hash, which keeps the memory of a walk small: that two of some
// millions of worlds share one of 64 bits is a matter of one run in a million.
func (w *planWalk) key(world planWorld) uint64 { return maphash.Comparable(w.seed, world) }

func planActions() []reconciler.Action {
	var actions []reconciler.Action
	for action := range planStepRules {
		actions = append(actions, action)
	}
	slices.Sort(actions)
	return actions
}

func (w *planWalk) breach(rule, why string, c *planCase) {
	if w.broken[rule] == nil {
		w.broken[rule] = map[string]*planBreach{}
	}
	b := w.broken[rule][why]
	if b == nil {
		b = &planBreach{first: c.String()}
		w.broken[rule][why] = b
	}
	b.states++
}

// from judges the plan for a world and those for every world that its steps
// lead to. It returns the most steps that can be run until none is planned.
func (w *planWalk) from(world planWorld) int {
	key := w.key(world)
	if steps, ok := w.seen[key]; ok {
		if steps == planOnTheWay {
			c := world.look()
			w.breach(ruleEnds, "the steps lead back to where they began", &c)
			return 0
		}
		return int(steps)
	}
	w.seen[key] = planOnTheWay
	c := world.look()
	w.judge(world, &c)
	longest := 0
	if next := world.settle(&c); next != world {
		longest = w.from(next)
	} else {
		for _, step := range c.plan.Steps {
			next := world.after(step)
			if after := next.look(); step.Action == reconciler.Release && after.highest().Held {
				continue // it fails, as mounts at the record's own paths hold the device too
			}
			longest = max(longest, 1+w.from(next))
		}
		if len(c.plan.Steps) == 0 {
			w.judgeEnd(&c)
		}
	}
	if longest > planMaxSteps {
		w.breach(ruleEnds, fmt.Sprintf("more than %d steps", planMaxSteps), &c)
		longest = planMaxSteps
	}
	w.seen[key] = int8(longest)
	return longest
}

func (w *planWalk) judge(world planWorld, c *planCase) {
	for _, step := range c.plan.Steps {
		rule, known := planStepRules[step.Action]
		if !known {
			w.breach(ruleEnds, "unknown step "+step.String(), c)
			continue
		}
		w.met[step.Action] = true
		c.layer = step.Layer
		if why := rule.broken(c, step.Part); why != "" {
			w.breach(rule.name, step.String()+": "+why, c)
		}
	}
	c.layer = ""
	for _, rule := range planStateRules {
		if why := rule.broken(c); why != "" {
			w.breach(rule.name, why, c)
		}
	}
	for part, v := range c.plan.Verdicts.All() {
		if v.Problem == (reconciler.Problem{}) {
			continue
		}
		if cause := c.causeOf(part, v); cause != nil {
			w.met[cause] = true
		} else {
			w.breach(ruleCause, part.String(), c)
		}
	}
	if why := w.dependence(world, c); why != "" {
		w.breach(ruleAlone, why, c)
	}
	if len(w.seen)%64 == 0 {
		again := world.look()
		if !reflect.DeepEqual(*c, again) {
			w.breach(rulePurity, fmt.Sprintf("against %+v", again), c)
		}
		if plan := reconciler.MakePlan(c.want, c.have); !reflect.DeepEqual(plan, c.plan) || !reflect.DeepEqual(*c, again) {
			w.breach(rulePurity, fmt.Sprintf("against %+v", plan), c)
		}
	}
}

// dependence says what the second target changed for the first one.
func (w *planWalk) dependence(world planWorld, c *planCase) string {
	if world.targets[0].want == wantNothing || world.targets[1].want == wantNothing {
		return ""
	}
	if c.broken() {
		return "" // all its mounts go or none
	}
	lone := world
	lone.targets[1] = targetWorld{}
	key := w.key(lone)
	alone, ok := w.alone[key]
	if !ok {
		l := lone.look()
		alone = planOutcome{l.plan.Verdicts.Of(planFirst), l.steps(planFirst)}
		w.alone[key] = alone
	}
	verdict, steps := c.plan.Verdicts.Of(planFirst), c.steps(planFirst)
	if !slices.Equal(steps, alone.steps) || verdict.Settled != alone.verdict.Settled ||
		verdict.Problem != alone.verdict.Problem || !slices.Equal(verdict.Needs, alone.verdict.Needs) {
		return fmt.Sprintf("alone it gets %+v", alone)
	}
	return ""
}

// judgeEnd judges a world for which nothing is planned and nothing to be noted.
func (w *planWalk) judgeEnd(c *planCase) {
	for part, v := range c.plan.Verdicts.All() {
		if !v.Settled && !c.explained(part, len(c.plan.Verdicts)) {
			w.breach(ruleAtEnd, part.String()+" is neither settled nor stuck", c)
		}
	}
	v := c.have.View
	if c.stageWanted() && v.State == state.DeviceAttached && !v.Held && !c.unknown() && !c.someTargetWantsView() && !c.someTargetUnseen() &&
		!c.somewhere(func(_ *state.Target, m state.Mount) bool { return mountOf(m, v.Number) }) {
		w.breach(ruleAtEnd, "a view is left that nobody shows", c)
	}
}
