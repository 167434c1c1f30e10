package reconciler_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/maphash"
	"iter"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// TestPlanForEveryState walks every pair of a desired and an actual state
// within two bounds, and from each of them every order in which the steps of
// the plans can be run on a model of the kernel, until nothing is planned. Each
// plan on the way is held against rules that know nothing of the planner. A
// rule that is broken fails as a subtest of its own, with the first state that
// broke it: worlds are listed simplest first.
//
// With -failfast all walks end at the first broken rule.
func TestPlanForEveryState(t *testing.T) {
	hasty := flag.Lookup("test.failfast").Value.String() == "true"
	var broken atomic.Bool
	met := map[*planCause]*atomic.Bool{}
	for _, cause := range slices.Concat(planCauses...) {
		met[cause] = &atomic.Bool{}
	}
	t.Cleanup(func() {
		for cause, m := range met {
			if !m.Load() && !t.Failed() && !testing.Short() {
				t.Errorf("no state has the cause %q", cause.words)
			}
		}
	})
	for _, walk := range []struct {
		name   string
		worlds iter.Seq[planWorld]
	}{
		{"device, contents and stage", planDeviceWorlds},
		{"stage and targets", planTargetWorlds},
		{"source and layer", planLayerWorlds},
		{"mount source", planSourceWorlds},
	} {
		t.Run(walk.name, func(t *testing.T) {
			t.Parallel()
			w := newPlanWalk()
			w.met = met
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

// planWalk is one walk through worlds and what was found on it.
type planWalk struct {
	seed    maphash.Seed
	seen    map[uint64]int8 // by hash of the world: most steps to the end, or planOnTheWay
	longest int
	rules   []string
	broken  map[string]map[string]*planBreach // by rule and why
	alone   map[uint64]planOutcome            // by hash of the world: what the first target gets without the second
	met     map[*planCause]*atomic.Bool
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

	ruleEnds   = "every order of steps ends"
	ruleAtEnd  = "at the end nothing is left under way"
	ruleAlone  = "a target does not depend on the other target"
	rulePurity = "the same input gives the same plan and stays as it is"
)

func newPlanWalk() *planWalk {
	w := &planWalk{seed: maphash.MakeSeed(), seen: map[uint64]int8{}, broken: map[string]map[string]*planBreach{}, alone: map[uint64]planOutcome{}}
	for _, action := range planActions() {
		w.rules = append(w.rules, planStepRules[action].name)
	}
	for _, r := range planStateRules {
		w.rules = append(w.rules, r.name)
	}
	w.rules = append(w.rules, ruleEnds, ruleAtEnd, ruleAlone, rulePurity)
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
			if after := next.look(); step.Action == reconciler.Release && after.standing().Held {
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
	for part, v := range c.plan.Verdicts {
		if cause := c.causeOf(part, v); cause != nil && !w.met[cause].Load() {
			w.met[cause].Store(true)
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
		alone = planOutcome{l.plan.Verdicts[planFirst], l.steps(planFirst)}
		w.alone[key] = alone
	}
	verdict, steps := c.plan.Verdicts[planFirst], c.steps(planFirst)
	if !slices.Equal(steps, alone.steps) || verdict.Settled != alone.verdict.Settled ||
		verdict.Problem != alone.verdict.Problem || !slices.Equal(verdict.Needs, alone.verdict.Needs) {
		return fmt.Sprintf("alone it gets %+v", alone)
	}
	return ""
}

// judgeEnd judges a world for which nothing is planned and nothing to be noted.
func (w *planWalk) judgeEnd(c *planCase) {
	for part, v := range c.plan.Verdicts {
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

// ---- Rules for steps: what must hold for a step to be planned. ----

type planStepRule struct {
	name   string
	broken func(c *planCase, part state.Part) string // why, empty when the rule holds
}

var planStepRules = map[reconciler.Action]planStepRule{
	reconciler.Unbind: {"unbind takes only the volume's own mount from a target that must not be so", func(c *planCase, part state.Part) string {
		t, m := c.want.Targets[part.Path], c.have.Targets[part.Path]
		return firstOf(
			t == nil, "no such target",
			notSeen(m), "the path was not seen",
			len(m.Mounts) == 0 || !c.showsAt(t, m.Mounts[0]), "the top mount is not the volume's",
			t != nil && !t.Gone && c.targetStands(t), "the target is as asked",
			t != nil && !t.Gone && c.broken() && c.brokenCause(), "a pod loses what is broken and stays so")
	}},
	reconciler.RemoveTarget: {"remove-target takes only what is empty, unmounted and asked away by the CO", func(c *planCase, part state.Part) string {
		t, m := c.want.Targets[part.Path], c.have.Targets[part.Path]
		return firstOf(
			t == nil || !t.Gone, "the target is not to go",
			t != nil && t.Withdrawn, "what a refused request found is not its to remove",
			notSeen(m), "the path was not seen",
			len(m.Mounts) > 0, "something is mounted",
			!m.Empty, "it is not empty",
			m.File != state.Directory && m.File != state.RegularFile, "neither a directory nor a file")
	}},
	reconciler.Unmount: {"unmount never takes the stage from under a target, nor what is not the volume's", func(c *planCase, part state.Part) string {
		s, m := c.want.Stage, c.have.Stage
		doubled := len(m.Mounts) > 1 && c.shows(m.Mounts[1])
		return firstOf(
			part != state.StagePart() || s == nil, "not for the stage",
			notSeen(m), "the path was not seen",
			len(m.Mounts) == 0 || !c.shows(m.Mounts[0]), "the top mount is not the volume's",
			c.stageWanted() && c.stageStands(), "the stage is as asked",
			c.stageWanted() && c.broken() && c.brokenCause(), "what is broken is taken down and stays so",
			!(doubled && c.stageWanted()) && c.someTargetBound(), "a target is mounted from it",
			!(doubled && c.stageWanted()) && c.someTargetUnseen(), "a target that was not seen may be mounted from it")
	}},
	reconciler.Release: {"release empties only the unmounted directory of a stage that ends", func(c *planCase, part state.Part) string {
		s, m := c.want.Stage, c.have.Stage
		return firstOf(
			part != state.StagePart() || s == nil || !s.Gone, "the stage is not to go",
			notSeen(m), "the path was not seen",
			len(m.Mounts) > 0, "something is mounted",
			m.File != state.Directory || !m.Empty, "it is no empty directory",
			!c.standing().Held, "nobody holds the device",
			c.someTargetBound() || c.someTargetUnseen(), "a target is or may be mounted from it")
	}},
	reconciler.DetachView: {"detach-view never takes a view that is shown, wanted or held", func(c *planCase, part state.Part) string {
		v := c.have.View
		return firstOf(
			part != state.StagePart() || c.want.Stage == nil, "not for the stage",
			v.State != state.DeviceAttached, "no view is attached",
			v.Held, "the view is held",
			c.somewhere(func(_ *state.Target, m state.Mount) bool { return mountOf(m, v.Number) }), "the view is mounted",
			c.stageWanted() && c.someTargetWantsView(), "a target wants the view")
	}},
	reconciler.Detach: {"detach never takes a device that is mounted, held or under a view", func(c *planCase, part state.Part) string {
		s, d := c.want.Stage, c.source()
		return firstOf(
			part != state.StagePart() || s == nil, "not for the stage",
			c.layered() && c.open(), "a layer stands on it",
			d.State != state.DeviceAttached, "no device is attached",
			d.Held, "the device is held",
			c.have.View.State != state.DeviceAbsent, "a view stands on it",
			c.somewhere(c.showsAt), "the device is mounted",
			unseen(c.have.Stage) && !c.wantsBlock(), "the device may be mounted at the staging path, which was not seen",
			c.someTargetUnseen(), "a target that was not seen may show the device",
			c.stageWanted() && c.stranger(), "it is another device than the stage was seen with",
			c.stageWanted() && d.ReadOnly == s.ReadOnly, "the device is as asked")
	}},
	reconciler.Attach: {"attach never takes a device that is missing, foreign, truncated or attached", func(c *planCase, part state.Part) string {
		d := c.source()
		return firstOf(
			part != state.StagePart() || !c.stageWanted(), "no stage is wanted",
			d.Err != nil, "what the backend knows was not read",
			d.Missing, "the backend knows no such volume",
			c.stranger(), "it is another device than the stage was seen with",
			d.State == state.DeviceForeign, "something else uses the backing",
			d.State == state.DeviceAttached, "the device is attached",
			d.State == state.DeviceAbsent && d.Size < d.Capacity, "the backing was truncated",
			c.have.Device.State == state.DeviceAbsent && !c.wantsBlock() && len(c.have.Stage.Mounts) == 0 && !freePath(c.have.Stage, state.Directory), "the mount would fail: the staging path is not free")
	}},
	reconciler.GrowDevice: {"grow-device only grows an attached device of a wanted stage", func(c *planCase, part state.Part) string {
		d := c.source()
		bySize := part == state.SizePart()
		return firstOf(
			!c.stageWanted(), "no stage is wanted",
			c.stranger(), "it is another device than the stage was seen with",
			d.Err != nil, "what the backend knows was not read",
			d.State != state.DeviceAttached || d.Missing, "no device is attached",
			c.stranger(), "it is another device than the stage was seen with",
			!bySize && d.Size >= d.Capacity, "the device has its size",
			bySize && (c.want.Size == nil || d.Size >= c.want.Size.Bytes), "the device has the size wanted",
			bySize && !c.stageStands(), "the stage does not stand")
	}},
	reconciler.BeginFormat: {"begin-format needs a provably blank device that never was formatted", func(c *planCase, part state.Part) string {
		d := c.have.Device
		if c.layered() {
			return firstOf(c.whyNotMake() != "", c.whyNotMake(), c.source().Formatting, "it has the mark", !blankKind(c.have.Beneath.Kind), "the source is not blank")
		}
		return c.whyNotWrite(part, firstOf(
			!c.maybeBlank(), "the device is not blank",
			d.Formatting, "it has the mark",
			d.Raw, "it was published raw",
			d.Size < c.have.Smallest, "it is too small",
			d.Formatted != "", "it was formatted before",
			c.remembers(), "the stage was seen with a file system"))
	}},
	reconciler.Erase: {"erase needs the formatting mark", func(c *planCase, part state.Part) string {
		if c.layered() && c.layer == "" {
			return firstOf(c.whyNotMake() != "", c.whyNotMake(), !c.source().Formatting, "without the mark")
		}
		return c.whyNotWrite(part, firstOf(
			!c.have.Device.Formatting, "without the mark",
			c.have.Device.Raw, "it was published raw",
			c.have.Device.Size < c.have.Smallest, "it is too small",
			c.remembers(), "the stage was seen with a file system"))
	}},
	reconciler.Format: {"format needs the formatting mark and a provably blank device", func(c *planCase, part state.Part) string {
		return c.whyNotWrite(part, firstOf(
			!c.have.Device.Formatting, "without the mark",
			c.have.Device.Raw, "it was published raw",
			c.have.Device.Size < c.have.Smallest, "it is too small",
			!c.maybeBlank(), "the device is not blank",
			c.remembers(), "the stage was seen with a file system"))
	}},
	reconciler.CreateLayer: {"create-layer needs a blank source with the mark", func(c *planCase, part state.Part) string {
		if d := c.have.Device; !d.Unmade {
			return firstOf(!c.layered() || !c.source().Attached(), "no source", !c.source().Formatting, "without the mark", c.source().ReadOnly || c.want.Stage == nil || c.want.Stage.ReadOnly, "nothing is to be written", !d.Fresh || c.open(), "the layer is in use, or not new")
		}
		return firstOf(c.whyNotMake() != "", c.whyNotMake(), !c.source().Formatting, "without the mark", !blankKind(c.have.Beneath.Kind), "the source is not blank")
	}},
	reconciler.OpenLayer: {"open-layer needs a source that stands as asked, the layer on it, and its secret", func(c *planCase, part state.Part) string {
		d := c.have.Device
		return firstOf(
			part != state.StagePart() || !c.stageWanted() || !c.layered(), "no stage with a layer is wanted",
			!c.sourceStands(), "the source is not as asked",
			c.source().Formatting, "its making is not over",
			d.Unmade, "there is no layer",
			d.Err != nil || d.State != state.DeviceAbsent && d.State != state.DeviceDetaching, "it stands, or something else does",
			d.NeedsSecret, "its secret is not at hand")
	}},
	reconciler.CloseLayer: {"close-layer never takes a device that is mounted or held, nor one that could not be opened again", func(c *planCase, part state.Part) string {
		s, d := c.want.Stage, c.have.Device
		return firstOf(
			part != state.StagePart() || s == nil || !c.layered(), "no stage with a layer",
			!c.open(), "it does not stand",
			d.Held, "it is held",
			c.somewhere(c.showsAt), "it is mounted",
			c.someTargetUnseen(), "a target that was not seen may show it",
			unseen(c.have.Stage) && !c.wantsBlock(), "it may be mounted at the staging path, which was not seen",
			c.stageWanted() && !d.Stray && d.ReadOnly == s.ReadOnly && c.source().ReadOnly == s.ReadOnly && !c.source().Formatting, "it is as asked",
			c.stageWanted() && !d.Stray && d.NeedsSecret, "its secret is not at hand")
	}},
	reconciler.GrowLayer: {"grow-layer only grows a layer's device that stands", func(c *planCase, part state.Part) string {
		d := c.have.Device
		return firstOf(
			!c.stageWanted() || !c.layered() || !c.sourceStands(), "no stage with a layer is wanted, or its source is not as asked",
			d.State != state.DeviceAttached || d.Size >= d.Capacity, "it does not stand, or has its size",
			d.NeedsSecret, "its secret is not at hand")
	}},
	reconciler.Check: {"check needs an idle device with the file system asked for", func(c *planCase, part state.Part) string {
		return c.whyNotWrite(part, firstOf(
			!c.holdsFilesystem() || c.swapped(), "not the file system asked for",
			!c.have.Contents.NeedsCheck, "no check is needed"))
	}},
	reconciler.GrowFilesystem: {"grow-filesystem grows as this kind of file system can", func(c *planCase, part state.Part) string {
		f := c.have.Contents
		if part == state.SizePart() {
			return firstOf(
				!c.stageWanted() || !c.stageStands() || c.wantsBlock(), "the file system is not mounted as asked",
				c.contentsUnseen() || !f.Growable || !f.GrowsMounted, "it does not grow mounted",
				c.want.Stage.ReadOnly, "it is read-only")
		}
		return c.whyNotWrite(part, firstOf(
			!c.holdsFilesystem() || c.swapped(), "not the file system asked for",
			f.NeedsCheck, "it needs a check first",
			!f.Growable || !f.GrowsUnmounted, "it does not grow unmounted",
			f.GrowsMounted, "it grows mounted, which is later"))
	}},
	reconciler.Mount: {"mount needs the right device with the right file system, and a free path", func(c *planCase, part state.Part) string {
		s, m, f := c.want.Stage, c.have.Stage, c.have.Contents
		return firstOf(
			part != state.StagePart() || !c.stageWanted() || c.wantsBlock(), "no mounted stage is wanted",
			!c.deviceStands(), "the device is not as asked",
			c.have.Device.Formatting, "a format was interrupted",
			c.broken(), "it is mounted and broken",
			c.swapped(), "the file system is not the one that the stage was seen with",
			!c.holdsFilesystem(), "not the file system asked for",
			f.NeedsCheck && s != nil && !s.ReadOnly && !c.mountedElsewhere(), "it needs a check first",
			!freePath(m, state.Directory), "the staging path is not free",
			f.Growable && f.GrowsUnmounted && !f.GrowsMounted && s != nil && !s.ReadOnly && !c.mountedElsewhere(), "it grows unmounted, which is now",
			m.File == state.NoFile && s != nil && s.Accepted && !c.asked(), "a removed directory is made again though nobody asks")
	}},
	reconciler.SetAttributes: {"set-attributes touches only the volume's own mount with the wrong attributes", func(c *planCase, part state.Part) string {
		if part == state.StagePart() {
			m := c.have.Stage
			return firstOf(
				!c.stageWanted() || c.wantsBlock(), "no mounted stage is wanted",
				notSeen(m) || len(m.Mounts) == 0 || !wholeOf(m.Mounts[0], c.have.Device.Number), "the top mount is not the stage",
				c.stageStands(), "the stage is as asked")
		}
		t, m := c.want.Targets[part.Path], c.have.Targets[part.Path]
		return firstOf(
			t == nil || t.Gone, "the target is not wanted",
			notSeen(m) || len(m.Mounts) == 0 || !c.whole(m.Mounts[0]), "the top mount is not the volume's",
			t != nil && c.targetStands(t), "the target is as asked")
	}},
	reconciler.AttachView: {"attach-view needs an attached writable device and a target that wants it", func(c *planCase, part state.Part) string {
		if part == state.SizePart() {
			return firstOf(!c.stageWanted() || !c.stageStands(), "the stage does not stand", !c.viewLags(), "the view has its size, or nobody wants it")
		}
		t := c.want.Targets[part.Path]
		return firstOf(
			t == nil || t.Gone || !c.wantsView(t), "the target wants no view",
			!c.stageWanted() || !c.stageStands(), "the stage does not stand",
			c.have.View.State == state.DeviceAttached, "the view is attached")
	}},
	reconciler.MarkRaw: {"mark-raw comes before a target that takes raw writes", func(c *planCase, part state.Part) string {
		t := c.want.Targets[part.Path]
		return firstOf(
			t == nil || t.Gone || t.Capability.Access != state.BlockAccess, "no raw target is wanted",
			!c.stageWanted() || !c.stageStands(), "the stage does not stand",
			!c.takesRawWrites(t), "nobody can write",
			c.have.Device.Raw, "it has the mark")
	}},
	reconciler.Bind: {"bind needs the stage to stand and a free target that may be made", func(c *planCase, part state.Part) string {
		t := c.want.Targets[part.Path]
		if t == nil || t.Gone {
			return "the target is not wanted"
		}
		return firstOf(
			c.sourced(), "there is nothing to bind",
			c.whyNotTarget(t) != "", c.whyNotTarget(t),
			c.wantsView(t) && c.have.View.State != state.DeviceAttached, "there is no view",
			c.takesRawWrites(t) && !c.have.Device.Raw, "nothing would remember that it was written raw",
			c.numberChanged(t), "the pod knows another number")
	}},
	reconciler.MountSource: {"mount-source needs a source, the stage to stand and a free target that may be made", func(c *planCase, part state.Part) string {
		t := c.want.Targets[part.Path]
		if t == nil || t.Gone {
			return "the target is not wanted"
		}
		return firstOf(!c.sourced(), "it has a device", c.whyNotTarget(t) != "", c.whyNotTarget(t))
	}},
}

// whyNotTarget says why nothing must be mounted at a target that is wanted.
func (c *planCase) whyNotTarget(t *state.Target) string {
	m := c.have.Targets[t.Path]
	return firstOf(
		!c.stageWanted() || !c.stageStands(), "the stage does not stand",
		!freePath(m, fileFor(t)), "the target is not free",
		m.File == state.NoFile && t.Accepted && !t.Asked, "a removed target is made again though nobody asks")
}

// whyNotMake says why no layer must be made on the source.
func (c *planCase) whyNotMake() string {
	s, d := c.want.Stage, c.source()
	return firstOf(
		!c.layered() || !c.stageWanted() || !c.have.Device.Unmade || c.open(), "no layer is to be made",
		s != nil && s.ReadOnly || d.ReadOnly, "nothing is to be written",
		d.State != state.DeviceAttached || d.Missing || d.Err != nil, "no source is attached",
		c.stranger(), "it is another device than the stage was seen with",
		d.Held, "the source is held",
		d.Raw, "it was published raw",
		d.Formatted != "", "it bore a layer before",
		c.have.Device.NeedsSecret, "its secret is not at hand",
		c.have.Beneath.Err != nil || c.have.Beneath.Kind == state.ContentsUnread, "the source was not read",
		c.remembers(), "the stage was seen with a file system")
}

func blankKind(kind state.ContentsKind) bool {
	return kind == state.ContentsBlank || kind == state.ContentsUnproven
}

func (c *planCase) layered() bool { return len(c.have.Lower) > 0 }

// source is the device of the backend.
func (c *planCase) source() state.Device {
	if c.layered() {
		return c.have.Lower[0].Device
	}
	return c.have.Device
}

// open reports whether a device stands for the layer, be it on another element.
func (c *planCase) open() bool {
	d := c.have.Device
	return d.State == state.DeviceAttached || d.State == state.DeviceDetaching || d.Stray
}

// standing is the highest device that stands.
func (c *planCase) standing() state.Device {
	if c.layered() && !c.open() {
		return c.source()
	}
	return c.have.Device
}

// sourceStands reports whether the device of the backend is as asked.
func (c *planCase) sourceStands() bool {
	d := c.source()
	return d.State == state.DeviceAttached && !c.unknown() && !c.stranger() && d.Err == nil && !d.Missing && d.Size >= d.Capacity && d.ReadOnly == c.want.Stage.ReadOnly
}

// whyNotWrite says why a device must not be written to below a file system; why
// is what else stands against it.
func (c *planCase) whyNotWrite(part state.Part, why string) string {
	d := c.have.Device
	return firstOf(
		part != state.StagePart() || !c.stageWanted() || c.wantsBlock(), "no mounted stage is wanted",
		c.want.Stage != nil && c.want.Stage.ReadOnly, "read-only access was asked for",
		d.State != state.DeviceAttached || d.Missing, "no device is attached",
		d.Err != nil, "what the backend knows was not read",
		d.ReadOnly, "the device is read-only",
		c.have.View.Held, "its view is held",
		d.Held, "the device is held",
		c.somewhere(c.showsAt), "the device is mounted",
		c.contentsUnseen(), "the contents were not seen",
		notSeen(c.have.Stage), "the staging path was not seen",
		why != "", why)
}

// ---- Rules for plans. ----

var planStateRules = []struct {
	name   string
	broken func(c *planCase) string
}{
	{"settled means that it holds", func(c *planCase) string {
		for part, v := range c.plan.Verdicts {
			if v.Settled && !c.holds(part) && (v.Problem == reconciler.Problem{} || !c.leftBehind(part)) {
				return part.String()
			}
		}
		return ""
	}},
	{"what holds is settled and left alone", func(c *planCase) string {
		for _, part := range c.parts {
			v := c.plan.Verdicts[part]
			if c.holds(part) && (!v.Settled || v.Problem != reconciler.Problem{} || len(c.ownSteps(part)) > 0) {
				return part.String()
			}
		}
		return ""
	}},
	{"what is not known settles nothing, and is not taken for absent", func(c *planCase) string {
		for part, v := range c.plan.Verdicts {
			m := c.have.Stage
			intent := c.want.Intent(part)
			if part.Kind == state.TargetKind {
				m = c.have.Targets[part.Path]
			}
			record := c.sourced() && part == state.StagePart() && c.stageWanted() // nothing stands at its path
			dark := unseen(m) && !record || c.unknown() && (part.Kind != state.TargetKind || !intent.Gone || len(m.Mounts) > 0)
			if dark && v.Settled {
				return part.String() + " is settled in the dark"
			}
		}
		for _, step := range c.plan.Steps {
			switch step.Action {
			case reconciler.Unbind, reconciler.RemoveTarget:
			case reconciler.Unmount, reconciler.DetachView: // of what is known; the device stays
				if c.have.Device.State == state.DeviceUnknown {
					return step.String() + " in the dark"
				}
			default:
				if c.unknown() {
					return step.String() + " in the dark"
				}
			}
		}
		return ""
	}},
	{"what other nodes can reach is set up for who asks only, and formatted if it is proven that nobody else has it", func(c *planCase) string {
		if !c.have.Device.Shared {
			return ""
		}
		for _, step := range c.plan.Steps {
			switch step.Action {
			case reconciler.BeginFormat, reconciler.Erase, reconciler.Format:
				if !c.have.Device.Exclusive {
					return step.String() + " without proof"
				}
			case reconciler.Attach, reconciler.Check, reconciler.Mount:
			case reconciler.Detach:
				if !c.stageWanted() {
					continue
				}
			case reconciler.Unmount, reconciler.Unbind:
				if !c.stageWanted() || !c.broken() || c.want.Intent(step.Part).Gone {
					continue
				}
			default:
				continue
			}
			if !c.asked() {
				return step.String() + " unasked"
			}
		}
		return ""
	}},
	{"what is shown grows with its device, asked or not", func(c *planCase) string {
		f := c.have.Contents
		grows := c.stageWanted() && !c.sourced() && c.stageStands() && !c.wantsBlock() && !c.want.Stage.ReadOnly && f.Growable && f.GrowsMounted
		follows := c.stageWanted() && !c.sourced() && c.stageStands() && c.viewLags()
		return firstOf(
			grows && !slices.Contains(c.plan.Steps, reconciler.Step{Action: reconciler.GrowFilesystem, Part: state.SizePart()}), "the file system does not",
			follows && !slices.Contains(c.plan.Steps, reconciler.Step{Action: reconciler.AttachView, Part: state.SizePart()}), "the view does not")
	}},
	{"what is mounted from a source has steps at its paths only", func(c *planCase) string {
		for _, step := range c.plan.Steps {
			switch step.Action {
			case reconciler.Unbind, reconciler.RemoveTarget, reconciler.Unmount, reconciler.MountSource, reconciler.SetAttributes:
			default:
				if c.sourced() {
					return step.String()
				}
			}
		}
		return ""
	}},
	{"every part has one of four verdicts, and a step exactly when under way", func(c *planCase) string {
		if len(c.parts) != len(c.plan.Verdicts) {
			return fmt.Sprintf("%d verdicts for %d parts", len(c.plan.Verdicts), len(c.parts))
		}
		for _, part := range c.parts {
			v, known := c.plan.Verdicts[part]
			steps := len(c.ownSteps(part))
			stuck := v.Problem != reconciler.Problem{}
			underWay := !v.Settled && !stuck && len(v.Needs) == 0
			why := firstOf(
				!known, "no verdict",
				underWay && steps == 0, "silently stuck",
				steps > 1 && part != state.SizePart(), "two steps at once", // a size may grow the device and the file system
				!underWay && steps != 0, "a step without need",
				len(v.Needs) > 0 && (v.Settled || stuck), "two verdicts",
				stuck && v.Problem.Text == "", "a problem without words")
			if why != "" {
				return part.String() + ": " + why
			}
		}
		return ""
	}},
	{"needs lead to a step or a problem, never in a circle", func(c *planCase) string {
		for part, v := range c.plan.Verdicts {
			if len(v.Needs) > 0 && !c.leads(part, len(c.plan.Verdicts)) {
				return part.String()
			}
		}
		return ""
	}},
	{"what is stuck, or left behind, has a cause, which is told with its class", func(c *planCase) string {
		for part, v := range c.plan.Verdicts {
			if v.Problem != (reconciler.Problem{}) && c.causeOf(part, v) == nil {
				return part.String()
			}
		}
		return ""
	}},
	{"what must go is planned before what must come, in the order of MakePlan", func(c *planCase) string {
		last := 0
		for _, step := range c.plan.Steps {
			r := c.rank(step)
			if r < last {
				return step.String() + " comes too late"
			}
			last = r
		}
		return ""
	}},
	{"no step is planned twice", func(c *planCase) string {
		for i, step := range c.plan.Steps {
			if slices.Contains(c.plan.Steps[:i], step) {
				return step.String()
			}
		}
		return ""
	}},
}

// rank is the place of a step: pods, stage, device for what must go, then
// device, stage, pods for what must come. A part that stays may need something
// taken away to be put right; that is part of its coming.
func (c *planCase) rank(step reconciler.Step) int {
	intent := c.want.Intent(step.Part)
	gone := intent != nil && intent.Gone
	switch {
	case gone && step.Part.Kind == state.TargetKind:
		return 0
	case gone:
		return 1
	case step.Action == reconciler.DetachView: // of a stage that stays: nobody shows it
		return 2
	case step.Part.Kind == state.StageKind:
		return 3
	case step.Part.Kind == state.SizeKind:
		return 4
	}
	return 5
}

// leads reports whether the needs of a part end at steps or problems within
// that many hops.
func (c *planCase) leads(part state.Part, hops int) bool {
	v, known := c.plan.Verdicts[part]
	switch {
	case !known || hops == 0 || v.Settled:
		return false
	case v.Problem != (reconciler.Problem{}), len(c.ownSteps(part)) > 0:
		return true
	}
	for _, need := range v.Needs {
		if !c.leads(need, hops-1) {
			return false
		}
	}
	return len(v.Needs) > 0
}

// explained reports whether a part that is not settled is stuck, or waits for one that is.
func (c *planCase) explained(part state.Part, hops int) bool {
	v := c.plan.Verdicts[part]
	if v.Problem != (reconciler.Problem{}) {
		return true
	}
	return hops > 0 && slices.ContainsFunc(v.Needs, func(need state.Part) bool { return c.explained(need, hops-1) })
}

// ---- Causes: what a part may be stuck on, and as what that is told. ----

// planCause is a reason for which a part may be stuck. Its class decides whether
// the caller tries again.
type planCause struct {
	class state.Class
	words string // in what is told
	when  func(c *planCase) bool
}

// causeOf returns the cause that a verdict tells, if it is one of the part's and
// there in this state.
func (c *planCase) causeOf(part state.Part, v reconciler.Verdict) *planCause {
	if v.Problem == (reconciler.Problem{}) {
		return nil
	}
	defer func() { c.target, c.place = nil, state.Mountpoint{} }()
	if part.Kind == state.TargetKind {
		c.target, c.place = c.want.Targets[part.Path], c.have.Targets[part.Path]
	} else {
		c.place = c.have.Stage
	}
	for _, causes := range c.causesFor(part, v.Settled) {
		for _, cause := range causes {
			if cause.class == v.Problem.Class && strings.Contains(v.Problem.Text, cause.words) && cause.when(c) {
				return cause
			}
		}
	}
	return nil
}

// causesFor returns the causes on which a part can be stuck.
func (c *planCase) causesFor(part state.Part, settled bool) [][]*planCause {
	switch {
	case settled && part.Kind == state.TargetKind && c.leftBehind(part):
		return [][]*planCause{residueCauses}
	case settled:
		return nil
	case part.Kind == state.SizeKind && c.stageWanted() && !c.wantsBlock() && !c.sourced() && c.contentsUnseen():
		return [][]*planCause{unreadCauses}
	case part.Kind == state.SizeKind:
		return [][]*planCause{sizeCauses}
	case part.Kind == state.TargetKind && !c.target.Gone && !c.stageWanted():
		return [][]*planCause{publishCauses}
	case part.Kind == state.TargetKind && notSeen(c.place):
		return [][]*planCause{placeCauses}
	case part.Kind == state.TargetKind && c.target.Gone:
		return [][]*planCause{unpublishCauses}
	case part.Kind == state.TargetKind:
		return [][]*planCause{publishCauses}
	case !c.stageWanted():
		return [][]*planCause{placeCauses, unstageCauses}
	case c.sourced():
		return [][]*planCause{unknownCauses, sourceCauses}
	}
	causes := [][]*planCause{unknownCauses, deviceCauses}
	if c.layered() {
		causes = append(causes, layerCauses)
	}
	switch {
	case notSeen(c.place):
		return append(causes, placeCauses)
	case c.wantsBlock():
		return append(causes, rawCauses)
	case c.broken() && c.contentsUnseen():
		return append(causes, unreadCauses)
	case c.broken():
		return append(causes, brokenCauses)
	case len(c.place.Mounts) > 0:
		return append(causes, mountedCauses)
	case c.contentsUnseen():
		return append(causes, stagingCauses, unreadCauses)
	}
	return append(causes, stagingCauses, contentsCauses)
}

// planCauses are all of them. Each is met in some state.
var planCauses = [][]*planCause{
	unknownCauses, deviceCauses, layerCauses, sourceCauses, placeCauses, rawCauses, mountedCauses, stagingCauses, unreadCauses, brokenCauses, contentsCauses,
	unstageCauses, sizeCauses, publishCauses, unpublishCauses, residueCauses,
}

const notLookedAt = "it was not looked at"

var (
	unknownCauses = []*planCause{
		{state.Unavailable, "not known now", (*planCase).unknown},
		{state.Unavailable, "unread", func(c *planCase) bool { return c.source().Err != nil }},
	}
	placeCauses = []*planCause{
		{state.Unavailable, errPlanNow.Error(), func(c *planCase) bool { return c.place.Err == errPlanNow }},
		{state.InvalidArgument, "a symbolic link", func(c *planCase) bool { return c.place.Err == errPlanPath }},
		{state.Unavailable, notLookedAt, func(c *planCase) bool { return c.place.Err == nil && c.place.File == state.UnknownFile }},
	}
	sourceCauses = []*planCause{
		{state.NotFound, "no such volume", func(c *planCase) bool { return c.have.Device.Missing }},
		{state.InvalidArgument, "no block device", (*planCase).wantsBlock},
		{state.InvalidArgument, "mounted as nfs4, and ext4 was asked for", func(c *planCase) bool { return c.want.Stage.Capability.FSType == "ext4" }},
	}

	// What the backend's device is stuck on.
	deviceCauses = []*planCause{
		{state.NotFound, "no such volume", func(c *planCase) bool { return c.source().Missing }},
		{state.FailedPrecondition, "staged from the device its, and what is there now", func(c *planCase) bool { return c.stranger() && c.source().Identity != "" }},
		{state.Unavailable, "does not tell now which one it is", func(c *planCase) bool { return c.stranger() && c.source().Identity == "" }},
		{state.FailedPrecondition, "which the plugin did not attach", func(c *planCase) bool { return c.source().State == state.DeviceForeign }},
		{state.FailedPrecondition, "was truncated", func(c *planCase) bool {
			return c.source().State == state.DeviceAbsent && c.source().Size < c.source().Capacity
		}},
		{state.FailedPrecondition, "so it cannot be attached", func(c *planCase) bool { return c.otherMode(c.source()) && c.shown() }},
		{state.Unavailable, "only when somebody asks", func(c *planCase) bool { return c.have.Device.Shared && !c.asked() }},
		{state.FailedPrecondition, "it is not formatted. Use an access mode", func(c *planCase) bool {
			return c.have.Device.Shared && !c.have.Device.Exclusive && (c.have.Device.Formatting || c.maybeBlank())
		}},
	}

	// What its layer is stuck on.
	layerCauses = []*planCause{
		{state.Unavailable, "waits for its secret", func(c *planCase) bool {
			d, source := c.have.Device, c.source()
			return d.NeedsSecret && (d.State != state.DeviceAttached || d.Size < d.Capacity || c.otherMode(d) || c.otherMode(source) || source.Formatting)
		}},
		{state.Unavailable, "not the volume's any more, and is in use", func(c *planCase) bool { return c.have.Device.Stray && c.shown() }},
		{state.FailedPrecondition, "which the plugin did not open", func(c *planCase) bool {
			return c.have.Device.State == state.DeviceForeign && !c.have.Device.Stray
		}},
		{state.FailedPrecondition, "does not bear it any more", func(c *planCase) bool { return c.have.Device.Unmade && c.open() }},
		{state.Unavailable, errPlanNow.Error(), func(c *planCase) bool { return c.have.Device.Unmade && c.have.Beneath.Err != nil }},
		{state.Unavailable, notLookedAt, func(c *planCase) bool {
			return c.have.Device.Unmade && c.have.Beneath.Kind == state.ContentsUnread
		}},
		{state.FailedPrecondition, "its data is lost, and it is not made again", func(c *planCase) bool {
			return c.have.Device.Unmade && (c.source().Formatted != "" || c.remembers())
		}},
		{state.FailedPrecondition, "no layer L is made on it", func(c *planCase) bool { return c.have.Device.Unmade && c.source().Raw }},
		{state.FailedPrecondition, "has no layer L yet, and read-only access", func(c *planCase) bool { return c.have.Device.Unmade && c.want.Stage.ReadOnly }},
		{state.Unavailable, "still held, which must end before its layer L is made", func(c *planCase) bool { return c.have.Device.Unmade && c.source().Held }},
		{state.FailedPrecondition, "neither blank nor bears the layer L", func(c *planCase) bool {
			return c.have.Device.Unmade && !c.source().Formatting && !blankKind(c.have.Beneath.Kind)
		}},
		{state.FailedPrecondition, "was interrupted and read-only access", func(c *planCase) bool {
			return c.source().Formatting && c.have.Device.Fresh && c.want.Stage.ReadOnly
		}},
		{state.FailedPrecondition, "in use, or not new", func(c *planCase) bool {
			return c.source().Formatting && !c.have.Device.Unmade && (!c.have.Device.Fresh || c.open() && c.shown())
		}},
		{state.FailedPrecondition, "so it cannot be opened", func(c *planCase) bool { return c.otherMode(c.have.Device) && c.shown() }},
	}

	// What a stage is stuck on when its device stands.
	rawCauses = []*planCause{
		{state.FailedPrecondition, "file system is mounted at the staging path", func(c *planCase) bool { return slices.ContainsFunc(c.have.Stage.Mounts, c.shows) }},
		{state.FailedPrecondition, "so the next mount erases it", (*planCase).rawCause},
	}
	mountedCauses = []*planCause{
		{state.FailedPrecondition, "it is not this volume's", func(c *planCase) bool { return !wholeOf(c.have.Stage.Mounts[0], c.have.Device.Number) }},
		{state.FailedPrecondition, "is broken, and lies over tmpfs", func(c *planCase) bool {
			m := c.have.Stage.Mounts
			return m[0].Corrupt && len(m) > 1 && !c.shows(m[1])
		}},
		{state.FailedPrecondition, "its data was swapped", (*planCase).swapped},
		{state.FailedPrecondition, "as xfs, and ext4 was asked for", func(c *planCase) bool { return c.have.Stage.Mounts[0].FSType == "xfs" }},
		{state.FailedPrecondition, "has turned read-only", func(c *planCase) bool { return c.have.Stage.Mounts[0].SuperReadOnly && !c.want.Stage.ReadOnly }},
	}
	unreadCauses = []*planCause{
		{state.Unavailable, errPlanNow.Error(), func(c *planCase) bool { return c.have.Contents.Err != nil }},
		{state.Unavailable, notLookedAt, func(c *planCase) bool { return c.contentsUnseen() && c.have.Contents.Err == nil }},
	}
	brokenCauses = []*planCause{
		{state.FailedPrecondition, "its data was swapped", (*planCase).swapped},
		{state.FailedPrecondition, "holds none now", func(c *planCase) bool {
			return c.have.Device.Formatting || c.have.Contents.Kind != state.ContentsFilesystem
		}},
		{state.Unavailable, "kept by somebody", func(c *planCase) bool { return len(c.have.Keepers) > 0 }},
		{state.Unavailable, "targets are covered, not broken, or cannot be looked at", (*planCase).brokenElsewhere},
	}
	stagingCauses = []*planCause{
		{state.FailedPrecondition, ", not a directory", func(c *planCase) bool { return c.place.File != state.NoFile && c.place.File != state.Directory }},
		{state.FailedPrecondition, "holds files that the mount would hide", func(c *planCase) bool { return c.place.File == state.Directory && !c.place.Empty }},
		{state.FailedPrecondition, "made again only when the volume is staged or published", func(c *planCase) bool {
			return c.place.File == state.NoFile && c.want.Stage.Accepted && !c.asked()
		}},
	}
	contentsCauses = []*planCause{
		{state.FailedPrecondition, "its data was swapped", (*planCase).swapped},
		{state.FailedPrecondition, "its data is lost, and it is not formatted again", func(c *planCase) bool { return c.toFormat() && c.remembers() }},
		{state.FailedPrecondition, "published as a raw block device before", func(c *planCase) bool { return c.toFormat() && c.have.Device.Raw }},
		{state.FailedPrecondition, "was interrupted and read-only access", func(c *planCase) bool { return c.have.Device.Formatting && c.want.Stage.ReadOnly }},
		{state.FailedPrecondition, "is blank and read-only access", func(c *planCase) bool { return c.maybeBlank() && c.want.Stage.ReadOnly }},
		{state.FailedPrecondition, "layer L is not new", func(c *planCase) bool { return c.layered() && c.maybeBlank() && !c.have.Device.Fresh }},
		{state.FailedPrecondition, "was formatted as ext4 before", func(c *planCase) bool {
			return c.maybeBlank() && !c.have.Device.Formatting && c.have.Device.Formatted != ""
		}},
		{state.FailedPrecondition, "needs at least 1000", func(c *planCase) bool { return c.toFormat() && c.have.Device.Size < c.have.Smallest }},
		{state.Unavailable, "still held, which must end before formatting", func(c *planCase) bool { return c.toFormat() && c.claimed() }},
		{state.FailedPrecondition, "of type xfs, and ext4 was asked for", func(c *planCase) bool { return c.have.Contents.FSType == "xfs" }},
		{state.FailedPrecondition, "neither blank nor a file system", func(c *planCase) bool { return c.have.Contents.Kind == state.ContentsOther }},
		{state.Unavailable, "still held, which must end before checking or growing", func(c *planCase) bool {
			f := c.have.Contents
			return c.claimed() && !c.want.Stage.ReadOnly && (f.NeedsCheck || f.Growable && f.GrowsUnmounted)
		}},
	}

	// What the others are stuck on.
	unstageCauses = []*planCause{
		{state.Unavailable, "not known now", (*planCase).unknown},
		{state.Unavailable, "unread", func(c *planCase) bool { return c.unknown() && c.have.Device.Err != nil }},
		{state.FailedPrecondition, "mounted over the volume at the staging path", func(c *planCase) bool {
			m := c.have.Stage.Mounts
			return len(m) > 1 && !c.shows(m[0]) && c.shows(m[1])
		}},
		{state.Unavailable, "still held, which must end before it is detached", func(c *planCase) bool {
			d, v := c.standing(), c.have.View
			return v.State == state.DeviceDetaching || v.Held || d.State == state.DeviceDetaching || d.Held
		}},
	}
	sizeCauses = []*planCause{
		{state.FailedPrecondition, "not staged on this node", func(c *planCase) bool { return !c.stageWanted() }},
		{state.FailedPrecondition, "no device on this node", (*planCase).sourced},
		{state.FailedPrecondition, "mounted read-only and grows when", func(c *planCase) bool { return c.have.Contents.Growable && c.want.Stage.ReadOnly }},
		{state.FailedPrecondition, "CAP_SYS_RESOURCE", func(c *planCase) bool { return c.have.Contents.Growable && !c.have.Contents.GrowsMounted }},
	}
	publishCauses = []*planCause{
		{state.FailedPrecondition, "not staged on this node", func(c *planCase) bool { return !c.stageWanted() }},
		{state.FailedPrecondition, "restart the pod", func(c *planCase) bool { return c.numberChanged(c.target) }},
		{state.FailedPrecondition, "it is not this volume's", func(c *planCase) bool {
			return len(c.place.Mounts) > 0 && (!c.showsAt(c.target, c.place.Mounts[0]) || !c.rightKind(c.target, c.place.Mounts[0]))
		}},
		{state.FailedPrecondition, "made again only when the volume is published there again", func(c *planCase) bool {
			return c.place.File == state.NoFile && c.target.Accepted && !c.target.Asked
		}},
		{state.FailedPrecondition, ", not a ", func(c *planCase) bool { return c.place.File != state.NoFile && c.place.File != fileFor(c.target) }},
		{state.FailedPrecondition, "holds data that the volume would hide", func(c *planCase) bool { return c.place.File == fileFor(c.target) && !c.place.Empty }},
	}
	unpublishCauses = []*planCause{
		{state.Unavailable, "not known now", (*planCase).unknown},
		{state.Unavailable, "unread", func(c *planCase) bool { return c.unknown() && c.have.Device.Err != nil }},
		{state.FailedPrecondition, "is mounted over the volume", func(c *planCase) bool {
			return len(c.place.Mounts) > 0 && !c.showsAt(c.target, c.place.Mounts[0])
		}},
	}

	// What an end leaves, which is told when it is over.
	residueCauses = []*planCause{
		{state.FailedPrecondition, "it is not this volume's", func(c *planCase) bool { return len(c.place.Mounts) > 0 }},
		{state.FailedPrecondition, "holds files: move them away", func(c *planCase) bool { return c.place.File == state.Directory && !c.place.Empty }},
		{state.FailedPrecondition, "the plugin did not make", func(c *planCase) bool { return c.place.File != state.Directory }},
	}
)

// toFormat reports whether nothing that is known is on a device, or its mark says so.
func (c *planCase) toFormat() bool { return c.have.Device.Formatting || c.maybeBlank() }

// claimed reports whether somebody uses the device.
func (c *planCase) claimed() bool {
	return c.have.Device.Held || c.have.View.Held || c.someTargetBound()
}

// shown reports whether the highest device that stands is, or may be, in use.
func (c *planCase) shown() bool {
	return c.standing().Held || c.have.View.State != state.DeviceAbsent || c.somewhere(c.showsAt) || c.someTargetUnseen() || unseen(c.have.Stage)
}

// otherMode reports whether a device stands that takes writes and should not, or the reverse.
func (c *planCase) otherMode(d state.Device) bool {
	return d.State == state.DeviceAttached && d.ReadOnly != c.want.Stage.ReadOnly
}

// ---- What holds, judged from the desired and the actual state alone. ----

// planCase is one desired and one actual state, and the plan for them.
type planCase struct {
	want   *state.Volume
	parts  []state.Part     // of want
	layer  string           // of the step that is judged
	target *state.Target    // of the part that is judged, nil for others
	place  state.Mountpoint // of that part
	have   state.Actual
	plan   reconciler.Plan
}

func (c *planCase) String() string {
	want, err := json.Marshal(c.want)
	if err != nil {
		return err.Error()
	}
	return strings.Join([]string{
		fmt.Sprintf("want %s", want),
		fmt.Sprintf("device %+v", c.have.Device), fmt.Sprintf("view %+v", c.have.View),
		fmt.Sprintf("contents %+v", c.have.Contents), fmt.Sprintf("stage %+v", c.have.Stage),
		fmt.Sprintf("targets %+v", c.have.Targets),
		fmt.Sprintf("steps %v", c.plan.Steps), fmt.Sprintf("verdicts %+v", c.plan.Verdicts),
	}, "\n")
}

func (c *planCase) steps(part state.Part) []reconciler.Step {
	var steps []reconciler.Step
	for _, step := range c.plan.Steps {
		if step.Part == part {
			steps = append(steps, step)
		}
	}
	return steps
}

// ownSteps leaves out the two steps that are planned whatever is asked of their
// part: detaching an idle view and growing into the device.
func (c *planCase) ownSteps(part state.Part) []reconciler.Step {
	return slices.DeleteFunc(c.steps(part), func(s reconciler.Step) bool {
		return s.Action == reconciler.DetachView && c.stageWanted()
	})
}

func (c *planCase) stageWanted() bool { return c.want.Stage != nil && !c.want.Stage.Gone }

func (c *planCase) wantsBlock() bool {
	return c.want.Stage != nil && c.want.Stage.Capability.Access == state.BlockAccess
}

func (c *planCase) wantsView(t *state.Target) bool {
	return t.Capability.Access == state.BlockAccess && t.ReadOnly && !c.have.Device.ReadOnly
}

// takesRawWrites reports whether who has the target can write to the device.
func (c *planCase) takesRawWrites(t *state.Target) bool {
	return t.Capability.Access == state.BlockAccess && !t.ReadOnly && !c.have.Device.ReadOnly
}

// maybeBlank reports whether a look found nothing that speaks against a format.
func (c *planCase) maybeBlank() bool {
	return c.have.Contents.Kind == state.ContentsBlank || c.have.Contents.Kind == state.ContentsUnproven
}

func (c *planCase) someTargetWantsView() bool {
	for _, t := range c.want.Targets {
		if !t.Gone && c.wantsView(t) {
			return true
		}
	}
	return false
}

// viewLags reports whether a target wants the view, and it is smaller than its device.
func (c *planCase) viewLags() bool {
	v := c.have.View
	return v.State == state.DeviceAttached && v.Size < c.have.Device.Size && c.someTargetWantsView()
}

// node is the device whose node a block target shows.
func (c *planCase) node(t *state.Target) state.DeviceNumber {
	if c.wantsView(t) {
		return c.have.View.Number
	}
	return c.have.Device.Number
}

func (c *planCase) numberChanged(t *state.Target) bool {
	return t.Capability.Access == state.BlockAccess && t.Accepted && t.Device != state.DeviceNumber{} && t.Device != c.node(t)
}

// mountOf reports whether m is all of a device: its file system or its node.
func mountOf(m state.Mount, n state.DeviceNumber) bool {
	return n != state.DeviceNumber{} && m.Device == n && (m.Node || m.Root == "/")
}

func wholeOf(m state.Mount, n state.DeviceNumber) bool { return mountOf(m, n) && !m.Node }

// sourced reports whether the volume is mounted from a source and has no device.
func (c *planCase) sourced() bool { return c.have.Source != nil }

// whole reports whether a mount is all of the file system that targets show.
func (c *planCase) whole(m state.Mount) bool {
	if c.sourced() {
		return m.FSType == planSource.FSType && m.Source == planSource.Source && m.Root == "/"
	}
	return wholeOf(m, c.have.Device.Number)
}

// shows reports whether a mount is one of the volume.
func (c *planCase) shows(m state.Mount) bool {
	return c.sourced() && c.whole(m) || mountOf(m, c.have.Device.Number) || mountOf(m, c.have.View.Number)
}

// showsAt is shows at a target, nil for the staging path. A node that the
// target was seen with is the volume's still when the device has gone.
func (c *planCase) showsAt(t *state.Target, m state.Mount) bool {
	return c.shows(m) || t != nil && m.Node && mountOf(m, t.Device)
}

// somewhere reports whether a mount at any path of the record is such.
func (c *planCase) somewhere(such func(*state.Target, state.Mount) bool) bool {
	for _, m := range c.have.Stage.Mounts {
		if such(nil, m) {
			return true
		}
	}
	return c.atSomeTarget(such)
}

func (c *planCase) atSomeTarget(such func(*state.Target, state.Mount) bool) bool {
	for path, t := range c.want.Targets {
		for _, m := range c.have.Targets[path].Mounts {
			if such(t, m) {
				return true
			}
		}
	}
	return false
}

func (c *planCase) someTargetBound() bool { return c.atSomeTarget(c.showsAt) }

// someTargetUnseen reports whether a target could not be looked at, for a
// reason other than that nothing can be mounted there.
func (c *planCase) someTargetUnseen() bool {
	for path := range c.want.Targets {
		if unseen(c.have.Targets[path]) {
			return true
		}
	}
	return false
}

// notSeen reports whether nothing is known of a path.
func notSeen(m state.Mountpoint) bool { return m.Err != nil || m.File == state.UnknownFile }

// unseen reports whether something may be mounted at a path of which nothing is known.
func unseen(m state.Mountpoint) bool {
	return notSeen(m) && (m.Err == nil || !state.ClassOf(m.Err).Final())
}

// contentsUnseen reports whether nothing is known of what the device holds.
func (c *planCase) contentsUnseen() bool {
	return c.have.Contents.Err != nil || c.have.Contents.Kind == state.ContentsUnread
}

// unknown reports whether it is unknown which devices are the volume's.
func (c *planCase) unknown() bool {
	return c.have.Device.State == state.DeviceUnknown || c.have.View.State == state.DeviceUnknown || c.source().State == state.DeviceUnknown
}

func (c *planCase) holdsFilesystem() bool {
	f := c.have.Contents
	return f.Err == nil && f.Kind == state.ContentsFilesystem && f.FSType == c.want.Stage.Capability.FSType
}

// remembers reports whether the stage was seen to hold with a file system.
func (c *planCase) remembers() bool { return c.want.Stage != nil && c.want.Stage.UUID != "" }

// swapped reports whether the device shows another file system than that one.
func (c *planCase) swapped() bool {
	f := c.have.Contents
	return c.remembers() && f.Err == nil && f.UUID != "" && f.UUID != c.want.Stage.UUID
}

// broken reports whether the volume's file system is broken where it is mounted,
// at the staging path or, when nothing is mounted there, at a target.
func (c *planCase) broken() bool {
	if len(c.have.Stage.Mounts) > 0 {
		return c.corrupt(c.have.Stage)
	}
	for _, m := range c.have.Targets {
		if c.corrupt(m) {
			return true
		}
	}
	return false
}

func (c *planCase) corrupt(m state.Mountpoint) bool {
	return len(m.Mounts) == 1 && wholeOf(m.Mounts[0], c.have.Device.Number) && m.Mounts[0].Corrupt
}

// brokenCause reports whether a broken file system must stay: something keeps it
// that is not the record's, or its data is not there to be mounted anew.
func (c *planCase) brokenCause() bool {
	return c.contentsUnseen() || slices.ContainsFunc(brokenCauses, func(cause *planCause) bool { return cause.when(c) })
}

// brokenElsewhere reports whether a target that shows it, or may, is not broken too.
func (c *planCase) brokenElsewhere() bool {
	for path, t := range c.want.Targets {
		m := c.have.Targets[path]
		bound := slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return c.showsAt(t, m) })
		if unseen(m) || bound && !c.corrupt(m) {
			return true
		}
	}
	return false
}

// freePath reports whether something may be mounted at a path: nothing is
// there, or an empty directory or file of the kind.
func freePath(m state.Mountpoint, kind state.FileType) bool {
	return !notSeen(m) && len(m.Mounts) == 0 && (m.File == state.NoFile || m.File == kind && m.Empty)
}

// attributesMet reports whether a mount has the attributes that flags and the
// read-only setting ask for. Only the flags that worlds know count.
func attributesMet(a state.Attributes, readOnly bool, flags ...string) bool {
	readOnly = readOnly || slices.Contains(flags, "ro")
	return (a&state.ReadOnly != 0) == readOnly && (a&state.NoDev != 0 || !slices.Contains(flags, "nodev"))
}

func (c *planCase) deviceStands() bool {
	d := c.have.Device
	if c.layered() && (d.State != state.DeviceAttached || d.Unmade || d.Err != nil || d.Size < d.Capacity || d.ReadOnly != c.want.Stage.ReadOnly || c.source().Formatting) {
		return false
	}
	return c.sourceStands()
}

// stageStands reports whether the wanted stage is exactly as asked.
func (c *planCase) stageStands() bool {
	s, mounts := c.want.Stage, c.have.Stage.Mounts
	if c.sourced() {
		return !c.sourceCause()
	}
	if !c.deviceStands() || c.wantsBlock() {
		return c.deviceStands() && !c.rawCause()
	}
	if notSeen(c.have.Stage) || len(mounts) == 0 || len(mounts) > 1 && c.shows(mounts[1]) {
		return false
	}
	m := mounts[0]
	return wholeOf(m, c.have.Device.Number) && m.FSType == s.Capability.FSType && !m.Corrupt && !c.swapped() &&
		(s.ReadOnly || !m.SuperReadOnly) && attributesMet(m.Attributes, s.ReadOnly, s.Capability.Flags...)
}

// targetStands reports whether a wanted target is exactly as asked.
func (c *planCase) targetStands(t *state.Target) bool {
	m := c.have.Targets[t.Path]
	if !c.stageWanted() || !c.stageStands() || notSeen(m) || len(m.Mounts) == 0 || len(m.Mounts) > 1 && c.showsAt(t, m.Mounts[1]) {
		return false
	}
	top := m.Mounts[0]
	if t.Capability.Access == state.BlockAccess {
		return top.Node && mountOf(top, c.node(t)) && !c.numberChanged(t) && (!c.wantsView(t) || c.have.View.State == state.DeviceAttached) &&
			(!c.takesRawWrites(t) || c.have.Device.Raw)
	}
	s := c.want.Stage
	return c.whole(top) && !top.Corrupt &&
		attributesMet(top.Attributes, s.ReadOnly || t.ReadOnly, append(slices.Clone(s.Capability.Flags), t.Capability.Flags...)...)
}

// holds reports whether a part is exactly as asked.
func (c *planCase) holds(part state.Part) bool {
	d, f := c.source(), c.have.Contents
	switch part.Kind {
	case state.StageKind:
		if c.stageWanted() {
			return c.stageStands()
		}
		return !notSeen(c.have.Stage) && !c.somewhere(c.showsAt) && !c.someTargetUnseen() && c.have.View.State == state.DeviceAbsent &&
			!(c.layered() && (c.open() || c.have.Device.State == state.DeviceUnknown)) && (d.State == state.DeviceAbsent || d.State == state.DeviceForeign)
	case state.SizeKind:
		if !c.stageWanted() || !c.stageStands() || c.sourced() || d.Size < c.want.Size.Bytes {
			return false
		}
		if c.wantsBlock() {
			return !c.viewLags()
		}
		return !c.contentsUnseen() && (!f.Growable || c.want.Size.Accepted && (!f.GrowsMounted || c.want.Stage.ReadOnly))
	}
	t, m := c.want.Targets[part.Path], c.have.Targets[part.Path]
	switch {
	case !t.Gone:
		return c.targetStands(t)
	case notSeen(m):
		return t.Withdrawn && !unseen(m)
	case c.unknown() && len(m.Mounts) > 0:
		return false // it may be the volume's
	}
	return (t.Withdrawn || m.File == state.NoFile) && !slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return c.showsAt(t, m) })
}

// leftBehind reports whether a target that is to go shows nothing of the volume
// and something that the plugin did not make.
func (c *planCase) leftBehind(part state.Part) bool {
	t, m := c.want.Targets[part.Path], c.have.Targets[part.Path]
	if t == nil || !t.Gone || notSeen(m) || c.unknown() && len(m.Mounts) > 0 || slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return c.showsAt(t, m) }) {
		return false
	}
	return len(m.Mounts) > 0 || !m.Empty || m.File != state.Directory && m.File != state.RegularFile
}

// rightKind reports whether a mount is what the plugin binds at such a target,
// right or wrong in detail: a node, or the file system on the device itself.
func (c *planCase) rightKind(t *state.Target, m state.Mount) bool {
	if t.Capability.Access == state.BlockAccess {
		return m.Node
	}
	return c.whole(m)
}

// fileFor is what a target is made as.
func fileFor(t *state.Target) state.FileType {
	if t.Capability.Access == state.BlockAccess {
		return state.RegularFile
	}
	return state.Directory
}

// sourceCause tells why a volume cannot be mounted from its source.
func (c *planCase) sourceCause() bool {
	d := c.have.Device
	return d.Err != nil || d.Missing || c.wantsBlock() || c.want.Stage.Capability.FSType != planSource.FSType
}

// rawCause tells why a device that stands must not be shown raw: its file
// system is or may be mounted, or the next mount would erase it.
func (c *planCase) rawCause() bool {
	s := c.want.Stage
	return notSeen(c.have.Stage) || slices.ContainsFunc(c.have.Stage.Mounts, c.shows) ||
		c.have.Device.Formatting && !c.layered() && !s.ReadOnly && !s.Accepted
}

// asked reports whether a caller waits for the stage, or for a target that needs it.
func (c *planCase) asked() bool {
	for _, t := range c.want.Targets {
		if t.Asked && !t.Gone {
			return true
		}
	}
	return c.want.Stage != nil && c.want.Stage.Asked
}

// stranger reports whether the device is, or may be, another than the one that
// the stage was seen with.
func (c *planCase) stranger() bool {
	s, d := c.want.Stage, c.source()
	return s != nil && s.Identity != "" && d.Identity != s.Identity && (d.Identity != "" || d.State == state.DeviceAttached)
}

// firstOf returns the words after the first condition that is true.
func firstOf(pairs ...any) string {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i].(bool) {
			return pairs[i+1].(string)
		}
	}
	return ""
}

