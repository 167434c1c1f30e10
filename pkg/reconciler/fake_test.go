package reconciler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// fakeKernel is a node in memory: devices, contents, mounts, files. It outlives
// the processes that act on it. Each call is checked against the safety rules
// of the planner, whatever the planner thinks; a breach is kept in violations.
type fakeKernel struct {
	mu         sync.Mutex
	volumes    map[string]*fakeVolume
	mounts     map[string][]fakeMount // by path, the top first
	mountIDs   uint64                 // the last one given out
	files      map[string]*fakeFile   // by path, beneath the mounts
	minors     uint32                 // never used twice
	formats    int
	endless    bool // a proof ends with its context only
	faults     []*fault
	calls      map[callKey]int
	acting     map[string]op // the mutating call that a volume is in
	looks      map[string]spin
	log        []entry
	violations []string
	began      time.Time
	unread     error  // the backend's facts cannot be read
	delays     uint64 // when not 0, each call takes a little time, which depends on this
	events     int    // looks at volumes and drifts so far
	tables     int    // looks at all mount tables for binds
	obeys      bool   // it does what a kernel does, whatever the planner's rules say

	forgotten map[string]bool                 // paths of mounts whose records were lost, or do not tell the number yet
	known     map[string]state.DeviceNumber   // by path: the number that a record tells
	judged    bool                            // a history's judge says when a record tells it
	strangers map[string]int                  // by path: mounts of somebody else's that must be left alone
	askers    map[string]int                  // by volume: callers who wait for a stage or a publish
	left      map[string]event                // by volume: when the last of them left
	copies    map[state.DeviceNumber][]string // binds of nodes in other mount namespaces

	// By volume: the last look, the last one of an earlier moment, the last one at what its
	// device holds, the last drift.
	looked, lookedBefore, probed, drifted map[string]event
	ended                                 map[string]time.Time // by volume: when a part of a look that took its time last ended
}

// fakeVolume is the data of one volume and what is attached of it.
type fakeVolume struct {
	capacity                  int64 // bytes promised
	size                      int64 // bytes of the backing
	foreign                   string
	away                      bool        // it has not come to the node yet
	device                    *fakeDevice // the backend's
	layer                     *fakeLayer  // over it; nil: the volume wants none
	view                      *fakeDevice // over the highest
	held, viewHeld            bool        // the highest device, and the view, is claimed by somebody outside
	private                   bool        // a pod with a private mount namespace keeps a copy of the stage
	copied                    bool        // such a copy holds the device now
	created                   string      // the fs type that it was made for
	superRO                   bool        // the kernel turned the file system read-only
	dead                      bool        // the mounted file system was shut down
	keepers                   []string
	source, shared, exclusive bool // what sort of storage it is

	fakeData
	spare   fakeData // of another device, which may come in the place of this one
	first   string   // the identity that the record remembers
	noted   bool     // the facts about its format are notes of the node
	zeros   bool     // it reads as zeros, and keeps nothing that is written to it
	guessed bool     // the flags of a stage that is but a record were once those of a publish
}

// fakeData is what is on a device, and the durable facts about it.
type fakeData struct {
	identity   string
	formatting bool
	uuid       string // of the mark
	trial      string // UUID of the stamp that was last to be written
	stamp      string // UUID of the one that is there
	formatted  string
	raw        bool           // published raw for writing
	header     string         // of a layer: stampedNew, or used
	beneath    state.Contents // of a device that is to bear a layer and does not
	contents   state.Contents // of the top
	data       bool           // it was mounted for writing: erasing it would lose data
}

type fakeDevice struct {
	number    state.DeviceNumber
	size      int64
	readOnly  bool
	detaching bool
}

type fakeMount struct {
	state.Mount
	volume string // empty for a mount that the plugin did not make
}

type fakeFile struct {
	kind  state.FileType
	inUse bool // holds entries or bytes
}

// op names a call. Those of reads come first.
type op string

const (
	opFind      op = "find"
	opFindView  op = "find-view"
	opFindLayer op = "find-layer"
	opProbe     op = "probe"
	opLook      op = "look"
	opProve     op = "prove"
	opCommit    op = "commit" // of the store: it only counts

	opAttach        op = "attach"
	opDetach        op = "detach"
	opGrowDevice    op = "grow-device"
	opTryFormat     op = "try-format"
	opTry           op = "try"
	opBeginFormat   op = "begin-format"
	opBeginRaw      op = "begin-raw"
	opErase         op = "erase"
	opEndFormat     op = "end-format"
	opCreateLayer   op = "create-layer"
	opOpenLayer     op = "open-layer"
	opCloseLayer    op = "close-layer"
	opGrowLayer     op = "grow-layer"
	opEraseLayer    op = "erase-layer"
	opUseLayer      op = "use-layer"
	opAttachView    op = "attach-view"
	opDetachView    op = "detach-view"
	opFormat        op = "format"
	opCheck         op = "check"
	opGrow          op = "grow"
	opMount         op = "mount"
	opMountSource   op = "mount-source"
	opBind          op = "bind"
	opBindDevice    op = "bind-device"
	opSetAttributes op = "set-attributes"
	opUnmount       op = "unmount"
	opRemove        op = "remove"
	opRenew         op = "renew"
)

// lookers lists every call that looks and may fail.
func lookers() []op { return []op{opFind, opFindView, opFindLayer, opProbe, opLook} }

// mutators lists every call that changes something.
func mutators() []op {
	return []op{opAttach, opDetach, opGrowDevice, opBeginFormat, opBeginRaw, opErase, opEndFormat, opAttachView, opDetachView,
		opCreateLayer, opOpenLayer, opCloseLayer, opGrowLayer, opEraseLayer, opUseLayer,
		opFormat, opCheck, opGrow, opMount, opMountSource, opBind, opBindDevice, opSetAttributes, opUnmount, opRemove, opRenew}
}

// trials lists the calls of a trial, before the mark of a volume whose facts are notes.
func trials() []op { return []op{opTryFormat, opTry} }

func (o op) reads() bool {
	return o == opProve || o == opCommit || slices.Contains(lookers(), o)
}

type callKey struct {
	op  op
	key string // volume id, or path of a call that has one
}

type spin struct {
	since time.Time
	n     int
}

// maxLooks at one volume within a second: a worker that looks more often spins.
const maxLooks = 3000

// entry is a line of the log. It is put into words only when somebody reads it.
type entry struct {
	at     time.Duration // since the kernel began
	format string
	args   []any
}

func (e entry) String() string { return fmt.Sprintf("%14s ", e.at) + fmt.Sprintf(e.format, e.args...) }

// mode is what becomes of a call that meets a fault.
type mode int

const (
	works   mode = iota // after the delay
	fails               // and has no effect
	halfway             // has part of its effect, then fails
	idles               // reports success and has no effect
	crashes             // has part of its effect, and the process dies
)

// fault is what calls of an op meet.
type fault struct {
	op     op
	key    string // volume id or path; empty for any
	times  int    // that are left; negative for ever
	mode   mode
	err    error
	takes  time.Duration
	hang   chan struct{} // until closed, or ctx ends
	deaf   bool          // the hang does not end with ctx
	late   bool          // and then has its effect though the process is dead
	opened sync.Once
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		volumes: map[string]*fakeVolume{}, mounts: map[string][]fakeMount{}, files: map[string]*fakeFile{},
		calls: map[callKey]int{}, acting: map[string]op{}, looks: map[string]spin{}, began: time.Now(),
		forgotten: map[string]bool{}, known: map[string]state.DeviceNumber{}, strangers: map[string]int{}, askers: map[string]int{}, left: map[string]event{}, looked: map[string]event{}, lookedBefore: map[string]event{}, probed: map[string]event{}, drifted: map[string]event{}, ended: map[string]time.Time{},
	}
}

// fault adds one; of several that fit a call the first that is left counts.
func (k *fakeKernel) fault(f *fault) *fault {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.faults = append(k.faults, f)
	return f
}

// fail makes calls fail, times of them or (negative) for ever.
func (k *fakeKernel) fail(o op, key string, times int, err error) *fault {
	return k.fault(&fault{op: o, key: key, times: times, mode: fails, err: err})
}

// slow makes calls take virtual time.
func (k *fakeKernel) slow(o op, key string, times int, takes time.Duration) *fault {
	return k.fault(&fault{op: o, key: key, times: times, takes: takes})
}

// hang makes one call hang until open or, unless deaf, until its ctx ends.
func (k *fakeKernel) hang(o op, key string, deaf bool) *fault {
	return k.fault(&fault{op: o, key: key, times: 1, hang: make(chan struct{}), deaf: deaf})
}

