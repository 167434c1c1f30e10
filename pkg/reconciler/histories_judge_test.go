package reconciler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// demand is one request, as far as the judge needs to know it. History.mu guards
// what changes.
type demand struct {
	request
	asksFor    func(*state.Volume) bool // whether a record asks for just this; nil for a removal
	order      int                      // which edit of its part this is
	intent     uint64                   // the revision that it waits for; 0 while it has asked for nothing
	gone       bool                     // it asks for an end
	pending    bool                     // something else was asked for that was not accepted, when this one was refused
	existed    bool                     // the volume was mounted there, or attached for a stage, before it came
	asks       bool                     // it is among those who wait for a stage or a publish
	answered   int                      // the event before its answer
	answeredAt time.Time
}

// ask is r under the eyes of the judge.
func (y *history) ask(r request, asksFor func(*state.Volume) bool) *demand {
	a := &demand{request: r, asksFor: asksFor}
	edit := r.edit
	a.edit = func(v *state.Volume) error {
		y.asking = a
		a.intent, a.pending = 0, false
		if err := edit(v); err != nil {
			last := v.Latest(r.part)
			a.pending = asksFor != nil && last != nil && !last.Gone && !last.Accepted
			if strings.Contains(err.Error(), "a caller waits") && !y.anybodyWaits(a) {
				y.t.Errorf("%s: refused for a caller, and there is none: %v", a, err)
			}
			return err
		}
		if intent := v.Latest(r.part); intent != nil {
			a.intent, a.gone = intent.Revision, intent.Gone
		}
		y.k.with(func() {
			a.existed = y.k.shown(r)
			if !a.asks && !a.gone && r.part.Kind != state.SizeKind {
				a.asks = true
				y.k.askers[r.id]++
			}
		})
		return nil
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	y.waiting[a] = struct{}{}
	return a
}

// shown reports whether anything of a part's is there. The caller holds mu.
func (k *fakeKernel) shown(r request) bool {
	at := r.part.Path
	if r.part.Kind == state.StageKind {
		if v := k.volumes[r.id]; v != nil && v.highest() != nil {
			return true
		}
		at = stagePath(r.id)
	}
	return slices.ContainsFunc(k.mounts[at], func(m fakeMount) bool { return m.volume == r.id })
}

// atTargets reports whether a volume's file system is mounted at a target. The caller holds mu.
func (k *fakeKernel) atTargets(id string) bool {
	for n := range 3 {
		if slices.ContainsFunc(k.mounts[targetPath(id, n+1)], func(m fakeMount) bool { return m.volume == id && !m.Node }) {
			return true
		}
	}
	return false
}

// edited judges an edit of a record, whoever made it.
func (y *history) edited(before, after *state.Volume) {
	by := y.asking
	y.asking = nil
	if before == after {
		if by != nil {
			y.note(by, false)
		}
		return
	}
	y.remembered(before, after)
	for _, part := range parts(before, after) {
		was, is := before.Intent(part), after.Intent(part)
		if by == nil {
			y.editedByWorker(before, after, part)
		} else if own := part == by.part || part == state.SizePart() && by.part == state.StagePart(); !own && !same(was, is) && !withdrawnWith(by, was, is) && !presumedWith(before, after, part) {
			y.t.Errorf("%s: the edit changed %s", by, part)
		}
	}
	if by != nil {
		y.note(by, true)
	}
}

// remembered judges what a record says of the device that its stage was seen with,
// and keeps it, as well as the numbers with which it is published.
func (y *history) remembered(before, after *state.Volume) {
	was, is := before.Stage, after.Stage
	y.k.with(func() {
		for path := range before.Targets {
			delete(y.k.known, path)
			delete(y.k.knownFrom, path)
		}
		for path, t := range after.Targets {
			if y.k.known[path] = t.Device; t.From != nil {
				y.k.knownFrom[path] = t.From.Source
			}
			for id, other := range y.k.volumes {
				if old := before.Targets[path]; id != after.ID && other.has(t.Device) && (old == nil || old.Device != t.Device) {
					y.k.drift(id)
				}
			}
		}
		v := y.k.volumes[after.ID]
		if v == nil {
			return
		}
		if v.first = ""; is == nil {
			return
		}
		v.first, v.guessed = is.Identity, v.guessed || v.source && is.Adopted
		old := ""
		if was != nil {
			old = was.Identity
		}
		switch {
		case old != "" && is.Identity != old && (is.Identity != "" || is.Accepted):
			y.t.Errorf("%s: the stage was seen with the device %s, and remembers %q", after.ID, old, is.Identity)
		case is.Identity != "" && is.Identity != old && is.Identity != v.identity && y.k.told(after.ID):
			y.t.Errorf("%s: the stage remembers the device %s, and has %s", after.ID, is.Identity, v.identity)
		case is.Accepted && !is.Adopted && is.Identity == "" && !v.source:
			y.t.Errorf("%s: the stage was seen, and does not remember with which device", after.ID)
		}
	})
}

// taking are the calls that take down what is there: they need less than the others.
var taking = []op{opUnmount, opRemove, opRenew, opDetachView, opCloseLayer, opDetach}

// forbidden says which rule of stacks, identities, sources and shared storage a call
// of the plugin's breaks, whatever the planner thinks. The caller holds mu.
func (k *fakeKernel) forbidden(o op, id string) string {
	v := k.volumes[id]
	if v == nil || o.reads() {
		return ""
	}
	among := func(calls ...op) bool { return slices.Contains(calls, o) }
	whole := v.unready() == ""
	switch {
	case v.source != (o == opMountSource) && !among(opUnmount, opRemove, opRenew, opSetAttributes):
		return "what is mounted from a source has no device and no stage, and nothing else has a source"
	case v.first != "" && v.identity != v.first && !among(taking...) && o != opSetAttributes:
		return "the stage was seen with " + v.first + ", and the device is " + v.identity
	case v.shared && among(opAttach, opOpenLayer, opCheck, opMount) && !k.asked(id):
		return "another node may have it, and nobody asks"
	case v.shared && !v.exclusive && among(opBeginFormat, opCreateLayer, opErase, opEraseLayer, opFormat):
		return "another node may have it, and nothing is to be written without proof"
	case !among(taking...) && !among(opAttach, opAbandonFormat, opGrowDevice) && k.whosePods(id) != "":
		return "pods of " + k.whosePods(id) + " have its number"
	case v.layer == nil:
		return ""
	case o == opDetach && v.open():
		return "a layer is over it"
	case among(opBeginFormat, opErase, opCreateLayer) && (v.open() || v.header == used || v.data || !k.free(id)):
		return "it bears a layer, or is not free"
	case o == opCreateLayer && (!v.formatting || v.header == "" && v.beneath.Kind != state.ContentsBlank && v.beneath.Kind != state.ContentsUnproven):
		return "it is not blank, or without a mark"
	case o == opOpenLayer && (v.device == nil || v.device.detaching || v.header == "" || v.formatting || v.open() && v.layer.over != v.device):
		return "nothing is attached beneath it, or it is no layer, or it is over another device"
	case among(opFormat, opCheck, opGrow, opMount, opBind, opBindDevice, opGrowLayer, opEraseLayer) && !whole:
		return v.unready()
	case among(opFormat, opEraseLayer) && v.header != stampedNew:
		return "the layer is not new"
	case o == opGrow && v.top().size < v.device.size-headerBytes:
		return "the layer comes first"
	case o == opCloseLayer && v.open() && (v.view != nil || len(k.seen(id, v.layer.device.number)) > 0):
		return "the layer is in use"
	}
	return ""
}

// asked reports whether somebody waits for a stage or a publish, or did so when the
// worker last looked. The caller holds mu.
func (k *fakeKernel) asked(id string) bool {
	left, looked := k.left[id], k.looked[id]
	return k.askers[id] > 0 || left.n >= looked.n || left.at.Equal(looked.at)
}

// withdrawnWith reports whether a target was taken back because its stage, which
// nobody was told of, gave way to another.
func withdrawnWith(by *demand, was, is *state.Intent) bool {
	return by.part == state.StagePart() && by.asksFor != nil && was != nil && !was.Confirmed() &&
		(is == nil && !was.Begun || is != nil && is.Gone && is.Withdrawn)
}

// presumedWith reports whether a part came or went with a provisional stage.
func presumedWith(before, after *state.Volume, part state.Part) bool {
	was, is := before.Intent(part), after.Intent(part)
	switch s := before.Stage; {
	case s == nil:
		return part == state.StagePart() && after.Stage.Provisional
	case !s.Provisional:
		return false
	case part == state.StagePart():
		return true
	}
	return !was.Gone && !was.Accepted && (is == nil && !was.Begun || is != nil && is.Withdrawn)
}

// anybodyWaits reports whether a caller other than a waits for something of the volume.
func (y *history) anybodyWaits(a *demand) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	for other := range y.waiting {
		if other != a && other.id == a.id && other.answered == 0 && other.intent != 0 {
			return true
		}
	}
	return false
}

