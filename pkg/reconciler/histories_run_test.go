package reconciler

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// history is one run of a history: a node, the plugin on it, callers, and
// everything that goes wrong. What it checks is in histories_judge_test.go.
type history struct {
	*harness
	amnesia   bool // the record was lost, so what is mounted may be in none
	gone      *fakePods
	callers   sync.WaitGroup
	down      bool
	unwritten int            // commits of the store that are yet to fail; guarded by store.mu
	asking    *demand        // whose edit is being made; guarded by store.mu
	ends      map[string]int // by part: the look that saw its end; guarded by store.mu
	mu        sync.Mutex
	orders    map[string]int       // by part: how many edits of callers changed what is asked
	waiting   map[*demand]struct{} // callers that have no answer yet
}

// play makes the operations one after the other, and then sees to it that all
// ends well. Whatever is wrong is told to h.t.
func (h *harness) play(operations []operation) {
	y := &history{
		harness: h, gone: &fakePods{gone: map[string]bool{}}, down: true,
		orders: map[string]int{}, ends: map[string]int{}, waiting: map[*demand]struct{}{},
	}
	h.pods, h.resync = y.gone, 10*time.Minute
	h.random = func() float64 { // the same for all that is asked at one moment, whatever the order
		return float64(time.Now().UnixNano()%997) / 997
	}
	y.watch()
	h.k.judged = true
	speak := grammar()
	for _, o := range operations {
		h.k.with(func() { h.k.note("-- %s", o) })
		y.awaitDeath()
		speak[o[0]].do(y, o)
		synctest.Wait()
		time.Sleep(time.Nanosecond)
	}
	y.finish()
}

// watch puts the judge beside the store.
func (y *history) watch() {
	y.store.edited = y.edited
	y.store.fail = func(id string) error {
		if y.unwritten > 0 {
			y.unwritten--
			return errors.New("no space left on device")
		}
		return nil
	}
}

// awaitDeath waits for the end of a process that has died of itself.
func (y *history) awaitDeath() {
	if !y.down && y.dead() {
		y.ended()
	}
}

// ended waits until a process that was told to end, or is dead, has ended. What
// hangs in the kernel has its effect first: until then the process holds the lock
// of the store.
func (y *history) ended() {
	y.k.with(func() {
		for _, f := range y.k.faults {
			if f.hang != nil && f.deaf {
				f.times = 0
				f.open()
			}
		}
	})
	<-y.p.done
	y.k.with(y.p.die) // what its callers are at has no effect any more
	y.down = true
}

// alive starts the plugin if it is down.
func (y *history) alive() {
	y.awaitDeath()
	if y.down {
		y.start()
		y.down = false
	}
}

func (y *history) up(operation) { y.alive() }

func (y *history) kill9(operation) {
	if !y.down {
		y.k.with(y.p.die)
		y.ended()
	}
}

// terminate ends the plugin as SIGTERM does: after ten seconds it leaves a step
// that hangs.
func (y *history) terminate(operation) {
	if y.down {
		return
	}
	y.p.end()
	select {
	case <-y.p.done:
		y.ended()
	case <-time.After(10 * time.Second):
		y.kill9(nil)
	}
}

func (y *history) loseStore(operation) {
	if !y.down {
		return
	}
	y.store.lose()
	y.store.mu.Lock()
	defer y.store.mu.Unlock()
	y.amnesia = true
	y.k.with(func() {
		clear(y.k.known)
		clear(y.k.knownFrom)
		for path := range y.k.mounts {
			y.k.forgotten[path] = true
		}
		for _, v := range y.k.volumes {
			if swapped := v.first != "" && v.first != v.identity; swapped && (v.open() || y.k.mountedAnywhere(v)) { // or nobody would ever know on what it was opened or mounted
				v.swap()
			}
			v.first = ""
		}
		y.k.orphan()
	})
	y.disturbAll()
}

// reboot leaves the data, the directories, and nothing else.
func (y *history) reboot(operation) {
	y.kill9(nil)
	y.k.with(func() {
		clear(y.k.mounts)
		for id, v := range y.k.volumes {
			v.device, v.view, v.held, v.private, v.copied, v.superRO, v.dead, v.foreign = nil, nil, false, false, false, false, false, ""
			if v.layer != nil {
				v.layer = &fakeLayer{}
			}
			y.k.drift(id)
		}
	})
	clear(y.k.strangers)
	y.loseStore(nil)
	y.amnesia = false
	clear(y.k.forgotten)
}