// open ends a hang: the call then has its effect.
func (f *fault) open() { f.opened.Do(func() { close(f.hang) }) }

// mend takes away all faults and opens all hangs.
func (k *fakeKernel) mend() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, v := range k.volumes {
		v.zeros = false
	}
	for _, f := range k.faults {
		f.times = 0
		if f.hang != nil {
			f.open()
		}
	}
}

// count returns how many calls there were.
func (k *fakeKernel) count(o op, key string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.calls[callKey{o, key}]
}

// changes returns how many mutating calls there were.
func (k *fakeKernel) changes() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := 0
	for key, calls := range k.calls {
		if !key.op.reads() {
			n += calls
		}
	}
	return n
}

// with lets a test look at the node, or change it behind the plugin's back.
func (k *fakeKernel) with(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// violate notes a breach of the safety rules, and is the error of the call.
func (k *fakeKernel) violate(format string, args ...any) error {
	err := fmt.Errorf("VIOLATION: "+format, args...)
	k.violations = append(k.violations, err.Error())
	k.note("%v", err)
	return err
}

// refuse is the answer to a call that nobody should have made who has just
// looked at the volume: a breach, unless the volume was changed by somebody else
// since that look. Then the kernel, or who acts on it, refuses.
func (k *fakeKernel) refuse(id, format string, args ...any) error {
	return k.refuseAs(state.Unavailable, id, format, args...)
}

// refuseAs is refuse with the class that the interfaces of devices name.
func (k *fakeKernel) refuseAs(class state.Class, id, format string, args ...any) error {
	if k.fresh(id) && !k.obeys {
		return k.violate("volume "+id+": "+format, args...)
	}
	return state.Errorf(class, format, args...)
}

// rule is refuse for what a kernel does when it is told to, and the plugin must
// never tell it to.
func (k *fakeKernel) rule(id, format string, args ...any) error {
	if k.obeys {
		return nil
	}
	return k.refuse(id, format, args...)
}

func (k *fakeKernel) note(format string, args ...any) {
	k.log = append(k.log, entry{time.Since(k.began), format, args})
}

// drift notes that somebody else has changed a volume, or what is at its paths.
// The caller holds mu.
func (k *fakeKernel) drift(id string) {
	k.drifted[id] = k.event()
}

// event is a look or a drift: the number that it has among all, and its moment.
type event struct {
	n  int
	at time.Time
}

func (k *fakeKernel) event() event {
	k.events++
	return event{k.events, time.Now()}
}

// fresh reports whether nobody has changed a volume since its worker last began
// to look at it, so that what the worker does is what it should do. The caller
// holds mu.
func (k *fakeKernel) fresh(id string) bool { return k.drifted[id].n <= k.looked[id].n }

// told reports whether what the worker has just said of a volume must be true:
// nobody has changed it since the look that the worker speaks of, which may have
// begun earlier, and been followed by another at the moment of its end. The caller
// holds mu.
func (k *fakeKernel) told(id string) bool {
	look, now := k.looked[id], time.Now()
	if look.at.Equal(now) && (k.delays != 0 || k.ended[id].Equal(now)) {
		look = k.lookedBefore[id]
	}
	return k.drifted[id].n <= look.n
}

// delay is how long a call takes, or a commit: nothing, or at most two
// milliseconds that depend on nothing but the call, so that a history takes the
// same turns each time.
func (k *fakeKernel) delay(what, key string, n int) time.Duration {
	if k.delays == 0 {
		return 0
	}
	hash := fnv.New64a()
	fmt.Fprintf(hash, "%d %s %s %d", k.delays, what, key, n)
	sum := hash.Sum64()
	return time.Duration(1+sum>>32%1000) * time.Duration(1+sum%2000)
}

var errDead = errors.New("the process is dead")

// call is the frame of every call: it counts and checks, meets the faults, and
// has its effect at once at its end.
func (p *process) call(ctx context.Context, o op, volume, key string, act func(half bool) error) (err error) {
	k := p.k
	effect := func(half bool) error {
		if why := k.forbidden(o, volume); why != "" {
			return k.refuse(volume, "%s %s: %s", o, key, why)
		}
		return act(half)
	}
	f, err := k.enter(p, o, volume, key)
	if err != nil {
		return err
	}
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if !o.reads() {
			delete(k.acting, volume)
			k.note("%s %s: %v", o, key, err)
		} else if f.takes > 0 || f.hang != nil {
			k.ended[volume] = time.Now()
		}
	}()
	if err := f.wait(ctx); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.dead {
		if f.late {
			return errors.Join(errDead, effect(false))
		}
		return errDead
	}
	switch f.mode {
	case fails:
		return f.err
	case idles:
		if o == opFormat || o == opCreateLayer { // reads back what it made
			return fmt.Errorf("%s reported success, and what it makes is not on the device", o)
		}
		return nil
	case halfway:
		return errors.Join(f.err, effect(true))
	case crashes:
		err := effect(true)
		p.die()
		return errors.Join(errDead, err)
	}
	return effect(false)
}

func (k *fakeKernel) enter(p *process, o op, volume, key string) (met, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.dead {
		return met{}, errDead
	}
	k.calls[callKey{o, key}]++
	if other, busy := k.acting[volume]; busy && !o.reads() && !k.obeys {
		return met{}, k.violate("volume %s: %s of %s while %s is under way", volume, o, key, other)
	}
	if !o.reads() {
		k.acting[volume] = o
	}
	if o == opFind {
		if look := k.looked[volume]; !look.at.Equal(time.Now()) {
			k.lookedBefore[volume] = look
		}
		k.looked[volume] = k.event()
		s := k.looks[volume]
		if time.Since(s.since) >= time.Second {
			s = spin{since: time.Now()}
		}
		s.n++
		k.looks[volume] = s
		if s.n == maxLooks {
			k.violate("volume %s: the worker spins: %d looks within a second", volume, s.n)
			p.die() // or the test would never end
			return met{}, errDead
		}
	}
	if o == opProbe {
		k.probed[volume] = k.event()
	}
	nth := k.calls[callKey{o, key}]
	if o.reads() {
		nth = 0 // or a look more, of which the scheduler decides, would change all that follows
	}
	met := met{fault: &fault{}, takes: k.delay(string(o), key, nth)}
	for _, f := range k.faults {
		if f.op == o && f.times != 0 && (f.key == "" || f.key == key || f.key == volume) {
			f.times--
			met.fault = f
			met.takes += f.takes
			break
		}
	}
	return met, nil
}

// met is what one call meets.
type met struct {
	*fault
	takes time.Duration
}