// note counts a caller's edit.
func (y *history) note(by *demand, changed bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if changed {
		y.orders[by.String()]++
		if by.part == state.StagePart() {
			y.orders[request{id: by.id, part: state.SizePart()}.String()]++ // an unstage forgets it
		}
	}
	by.order = y.orders[by.String()]
}

func parts(records ...*state.Volume) (all []state.Part) {
	for _, v := range records {
		for _, part := range v.Parts() {
			if !slices.Contains(all, part) {
				all = append(all, part)
			}
		}
	}
	return all
}

func same(a, b *state.Intent) bool { return a == b || a != nil && b != nil && *a == *b }

// editedByWorker judges what the worker made of one part of a record: it may
// note what it has seen, take back what it has refused, and retire.
func (y *history) editedByWorker(before, after *state.Volume, part state.Part) {
	was, is := before.Intent(part), after.Intent(part)
	what := request{id: before.ID, part: part}
	gone := is == nil || is.Gone
	switch {
	case same(was, is):
	case gone && part == state.StagePart() && before.Stage.Provisional:
		if after.Size != nil || slices.ContainsFunc(after.TargetPaths(), func(path string) bool { return !after.Targets[path].Gone }) {
			y.t.Errorf("%s: a provisional stage went before what needs it", what)
		}
	case was == nil:
		y.t.Errorf("%s: the worker asked for it", what)
	case was.Gone && !gone && before.Latest(part) != was && *before.Latest(part) == *is: // what was begun before is undone
		y.k.with(func() {
			if y.k.shown(what) && y.k.told(what.id) && y.k.fresh(what.id) {
				y.t.Errorf("%s: the next begins, and what was begun before is still there", what)
			}
		})
	case was.Gone && !gone:
		y.t.Errorf("%s: a removal was withdrawn", what)
	case was.Gone:
		if is == nil {
			y.k.with(func() {
				y.ends[what.String()] = y.k.looked[what.id].n
				published := y.amnesia && part == state.StagePart() && y.k.atTargets(what.id) // which was told
				if y.k.shown(what) && y.k.told(what.id) && !published {
					y.t.Errorf("%s: forgotten, and it is still there", what)
				}
			})
		}
	case gone && part.Kind == state.TargetKind && y.gone.Gone(part.Path): // retired
	case gone && was.Accepted:
		y.t.Errorf("%s: what was accepted was taken back", what)
	case gone, part.Kind == state.SizeKind && is.Revision != was.Revision:
		if !y.somebodyWaits(what, was.Revision) {
			y.t.Errorf("%s: taken back, and there is nobody to be told", what)
		}
	case is.Revision != was.Revision || was.Accepted && !is.Accepted || was.Begun && !is.Begun:
		y.t.Errorf("%s: %+v became %+v", what, *was, *is)
	case is.Accepted && !was.Accepted:
		y.mustBeTrue("accepted", after, what)
		y.k.with(func() {
			delete(y.k.forgotten, part.Path)
		})
	}
}