// ---- Worlds: desired and actual states in few bytes, and a model of the kernel. ----

// planWorld is a desired state and what is really there. It is comparable.
type planWorld struct {
	stage    stageWorld
	at       placeWorld // of the stage
	targets  [2]targetWorld
	size     sizeWorld
	device   deviceWorld
	contents contentsWorld // of the device, whether it can be read now or not
	layer    layerWorld    // on the device, and then contents and mounts are of the layer's
	source   sourceWorld
}

// sourceWorld is what a volume without a device is mounted from.
type sourceWorld struct {
	wanted bool
	other  bool // the stage asks for another type of file system
}

// layerWorld is a layer of the volume.
type layerWorld struct {
	wanted                        bool
	state                         standing
	made, stamped, stray          bool // what the source bears, and on what the layer's device stands
	readOnly, held, short, locked bool
	beneath                       contentsKind // of a source that does not bear the layer
}

type wish uint8

const (
	wantNothing wish = iota
	wantThere
	wantGone
)

type stageWorld struct {
	want                              wish
	block, readOnly, noDev, withdrawn bool
	remembers                         bool // the file system that it was seen with
	identity                          bool // it remembers that of the device
	accepted, asked                   bool
}

type targetWorld struct {
	want                                               wish
	block, readOnly, noDev, withdrawn, accepted, asked bool
	remembers                                          number
	at                                                 placeWorld
}