func (f met) wait(ctx context.Context) error {
	if f.takes > 0 {
		timer := time.NewTimer(f.takes)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	switch {
	case f.hang == nil:
	case f.deaf:
		<-f.hang
	default:
		select {
		case <-f.hang:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// What others do to a node. The callers hold mu.

// rmdir removes a directory, or a file, on which nothing is mounted.
func (k *fakeKernel) rmdir(at string) {
	v := k.volumes[volumeOf(at)]
	if len(k.mounts[at]) > 0 {
		return
	}
	delete(k.files, at)
	if at == stagePath(volumeOf(at)) { // the kernel drops copies with the directory
		v.copied = false
		k.autoclear(v)
	}
}

// litter puts something into a directory, or a file, on which nothing is mounted.
func (k *fakeKernel) litter(at string) {
	switch f := k.files[at]; {
	case f == nil:
		k.files[at] = &fakeFile{kind: state.Directory, inUse: true}
	case len(k.mounts[at]) == 0:
		f.inUse = true
	}
}

// push mounts something over what is at a path, and returns the path.
func (k *fakeKernel) push(at string, m fakeMount) []string {
	if k.files[at] == nil {
		k.files[at] = &fakeFile{kind: state.Directory}
	}
	k.mountIDs++
	m.ID = k.mountIDs
	k.mounts[at] = append([]fakeMount{m}, k.mounts[at]...)
	return []string{at}
}

// losetupD detaches a device, or has it go with the last who holds it.
func (k *fakeKernel) losetupD(v *fakeVolume) {
	if v.device != nil {
		v.device.detaching = true
		k.autoclear(v)
	}
}

// The paths of volume id; the last component names the volume.
func stagePath(id string) string         { return "/k/stage/" + id }
func targetPath(id string, n int) string { return fmt.Sprintf("/k/pods/%d/%s", n, id) }
func volumeOf(p string) string           { return path.Base(p) }

// mounted returns the paths at which a device is mounted, whole or as a node,
// but for one path.
func (k *fakeKernel) mounted(number state.DeviceNumber, but string) []string {
	var paths []string
	for p, stack := range k.mounts {
		if p != but && slices.ContainsFunc(stack, func(m fakeMount) bool { return m.Device == number }) {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	return paths
}

// seen is mounted without what nobody can see: the record was lost, and
// something else covers the mount.
func (k *fakeKernel) seen(number state.DeviceNumber) []string {
	return slices.DeleteFunc(k.mounted(number, ""), func(p string) bool { return k.forgotten[p] && k.mounts[p][0].volume == "" })
}

// orphan makes strangers of bound device nodes of which no record is left nor a
// device: nothing tells whose they were. The caller holds k.mu.
func (k *fakeKernel) orphan() {
	for path := range k.forgotten {
		stack := slices.Clone(k.mounts[path])
		for i, m := range stack {
			v := k.volumes[m.volume]
			if m.Node && v != nil && k.known[path] != m.Device && !v.has(m.Device) {
				stack[i].volume = ""
				k.strangers[path]++
				k.mounts[path] = stack
			}
		}
	}
}

// claimed reports whether an exclusive open of the highest device would say EBUSY.
func (k *fakeKernel) claimed(v *fakeVolume) bool {
	if v.held || v.copied {
		return true
	}
	return k.mountedAnywhere(v)
}

// mountedAnywhere reports whether the file system of a volume is mounted.
func (k *fakeKernel) mountedAnywhere(v *fakeVolume) bool {
	d := v.highest()
	for _, stack := range k.mounts {
		for _, m := range stack {
			if d != nil && m.Device == d.number && !m.Node {
				return true
			}
		}
	}
	return false
}

// autoclear lets a device go whose last holder has gone, and the superblock
// with its last mount.
func (k *fakeKernel) autoclear(v *fakeVolume) {
	if !k.claimed(v) {
		v.superRO = false
	}
	if v.open() && v.layer.device.detaching && !k.claimed(v) && v.view == nil {
		v.layer.device = nil
	}
	if v.device != nil && v.device.detaching && !v.open() && !k.claimed(v) && v.view == nil {
		v.device = nil
	}
}

func (k *fakeKernel) number() state.DeviceNumber {
	k.minors++
	return state.DeviceNumber{Major: 7, Minor: k.minors}
}

func (k *fakeKernel) facts(id string) state.Device {
	v := k.volumes[id]
	if v == nil {
		return state.Device{State: state.DeviceAbsent, Missing: true}
	}
	if v.source {
		return state.Device{State: state.DeviceAbsent}
	}
	d := state.Device{State: state.DeviceAbsent, Identity: v.identity, Shared: v.shared, Exclusive: v.exclusive, Size: v.size, Capacity: v.capacity, Backing: "/pool/" + id, Formatting: v.formatting, Formatted: v.formatted, CreatedFor: v.created, Raw: v.raw, Noted: v.noted, FormatUUID: v.uuid, Trial: v.trial}
	switch {
	case v.foreign != "":
		d.State, d.Holder = state.DeviceForeign, v.foreign
	case v.device != nil:
		d.State = state.DeviceAttached
		if v.device.detaching {
			d.State = state.DeviceDetaching
		}
		d.Number, d.Path = v.device.number, fmt.Sprintf("/dev/loop%d", v.device.number.Minor)
		d.Size, d.ReadOnly = v.device.size, v.device.readOnly
	}
	if k.unread != nil {
		known := state.Device{State: d.State, Number: d.Number, Path: d.Path, ReadOnly: d.ReadOnly, Err: k.unread}
		if v.device != nil {
			known.Size = d.Size
		}
		return known
	}
	return d
}

// fakePool is more than the fake backend has room for, in bytes.
const fakePool = 1 << 50

// fakeDevices is the backend, the formatter and the viewer of a process.
type fakeDevices struct{ *process }

// Validate takes any id.
func (d fakeDevices) Validate(devices.Volume) error { return nil }

func (d fakeDevices) Find(ctx context.Context, volume devices.Volume) (have state.Device, err error) {
	id := volume.ID
	err = d.call(ctx, opFind, id, id, func(bool) error {
		have = d.k.facts(id)
		return nil
	})
	return have, err
}

// onVolume is a call that changes a volume, which must be there.
func (d fakeDevices) onVolume(ctx context.Context, o op, id string, act func(v *fakeVolume, half bool) error) error {
	return d.call(ctx, o, id, id, func(half bool) error {
		v := d.k.volumes[id]
		if v == nil {
			return d.k.refuseAs(state.NotFound, id, "%s of a missing volume", o)
		}
		return act(v, half)
	})
}

func (d fakeDevices) Attach(ctx context.Context, volume devices.Volume, readOnly bool) error {
	id := volume.ID
	return d.onVolume(ctx, opAttach, id, func(v *fakeVolume, _ bool) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case v.foreign != "":
			return d.k.refuse(id, "attach beside %s", v.foreign)
		case v.device == nil && v.away:
			return fmt.Errorf("volume %s: attach: %w", id, devices.ErrNoDevice)
		case v.device == nil && v.size < v.capacity:
			return d.k.refuse(id, "attach of a truncated backing")
		case v.device == nil:
			v.device = &fakeDevice{number: d.k.number(), size: v.size, readOnly: readOnly}
		case v.device.readOnly != readOnly && !v.device.detaching && d.k.obeys && !d.k.claimed(v):
			v.device = &fakeDevice{number: d.k.number(), size: v.size, readOnly: readOnly}
		case v.device.readOnly != readOnly && !v.device.detaching:
			return d.k.refuseAs(state.FailedPrecondition, id, "attach of a device that stands with another access")
		}
		v.device.detaching = false
		return nil
	})
}

func (d fakeDevices) Detach(ctx context.Context, volume devices.Volume) error {
	id := volume.ID
	return d.call(ctx, opDetach, id, id, func(bool) error {
		v := d.k.volumes[id]
		if v == nil || v.device == nil {
			return nil
		}
		if paths := d.k.seen(v.highest().number); len(paths) > 0 {
			return d.k.refuse(id, "detach while mounted at %v", paths)
		}
		if v.view != nil {
			return d.k.refuse(id, "detach beneath its view")
		}
		if d.k.claimed(v) {
			return fmt.Errorf("device of %s is held by pid 7 (holder)", id)
		}
		v.device = nil
		d.k.orphan()
		return nil
	})
}

func (d fakeDevices) Grow(ctx context.Context, volume devices.Volume, bytes int64) error {
	return d.onVolume(ctx, opGrowDevice, volume.ID, func(v *fakeVolume, half bool) error {
		if bytes > fakePool {
			return state.Errorf(state.ResourceExhausted, "volume %s: no room for %d bytes", volume.ID, bytes)
		}
		v.capacity = max(v.capacity, bytes)
		v.size = max(v.size, v.capacity)
		if !half && v.device != nil {
			v.device.size = v.size
		}
		return nil
	})
}

// TryFormat begins the trial of a volume whose facts are notes.
func (d fakeDevices) TryFormat(ctx context.Context, volume devices.Volume) (uuid string, err error) {
	id := volume.ID
	return uuid, d.onVolume(ctx, opTryFormat, id, func(v *fakeVolume, _ bool) error {
		if !v.noted {
			return d.k.refuse(id, "trial of what nobody else can have")
		}
		d.k.formats++
		uuid = fmt.Sprintf("uuid-%d", d.k.formats)
		v.formatting, v.uuid, v.trial = false, "", uuid
		return nil
	})
}

func (d fakeDevices) BeginFormat(ctx context.Context, volume devices.Volume) error {
	id := volume.ID
	return d.onVolume(ctx, opBeginFormat, id, func(v *fakeVolume, _ bool) error {
		switch {
		case v.formatted != "":
			return d.k.refuseAs(state.FailedPrecondition, id, "formatting mark on what was formatted as %q", v.formatted)
		case v.raw:
			return d.k.refuseAs(state.FailedPrecondition, id, "formatting mark on what was published raw")
		}
		kind := v.lowest().Kind
		blank := kind == state.ContentsBlank || kind == state.ContentsUnproven
		if free := d.k.free(v); !blank || v.data || !free {
			if err := d.k.rule(id, "formatting mark on %v, data %t, free %t", kind, v.data, free); err != nil {
				return err
			}
		}
		if v.noted && v.trial == "" {
			return d.k.refuse(id, "formatting mark without a trial")
		}
		v.formatting, v.uuid, v.trial = true, v.trial, ""
		return nil
	})
}

func (d fakeDevices) Erase(ctx context.Context, volume devices.Volume) error {
	id := volume.ID
	return d.onVolume(ctx, opErase, id, func(v *fakeVolume, half bool) error {
		switch {
		case !v.formatting || v.data:
			return d.k.refuseAs(state.FailedPrecondition, id, "erased without a formatting mark or with data")
		case v.device == nil || v.device.readOnly:
			return d.k.refuseAs(state.FailedPrecondition, id, "erased and not attached for writing")
		}
		if err := d.k.exclusive(id, "erase"); err != nil {
			return err
		}
		if c := *v.lowest(); v.uuid != "" && c.Kind != state.ContentsBlank && c.Kind != state.ContentsUnproven && c.UUID != v.uuid && !strings.HasPrefix(c.Found, "half") && !v.zeros {
			return d.k.refuse(id, "erased %+v under the mark of %s", c, v.uuid)
		}
		if !half && !v.zeros {
			*v.lowest() = state.Contents{Kind: state.ContentsBlank}
			v.stamp = ""
		}
		return nil
	})
}

func (d fakeDevices) BeginRaw(ctx context.Context, volume devices.Volume) error {
	return d.onVolume(ctx, opBeginRaw, volume.ID, func(v *fakeVolume, _ bool) error {
		v.raw = true
		return nil
	})
}

// AbandonFormat clears the mark of a volume whose facts are notes.
func (d fakeDevices) AbandonFormat(_ context.Context, volume devices.Volume) error {
	d.k.with(func() {
		if v := d.k.volumes[volume.ID]; v != nil && v.noted {
			v.formatting, v.uuid = false, ""
		}
	})
	return nil
}

func (d fakeDevices) EndFormat(ctx context.Context, volume devices.Volume, fsType string) error {
	id := volume.ID
	return d.onVolume(ctx, opEndFormat, id, func(v *fakeVolume, half bool) error {
		if !v.formatting && v.formatted != fsType {
			return d.k.refuseAs(state.FailedPrecondition, id, "end of a format that was not begun")
		}
		if v.layer == nil && v.contents.FSType != fsType {
			if err := d.k.rule(id, "end of a format that left %q", v.contents.FSType); err != nil {
				return err
			}
		}
		if !half {
			v.formatting, v.uuid, v.trial, v.formatted = false, "", "", fsType
		}
		return nil
	})
}

// free reports whether a device is there to be written to, and nobody has it.
func (k *fakeKernel) free(v *fakeVolume) bool {
	d := v.highest()
	return d != nil && !d.detaching && !d.readOnly && !v.superRO && !k.claimed(v) && v.view == nil && len(k.mounted(d.number, "")) == 0
}

// exclusive checks that a device may be written to: attached, writable, held
// by nobody.
func (k *fakeKernel) exclusive(id, what string) error {
	if !k.free(k.volumes[id]) {
		return k.refuse(id, "%s on a device that is not attached for writing and free", what)
	}
	return nil
}

// Held is a part of the look that Find begins: it does not fail by itself.
func (d fakeDevices) Held(_ context.Context, device state.Device) (bool, error) {
	d.k.mu.Lock()
	defer d.k.mu.Unlock()
	v := d.k.volumes[path.Base(device.Backing)]
	switch {
	case v == nil || v.highest() == nil:
		return false, nil
	case v.highest().number == device.Number:
		return d.k.claimed(v), nil
	case v.view != nil && v.view.number == device.Number:
		return v.viewHeld, nil
	}
	return v.open() && v.layer.over == v.device && v.device.number == device.Number, nil // the layer claims what it stands on
}

func (d fakeDevices) FindView(ctx context.Context, device state.Device) (view state.Device, err error) {
	id := path.Base(device.Backing)
	err = d.call(ctx, opFindView, id, id, func(bool) error {
		view = state.Device{State: state.DeviceAbsent}
		if v := d.k.volumes[id]; v != nil && v.view != nil {
			view = state.Device{State: state.DeviceAttached, Number: v.view.number, Path: fmt.Sprintf("/dev/loop%d", v.view.number.Minor), ReadOnly: true, Size: v.highest().size, Backing: device.Backing}
		}
		return nil
	})
	return view, err
}

func (d fakeDevices) AttachView(ctx context.Context, device state.Device) error {
	id := path.Base(device.Backing)
	return d.call(ctx, opAttachView, id, id, func(bool) error {
		v := d.k.volumes[id]
		if v.highest() == nil || v.highest().number != device.Number {
			return d.k.refuse(id, "view over a device that is not there")
		}
		if v.view != nil {
			return d.k.rule(id, "view over a device that has one")
		}
		v.view = &fakeDevice{number: d.k.number(), readOnly: true}
		return nil
	})
}

func (d fakeDevices) DetachView(ctx context.Context, device state.Device) error {
	id := path.Base(device.Backing)
	return d.call(ctx, opDetachView, id, id, func(bool) error {
		v := d.k.volumes[id]
		if v.view == nil {
			return nil
		}
		if paths := d.k.seen(v.view.number); len(paths) > 0 {
			return d.k.refuse(id, "view detached while shown at %v", paths)
		}
		if v.viewHeld {
			return fmt.Errorf("view of %s is held by pid 7 (holder)", id)
		}
		v.view = nil
		d.k.autoclear(v)
		d.k.orphan()
		return nil
	})
}

// growsMounted reports whether a type of file system grows while it is mounted. The others
// grow while they are not.
func growsMounted(fsType string) bool { return fsType == "xfs" }

// fakeFilesystems is mkfs and its kin.
type fakeFilesystems struct{ *process }

func (f fakeFilesystems) Probe(ctx context.Context, device state.Device, mountpoint string) (c state.Contents, err error) {
	id := path.Base(device.Backing)
	err = f.call(ctx, opProbe, id, id, func(bool) error {
		v := f.k.volumes[id]
		switch top := v.top(); {
		case v.layer != nil && v.device != nil && v.device.number == device.Number:
			c = v.shown(v.beneath, device)
			return nil
		case top == nil:
			return fmt.Errorf("no device of %s", id)
		}
		c = v.shown(v.contents, device)
		if c.Kind == state.ContentsFilesystem {
			c.Growable = c.Size < v.top().size
			c.GrowsMounted, c.GrowsUnmounted = growsMounted(c.FSType), !growsMounted(c.FSType)
		}
		return nil
	})
	return c, err
}

// shown is what a look finds where there are such contents.
func (v *fakeVolume) shown(c state.Contents, device state.Device) state.Contents {
	switch {
	case v.zeros:
		return state.Contents{Kind: state.ContentsBlank}
	case v.stamp != "" && v.stamp == device.Trial:
		return state.Contents{Kind: state.ContentsUnproven, Found: "a stamp"}
	case v.stamp != "":
		c = state.Contents{Kind: state.ContentsOther, Found: "half a trial"}
	}
	switch {
	case device.FormatUUID == "" || maybeBlank(c):
	case c.UUID == device.FormatUUID:
		c.Origin = state.OriginFormat
	case strings.HasPrefix(c.Found, "half"):
		c.Origin = state.OriginUnnamed
	default:
		c.Origin = state.OriginOther
	}
	return c
}

// Try leaves the stamp when it is cut short.
func (f fakeFilesystems) Try(ctx context.Context, device state.Device, uuid string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opTry, id, id, func(half bool) error {
		v := f.k.volumes[id]
		switch c := v.shown(*v.lowest(), device); {
		case v.trial != uuid:
			return f.k.refuse(id, "trial of %s, and %q was begun", uuid, v.trial)
		case !maybeBlank(c) || v.zeros:
			return &state.Unwritten{Err: fmt.Errorf("it keeps nothing, or holds %v", c.Kind)}
		case half:
			v.stamp = uuid
		}
		return f.k.exclusive(id, "try")
	})
}

// FormatAfter is Format, as mkfs is told a UUID.
func (f fakeFilesystems) FormatAfter(ctx context.Context, device state.Device, fsType string, last func(context.Context) (string, error)) error {
	var blank bool
	f.k.with(func() {
		blank = maybeBlank(f.k.volumes[path.Base(device.Backing)].shown(f.k.volumes[path.Base(device.Backing)].contents, device))
	})
	if !blank {
		return &state.Unwritten{Err: state.Errorf(state.FailedPrecondition, "only a blank device is formatted")}
	}
	uuid, err := last(ctx)
	if err != nil {
		return err
	}
	device.FormatUUID = uuid
	return f.Format(ctx, device, fsType)
}

func (f fakeFilesystems) Prove(ctx context.Context, device state.Device) error {
	id := path.Base(device.Backing)
	state.Progress(ctx, "proving that it is blank: none read")
	var endless bool
	for f.k.with(func() { endless = f.k.endless }); endless; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
			state.Progress(ctx, "proving that it is blank: some read")
		}
	}
	return f.call(ctx, opProve, id, id, func(bool) error {
		v := f.k.volumes[id]
		if v.stamp != "" && v.stamp == device.Trial {
			v.stamp = ""
		}
		if kind := v.shown(*v.lowest(), device).Kind; kind != state.ContentsBlank && kind != state.ContentsUnproven {
			if f.k.drifted[id].n > f.k.probed[id].n { // the look right before a proof is not at this
				return state.Errorf(state.Unavailable, "it is %v by now", kind)
			}
			return f.k.refuse(id, "proof of %v", kind)
		}
		return nil
	})
}

func (f fakeFilesystems) Smallest(string) int64 { return 0 }

func (f fakeFilesystems) Format(ctx context.Context, device state.Device, fsType string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opFormat, id, id, func(half bool) error {
		v := f.k.volumes[id]
		if v.zeros {
			return &state.Unwritten{Err: errors.New("mkfs reported success, and there is no file system on the device")}
		}
		blank := v.contents.Kind == state.ContentsBlank || v.contents.Kind == state.ContentsUnproven && device.Fresh
		if !v.marked() || !blank || v.data {
			return f.k.refuse(id, "format of %v, mark %t", v.contents.Kind, v.marked())
		}
		if err := f.k.exclusive(id, "format"); err != nil {
			return err
		}
		if half {
			v.contents = state.Contents{Kind: state.ContentsOther, Found: "half of " + fsType}
			return nil
		}
		f.k.formats++
		v.contents = state.Contents{Kind: state.ContentsFilesystem, FSType: fsType, UUID: cmp.Or(device.FormatUUID, fmt.Sprintf("uuid-%d", f.k.formats)), Size: v.top().size}
		return nil
	})
}