func (y *history) disturbAll() {
	y.k.with(func() {
		for id := range y.k.volumes {
			y.k.drift(id)
		}
	})
}

func (y *history) delays(o operation) { y.k.with(func() { y.k.delays = uint64(o.number(1)) }) }

func (y *history) reuse(operation) { y.k.with(func() { y.k.reuses = true }) }

func (y *history) otherDevices(o operation) {
	y.k.with(func() {
		for len(y.k.others) < o.number(1) {
			y.k.others = append(y.k.others, y.k.number())
		}
		y.k.others = y.k.others[len(y.k.others)-o.number(1):]
	})
}

func (y *history) heal(o operation) {
	if y.down {
		y.detectOnly = o.number(1) == 0
	}
}

func (y *history) add(o operation) {
	y.k.with(func() {
		if y.k.volumes[o.volume()] != nil {
			return
		}
		blank := fakeData{contents: state.Contents{Kind: state.ContentsBlank}, beneath: state.Contents{Kind: state.ContentsBlank}}
		v := &fakeVolume{capacity: gib, size: gib, fakeData: blank, spare: blank}
		v.identity, v.spare.identity = "disk", "another disk"
		has := func(nature string) bool { return slices.Contains(o[3:], nature) }
		v.source, v.shared, v.exclusive = has("source"), has("shared"), has("exclusive")
		if v.noted = has("noted"); has("layer") {
			v.layer = &fakeLayer{}
		}
		switch content := o[2]; content {
		case "ext4", "xfs":
			v.formatted, v.data = content, true
			v.contents = state.Contents{Kind: state.ContentsFilesystem, FSType: content, UUID: "old", Size: gib}
			if v.layer != nil {
				v.formatted, v.header, v.contents.Size = "layer", used, gib-headerBytes
			}
		case "other":
			v.data = true
			*v.lowest() = state.Contents{Kind: state.ContentsOther, Found: "a LUKS header"}
		}
		y.k.volumes[o.volume()] = v
		y.k.drift(o.volume())
	})
}

func (y *history) pause(o operation) { time.Sleep(o.duration(1)) }

func (y *history) await(operation) {
	y.alive()
	y.callers.Wait()
	time.Sleep(time.Nanosecond) // the next operation is not at the moment of the last answer
}

// Calls.

func (y *history) callVolume(o operation) {
	w := howOf(o[2:])
	if o[0] == "unstage" {
		y.begin(unstage(o.volume()), w, nil)
		return
	}
	ask := func() *state.Stage {
		return &state.Stage{Path: stagePath(o.volume()), Capability: w.capability, ReadOnly: w.readOnly, Context: y.context(o.volume())}
	}
	y.begin(request{o.volume(), state.StagePart(), func(v *state.Volume) error { return v.AskStage(ask(), time.Now()) }}, w,
		func(v *state.Volume) bool { return v.Stage != nil && !v.Stage.Gone && v.Stage.SameAs(ask()) })
}

func (y *history) callTarget(o operation) {
	w, path := howOf(o[3:]), o.path(2)
	if o[0] == "unpublish" {
		y.begin(unpublish(o.volume(), o.number(2)), w, nil)
		return
	}
	ask := func() *state.Target {
		return &state.Target{Path: path, Capability: w.capability, ReadOnly: w.readOnly, Context: y.context(o.volume())}
	}
	y.begin(request{o.volume(), state.TargetPart(path), func(v *state.Volume) error { return v.AskPublish(ask(), stagePath(o.volume()), time.Now()) }}, w,
		func(v *state.Volume) bool {
			t := v.Targets[path]
			return t != nil && !t.Gone && t.SameAs(ask())
		})
}

func (y *history) callSize(o operation) {
	y.begin(resize(o.volume(), int64(o.number(2))*gib), howOf(o[3:]), nil)
}

// context is what a caller says of a volume.
func (y *history) context(id string) (context map[string]string) {
	y.k.with(func() {
		if v := y.k.volumes[id]; v != nil && v.layer != nil {
			context = layerContext()
		}
	})
	return context
}

