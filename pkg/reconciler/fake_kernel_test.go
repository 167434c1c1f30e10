package reconciler

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

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
	minors     uint32                 // the highest that was given out
	reuses     bool                   // the lowest number that is free is given out, not one that never was
	others     []state.DeviceNumber   // of devices of other processes
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
	knownFrom map[string]string               // by path: the source that a record tells
	judged    bool                            // a history's judge says when a record tells it
	strangers map[string]int                  // by path: mounts of somebody else's that must be left alone
	askers    map[string]int                  // by volume: callers who wait for a stage or a publish
	left      map[string]event                // by volume: when the last of them left
	copies    map[state.DeviceNumber][]string // binds of nodes in other mount namespaces

	// By volume: the last look, the last one of an earlier moment, the last one at what its
	// device holds, the last drift.
	looked, lookedBefore, probed, drifted map[string]event
	lookedAt                              map[string]event     // by path: the last look
	flushing                              map[string]int       // by volume: how many answers are being made durable
	answering                             map[string]event     // the looks that the last answers were of, while those are made durable
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
	serverAway                bool        // what is mounted from a source fails, and works again later
	moved                     bool        // it is mounted from another source
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
	opHeld      op = "held"   // of a volume's device or view: it only counts

	opAttach        op = "attach"
	opDetach        op = "detach"
	opGrowDevice    op = "grow-device"
	opTryFormat     op = "try-format"
	opTry           op = "try"
	opBeginFormat   op = "begin-format"
	opBeginRaw      op = "begin-raw"
	opErase         op = "erase"
	opEndFormat     op = "end-format"
	opAbandonFormat op = "abandon-format"
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
	return []op{opAttach, opDetach, opGrowDevice, opBeginFormat, opBeginRaw, opErase, opEndFormat, opAbandonFormat, opAttachView, opDetachView,
		opCreateLayer, opOpenLayer, opCloseLayer, opGrowLayer, opEraseLayer, opUseLayer,
		opFormat, opCheck, opGrow, opMount, opMountSource, opBind, opBindDevice, opSetAttributes, opUnmount, opRemove, opRenew}
}

// trials lists the calls of a trial, before the mark of a volume whose facts are notes.
func trials() []op { return []op{opTryFormat, opTry} }

func (o op) reads() bool {
	return o == opProve || o == opCommit || o == opHeld || slices.Contains(lookers(), o)
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
		forgotten: map[string]bool{}, known: map[string]state.DeviceNumber{}, knownFrom: map[string]string{}, strangers: map[string]int{}, askers: map[string]int{}, left: map[string]event{}, looked: map[string]event{}, lookedAt: map[string]event{}, lookedBefore: map[string]event{}, probed: map[string]event{}, answering: map[string]event{}, flushing: map[string]int{}, drifted: map[string]event{}, ended: map[string]time.Time{},
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
func (k *fakeKernel) slow(o op, key string, times int, takes time.Duration) {
	k.fault(&fault{op: o, key: key, times: times, takes: takes})
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

// refuseAt is refuse for what is at a path, which is not looked at again after a step
// that changes something else.
func (k *fakeKernel) refuseAt(at, format string, args ...any) error {
	id := volumeOf(at)
	if k.drifted[id].n > k.lookedAt[at].n {
		return state.Errorf(state.Unavailable, format, args...)
	}
	return k.refuse(id, format, args...)
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
func (k *fakeKernel) told(id string) bool { return k.drifted[id].n <= k.spokenOf(id).n }

// spokenOf returns the look that the worker speaks of. The caller holds mu.
func (k *fakeKernel) spokenOf(id string) event {
	look, now := k.looked[id], time.Now()
	if look.at.Equal(now) && (k.delays != 0 || k.ended[id].Equal(now)) {
		return k.lookedBefore[id]
	}
	return look
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
	switch o {
	case opProbe:
		k.probed[volume] = k.event()
	case opLook:
		k.lookedAt[key] = k.event()
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

// mounted returns the paths of a volume at which a device of its is mounted, whole or as a
// node, but for one path.
func (k *fakeKernel) mounted(id string, number state.DeviceNumber, but string) []string {
	var paths []string
	for p, stack := range k.mounts {
		if p != but && volumeOf(p) == id && slices.ContainsFunc(stack, func(m fakeMount) bool { return m.Device == number }) {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	return paths
}

// seen is mounted without what nobody can see: the record was lost, and
// something else covers the mount.
func (k *fakeKernel) seen(id string, number state.DeviceNumber) []string {
	return slices.DeleteFunc(k.mounted(id, number, ""), func(p string) bool { return k.forgotten[p] && k.mounts[p][0].volume == "" })
}

// orphan makes strangers of bound device nodes of which no record is left nor a
// device, and of what was mounted from where nobody tells: nothing tells whose they were,
// until the volume gets the number, or the source, again. The caller holds k.mu.
func (k *fakeKernel) orphan() {
	for path := range k.forgotten {
		stack, id := slices.Clone(k.mounts[path]), volumeOf(path)
		v := k.volumes[id]
		for i, m := range stack {
			told := m.Device == k.known[path] || v != nil && v.shows(m.Device)
			if m.FSType == sourceType {
				told = m.Source == k.knownFrom[path] || m.Source == k.sourceOf(id)
			}
			switch {
			case !m.Node && m.FSType != sourceType || told == (m.volume != ""):
			case told:
				stack[i].volume = id
				k.strangers[path]--
			default:
				stack[i].volume = ""
				k.strangers[path]++
			}
		}
		if len(stack) > 0 {
			k.mounts[path] = stack
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
		v.superRO, v.dead = false, v.dead && len(v.keepers) > 0
	}
	if v.open() && v.layer.device.detaching && !k.claimed(v) && v.view == nil {
		v.layer.device = nil
	}
	if v.device != nil && v.device.detaching && !v.open() && !k.claimed(v) && v.view == nil {
		v.device = nil
	}
}

// regain is orphan once a volume has a device. The caller holds k.mu.
func (k *fakeKernel) regain() {
	if k.reuses {
		k.orphan()
	}
}

// number returns that of a new device.
func (k *fakeKernel) number() state.DeviceNumber {
	for minor := uint32(1); k.reuses && minor <= k.minors; minor++ {
		if n := (state.DeviceNumber{Major: 7, Minor: minor}); !k.taken(n) {
			return n
		}
	}
	return k.unused()
}

// unused returns the number of a new device that no other ever had.
func (k *fakeKernel) unused() state.DeviceNumber {
	k.minors++
	return state.DeviceNumber{Major: 7, Minor: k.minors}
}

// taken reports whether there is a device with a number.
func (k *fakeKernel) taken(n state.DeviceNumber) bool {
	for _, v := range k.volumes {
		if v.has(n) || v.open() && v.layer.over.number == n {
			return true
		}
	}
	return slices.Contains(k.others, n)
}

// published reports whether a record tells that a volume is published with a number.
func (k *fakeKernel) published(id string, number state.DeviceNumber) bool {
	for p, n := range k.known {
		if volumeOf(p) == id && n == number {
			return true
		}
	}
	return false
}

// whosePods returns the volume whose pods are shown another one: its record tells that they
// have a number that a device of the other has by now, which nothing of the other's shows.
func (k *fakeKernel) whosePods(id string) string {
	if !k.judged {
		return ""
	}
	for p, n := range k.known {
		if owner := volumeOf(p); owner != id && k.volumes[id].has(n) && len(k.mounted(id, n, "")) == 0 && !k.published(id, n) {
			return owner
		}
	}
	return ""
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