func (f fakeFilesystems) Check(ctx context.Context, device state.Device, fsType string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opCheck, id, id, func(half bool) error {
		v := f.k.volumes[id]
		if err := f.k.exclusive(id, "check"); err != nil {
			return err
		}
		v.contents.NeedsCheck = half
		return nil
	})
}

func (f fakeFilesystems) Grow(ctx context.Context, device state.Device, fsType, mountpoint string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opGrow, id, id, func(half bool) error {
		v := f.k.volumes[id]
		switch {
		case (mountpoint != "") != growsMounted(fsType):
			return f.k.refuse(id, "%s cannot grow at %q", fsType, mountpoint)
		case mountpoint == "":
			if err := f.k.exclusive(id, "grow"); err != nil {
				return err
			}
		case len(f.k.mounts[mountpoint]) == 0 || f.k.mounts[mountpoint][0].volume != id || f.k.mounts[mountpoint][0].SuperReadOnly:
			return f.k.refuse(id, "grow at %s, where it is not mounted for writing", mountpoint)
		}
		if half {
			v.contents.Size += (v.top().size - v.contents.Size) / 2
			return nil
		}
		v.contents.Size = v.top().size
		return nil
	})
}

// Default is xfs for what nobody has formatted or asked a type of.
func (f fakeFilesystems) Default(int64) string { return "xfs" }