// begin makes a call in the background.
func (y *history) begin(r request, w how, asksFor func(*state.Volume) bool) {
	y.alive()
	p := y.p
	y.callers.Go(func() {
		ctx, end := context.WithTimeout(klog.NewContext(context.Background(), klog.Logger{}), w.deadline)
		defer end()
		if w.cancel > 0 {
			defer time.AfterFunc(w.cancel, end).Stop()
		}
		y.ensure(ctx, p, r, w, asksFor)
	})
}

// ensure is one request, and the judgement of its answer.
func (y *history) ensure(ctx context.Context, p *process, r request, w how, asksFor func(*state.Volume) bool) error {
	edit := r.edit
	r.edit = func(v *state.Volume) error {
		if w.key != "" {
			p.r.Remember(r.id, map[string]string{layerKey: w.key})
		}
		return edit(v)
	}
	a := y.ask(r, asksFor)
	began := time.Now()
	err := p.r.Ensure(ctx, r.id, r.part, a.edit)
	y.answered(a, err, time.Since(began), w.deadline)
	return err
}

func (y *history) retry(o operation) {
	y.alive()
	p := y.p
	y.callers.Go(func() {
		ctx, end := context.WithTimeout(context.Background(), 10*time.Second)
		defer end()
		began := time.Now()
		_, err := p.r.Retry(ctx, o.volume())
		y.k.with(func() { y.k.note("retry %s: %v", o.volume(), err) })
		if took := time.Since(began); took > 10*time.Second {
			y.t.Errorf("retry %s: answered after %s", o.volume(), took)
		}
		switch class := state.ClassOf(err); {
		case err == nil, class == state.NotFound, class == state.DeadlineExceeded, class == state.Unavailable:
		default:
			y.t.Errorf("retry %s: %s: %v", o.volume(), class, err)
		}
	})
}

// What others do to the node.

// tamper changes a volume, or what is at one of its paths, behind the plugin's
// back. It is noticed only if change returns paths: of mounts that came or went.
func (y *history) tamper(id string, change func(v *fakeVolume) []string) {
	var paths []string
	y.k.with(func() {
		if v := y.k.volumes[id]; v != nil {
			paths = change(v)
			y.k.orphan()
			y.k.drift(id)
		}
	})
	if y.down || y.dead() {
		return
	}
	for _, path := range paths {
		y.p.r.Changed(path)
	}
}

// onPlaces is what others do at a path of a volume: to the staging path, or to a target.
// It returns the paths of mounts that came or went. The caller holds k.mu.
var onPlaces = map[string]func(y *history, at string) (told []string){
	"umount": (*history).unmountOne,
	"rmdir": func(y *history, at string) []string {
		y.k.rmdir(at)
		return nil
	},
	"litter": func(y *history, at string) []string { // a file in the directory
		y.k.litter(at)
		return nil
	},
	"cover": func(y *history, at string) []string { // a mount of somebody's
		y.k.strangers[at]++
		return y.k.push(at, fakeMount{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}})
	},
	"uncover": func(y *history, at string) (paths []string) {
		for len(y.k.mounts[at]) > 0 && y.k.mounts[at][0].volume == "" {
			paths = append(paths, y.unmountOne(at)...)
		}
		return paths
	},
	"twice": func(y *history, at string) []string { // the volume is mounted over itself
		stack := y.k.mounts[at]
		if len(stack) == 0 || stack[0].volume == "" {
			return nil
		}
		return y.k.push(at, stack[0])
	},
	"remount": func(y *history, at string) []string {
		if stack := slices.Clone(y.k.mounts[at]); len(stack) > 0 {
			stack[0].Attributes ^= state.ReadOnly
			y.k.mounts[at] = stack
		}
		return nil
	},
	"corrupt": func(y *history, at string) []string {
		if stack := slices.Clone(y.k.mounts[at]); len(stack) > 0 && !stack[0].Node {
			stack[0].Corrupt = true
			y.k.mounts[at] = stack
		}
		return nil
	},
}