// mustBeTrue checks a record against the node, unless that was changed since it
// was looked at. The caller holds store.mu.
func (y *history) mustBeTrue(claim string, record *state.Volume, r request) {
	y.k.with(func() {
		lie := y.k.lie(record, r)
		if lie == "" && !y.amnesia {
			lie = y.k.otherwise(record, r.part)
		}
		if lie != "" && y.k.told(r.id) {
			y.t.Errorf("%s: %s, and %s", r, claim, lie)
			y.k.note("%s: %s, and %s", r, claim, lie)
		}
	})
}

// otherwise says what is wrong with the access times of a mount, for which its
// flags ask. The caller holds mu.
func (k *fakeKernel) otherwise(record *state.Volume, part state.Part) string {
	s := record.Stage
	if v := k.volumes[record.ID]; v == nil || v.guessed || s == nil || s.Gone || s.Capability.Access != state.MountAccess || record.Intent(part) == nil || record.Intent(part).Gone {
		return ""
	}
	at, flags := s.Path, s.Capability.Flags
	if t := record.Targets[part.Path]; part.Kind == state.TargetKind {
		at, flags = part.Path, append(slices.Clone(flags), t.Capability.Flags...)
	}
	for _, m := range k.mounts[at] {
		if got, want := m.Attributes&state.NoAtime != 0, slices.Contains(flags, "noatime"); m.volume != "" && got != want {
			return fmt.Sprintf("noatime is %t at %s", got, at)
		}
	}
	return ""
}