// fakeMounts is the mount table and the directories.
type fakeMounts struct {
	*process
	existing bool // it makes nothing
}

func (fakeMounts) CheckOptions(fsType string, flags state.Flags) error {
	if slices.Contains(flags.Super, "bad-for-"+fsType) {
		return state.Errorf(state.InvalidArgument, "%s does not know the option", fsType)
	}
	return nil
}

// Above knows the mounts of volumes.
func (m fakeMounts) Above(at string) (mount state.Mount, point string, err error) {
	m.k.with(func() {
		for dir := path.Dir(at); dir != "/" && point == ""; dir = path.Dir(dir) {
			if stack := m.k.mounts[dir]; len(stack) > 0 {
				mount, point = stack[0].Mount, dir
			}
		}
	})
	return mount, point, nil
}

func (m fakeMounts) Look(ctx context.Context, at string) (have state.Mountpoint, err error) {
	err = m.call(ctx, opLook, volumeOf(at), at, func(bool) error {
		have = m.k.look(at)
		return nil
	})
	return have, err
}

func (k *fakeKernel) look(at string) state.Mountpoint {
	have := state.Mountpoint{File: state.NoFile}
	for _, mount := range k.mounts[at] {
		if v := k.volumes[mount.volume]; v != nil && v.superRO && !mount.Node {
			mount.SuperReadOnly = true
		}
		if v := k.volumes[mount.volume]; v != nil && v.dead && !mount.Node {
			mount.Corrupt = true
		}
		have.Mounts = append(have.Mounts, mount.Mount)
	}
	f := k.files[at]
	switch {
	case len(have.Mounts) > 0 && have.Mounts[0].Node:
		have.File = state.BlockDevice
	case len(have.Mounts) > 0:
		have.File = state.Directory
	case f != nil:
		have.File, have.Empty = f.kind, !f.inUse
	}
	return have
}

// place puts a mount at a path and makes the file beneath it if it is missing.
func (m fakeMounts) place(at string, kind state.FileType, mount fakeMount) error {
	k := m.k
	f := k.files[at]
	switch {
	case len(k.mounts[at]) > 0:
		return k.refuse(volumeOf(at), "%s: mounted over %s", at, describe(k.mounts[at][0].Mount))
	case f == nil && m.existing:
		return fmt.Errorf("%s does not exist", at)
	case f == nil:
		k.files[at] = &fakeFile{kind: kind}
	case f.kind != kind:
		return k.refuse(volumeOf(at), "%s: mounted over %s", at, f.kind)
	case f.inUse:
		if err := k.rule(volumeOf(at), "%s: mounted over what is in use", at); err != nil {
			return err
		}
	}
	k.mountIDs++
	mount.ID = k.mountIDs
	k.mounts[at] = []fakeMount{mount}
	return nil
}

func (m fakeMounts) MountDevice(ctx context.Context, device state.Device, at, fsType string, flags state.Flags, readOnly bool) error {
	id := volumeOf(at)
	return m.call(ctx, opMount, id, at, func(bool) error {
		v, top := m.k.volumes[id], m.k.volumes[id].top()
		switch {
		case top == nil || top.detaching || top.number != device.Number:
			return m.k.refuse(volumeOf(at), "%s: mount of a device that is not the volume's", at)
		case top.readOnly && !readOnly:
			return m.k.refuse(volumeOf(at), "%s: writable mount of a read-only device", at)
		case v.marked() || v.contents.Kind != state.ContentsFilesystem || v.contents.FSType != fsType:
			return m.k.refuse(volumeOf(at), "%s: mount of %s %s as %s, formatting mark %t", at, v.contents.Kind, v.contents.FSType, fsType, v.marked())
		}
		if v.dead {
			return fmt.Errorf("the file system is broken and kept by %v", v.keepers)
		}
		v.data = v.data || !readOnly
		attributes := flags.Set
		if readOnly {
			attributes |= state.ReadOnly
		}
		return m.place(at, state.Directory, fakeMount{volume: id, Mount: state.Mount{
			Device: device.Number, FSType: fsType, Source: device.Path, Root: "/", Attributes: attributes, Options: strings.Join(flags.Super, ","), SuperReadOnly: readOnly}})
	})
}

func (m fakeMounts) BindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags) error {
	return m.call(ctx, opBind, volumeOf(target), target, func(half bool) error {
		stack := m.k.mounts[source]
		if len(stack) == 0 || !stack[0].Is(device) || stack[0].volume != volumeOf(target) {
			return m.k.refuse(volumeOf(target), "%s: bound from %s, where the volume is not mounted", target, source)
		}
		mount := stack[0]
		mount.Attributes = mount.Attributes&^flags.Clear | flags.Set
		if half {
			m.k.files[target] = &fakeFile{kind: state.Directory}
			return nil
		}
		return m.place(target, state.Directory, mount)
	})
}