// onVolumes is what others do to a volume, of which nothing tells. The caller holds k.mu.
var onVolumes = map[string]func(y *history, v *fakeVolume){
	"readonly":  func(y *history, v *fakeVolume) { v.superRO = y.k.mountedAnywhere(v) },
	"die":       func(y *history, v *fakeVolume) { v.dead = v.dead || y.k.mountedAnywhere(v) },                           // its file system is shut down
	"dirty":     func(_ *history, v *fakeVolume) { v.contents.NeedsCheck = v.contents.Kind == state.ContentsFilesystem }, // needs a check
	"losetup-d": func(y *history, v *fakeVolume) { y.k.losetupD(v) },
	"losetup-v": func(y *history, v *fakeVolume) {
		v.view = nil
		y.k.autoclear(v)
	},
	"layer-d": func(y *history, v *fakeVolume) {
		if v.open() {
			v.layer.device.detaching = true
			y.k.autoclear(v)
		}
	},
	"unplug": func(_ *history, v *fakeVolume) { v.unplug() }, // the device beneath an open layer
	"swap": func(y *history, v *fakeVolume) { // another device for the volume's, or back
		if v.first != "" || !v.open() && !y.k.mountedAnywhere(v) { // else nobody has seen yet what is mounted, or beneath the layer
			v.swap()
		}
	},
	"hold": func(y *history, v *fakeVolume) {
		v.held = v.device != nil && !y.k.claimed(v) && v.view == nil || v.held
	},
	"release": func(y *history, v *fakeVolume) {
		v.held = false
		y.k.autoclear(v)
	},
	"zeros": func(y *history, v *fakeVolume) { // it reads as zeros and keeps nothing, or does not any more
		v.zeros = !v.zeros && v.noted && !v.open() && !y.k.mountedAnywhere(v)
	},
	"private": func(_ *history, v *fakeVolume) { v.private = true },
	"loop": func(_ *history, v *fakeVolume) { // somebody else's, over the backing
		if v.device == nil {
			v.foreign = "/dev/loop99"
		}
	},
	"unloop": func(_ *history, v *fakeVolume) { v.foreign = "" },
	"move":   func(_ *history, v *fakeVolume) { v.moved = !v.moved },
}

// unmountOne takes the top mount away. The caller holds k.mu.
func (y *history) unmountOne(path string) []string {
	stack := y.k.mounts[path]
	if len(stack) == 0 {
		return nil
	}
	if stack[0].volume == "" {
		y.k.strangers[path]--
	}
	y.k.unmount(path)
	return []string{path}
}

func (y *history) umountAll(o operation) {
	y.tamper(o.volume(), func(*fakeVolume) (paths []string) {
		for n := 3; n >= 0; n-- {
			for path := pathOf(o.volume(), n); len(y.k.mounts[path]) > 0; {
				paths = append(paths, y.unmountOne(path)...)
			}
		}
		return paths
	})
}

func (y *history) podGone(o operation) { y.gone.set("/pods/"+o[1]+"/", true) }
func (y *history) podBack(o operation) { y.gone.set("/pods/"+o[1]+"/", false) }

// Faults.

func (y *history) addFault(o operation) {
	f := &fault{op: op(o[1]), times: o.number(5), err: errBoom, takes: o.duration(6), key: o[2]}
	switch f.op {
	case opMount, opMountSource, opBind, opBindDevice, opSetAttributes, opUnmount, opRemove, opRenew, opLook:
		f.key = pathOf(o[2], o.number(3))
	}
	switch o[4] {
	case "fails":
		f.mode = fails
	case "final":
		f.mode, f.err = fails, state.Errorf(state.FailedPrecondition, "it cannot be: %w", errBoom)
	case "halfway":
		f.mode = halfway
	case "idles":
		f.mode = idles
	case "crashes":
		f.mode = crashes
	case "hangs":
		f.hang = make(chan struct{})
	case "late":
		f.hang, f.deaf, f.late = make(chan struct{}), true, true
	}
	if f.op == opMountSource { // it comes back at its deadline
		f.deaf, f.late = false, false
	}
	if f.op.reads() && f.mode != fails {
		f.mode = works
	}
	y.k.fault(f)
}

func (y *history) unwritable(o operation) {
	y.store.mu.Lock()
	defer y.store.mu.Unlock()
	y.unwritten = o.number(1)
}

func (y *history) mend(operation) {
	y.k.mend()
	y.store.mu.Lock()
	defer y.store.mu.Unlock()
	y.unwritten = 0
}