type sizeWorld struct {
	want, larger, accepted bool
}

// number names a block device.
type number uint8

const (
	noDevice number = iota
	theDevice
	theView
	olderDevice // which the volume once was
	otherDevice // which the volume never was
	theSource   // beneath a layer
)

func (n number) number() state.DeviceNumber {
	if n == noDevice {
		return state.DeviceNumber{}
	}
	return state.DeviceNumber{Major: 7, Minor: uint32(n)}
}

type deviceWorld struct {
	state                 standing
	missing, readOnly     bool
	held                  heldWorld
	bytes                 bytesWorld
	view                  standing
	viewHeld, viewShort   bool // it is smaller than its device
	formatting, formatted bool
	unread                bool // what the backend knows of the volume
	raw                   bool
	identity              string // what it says that it is
	shared, exclusive     bool
}

// standing is the condition of a device, and whether it was looked at.
type standing uint8

const (
	isAbsent standing = iota
	isAttached
	isDetaching
	isForeign
	isUnlooked
)

func (s standing) state() state.DeviceState {
	return [...]state.DeviceState{state.DeviceAbsent, state.DeviceAttached, state.DeviceDetaching, state.DeviceForeign, state.DeviceUnknown}[s]
}

type heldWorld uint8

const (
	heldByMounts heldWorld = iota // by those at the paths of the record
	heldElsewhere
	heldUnseen // its mounts came after the look at the device
)