func (m fakeMounts) BindDevice(ctx context.Context, device state.Device, target string) error {
	id := volumeOf(target)
	return m.call(ctx, opBindDevice, id, target, func(half bool) error {
		v, top := m.k.volumes[id], m.k.volumes[id].top()
		if top == nil || top.detaching || top.number != device.Number && (v.view == nil || v.view.number != device.Number) {
			return m.k.refuse(volumeOf(target), "%s: bind of a device that is not the volume's", target)
		}
		if top.number == device.Number && !top.readOnly && (!v.raw || v.header == stampedNew) {
			if err := m.k.rule(id, "%s: shown raw for writing, and nothing remembers that", target); err != nil {
				return err
			}
		}
		if half {
			m.k.files[target] = &fakeFile{kind: state.RegularFile}
			return nil
		}
		if top.number == device.Number && !top.readOnly && !m.k.obeys {
			v.data = true // whatever the pod writes
			if v.contents.Kind == state.ContentsBlank {
				v.contents = state.Contents{Kind: state.ContentsOther, Found: "a pod's data"}
			}
		}
		m.k.forgotten[target] = m.k.judged // until the number is in the record
		return m.place(target, state.RegularFile, fakeMount{volume: id, Mount: state.Mount{
			Device: device.Number, Node: true, FSType: "devtmpfs", Source: "devtmpfs", Root: fmt.Sprintf("/loop%d", device.Number.Minor)}})
	})
}

func (m fakeMounts) SetAttributes(ctx context.Context, at string, flags state.Flags) error {
	return m.call(ctx, opSetAttributes, volumeOf(at), at, func(bool) error {
		stack := m.k.mounts[at]
		if len(stack) == 0 || stack[0].volume == "" {
			return m.k.refuse(volumeOf(at), "%s: attributes of a foreign mount", at)
		}
		stack[0].Attributes = stack[0].Attributes&^flags.Clear | flags.Set
		return nil
	})
}

func (fakeFilesystems) Options(m state.Mount) string { return m.Options }

func (m fakeMounts) Elsewhere(_ context.Context, device state.DeviceNumber) (seen *state.Sighting, err error) {
	m.k.with(func() {
		for at, stack := range m.k.mounts {
			if len(stack) > 0 && !stack[0].Node && stack[0].Device == device {
				seen = &state.Sighting{Path: at, Mount: stack[0].Mount}
			}
		}
	})
	return seen, nil
}

func (m fakeMounts) MountedAt(_ context.Context, device state.DeviceNumber) (paths []string, err error) {
	m.k.with(func() {
		m.k.tables++
		for at, stack := range m.k.mounts {
			if slices.ContainsFunc(stack, func(m fakeMount) bool { return !m.Node && m.Is(device) }) {
				paths = append(paths, at)
			}
		}
	})
	slices.Sort(paths)
	return paths, nil
}

func (m fakeMounts) BoundAt(_ context.Context, device state.DeviceNumber) (paths []string, err error) {
	m.k.with(func() {
		m.k.tables++
		if paths = m.k.nodes(device); len(paths) == 0 {
			paths = m.k.copies[device]
		}
	})
	return paths, nil
}

// nodes returns the paths at which the node of a device is bound, be it covered.
// The caller holds mu.
func (k *fakeKernel) nodes(device state.DeviceNumber) (paths []string) {
	for at, stack := range k.mounts {
		if slices.ContainsFunc(stack, func(m fakeMount) bool { return m.Node && m.Device == device }) {
			paths = append(paths, at)
		}
	}
	return paths
}

func (m fakeMounts) Keepers(_ context.Context, device state.DeviceNumber, _ []string) (names []string) {
	m.k.with(func() {
		for _, v := range m.k.volumes {
			if v.has(device) {
				names = v.keepers
			}
		}
	})
	return names
}

func (m fakeMounts) UnmountDevice(ctx context.Context, at string) error { return m.Unmount(ctx, at) }

func (m fakeMounts) Unmount(ctx context.Context, at string) error {
	id := volumeOf(at)
	return m.call(ctx, opUnmount, id, at, func(bool) error {
		k, stack := m.k, m.k.mounts[at]
		if len(stack) == 0 {
			return fmt.Errorf("%s is not a mount point", at)
		}
		if stack[0].volume != id {
			return k.refuse(volumeOf(at), "%s: unmount of a foreign mount", at)
		}
		if at == stagePath(id) && len(stack) == 1 {
			paths := k.mounted(stack[0].Device, at)
			paths = slices.DeleteFunc(paths, func(p string) bool { return k.forgotten[p] || p == otherStagePath })
			if len(paths) > 0 {
				if err := k.rule(id, "%s: unmount of a stage that is bound at %v", at, paths); err != nil {
					return err
				}
			}
		}
		k.unmount(at)
		return nil
	})
}

// unmount takes the top mount at a path away, whoever does it.
func (k *fakeKernel) unmount(at string) {
	top, id := k.mounts[at][0], volumeOf(at)
	k.mounts[at] = slices.Clone(k.mounts[at][1:])
	if len(k.mounts[at]) == 0 {
		delete(k.mounts, at)
		delete(k.forgotten, at)
	}
	v := k.volumes[id]
	if v == nil || top.volume != id {
		return
	}
	v.copied = v.copied || v.private && at == stagePath(id)
	v.dead = v.dead && (len(v.keepers) > 0 || k.claimed(v))
	k.autoclear(v)
}

func (m fakeMounts) Remove(ctx context.Context, at string) error {
	return m.call(ctx, opRemove, volumeOf(at), at, func(bool) error {
		f := m.k.files[at]
		if len(m.k.mounts[at]) > 0 || f != nil && f.inUse {
			return m.k.refuse(volumeOf(at), "%s: removed while mounted or not empty", at)
		}
		delete(m.k.files, at)
		return nil
	})
}

func (m fakeMounts) Renew(ctx context.Context, at string) error {
	return m.call(ctx, opRenew, volumeOf(at), at, func(half bool) error {
		f := m.k.files[at]
		if len(m.k.mounts[at]) > 0 || f == nil || f.kind != state.Directory || f.inUse {
			return m.k.refuse(volumeOf(at), "%s: renewed while mounted, not empty or no directory", at)
		}
		if half {
			return nil
		}
		v := m.k.volumes[volumeOf(at)]
		v.copied = false
		m.k.autoclear(v)
		return nil
	})
}

// fakeStore keeps records as JSON, with the contract of store.Store: the edit
// sees the revision it would commit, revisions rise for ever, an edit that
// changes nothing commits nothing, an empty record goes. It sees that nobody changes
// the records that it serves.
type fakeStore struct {
	mu       sync.Mutex
	records  map[string][]byte
	served   map[string]*state.Volume // by record
	written  map[string][]byte        // of records with proposals: what a process that begins now would find
	revision uint64
	fail     func(id string) error             // asked before each commit; nil for none
	edits    func(id string)                   // called before each edit, without the lock; nil for none
	edited   func(before, after *state.Volume) // called after each edit, with the lock; after is before when nothing was committed; nil for none
}

func newFakeStore() *fakeStore {
	return &fakeStore{records: map[string][]byte{}, served: map[string]*state.Volume{}, written: map[string][]byte{}}
}

// begin forgets what was only proposed: a process has ended.
func (s *fakeStore) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, raw := range s.written {
		if s.records[id] = raw; raw == nil {
			delete(s.records, id)
		}
	}
	clear(s.written)
}

// lose forgets all records.
func (s *fakeStore) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.records)
	clear(s.written)
}

func (s *fakeStore) Get(id string) *state.Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.get(id)
}

func (s *fakeStore) get(id string) *state.Volume {
	raw, ok := s.records[id]
	if !ok {
		return nil
	}
	v := &state.Volume{}
	if err := json.Unmarshal(raw, v); err != nil {
		panic(err)
	}
	served := s.served[string(raw)]
	if served == nil {
		served, s.served[string(raw)] = v, v
	}
	if !reflect.DeepEqual(served, v) {
		panic(fmt.Sprintf("somebody changed the record %s: it is %s now", raw, marshal(served)))
	}
	return served
}

func (s *fakeStore) List() []*state.Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*state.Volume
	for _, id := range slices.Sorted(maps.Keys(s.records)) {
		all = append(all, s.get(id))
	}
	return all
}

func (s *fakeStore) VolumesAt(path string) []string {
	var ids []string
	for _, v := range s.List() {
		paths := v.TargetPaths()
		if v.Stage != nil {
			paths = append(paths, v.Stage.Path)
		}
		if slices.ContainsFunc(paths, func(own string) bool { return own == path || state.Within(own, strings.TrimSuffix(path, "/")) }) {
			ids = append(ids, v.ID)
		}
	}
	return ids
}

func (s *fakeStore) Edit(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, true)
}

func (s *fakeStore) Propose(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, false)
}

func (s *fakeStore) Flush(id string) error {
	_, err := s.Edit(id, func(*state.Volume) error { return nil })
	return err
}