// somebodyWaits reports whether a caller waits for an intent, or did so when
// the worker last looked: who is told in the same moment may be told before or after.
func (y *history) somebodyWaits(r request, intent uint64) bool {
	var looked event
	y.k.with(func() { looked = y.k.looked[r.id] })
	y.mu.Lock()
	defer y.mu.Unlock()
	for a := range y.waiting {
		if a.id == r.id && a.part == r.part && a.intent == intent && (a.answered == 0 || a.answered >= looked.n || a.answeredAt.Equal(looked.at)) {
			return true
		}
	}
	return false
}

// refusals are the words of which each final refusal holds some: everything
// for which a history gives a reason.
var refusals = []string{
	"not staged", "still published at", "staged already", "published already", "no such volume", "it cannot be: boom",
	"is staged as", "staged read-only", "allows one target", "was asked for", "restart the pod", "is not there any more",
	"find out whose", "which the plugin did not attach", "in use, so it cannot be attached", "has turned read-only",
	"does not know the option", "neither blank nor a file system", "formatting the volume was interrupted", "holds files", "holds data", "that the plugin did not make",
	"not a directory", "not a file", "grows when the volume is next staged", "no file system that fills it", "is blank now",
	"published as a raw block device before",
	"was staged from the device", "its data was swapped", "its data is lost", "holds none now", "does not bear it any more",
	"the key does not fit", "read-only access was asked for", "in use, so it cannot be opened", "bears the layer", "bears the mark of an interrupted format",
	"it is not formatted. Use an access mode", "end of a format that was not begun",
	"is no block device", "has no device on this node",
}

// answered judges the answer to a request.
func (y *history) answered(a *demand, err error, took, deadline time.Duration) {
	y.store.mu.Lock() // no edit now
	defer y.store.mu.Unlock()
	y.mu.Lock()
	defer y.mu.Unlock()
	y.k.with(func() {
		a.answered, a.answeredAt = max(y.k.events, 1), time.Now()
		if a.asks {
			y.k.askers[a.id]--
			y.k.left[a.id] = event{y.k.events, time.Now()}
		}
		y.k.note("%s: answered %v", a, err)
	})
	if took > deadline+10*time.Millisecond { // the store takes its time
		y.t.Errorf("%s: answered after %s, with a deadline of %s", a, took, deadline)
	}
	record := y.store.get(a.id)
	if record == nil {
		record = &state.Volume{ID: a.id}
	}
	latest := y.orders[a.String()] == a.order
	class := state.ClassOf(err)
	if err != nil && class.Final() && a.pending {
		y.t.Errorf("%s: %s, and something else is asked for and not over: %v", a, class, err)
	}
	switch {
	case err == nil && latest && a.intent != 0:
		seen, undisturbed := false, false
		y.k.with(func() {
			drifted := y.k.drifted[a.id].n
			seen, undisturbed = drifted <= y.k.answering[a.id].n, drifted <= y.ends[a.String()]
		})
		if seen && (undisturbed || record.Intent(a.part) != nil) { // what is forgotten, the worker saw end some time ago
			y.mustBeTrue("answered OK", record, a.request)
		}
	case err == nil:
	case !class.Final():
		if class == state.ResourceExhausted {
			y.t.Errorf("%s: %s: %v", a, class, err)
		}
	case !slices.ContainsFunc(refusals, func(words string) bool { return strings.Contains(err.Error(), words) }):
		y.t.Errorf("%s: %s for no good reason: %v", a, class, err)
	case latest && !a.gone && (a.intent != 0 || a.asksFor != nil && a.asksFor(record)):
		y.mustBeUndone(a, record, err)
	}
}