type bytesWorld uint8

const (
	bytesPromised bytesWorld = iota // 100, as the backend promised
	bytesUnknown                    // 100, and no promise is known
	bytesFewer                      // 50 of 100
	bytesGrown                      // 200, as the backend promised
)

type contentsWorld struct {
	kind                                          contentsKind
	check, growable, growsMounted, growsUnmounted bool
	swapped                                       bool // for another than a stage remembers
	tooSmall                                      bool // the device, for the file system wanted
}

type contentsKind uint8

const (
	holdsNothing contentsKind = iota
	holdsExt4
	holdsXFS
	holdsOther
	holdsUnreadable
	holdsUnproven
	holdsUnlooked // it was not looked at
)

// placeWorld is a path: the file there and what is mounted on it, the top first.
type placeWorld struct {
	file   fileWorld
	err    errWorld
	mounts [2]mountWorld
}

type fileWorld uint8

const (
	fileNone fileWorld = iota
	fileEmptyDirectory
	fileFullDirectory
	fileEmpty
	fileFull
	fileSpecial
)

type errWorld uint8

const (
	errNone     errWorld = iota
	errNow               // the path cannot be looked at now
	errPath              // it is no path to look at
	errUnlooked          // it was not looked at
)

type mountWorld struct {
	kind                                         mountKind
	of                                           number
	xfs, superReadOnly, corrupt, readOnly, noDev bool
}