func (s *fakeStore) proposed(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, is := s.written[id]
	return is
}

func (s *fakeStore) edit(id string, edit func(*state.Volume) error, write bool) (*state.Volume, error) {
	if s.edits != nil {
		s.edits(id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.get(id)
	if before == nil {
		before = &state.Volume{ID: id, Targets: map[string]*state.Target{}}
	}
	after := before
	if s.edited != nil {
		defer func() { s.edited(before, after) }()
	}
	v := before.Clone()
	v.Revision = s.revision + 1
	if err := edit(v); err != nil {
		return nil, err
	}
	committed := v.Revision
	v.Revision = before.Revision
	_, proposed := s.written[id]
	same := marshal(v) == marshal(before)
	if same && !(write && proposed) {
		return before, nil
	}
	if s.fail != nil && write {
		if err := s.fail(id); err != nil {
			return nil, err
		}
	}
	if !write && !proposed {
		s.written[id] = s.records[id]
	} else if write {
		delete(s.written, id)
	}
	if same {
		return before, nil
	}
	v.Revision, s.revision = committed, committed
	after = v
	if v.Empty() {
		delete(s.records, id)
		return &state.Volume{ID: id, Targets: map[string]*state.Target{}}, nil
	}
	s.records[id] = []byte(marshal(v))
	return s.get(id), nil
}

func marshal(v *state.Volume) string {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

// processStore is the store as one process sees it: none after its death.
type processStore struct {
	*fakeStore
	p *process
}

func (s processStore) Edit(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, true)
}

func (s processStore) Propose(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, false)
}

func (s processStore) Flush(id string) error {
	if !s.proposed(id) {
		return nil
	}
	_, err := s.Edit(id, func(*state.Volume) error { return nil })
	return err
}

func (s processStore) edit(id string, edit func(*state.Volume) error, write bool) (*state.Volume, error) {
	k := s.p.k
	var dead bool
	var before, after time.Duration
	k.with(func() {
		n := k.calls[callKey{opCommit, id}]
		k.calls[callKey{opCommit, id}] = n + 1
		before, after = k.delay("before", id, n), k.delay("after", id, n)
	})
	time.Sleep(before)
	if k.with(func() { dead = s.p.dead }); dead {
		return nil, errDead
	}
	record, err := s.fakeStore.edit(id, edit, write)
	time.Sleep(after)
	return record, err
}

// process is one life of the plugin over a kernel and a store.
type process struct {
	k    *fakeKernel
	r    *Reconciler
	end  context.CancelFunc
	done chan struct{} // closed when Run has returned
	dead bool          // guarded by k.mu: nothing that it does has an effect any more
}

// die ends the process as kill -9 does. The caller holds k.mu.
func (p *process) die() {
	p.dead = true
	p.end()
}

func (p *process) kernel() Kernel {
	return Kernel{
		Devices: fakeDevices{p}, Layers: []devices.Layer{fakeLayers{p}}, Views: fakeDevices{p},
		Filesystems: fakeFilesystems{p}, Mounts: fakeMounts{p, false}, Existing: fakeMounts{p, true}, Directories: fakeMounts{p, false},
		VolumeAt: func(device state.DeviceNumber) (volume string) {
			p.k.with(func() {
				for id, v := range p.k.volumes {
					if v.has(device) {
						volume = id
					}
				}
			})
			return volume
		},
		Bound: func(device state.DeviceNumber) (bound bool, _ error) {
			p.k.with(func() { bound = len(p.k.nodes(device)) > 0 })
			return bound, nil
		},
		Holders: func(_ context.Context, device state.DeviceNumber) (names []string) {
			p.k.with(func() {
				for _, v := range p.k.volumes {
					if v.has(device) && p.k.claimed(v) {
						names = []string{"pid 7 (holder)"}
					}
				}
			})
			return names
		},
	}
}

// story returns the end of the log.
func (k *fakeKernel) story() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var story strings.Builder
	for _, e := range k.log[max(0, len(k.log)-80):] {
		fmt.Fprintln(&story, e)
	}
	return story.String()
}

// harness is a node, a store and the process that works on them, in a bubble
// of virtual time.
type harness struct {
	t     testing.TB
	k     *fakeKernel
	store *fakeStore
	p     *process

	hook    func(ctx context.Context, volume string, step Step, moment Moment) error // of processes started after it was set
	metrics Metrics
	tracer  trace.Tracer

	detectOnly bool
	resync     time.Duration
	pods       Pods
	random     func() float64                // for jitter; nil for another one each time
	plant      func(*process, Kernel) Kernel // puts a fault of the plugin's into its kernel; nil for none
}

// bubble runs a test in virtual time with a process started. At its end the
// process is stopped and the node must have seen no breach of the safety rules.
func bubble(t *testing.T, test func(h *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &harness{t: t, k: newFakeKernel(), store: newFakeStore()}
		t.Cleanup(func() {
			h.k.mend()
			h.stop()
			for _, v := range h.k.violations {
				t.Error(v)
			}
			if t.Failed() {
				t.Logf("the story:\n%s", h.k.story())
			}
		})
		h.start()
		test(h)
	})
}

const gib = int64(1) << 30

// volume adds a blank volume of 1 GiB.
func (h *harness) volume(id string) *fakeVolume {
	v := &fakeVolume{capacity: gib, size: gib, fakeData: fakeData{contents: state.Contents{Kind: state.ContentsBlank}, beneath: state.Contents{Kind: state.ContentsBlank}}}
	h.k.with(func() { h.k.volumes[id] = v })
	return v
}

// formatted adds a volume that holds a file system.
func (h *harness) formatted(id, fsType string) *fakeVolume {
	v := h.volume(id)
	h.k.with(func() {
		v.formatted = fsType
		v.contents = state.Contents{Kind: state.ContentsFilesystem, FSType: fsType, Size: gib}
	})
	return v
}

func (h *harness) start() {
	h.store.begin()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	p := &process{k: h.k, end: cancel, done: make(chan struct{})}
	kernel := p.kernel()
	kernel.Pods = h.pods
	if h.plant != nil {
		kernel = h.plant(p, kernel)
	}
	p.r = New(Config{Store: processStore{h.store, p}, Kernel: kernel, Hook: h.hook, Metrics: h.metrics, Tracer: h.tracer, DetectOnly: h.detectOnly, Resync: h.resync})
	if h.random != nil {
		p.r.random = h.random
	}
	h.p = p
	go func() {
		defer close(p.done)
		p.r.Run(ctx)
	}()
}

// stop ends the process as SIGTERM does, and waits for its end.
func (h *harness) stop() {
	h.p.end()
	<-h.p.done
}

func (h *harness) restart() {
	h.stop()
	h.start()
}

// kill ends the process as kill -9 does; a step that hangs has no effect.
func (h *harness) kill() {
	h.k.with(h.p.die)
	<-h.p.done
}

// wake queues the volume and lets the worker finish: drift was noticed.
func (h *harness) wake(id string) {
	h.p.r.queue.Add(id)
	synctest.Wait()
}

// sleep lets virtual time pass, and all that is due in it be done.
func (h *harness) sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// request is one call of Ensure.
type request struct {
	id   string
	part state.Part
	edit func(*state.Volume) error
}

func (r request) String() string { return r.id + " " + r.part.String() }

func mountCapability() state.Capability {
	return state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"}
}

func blockCapability() state.Capability {
	return state.Capability{Access: state.BlockAccess, Mode: "SINGLE_NODE_MULTI_WRITER"}
}

func stage(id string, change ...func(*state.Stage)) request {
	return request{id, state.StagePart(), func(v *state.Volume) error {
		s := &state.Stage{Path: stagePath(id), Capability: mountCapability()}
		for _, c := range change {
			c(s)
		}
		return v.AskStage(s, time.Now())
	}}
}

func publish(id string, n int, change ...func(*state.Target)) request {
	return request{id, state.TargetPart(targetPath(id, n)), func(v *state.Volume) error {
		t := &state.Target{Path: targetPath(id, n), Capability: mountCapability()}
		for _, c := range change {
			c(t)
		}
		return v.AskPublish(t, stagePath(id), time.Now())
	}}
}

func unpublish(id string, n int) request {
	return request{id, state.TargetPart(targetPath(id, n)), func(v *state.Volume) error {
		return v.AskUnpublish(targetPath(id, n), time.Now())
	}}
}

func unstage(id string) request {
	return request{id, state.StagePart(), func(v *state.Volume) error {
		return v.AskUnstage(stagePath(id), time.Now())
	}}
}