// mustBeUndone checks that nothing is left of a request that was refused for
// good. The caller holds store.mu.
func (y *history) mustBeUndone(a *demand, record *state.Volume, err error) {
	intent := record.Intent(a.part)
	switch {
	case intent == nil || intent.Gone:
	case a.part == state.StagePart() && record.Stage.Provisional: // of a publish that came since
	case !intent.Accepted:
		y.t.Errorf("%s: refused for good (%v), and asked for still: %+v", a, err, *intent)
		return
	default:
		return // what was there before stays
	}
	y.k.with(func() {
		if y.k.shown(a.request) && !a.existed && y.k.told(a.id) && a.part.Kind != state.SizeKind {
			y.t.Errorf("%s: refused for good (%v), and it is still there", a, err)
		}
	})
}

// unhealed are the words for what a repair cannot put right, and a call can.
var unhealed = []string{"restart the pod", "made again only when", "repair is switched off", "waits for its secret", "again only when somebody asks"}

// finish removes all hindrances, gives the plugin time, and then
// wants to see every volume at rest as it was asked for, and every part gone
// once that is asked for.
func (y *history) finish() {
	y.alive()
	y.clean()
	y.callers.Wait()
	y.sleep(time.Minute) // what was seen before is written down
	y.putBack()
	y.alive()                                                            // if a fault had the last word
	for y.sleep(25 * time.Minute); y.dead(); y.sleep(25 * time.Minute) { // a step that died late
		y.alive()
	}
	for _, record := range y.store.List() {
		y.mustHaveHealed(record)
	}
	for _, record := range y.store.List() {
		y.askAgain(record)
	}
	y.sleep(time.Second) // calls take their time, also those that nobody waits for
	ids := y.ids()
	for _, id := range ids {
		if !y.amnesia {
			y.atRest(id)
		}
	}
	for _, id := range ids {
		for n := range 3 {
			y.mustDo(unpublish(id, n+1))
		}
		y.mustDo(unstage(id))
		y.sleep(time.Second)
		y.atRest(id)
	}
	y.nothingIsLeft()
}

func (y *history) ids() (ids []string) {
	y.k.with(func() {
		for id := range y.k.volumes {
			ids = append(ids, id)
		}
	})
	slices.Sort(ids)
	return ids
}

// clean takes away all that others did. What they mounted must still be there.
func (y *history) clean() {
	y.mend(nil)
	y.k.with(func() { y.k.reuses, y.k.others = false, nil })
	for _, n := range []string{"1", "2", "3"} {
		y.podBack(operation{"pod-back", n})
	}
	for _, id := range y.ids() {
		y.tamper(id, func(v *fakeVolume) (paths []string) {
			v.held, v.private, v.copied, v.superRO, v.foreign = false, false, false, false, ""
			y.k.autoclear(v)
			y.k.orphan()
			for n := range 4 {
				path := pathOf(id, n)
				if f := y.k.files[path]; f != nil {
					f.inUse = false
				}
				y.k.mounts[path] = slices.DeleteFunc(slices.Clone(y.k.mounts[path]), func(m fakeMount) bool {
					if m.volume == "" {
						y.k.strangers[path]--
					}
					return m.volume == ""
				})
				for i := range y.k.mounts[path] {
					y.k.mounts[path][i].Corrupt = false
				}
				if len(y.k.mounts[path]) == 0 {
					delete(y.k.mounts, path)
				}
				paths = append(paths, path)
			}
			y.k.autoclear(v)
			return paths
		})
	}
	for path, n := range y.k.strangers {
		if n != 0 {
			y.t.Errorf("%d mounts that are somebody else's are gone from %s", n, path)
		}
	}
}

// putBack gives each volume the device that its record remembers.
func (y *history) putBack() {
	for _, id := range y.ids() {
		y.tamper(id, func(v *fakeVolume) []string {
			v.plug()
			if v.first != "" && v.first != v.identity {
				v.swap()
			}
			return nil
		})
	}
}