type mountKind uint8

const (
	noMount mountKind = iota
	wholeMount
	subMount
	nodeMount
	otherMount  // of no block device
	sourceMount // of the volume's source
)

const (
	planStagePath = "/staging"
	planPathA     = "/pods/a/volume"
	planPathB     = "/pods/b/volume"
)

var (
	planPaths = [2]string{planPathA, planPathB}
	planFirst = state.TargetPart(planPathA)

	planSource = state.Source{FSType: "nfs4", Source: "server:/export"}

	errPlanNow  = errors.New("input/output error")
	errPlanPath = state.Errorf(state.InvalidArgument, "a symbolic link")
)

// look returns what the planner is told of a world, and what it decides.
func (w *planWorld) look() planCase {
	c := planCase{want: &state.Volume{ID: "vol", Targets: map[string]*state.Target{}}, have: state.Actual{Targets: map[string]state.Mountpoint{}}}
	if s := w.stage; s.want != wantNothing {
		capability := planCapability(s.block, s.noDev)
		c.want.Stage = &state.Stage{Path: planStagePath, Capability: capability, ReadOnly: s.readOnly, Intent: state.Intent{Gone: s.want == wantGone, Withdrawn: s.withdrawn, Accepted: s.accepted, Asked: s.asked}}
		if s.remembers {
			c.want.Stage.UUID = "its"
		}
		if s.identity {
			c.want.Stage.Identity = "its"
		}
		c.have.Stage = w.at.look()
	}
	for i, t := range w.targets {
		if t.want == wantNothing {
			continue
		}
		path := planPaths[i]
		c.want.Targets[path] = &state.Target{
			Path: path, Capability: planCapability(t.block, t.noDev), ReadOnly: t.readOnly, SeenDevice: state.SeenDevice{Device: t.remembers.number()},
			Intent: state.Intent{Gone: t.want == wantGone, Withdrawn: t.withdrawn, Accepted: t.accepted, Asked: t.asked},
		}
		if t.at.err != errUnlooked {
			c.have.Targets[path] = t.at.look()
		}
	}
	if w.size.want {
		c.want.Size = &state.Size{Bytes: 80, Intent: state.Intent{Accepted: w.size.accepted}}
		if w.size.larger {
			c.want.Size.Bytes = 200
		}
	}
	w.lookAtDevice(&c)
	if w.layer.wanted {
		w.lookAtLayer(&c)
	}
	if w.source.wanted {
		w.lookAtSource(&c)
	}
	c.parts = c.want.Parts()
	c.plan = reconciler.MakePlan(c.want, c.have)
	return c
}