// unmount is an unstage at a path other than the one at which the volume is staged.
func unmount(id, path string) request {
	return request{id, state.TargetPart(path), func(v *state.Volume) error {
		return v.AskUnmount(path, time.Now())
	}}
}

func resize(id string, bytes int64) request {
	return request{id, state.SizePart(), func(v *state.Volume) error { return v.AskSize(bytes, 0, time.Now()) }}
}

func stageBlock(s *state.Stage)    { s.Capability = blockCapability() }
func stageXFS(s *state.Stage)      { s.Capability.FSType = "xfs" }
func stageReadOnly(s *state.Stage) { s.ReadOnly = true }

func publishBlock(t *state.Target)    { t.Capability = blockCapability() }
func publishXFS(t *state.Target)      { t.Capability.FSType = "xfs" }
func publishReadOnly(t *state.Target) { t.ReadOnly = true }

// do makes a request as kubelet does, with two minutes for an answer.
func (h *harness) do(r request) error { return h.within(2*time.Minute, r) }

func (h *harness) within(d time.Duration, r request) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return h.p.r.Ensure(ctx, r.id, r.part, r.edit)
}

// begin makes a request in the background and returns when all is blocked.
func (h *harness) begin(r request) <-chan error {
	answer := make(chan error, 1)
	go func() { answer <- h.do(r) }()
	synctest.Wait()
	return answer
}

// ok makes requests that must succeed, one after the other.
func (h *harness) ok(requests ...request) {
	h.t.Helper()
	for _, r := range requests {
		if err := h.do(r); err != nil {
			h.t.Fatalf("%s: %v", r, err)
		}
		if lie := h.lie(r); lie != "" {
			h.t.Fatalf("%s: answered OK, and %s", r, lie)
		}
	}
}

// wantCalls checks how often the kernel was called so.
func (h *harness) wantCalls(times int, o op, key string) {
	h.t.Helper()
	if n := h.k.count(o, key); n != times {
		h.t.Errorf("%d calls of %s for %q, want %d", n, o, key, times)
	}
}

// noStepSince checks that the node was not changed since it had seen so many changes.
func (h *harness) noStepSince(changes int) {
	h.t.Helper()
	if n := h.k.changes() - changes; n != 0 {
		h.t.Errorf("%d steps were taken", n)
	}
}

// noRecord checks that the store knows nothing of a volume.
func (h *harness) noRecord(id string) {
	h.t.Helper()
	if v := h.store.Get(id); v != nil {
		h.t.Errorf("the record is %s", marshal(v))
	}
}

// atOnce checks that something takes no time.
func (h *harness) atOnce(do func()) {
	h.t.Helper()
	start := time.Now()
	do()
	if took := time.Since(start); took != 0 {
		h.t.Errorf("it took %s", took)
	}
}

// refuse checks that err has the class and names all the words.
func (h *harness) refuse(err error, class state.Class, words ...string) {
	h.t.Helper()
	if err == nil {
		h.t.Fatalf("OK, want %s", class)
	}
	if got := state.ClassOf(err); got != class {
		h.t.Fatalf("%s (%v), want %s", got, err, class)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			h.t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// got returns an answer that must be there already.
func (h *harness) got(answer <-chan error) error {
	h.t.Helper()
	synctest.Wait()
	select {
	case err := <-answer:
		return err
	default:
		h.t.Fatal("no answer yet")
		return nil
	}
}

// pending checks that there is no answer yet.
func (h *harness) pending(answer <-chan error) {
	h.t.Helper()
	synctest.Wait()
	select {
	case err := <-answer:
		h.t.Fatalf("answered already: %v", err)
	default:
	}
}

// lie says what is wrong with the node if the request was answered OK just now.
func (h *harness) lie(r request) (lie string) {
	record := h.store.Get(r.id)
	h.k.with(func() { lie = h.k.lie(record, r) })
	return lie
}

func (k *fakeKernel) lie(record *state.Volume, r request) string {
	asked := &state.Volume{ID: r.id, Stage: &state.Stage{Path: stagePath(r.id)}}
	if record != nil {
		asked = record
	}
	v := k.volumes[r.id]
	intent := asked.Intent(r.part)
	switch r.part.Kind {
	case state.SizeKind:
		if intent == nil || v.device == nil || v.device.size < asked.Size.Bytes {
			return "the device is smaller"
		}
	case state.StageKind:
		if record == nil || intent == nil || asked.Stage.Provisional {
			if k.shown(r) {
				return "the volume is still attached or mounted"
			}
			return ""
		}
		if why := v.unready(); why != "" {
			return why
		}
		if asked.Stage.Capability.Access == state.MountAccess && !v.source {
			return k.shows(asked.Stage.Path, v.top().number, asked.Stage.ReadOnly)
		}
	case state.TargetKind:
		if record == nil || intent == nil || intent.Gone {
			if len(k.mounts[r.part.Path]) > 0 || k.files[r.part.Path] != nil {
				return "the target is still there"
			}
			return ""
		}
		t := asked.Targets[r.part.Path]
		readOnly := t.Capability.Access == state.MountAccess && (t.ReadOnly || asked.Stage.ReadOnly)
		if v.source {
			if stack := k.mounts[t.Path]; len(stack) > 0 && stack[0].Source != sourceOf(r.id) {
				return "another source is mounted at " + t.Path
			}
			return k.shows(t.Path, state.DeviceNumber{}, readOnly)
		}
		if v.top() == nil {
			return "the device is not there"
		}
		if t.Capability.Access == state.BlockAccess && t.ReadOnly && !v.top().readOnly {
			if v.view == nil {
				return "there is no read-only view"
			}
			return k.shows(t.Path, v.view.number, false)
		}
		return k.shows(t.Path, v.top().number, readOnly)
	}
	return ""
}

// shows says what is wrong if not just the device is mounted at a path, once.
func (k *fakeKernel) shows(at string, number state.DeviceNumber, readOnly bool) string {
	stack := k.mounts[at]
	switch {
	case len(stack) != 1:
		return fmt.Sprintf("%d mounts are at %s", len(stack), at)
	case stack[0].Device != number:
		return fmt.Sprintf("device %s is mounted at %s, not %s", stack[0].Device, at, number)
	case readOnly && stack[0].Attributes&state.ReadOnly == 0:
		return at + " is writable"
	}
	return ""
}

// looking reports whether the worker of a volume is looking at it.
func (h *harness) looking(id string) bool {
	h.p.r.mu.Lock()
	defer h.p.r.mu.Unlock()
	v := h.p.r.volumes[id]
	return v != nil && !v.since.IsZero() && v.running.Action == Look
}

// atRest checks that the volume is as its record asks, with nothing under way
// and nothing forgotten.
func (h *harness) atRest(id string) {
	h.t.Helper()
	synctest.Wait()
	for range 100 {
		if !h.looking(id) { // as it does every ten minutes, also at rest
			break
		}
		h.sleep(time.Millisecond)
	}
	record := h.store.Get(id)
	if record != nil {
		for _, part := range record.Parts() {
			intent := record.Intent(part)
			if intent.Gone || !intent.Accepted {
				h.t.Errorf("volume %s: %s is at rest unsettled: %+v", id, part, *intent)
			}
			if lie := h.lie(request{id: id, part: part}); lie != "" {
				h.t.Errorf("volume %s: %s is at rest, and %s", id, part, lie)
			}
		}
	}
	h.k.with(func() {
		for at, stack := range h.k.mounts {
			if volumeOf(at) != id || stack[0].volume == "" {
				continue
			}
			if record == nil || record.Targets[at] == nil && (record.Stage == nil || record.Stage.Path != at) {
				h.t.Errorf("volume %s: still mounted at %s, which no record asks for", id, at)
			}
			if len(stack) > 1 {
				h.t.Errorf("volume %s: %d mounts stacked at %s", id, len(stack), at)
			}
		}
		if v := h.k.volumes[id]; v != nil && v.highest() != nil && (record == nil || record.Stage == nil) {
			h.t.Errorf("volume %s: still attached, which no record asks for", id)
		}
	})
	r := h.p.r
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volumes[id]
	switch {
	case v == nil && record != nil:
		h.t.Errorf("volume %s: nothing is known of it", id)
	case v == nil:
	case record == nil:
		h.t.Errorf("volume %s: kept in memory without a record", id)
	case !v.since.IsZero() || len(v.waiters) > 0 || len(v.attempts) > 0:
		h.t.Errorf("volume %s: not at rest: step since %v, %d waiters, %d attempts", id, v.since, len(v.waiters), len(v.attempts))
	}
}