// mustHaveHealed checks that nothing is under way after all that time, and that
// nothing fails but for good.
func (y *history) mustHaveHealed(record *state.Volume) {
	for i, status := range y.statusOf(record.ID).Parts {
		part := record.Parts()[i]
		text := status.Error
		given := func(all []string) bool {
			return slices.ContainsFunc(all, func(w string) bool { return strings.Contains(text, w) })
		}
		switch {
		case status.Is == report.Settled && record.Intent(part).Accepted:
		case status.Is == report.Failing && given(unhealed):
		case status.Is == report.Failing && !record.Intent(part).Accepted && given(refusals):
		case status.Is == report.Waiting && y.stageIsNot(record):
		case y.amnesia && held(text):
		default:
			y.t.Errorf("volume %s: %s is %s (%s), %+v", record.ID, part, status.Is, text, *record.Intent(part))
		}
	}
}

// held reports whether a text says that something is held, as by targets of which no record is left.
func held(text string) bool {
	return strings.Contains(text, "still held") || strings.Contains(text, "and kept by")
}

// stageIsNot reports whether the stage is not settled, for which others wait.
func (y *history) stageIsNot(record *state.Volume) bool {
	for i, status := range y.statusOf(record.ID).Parts {
		if record.Parts()[i] == state.StagePart() {
			return status.Is != report.Settled
		}
	}
	return false
}

func (y *history) statusOf(id string) report.Status {
	for _, s := range report.Statuses(y.p.r.Reports()) {
		if s.Volume == id {
			return s
		}
	}
	return report.Status{}
}

// askAgain repeats all that a record asks for. What was never accepted may be
// refused; of what was, a publish whose device has another number by now must
// be possible again after an unpublish.
func (y *history) askAgain(record *state.Volume) {
	again := func(part state.Part, edit func(v *state.Volume) error) error {
		return y.finally(request{record.ID, part, edit})
	}
	judge := func(part state.Part, err error) {
		intent := record.Intent(part)
		if err != nil && y.amnesia && held(err.Error()) {
			return
		}
		if err != nil && (intent.Accepted || !state.ClassOf(err).Final()) {
			y.t.Errorf("volume %s: %s: asked again in the end: %v", record.ID, part, err)
		}
	}
	unstaged := false
	if s := record.Stage; s != nil && !s.Gone {
		err := again(state.StagePart(), func(v *state.Volume) error {
			ask := *s
			return v.AskStage(&ask, time.Now())
		})
		judge(state.StagePart(), err)
		unstaged = err != nil
	}
	for _, path := range record.TargetPaths() {
		t := record.Targets[path]
		if t.Gone {
			continue
		}
		part := state.TargetPart(path)
		publish := func(v *state.Volume) error {
			ask := *t
			return v.AskPublish(&ask, stagePath(record.ID), time.Now())
		}
		err := again(part, publish)
		if err != nil && strings.Contains(err.Error(), "restart the pod") {
			y.mustDo(request{record.ID, part, func(v *state.Volume) error { return v.AskUnpublish(path, time.Now()) }})
			err = again(part, publish)
		}
		judge(part, err)
	}
	if z := record.Size; z != nil {
		err := again(state.SizePart(), func(v *state.Volume) error { return v.AskSize(z.Bytes, 0, time.Now()) })
		if !unstaged {
			judge(state.SizePart(), err)
		}
	}
}

// finally makes a call when nothing hinders it any more.
func (y *history) finally(r request) error {
	ctx, end := context.WithTimeout(context.Background(), 2*time.Minute)
	defer end()
	return y.ensure(ctx, y.p, r, howOf(nil), nil)
}

func (y *history) mustDo(r request) {
	if err := y.finally(r); err != nil {
		y.t.Errorf("%s: in the end: %v", r, err)
	}
}

// nothingIsLeft checks that a node of which nothing is asked holds nothing.
func (y *history) nothingIsLeft() {
	synctest.Wait()
	for _, record := range y.store.List() {
		y.t.Errorf("a record is left: %s", marshal(record))
	}
	y.k.with(func() {
		for path := range y.k.mounts {
			y.t.Errorf("%s is still mounted", path)
		}
		for id, v := range y.k.volumes {
			if v.highest() != nil || v.view != nil {
				y.t.Errorf("volume %s: still attached", id)
			}
		}
	})
	y.p.r.mu.Lock()
	defer y.p.r.mu.Unlock()
	for id := range y.p.r.volumes {
		y.t.Errorf("volume %s: kept in memory", id)
	}
}