func planCapability(block, noDev bool) state.Capability {
	c := state.Capability{Access: state.MountAccess, FSType: "ext4"}
	if block {
		c = state.Capability{Access: state.BlockAccess}
	}
	if noDev {
		c.Flags = []string{"nodev"}
	}
	return c
}

func (w *planWorld) lookAtDevice(c *planCase) {
	d := w.device
	c.have.View.State = d.view.state()
	if d.state == isUnlooked {
		return
	}
	stands := d.state == isAttached || d.state == isDetaching
	c.have.Device = state.Device{State: d.state.state(), Missing: d.missing, Formatting: d.formatting, Raw: d.raw, ReadOnly: stands && d.readOnly}
	have := &c.have.Device
	have.Identity, have.Shared, have.Exclusive = d.identity, d.shared, d.exclusive
	if d.formatted {
		have.Formatted = "ext4"
	}
	if d.unread {
		*have = state.Device{State: d.state.state(), ReadOnly: have.ReadOnly, Err: errors.New("unread")}
		if stands {
			have.Size = 100
		}
	}
	switch d.bytes {
	case bytesPromised:
		if d.unread {
			break
		}
		have.Size, have.Capacity = 100, 100
	case bytesUnknown:
		have.Size = 100
	case bytesFewer:
		have.Size, have.Capacity = 50, 100
	case bytesGrown:
		have.Size, have.Capacity = 200, 200
	}
	if !stands {
		return
	}
	have.Number = theDevice.number()
	if d.held == heldElsewhere {
		c.have.Keepers = []string{"somebody"}
	}
	have.Held = d.held == heldElsewhere || d.held == heldByMounts && w.mounted(theDevice)
	if d.view != isAbsent && d.view != isUnlooked {
		c.have.View = state.Device{State: d.view.state(), Number: theView.number(), ReadOnly: true, Held: d.viewHeld || w.mounted(theView), Size: have.Size}
		if d.viewShort {
			c.have.View.Size /= 2
		}
	}
	if d.state == isAttached && !d.unread && w.stage.want == wantThere && !w.stage.block {
		c.have.Contents = w.contents.look()
		if w.contents.tooSmall {
			c.have.Smallest = 1000
		}
	}
}

// lookAtLayer puts the layer on what was looked at as the device.
func (w *planWorld) lookAtLayer(c *planCase) {
	l, source := w.layer, c.have.Device
	if (source.Number != state.DeviceNumber{}) {
		source.Number, source.Held = theSource.number(), w.device.held == heldElsewhere
	}
	c.have.Lower = []state.Element{{Device: source}}
	c.have.Layer, c.have.Keepers = "L", nil
	d := state.Device{State: l.state.state(), NeedsSecret: l.locked, Missing: source.Missing, Identity: source.Identity, Err: source.Err}
	stands := l.state == isAttached || l.state == isDetaching
	if source.Attached() {
		d.Unmade = !l.made && !l.stray
		d.Fresh = l.made && l.stamped
	}
	d.Formatting, d.Raw = d.Fresh, source.Raw && !d.Fresh
	if stands || l.stray {
		d.Number, d.ReadOnly, d.Stray = theDevice.number(), l.readOnly, l.stray
		d.Held = l.held || w.mounted(theDevice)
		d.Size, d.Capacity = 99, 99
		if l.short {
			d.Size = 49
		}
	}
	wanted := w.stage.want == wantThere
	if c.have.Contents, c.have.Smallest = (state.Contents{}), 0; l.state == isAttached && d.Err == nil && wanted && !w.stage.block {
		c.have.Contents = w.contents.look()
	}
	if d.Unmade && wanted {
		c.have.Beneath = contentsWorld{kind: l.beneath}.look()
	}
	c.have.Device = d
}

// lookAtSource puts a source in the place of what was looked at as the device.
func (w *planWorld) lookAtSource(c *planCase) {
	d := c.have.Device
	if c.have.Device = (state.Device{State: d.State, Missing: d.Missing, Err: d.Err}); d.State != state.DeviceUnknown {
		c.have.Source = &planSource
	}
	if s := c.want.Stage; s != nil && s.Capability.Access == state.MountAccess && !w.source.other {
		s.Capability.FSType = planSource.FSType
	}
}

// mountedElsewhere reports whether a target of the volume shows its file system.
func (c *planCase) mountedElsewhere() bool {
	for path := range c.want.Targets {
		for _, m := range c.have.Targets[path].Mounts {
			if wholeOf(m, c.have.Device.Number) && !m.Node {
				return true
			}
		}
	}
	return false
}

// mounted reports whether a file system on the device is mounted. A bound node
// claims nothing.
func (w *planWorld) mounted(n number) bool {
	for _, place := range []placeWorld{w.at, w.targets[0].at, w.targets[1].at} {
		for _, m := range place.mounts {
			if m.of == n && (m.kind == wholeMount || m.kind == subMount) {
				return true
			}
		}
	}
	return false
}

func (f contentsWorld) look() state.Contents {
	switch f.kind {
	case holdsNothing:
		return state.Contents{Kind: state.ContentsBlank}
	case holdsOther:
		return state.Contents{Kind: state.ContentsOther}
	case holdsUnreadable:
		c := state.Contents{Err: errPlanNow}
		if f.swapped {
			c.UUID = "another"
		}
		return c
	case holdsUnproven:
		return state.Contents{Kind: state.ContentsUnproven}
	case holdsUnlooked:
		return state.Contents{}
	}
	c := state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", NeedsCheck: f.check, Growable: f.growable, GrowsMounted: f.growsMounted, GrowsUnmounted: f.growsUnmounted}
	if f.kind == holdsXFS {
		c.FSType = "xfs"
	}
	c.UUID = "its"
	if f.swapped {
		c.UUID = "another"
	}
	return c
}

func (p placeWorld) look() state.Mountpoint {
	switch p.err {
	case errUnlooked:
		return state.Mountpoint{}
	case errNow:
		return state.Mountpoint{Err: errPlanNow}
	case errPath:
		return state.Mountpoint{Err: errPlanPath}
	}
	m := state.Mountpoint{
		File:  [...]state.FileType{state.NoFile, state.Directory, state.Directory, state.RegularFile, state.RegularFile, state.OtherFile}[p.file],
		Empty: p.file == fileEmptyDirectory || p.file == fileEmpty,
	}
	for _, mount := range p.mounts {
		if mount.kind != noMount {
			m.Mounts = append(m.Mounts, mount.look())
		}
	}
	if len(m.Mounts) > 0 {
		m.File, m.Empty = state.Directory, false
		if m.Mounts[0].Node {
			m.File = state.BlockDevice
		}
	}
	return m
}

func (m mountWorld) look() state.Mount {
	if m.kind == otherMount {
		return state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}
	}
	look := state.Mount{Device: m.of.number(), FSType: "ext4", Source: "/dev/loop", Root: "/", SuperReadOnly: m.superReadOnly, Corrupt: m.corrupt}
	switch {
	case m.kind == sourceMount:
		look.FSType, look.Source = planSource.FSType, planSource.Source
	case m.kind == nodeMount:
		look.Node, look.FSType, look.Root = true, "devtmpfs", "/loop"
	case m.kind == subMount:
		look.Root = "/sub"
	case m.xfs:
		look.FSType = "xfs"
	}
	if m.readOnly {
		look.Attributes |= state.ReadOnly
	}
	if m.noDev {
		look.Attributes |= state.NoDev
	}
	return look
}

// settle notes what a plan found to hold: ends are forgotten, the rest accepted.
func (w planWorld) settle(c *planCase) planWorld {
	for i := range w.targets {
		t := &w.targets[i]
		switch {
		case t.want == wantNothing || !c.plan.Verdicts[state.TargetPart(planPaths[i])].Settled:
		case t.want == wantGone:
			*t = targetWorld{}
		case !t.accepted:
			t.accepted, t.asked = true, false
			if t.block {
				t.remembers = w.shownBy(t)
			}
		}
	}
	if w.stage.want == wantGone && c.plan.Verdicts[state.StagePart()].Settled {
		w.stage, w.at = stageWorld{}, placeWorld{}
	}
	if w.size.want && c.plan.Verdicts[state.SizePart()].Settled {
		w.size.accepted = true
	}
	return w
}

func (w *planWorld) shownBy(t *targetWorld) number {
	if t.readOnly && !w.device.readOnly {
		return theView
	}
	return theDevice
}

// after returns the world after a step that did what it is for.
func (w planWorld) after(step reconciler.Step) planWorld {
	var t *targetWorld
	if i := slices.Index(planPaths[:], step.Part.Path); i >= 0 {
		t = &w.targets[i]
	}
	d, s := &w.device, w.stage
	switch step.Action {
	case reconciler.Unbind:
		t.at.pop()
	case reconciler.RemoveTarget:
		t.at.file = fileNone
	case reconciler.Unmount:
		w.at.pop()
	case reconciler.Release:
		d.held, w.layer.held = heldByMounts, false
	case reconciler.DetachView:
		d.view, d.viewHeld, d.viewShort = isAbsent, false, false
	case reconciler.Detach:
		d.state, d.readOnly = isAbsent, false
	case reconciler.Attach:
		if d.state == isAbsent {
			d.readOnly = s.readOnly
		}
		d.state = isAttached
	case reconciler.GrowDevice:
		d.bytes, d.viewShort = bytesPromised, d.view == isAttached
		if step.Part == state.SizePart() {
			d.bytes = bytesGrown
		}
		if w.layer.wanted {
			w.layer.short = w.layer.state == isAttached
			break
		}
		w.contents.growable = w.contents.kind == holdsExt4 || w.contents.kind == holdsXFS
	case reconciler.CreateLayer:
		w.layer.made, w.layer.stamped, d.formatting, d.formatted = true, true, false, true
	case reconciler.OpenLayer:
		w.layer.state, w.layer.readOnly = isAttached, s.readOnly
	case reconciler.CloseLayer:
		w.layer = layerWorld{wanted: true, made: w.layer.made, stamped: w.layer.stamped, locked: w.layer.locked, beneath: w.layer.beneath}
	case reconciler.GrowLayer:
		w.layer.short = false
		w.contents.growable = w.contents.kind == holdsExt4
	case reconciler.BeginFormat:
		d.formatting = true
	case reconciler.MarkRaw:
		d.raw, w.layer.stamped = true, false
	case reconciler.Erase:
		if w.layer.wanted && step.Layer == "" {
			w.layer.beneath = holdsNothing
			break
		}
		w.contents = contentsWorld{growsMounted: w.contents.growsMounted, growsUnmounted: w.contents.growsUnmounted}
	case reconciler.Format:
		if w.layer.wanted {
			w.layer.stamped, w.contents.kind = false, holdsExt4
			break
		}
		d.formatting, d.formatted, w.contents.kind = false, true, holdsExt4
	case reconciler.Check:
		w.contents.check = false
	case reconciler.GrowFilesystem:
		w.contents.growable = false
	case reconciler.Mount:
		w.at.push(fileEmptyDirectory, mountWorld{kind: wholeMount, of: theDevice, superReadOnly: s.readOnly, readOnly: s.readOnly, noDev: s.noDev})
	case reconciler.SetAttributes:
		m := &w.at.mounts[0]
		m.readOnly, m.noDev = s.readOnly, m.noDev || s.noDev
		if t != nil {
			m = &t.at.mounts[0]
			m.readOnly, m.noDev = s.readOnly || t.readOnly, m.noDev || s.noDev || t.noDev
		}
	case reconciler.AttachView:
		d.view, d.viewShort = isAttached, false
	case reconciler.Bind:
		if t.block {
			t.at.push(fileEmpty, mountWorld{kind: nodeMount, of: w.shownBy(t)})
			break
		}
		stage := w.at.mounts[0]
		t.at.push(fileEmptyDirectory, mountWorld{
			kind: wholeMount, of: stage.of, superReadOnly: stage.superReadOnly,
			readOnly: s.readOnly || t.readOnly, noDev: stage.noDev || s.noDev || t.noDev,
		})
	case reconciler.MountSource:
		t.at.push(fileEmptyDirectory, mountWorld{kind: sourceMount, readOnly: s.readOnly || t.readOnly, noDev: s.noDev || t.noDev})
	}
	return w
}

func (p *placeWorld) pop() { p.mounts = [2]mountWorld{p.mounts[1]} }

func (p *placeWorld) push(file fileWorld, m mountWorld) {
	if p.file == fileNone {
		p.file = file
	}
	p.mounts = [2]mountWorld{m, p.mounts[0]}
}

// ---- The bounds of the walks. ----

var (
	mountedHere = mountWorld{kind: wholeMount, of: theDevice}
	mountedRO   = mountWorld{kind: wholeMount, of: theDevice, readOnly: true}
	mountedTurn = mountWorld{kind: wholeMount, of: theDevice, superReadOnly: true}
	mountedBoth = mountWorld{kind: wholeMount, of: theDevice, superReadOnly: true, readOnly: true}
	mountedDev  = mountWorld{kind: wholeMount, of: theDevice, noDev: true}
	mountedSick = mountWorld{kind: wholeMount, of: theDevice, corrupt: true}
	mountedXFS  = mountWorld{kind: wholeMount, of: theDevice, xfs: true}
	mountedSub  = mountWorld{kind: subMount, of: theDevice}
	mountedView = mountWorld{kind: wholeMount, of: theView}
	mountedDisk = mountWorld{kind: wholeMount, of: otherDevice}
	mountedTmp  = mountWorld{kind: otherMount}
	mountedFrom = mountWorld{kind: sourceMount}
	boundNode   = mountWorld{kind: nodeMount, of: theDevice}
	boundView   = mountWorld{kind: nodeMount, of: theView}
	boundOld    = mountWorld{kind: nodeMount, of: olderDevice}
	boundDisk   = mountWorld{kind: nodeMount, of: otherDevice}
)

// placesOf returns the places at which mounts stand on a file, each stack the top first.
func placesOf(file fileWorld, stacks ...[2]mountWorld) []placeWorld {
	var places []placeWorld
	for _, stack := range stacks {
		places = append(places, placeWorld{file: file, mounts: stack})
	}
	return places
}

// unmounted are the places at which nothing is mounted.
var unmounted = []placeWorld{
	{}, {file: fileEmptyDirectory}, {file: fileFullDirectory}, {file: fileEmpty}, {file: fileFull}, {file: fileSpecial}, {err: errNow}, {err: errPath}, {err: errUnlooked},
}

var (
	stagePlaces = slices.Concat(unmounted, placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedHere}, [2]mountWorld{mountedRO}, [2]mountWorld{mountedTurn}, [2]mountWorld{mountedBoth}, [2]mountWorld{mountedDev},
		[2]mountWorld{mountedSick}, [2]mountWorld{mountedXFS}, [2]mountWorld{mountedSub}, [2]mountWorld{mountedView},
		[2]mountWorld{mountedDisk}, [2]mountWorld{mountedTmp}, [2]mountWorld{boundNode},
		[2]mountWorld{mountedHere, mountedHere}, [2]mountWorld{mountedSick, mountedHere}, [2]mountWorld{mountedSick, mountedTmp}, [2]mountWorld{mountedRO, mountedSick},
		[2]mountWorld{mountedTmp, mountedHere}, [2]mountWorld{mountedHere, mountedTmp}, [2]mountWorld{mountedDisk, mountedTmp},
	))
	targetPlaces = slices.Concat(unmounted, placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedHere}, [2]mountWorld{mountedRO}, [2]mountWorld{mountedDev}, [2]mountWorld{mountedSick}, [2]mountWorld{mountedSub},
		[2]mountWorld{mountedView}, [2]mountWorld{mountedDisk}, [2]mountWorld{mountedTmp}, [2]mountWorld{boundNode},
		[2]mountWorld{mountedHere, mountedHere}, [2]mountWorld{mountedRO, mountedHere}, [2]mountWorld{mountedTmp, mountedHere}, [2]mountWorld{mountedHere, mountedTmp},
	), placesOf(fileFullDirectory, [2]mountWorld{mountedHere}))
	nodePlaces = slices.Concat(unmounted, placesOf(fileEmpty,
		[2]mountWorld{boundNode}, [2]mountWorld{boundView}, [2]mountWorld{boundOld}, [2]mountWorld{boundDisk}, [2]mountWorld{mountedHere}, [2]mountWorld{mountedTmp},
		[2]mountWorld{boundNode, boundNode}, [2]mountWorld{boundNode, boundView}, [2]mountWorld{boundView, boundNode}, [2]mountWorld{boundOld, boundNode},
		[2]mountWorld{mountedTmp, boundNode}, [2]mountWorld{boundNode, mountedTmp}, [2]mountWorld{mountedTmp, boundView},
	), placesOf(fileFull, [2]mountWorld{boundNode}))
)

var stageWishes = []stageWorld{
	{want: wantThere}, {want: wantThere, readOnly: true}, {want: wantThere, noDev: true, asked: true},
	{want: wantThere, block: true}, {want: wantThere, block: true, readOnly: true},
	{}, {want: wantGone}, {want: wantGone, withdrawn: true}, {want: wantGone, block: true},
	{want: wantThere, remembers: true, accepted: true}, {want: wantThere, readOnly: true, remembers: true},
	{want: wantThere, identity: true, accepted: true, asked: true}, {want: wantThere, block: true, identity: true, accepted: true}, {want: wantGone, identity: true},
}

// planDeviceWorlds ranges over everything that a device, its contents, the
// staging path and the size wanted can be, with few targets.
func planDeviceWorlds(yield func(planWorld) bool) {
	for _, stage := range stageWishes {
		for _, device := range deviceWorlds() {
			for _, contents := range contentsFor(stage, &device) {
				for _, at := range stagePlacesFor(stage) {
					for _, rest := range deviceSides(stage) {
						w := rest
						w.stage, w.at, w.device, w.contents = stage, at, device, contents
						if !yield(w) {
							return
						}
					}
				}
			}
		}
	}
}

func stagePlacesFor(stage stageWorld) []placeWorld {
	switch {
	case stage.want == wantNothing:
		return []placeWorld{{}}
	case stage.block && stage.want == wantThere: // nobody looks at the path
		return []placeWorld{{file: fileEmptyDirectory}, {err: errNow}, {err: errUnlooked}, {file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}}}
	}
	return stagePlaces
}

// deviceWorlds returns every device; the marks of a format vary with the contents.
func deviceWorlds() []deviceWorld {
	var all []deviceWorld
	for bytes := bytesPromised; bytes <= bytesGrown; bytes++ {
		all = append(all, deviceWorld{bytes: bytes})
	}
	all = append(all, deviceWorld{missing: true}, deviceWorld{unread: true}, deviceWorld{state: isUnlooked, view: isUnlooked}, deviceWorld{state: isForeign}, deviceWorld{state: isForeign, bytes: bytesFewer})
	for _, d := range []deviceWorld{
		{state: isAttached}, {state: isDetaching}, {state: isAttached, readOnly: true}, {state: isDetaching, readOnly: true},
	} {
		for d.held = heldByMounts; d.held <= heldUnseen; d.held++ {
			fewer := d
			fewer.bytes = bytesFewer
			all = append(all, d, withView(d), fewer)
		}
		d.held = heldByMounts
		heldView, leavingView, unseenView, missing, unknown, grown := d, d, d, d, d, d
		heldView.view, heldView.viewHeld, leavingView.view, unseenView.view = isAttached, true, isDetaching, isUnlooked
		missing.missing, unknown.bytes, grown.bytes = true, bytesUnknown, bytesGrown
		unread, unreadView := d, withView(d)
		unread.unread, unreadView.unread = true, true
		all = append(all, heldView, leavingView, unseenView, missing, unknown, grown)
		if !d.readOnly {
			all = append(all, unread, unreadView)
		}
	}
	for _, d := range []deviceWorld{{}, {state: isAttached}, {state: isAttached, readOnly: true}, {state: isAttached, bytes: bytesFewer}, {state: isDetaching}, {state: isForeign}} {
		for _, d.identity = range []string{"its", "another"} {
			all = append(all, d)
		}
	}
	for _, d := range []deviceWorld{{}, {state: isAttached}, {state: isAttached, readOnly: true}} {
		d.shared = true
		proven := d
		proven.exclusive = true
		all = append(all, d, proven)
	}
	return all
}

func withView(d deviceWorld) deviceWorld {
	d.view = isAttached
	return d
}

// contentsFor returns every contents that makes a difference to a stage. They
// are read only from an attached device for a wanted file system; elsewhere a
// few are enough to see what comes to light on the way.
func contentsFor(stage stageWorld, d *deviceWorld) iter.Seq2[int, contentsWorld] {
	return func(yield func(int, contentsWorld) bool) {
		all := []contentsWorld{
			{kind: holdsExt4}, {growsMounted: true, growsUnmounted: true}, {kind: holdsOther},
			{growsUnmounted: true}, {kind: holdsXFS}, {kind: holdsUnreadable}, {kind: holdsUnlooked}, {kind: holdsExt4, check: true},
			{kind: holdsExt4, growable: true}, {kind: holdsExt4, growable: true, growsUnmounted: true},
			{kind: holdsExt4, growable: true, growsMounted: true}, {kind: holdsExt4, growable: true, growsMounted: true, growsUnmounted: true},
			{kind: holdsExt4, growable: true, check: true, growsUnmounted: true}, {kind: holdsExt4, growable: true, check: true, growsMounted: true},
			{kind: holdsExt4, growsMounted: true}, {kind: holdsUnproven}, {tooSmall: true}, {kind: holdsOther, tooSmall: true},
		}
		if stage.remembers {
			all = []contentsWorld{
				{kind: holdsExt4}, {kind: holdsExt4, swapped: true}, {}, {kind: holdsXFS, swapped: true}, {kind: holdsUnreadable, swapped: true}, {kind: holdsUnlooked, swapped: true},
				{kind: holdsExt4, check: true, swapped: true}, {kind: holdsExt4, growable: true, growsMounted: true, growsUnmounted: true, swapped: true},
			}
		}
		read := stage.want == wantThere && !stage.block && d.state == isAttached && !d.missing && !d.unread
		if !read {
			all = all[:3]
		}
		for mark := range 6 { // what was published raw is not formatted, and seldom marked
			d.formatting, d.formatted, d.raw = mark&1 != 0, mark&2 != 0, mark&4 != 0
			if !read && mark >= 3 {
				continue
			}
			for i, contents := range all {
				if d.raw && i > 2 && contents.kind != holdsUnproven {
					continue
				}
				if !yield(i, contents) {
					return
				}
			}
		}
	}
}

// deviceSides returns the sizes and targets that stand beside a device.
func deviceSides(stage stageWorld) []planWorld {
	place := placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}}
	if stage.block {
		place = placeWorld{file: fileEmpty, mounts: [2]mountWorld{boundNode}}
	}
	bound := targetWorld{want: wantThere, block: stage.block, accepted: true, at: place}
	leaving := targetWorld{want: wantGone, block: stage.block, at: place, asked: true}
	blind := targetWorld{want: wantThere, block: stage.block, at: placeWorld{err: errNow}}
	node := targetWorld{want: wantGone, block: true, at: placeWorld{file: fileEmpty, mounts: [2]mountWorld{boundNode}}}
	smaller, larger, accepted := sizeWorld{want: true}, sizeWorld{want: true, larger: true}, sizeWorld{want: true, larger: true, accepted: true}
	return []planWorld{
		{}, {size: larger, targets: [2]targetWorld{blind}}, {size: smaller, targets: [2]targetWorld{bound}}, {size: accepted, targets: [2]targetWorld{bound}},
		{targets: [2]targetWorld{leaving}}, {targets: [2]targetWorld{node}},
	}
}

// planTargetWorlds ranges over everything that a target can be, with a few
// second targets, devices and stages.
func planTargetWorlds(yield func(planWorld) bool) {
	for _, stage := range stageWishes {
		for _, block := range []bool{stage.block, !stage.block} {
			if block != stage.block && stage.want == wantThere {
				continue // a publish is refused that differs from the stage
			}
			for _, device := range targetDevices(block) {
				for _, at := range targetStages(stage) {
					for _, first := range targetWorlds(block) {
						for _, second := range secondTargets(block) {
							w := planWorld{stage: stage, at: at, targets: [2]targetWorld{first, second}, device: device, contents: contentsWorld{kind: holdsExt4, swapped: stage.remembers}}
							if !yield(w) {
								return
							}
						}
					}
				}
			}
		}
	}
}

// planLayerWorlds ranges over everything that a layer and its source can be.
func planLayerWorlds(yield func(planWorld) bool) {
	var sources []deviceWorld
	for _, d := range []deviceWorld{
		{}, {missing: true}, {unread: true}, {state: isUnlooked, view: isUnlooked}, {state: isForeign}, {bytes: bytesFewer}, {state: isDetaching},
		{state: isAttached}, {state: isAttached, readOnly: true}, {state: isAttached, bytes: bytesFewer}, {state: isAttached, held: heldElsewhere},
		{state: isAttached, unread: true}, {state: isAttached, raw: true}, {state: isAttached, identity: "another"},
	} {
		marked, formatted := d, d
		marked.formatting, formatted.formatted = true, true
		sources = append(sources, d, marked, formatted)
	}
	layers := []layerWorld{
		{state: isUnlooked}, {state: isForeign}, {state: isForeign, stray: true}, {state: isForeign, stray: true, held: true}, {state: isForeign, stray: true, made: true},
		{beneath: holdsNothing}, {beneath: holdsExt4}, {beneath: holdsOther}, {beneath: holdsUnreadable}, {beneath: holdsUnlooked}, {beneath: holdsUnproven}, {locked: true},
		{made: true}, {made: true, stamped: true}, {made: true, locked: true}, {made: true, state: isDetaching}, {state: isAttached},
	}
	for _, l := range []layerWorld{{made: true, state: isAttached}, {made: true, state: isAttached, stamped: true}} {
		readOnly, held, short, locked := l, l, l, l
		readOnly.readOnly, held.held, short.short, locked.locked = true, true, true, true
		layers = append(layers, l, readOnly, held, short, locked)
	}
	places := append(slices.Clone(unmounted), placesOf(fileEmptyDirectory, [2]mountWorld{mountedHere}, [2]mountWorld{mountedBoth}, [2]mountWorld{mountedSick}, [2]mountWorld{mountedTmp, mountedHere})...)
	contents := []contentsWorld{{kind: holdsExt4}, {growsMounted: true}, {kind: holdsOther}, {kind: holdsExt4, growable: true, growsMounted: true}, {kind: holdsUnlooked}, {kind: holdsExt4, swapped: true}}
	for _, stage := range stageWishes {
		for _, device := range sources {
			for _, layer := range layers {
				layer.wanted = true
				for _, at := range places {
					for i, rest := range deviceSides(stage) {
						for _, c := range contents {
							w := rest
							w.stage, w.at, w.device, w.layer, w.contents = stage, at, device, layer, c
							if !yield(w) {
								return
							}
							if i > 2 || layer.state != isAttached || stage.want != wantThere {
								break // the rest is not read, or tells nothing new
							}
						}
					}
				}
			}
		}
	}
}

// planSourceWorlds ranges over everything that the stage and the targets of a volume
// without a device can be.
func planSourceWorlds(yield func(planWorld) bool) {
	readOnly, noDev, sick := mountedFrom, mountedFrom, mountedFrom
	readOnly.readOnly, noDev.noDev, sick.corrupt = true, true, true
	places := append(slices.Clone(unmounted), placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedFrom}, [2]mountWorld{readOnly}, [2]mountWorld{noDev}, [2]mountWorld{sick}, [2]mountWorld{mountedTmp}, [2]mountWorld{mountedDisk}, [2]mountWorld{boundDisk},
		[2]mountWorld{mountedFrom, mountedFrom}, [2]mountWorld{sick, mountedFrom}, [2]mountWorld{mountedTmp, mountedFrom}, [2]mountWorld{mountedFrom, mountedTmp},
	)...)
	bound := placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedFrom}}
	seconds := []targetWorld{{}, {want: wantThere, accepted: true, at: bound}, {want: wantThere, at: placeWorld{err: errNow}}, {want: wantGone, at: bound}}
	for _, stage := range stageWishes[:9] { // it remembers nothing
		for _, source := range []sourceWorld{{wanted: true}, {wanted: true, other: true}} {
			for _, device := range []deviceWorld{{}, {missing: true}, {unread: true}, {state: isUnlooked, view: isUnlooked}} {
				for _, at := range []placeWorld{{file: fileEmptyDirectory}, {err: errNow}, {err: errUnlooked}, bound, {file: fileEmptyDirectory, mounts: [2]mountWorld{mountedTmp, mountedFrom}}} {
					for _, first := range targetWorldsAt(stage.block, places) {
						for i, second := range seconds {
							second.block = stage.block
							w := planWorld{stage: stage, at: at, targets: [2]targetWorld{first, second}, size: sizeWorld{want: i == 1}, device: device, source: source}
							if !yield(w) {
								return
							}
						}
					}
				}
			}
		}
	}
}

// targetDevices returns the devices that make a difference to a target.
func targetDevices(block bool) []deviceWorld {
	plain := deviceWorld{state: isAttached}
	readOnly, held, view := plain, plain, plain
	readOnly.readOnly, held.held, view.view = true, heldElsewhere, isAttached
	all := []deviceWorld{plain, readOnly, {}, {state: isDetaching}, view, {state: isUnlooked, view: isUnlooked}, {state: isAttached, view: isUnlooked}}
	if !block {
		return append(all, held, deviceWorld{state: isForeign})
	}
	heldView, leavingView, readOnlyView := view, view, view
	heldView.viewHeld, leavingView.view, readOnlyView.readOnly = true, isDetaching, true
	shortView := view
	shortView.viewShort = true
	return append(all, heldView, leavingView, readOnlyView, shortView)
}

func targetStages(stage stageWorld) []placeWorld {
	if stage.want == wantNothing {
		return []placeWorld{{}}
	}
	places := []placeWorld{{file: fileEmptyDirectory}}
	if stage.block {
		return places
	}
	return append(places, placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedHere}, [2]mountWorld{mountedBoth}, [2]mountWorld{mountedDev}, [2]mountWorld{mountedSick}, [2]mountWorld{mountedTmp, mountedHere}, [2]mountWorld{mountedHere, mountedHere})...)
}

// targetWorlds returns every target of one access type.
func targetWorlds(block bool) []targetWorld {
	if block {
		return targetWorldsAt(block, nodePlaces)
	}
	return targetWorldsAt(block, targetPlaces)
}

func targetWorldsAt(block bool, places []placeWorld) []targetWorld {
	var wishes []targetWorld
	for _, readOnly := range []bool{false, true} {
		t := targetWorld{want: wantThere, block: block, readOnly: readOnly}
		asked, accepted, again := t, t, t
		asked.asked, accepted.accepted, again.accepted, again.asked = true, true, true, true
		wishes = append(wishes, t, asked, accepted, again)
		if block {
			for n := theDevice; n <= olderDevice; n++ {
				accepted.remembers, again.remembers = n, n
				wishes = append(wishes, accepted, again)
			}
		} else {
			accepted.noDev = true
			wishes = append(wishes, accepted)
		}
	}
	gone := targetWorld{want: wantGone, block: block}
	withdrawn := gone
	withdrawn.withdrawn = true
	wishes = append(wishes, gone, withdrawn)
	if block {
		for gone.remembers = theDevice; gone.remembers <= olderDevice; gone.remembers++ {
			wishes = append(wishes, gone)
		}
	}
	var all []targetWorld
	for _, t := range wishes {
		for _, t.at = range places {
			all = append(all, t)
		}
	}
	return all
}

// secondTargets returns the targets that stand beside the first one.
func secondTargets(block bool) []targetWorld {
	there, gone := targetWorld{want: wantThere, block: block}, targetWorld{want: wantGone, block: block}
	file, ours := fileEmptyDirectory, mountedHere
	if block {
		file, ours = fileEmpty, boundNode
	}
	with := func(t targetWorld, p placeWorld) targetWorld { t.at = p; return t }
	bound := placeWorld{file: file, mounts: [2]mountWorld{ours}}
	foreign := placeWorld{file: file, mounts: [2]mountWorld{mountedTmp}}
	covered := placeWorld{file: file, mounts: [2]mountWorld{mountedTmp, ours}}
	readOnly, accepted := there, there
	readOnly.readOnly, accepted.accepted = true, true
	return []targetWorld{
		{}, with(there, placeWorld{file: file}), with(readOnly, bound), with(accepted, bound),
		with(there, foreign), with(there, placeWorld{err: errNow}),
		with(gone, bound), with(gone, covered), with(gone, foreign), with(gone, placeWorld{err: errNow}),
	}
}
