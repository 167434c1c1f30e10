package mounts

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/state"
)

// Watcher tells where mounts come and go in this mount namespace, or change
// their attributes, and which device nodes are bound in it. It costs nothing while
// nothing changes.
type Watcher struct {
	h      *Host
	source eventSource
	// attributes wakes when attributes may have changed. It is nil if the source reports
	// that itself.
	attributes eventSource

	mu     sync.Mutex
	mounts map[uint64]watchedMount    // by id
	binds  map[state.DeviceNumber]int // how many mounts are of a node with that number
	stale  bool                       // a resync is due, and failed
	// changed is the function that Run got; until then, changes are kept in pending.
	changed func(path string)
	pending []string
}

// watchedMount is a mount as it was last seen.
type watchedMount struct {
	point      string
	attributes state.Attributes
	// nodes are the numbers of the block device node that is bound: by what is at
	// the mount point, which another mount may cover, and by the name of what is
	// bound. Zero: none.
	nodes [2]state.DeviceNumber
	root  string // what is bound, if it has nodes
	// what is a hash of what is mounted, where another mount may get the same id; 0: not known.
	what uint64
}

func (e entry) watched() watchedMount {
	m := watchedMount{point: e.point, attributes: e.attributes, nodes: e.nodes()}
	if m.bindsNode() {
		m.root = e.root
	}
	return m
}

func (m watchedMount) bindsNode() bool { return m.nodes != [2]state.DeviceNumber{} }

// eventSource reports mounts, unmounts and changes of attributes.
type eventSource interface {
	name() string
	// wait blocks until there may be events; os.ErrClosed: the source is closed.
	wait() error
	// read returns, without waiting, the events of everything that was done before it
	// is called. all: any mount may have changed.
	read() (changes []change, all bool, err error)
	// list returns the mounts of the namespace by their ids.
	list() (map[uint64]watchedMount, error)
	// find returns the id of the mount that a descriptor is of, and what of it is cheap to
	// read; list returns the rest. ENOENT: it is unmounted.
	find(fd int, point string) (uint64, watchedMount, error)
	close() error
}

// change is one mount that was attached or detached, or both.
type change struct {
	id                 uint64
	attached, detached bool
	own                bool // this process did it
}

// NewWatcher begins to collect events: by fanotify (Linux 6.15), else by poll(2)
// of /proc/self/mountinfo, which the kernel wakes at every change, and which is
// then read as a whole. fanotify does not report changes of attributes, so the same poll
// runs beside it: after each wake-up the attributes of the mounts below the root are
// compared. Run, or else Close, ends it.
func (h *Host) NewWatcher() (*Watcher, error) {
	var s eventSource
	s, err := newFanotify()
	if err != nil {
		if s, err = newMountinfoPoll(); err != nil {
			return nil, fmt.Errorf("watch the mount table: %w", err)
		}
	}
	return h.watch(s)
}

// watch lists the mounts after the source has begun, so that none is missed.
func (h *Host) watch(s eventSource) (*Watcher, error) {
	w := &Watcher{h: h, source: s}
	var err error
	if _, partial := s.(*fanotify); partial {
		if w.attributes, err = newMountinfoPoll(); err != nil {
			return nil, errors.Join(fmt.Errorf("watch the attributes of mounts: %w", err), s.close())
		}
	}
	w.mu.Lock() // what this process mounts meanwhile is noted after the list
	h.mu.Lock()
	h.watchers = append(slices.Clone(h.watchers), w)
	h.mu.Unlock()
	mounts, err := s.list()
	w.replace(mounts)
	w.mu.Unlock()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("list the mounts: %w", err), w.Close())
	}
	return w, nil
}

// Bound reports whether a block device node with the number is bound anywhere in
// this mount namespace, by whomever, at the time of the call: pending events are
// applied first. Its cost depends only on what has changed since the last call; if the
// source is "mountinfo", the table is read after any change.
func (w *Watcher) Bound(number state.DeviceNumber) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	tell := w.changed
	if tell == nil {
		tell = func(path string) { w.pending = append(w.pending, path) }
	}
	if err := w.take(tell); err != nil {
		return false, fmt.Errorf("which device nodes are bound: %w", err)
	}
	return w.binds[number] > 0, nil
}

// take reads the events and applies them. The caller holds mu, so that nobody
// else has read some and not applied them yet.
func (w *Watcher) take(changed func(string)) error {
	changes, all, err := w.source.read()
	if err != nil {
		return err
	}
	if w.stale = w.stale || all; w.stale {
		if err := w.resync(changed); err != nil {
			return err
		}
		w.stale = false
	}
	for _, c := range changes {
		w.apply(c, changed)
	}
	return nil
}

// set notes a mount. The caller holds mu, as for drop and replace.
func (w *Watcher) set(id uint64, m watchedMount) {
	w.drop(id)
	w.mounts[id] = m
	for _, n := range m.nodes {
		if (n != state.DeviceNumber{}) {
			w.binds[n]++
		}
	}
}

func (w *Watcher) drop(id uint64) {
	for _, n := range w.mounts[id].nodes {
		if w.binds[n]--; w.binds[n] <= 0 {
			delete(w.binds, n)
		}
	}
	delete(w.mounts, id)
}

func (w *Watcher) replace(mounts map[uint64]watchedMount) {
	w.mounts, w.binds = make(map[uint64]watchedMount, len(mounts)), map[state.DeviceNumber]int{}
	for id, m := range mounts {
		w.set(id, m)
	}
}

// Source names where the events come from: "fanotify" or "mountinfo".
func (w *Watcher) Source() string { return w.source.name() }

// Run calls changed, one after the other, with each path below the Host's root at which
// another process has mounted or unmounted something or changed the attributes of a
// mount, or above which it has hidden or uncovered a directory. Where the kernel does
// not tell who did it, as it never does for attributes, this process counts too. It
// returns nil when ctx ends, and closes the Watcher.
func (w *Watcher) Run(ctx context.Context, changed func(path string)) error {
	listening, stopListening := context.WithCancel(ctx)
	closeOnce := sync.OnceValue(w.Close)
	stop := context.AfterFunc(listening, func() { _ = closeOnce() }) // its error comes again below
	defer stop()
	var listener sync.WaitGroup
	defer listener.Wait()
	defer stopListening()
	if w.attributes != nil {
		listener.Go(func() { w.listen(listening, changed) })
	}
	w.mu.Lock()
	for _, path := range w.pending {
		changed(path)
	}
	w.changed, w.pending = changed, nil
	w.mu.Unlock()
	take := func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.take(changed)
	}
	for {
		err := w.source.wait()
		if err == nil {
			err = take()
		}
		if missed := (resyncError{}); errors.As(err, &missed) {
			klog.FromContext(ctx).Error(err, "Changes of the mount table are missed until it can be listed")
			poll.Until(ctx, listenPause, math.MaxInt64, func() bool {
				err = take()
				return !errors.As(err, &missed)
			})
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return closeOnce()
		default:
			return errors.Join(err, closeOnce())
		}
	}
}

// openWatchers returns the watchers that are not closed, in the order in which all of them may
// be locked.
func (h *Host) openWatchers() []*Watcher {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.watchers
}

// Close ends a Watcher that is not run.
func (w *Watcher) Close() error {
	w.h.mu.Lock()
	w.h.watchers = slices.DeleteFunc(slices.Clone(w.h.watchers), func(other *Watcher) bool { return other == w })
	w.h.mu.Unlock()
	if w.attributes == nil {
		return w.source.close()
	}
	return errors.Join(w.source.close(), w.attributes.close())
}

// listenPause is the least time between two comparisons by listen: a change in between
// wakes it afterwards. If there are so many mounts that this would take more than a
// hundredth of a processor, it waits longer, up to longestPause.
const (
	listenPause  = time.Second
	longestPause = 10 * time.Second
)

// listen asks for the attributes of the mounts whenever something has changed.
func (w *Watcher) listen(ctx context.Context, changed func(string)) {
	for {
		if err := w.attributes.wait(); err != nil {
			if ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Changed attributes of mounts are noticed late from now on")
			}
			return
		}
		began := time.Now()
		w.compare(changed)
		pause := time.NewTimer(min(max(listenPause, 100*time.Since(began)), longestPause))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return
		}
	}
}

// comparedAtOnce is how many mounts are compared while mu is held: mounts and unmounts of
// this process wait for mu.
const comparedAtOnce = 64

// compare asks each mount below the root for its attributes.
func (w *Watcher) compare(changed func(string)) {
	for ids := range slices.Chunk(w.belowRoot(), comparedAtOnce) {
		w.compareSome(ids, changed)
	}
}

// belowRoot returns the ids of the mounts below the root.
func (w *Watcher) belowRoot() []uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	root := strings.TrimSuffix(w.h.real, "/") + "/"
	ids := make([]uint64, 0, len(w.mounts))
	for id, m := range w.mounts {
		if strings.HasPrefix(m.point, root) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (w *Watcher) compareSome(ids []uint64, changed func(string)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		before, found := w.mounts[id]
		if !found {
			continue
		}
		now, err := attributesNow(id)
		if err != nil || now == before.attributes { // after an error it has gone, which the source reports
			continue
		}
		before.attributes = now
		w.mounts[id] = before
		w.notify(before.point, changed)
	}
}

// made notes a mount that this process has just made. If somebody else unmounts it before
// its event is read, only this note tells where it was. The caller holds mu.
func (w *Watcher) made(fd int, point string, kind state.FileType) error {
	id, m, err := w.source.find(fd, point)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil // it is unmounted already, which its maker finds when it looks at the path
	case err != nil:
		return fmt.Errorf("which mount was made at %s: %w", point, err)
	}
	if _, found := w.mounts[id]; found {
		return nil
	}
	if kind != state.Directory {
		if st, err := statx(fd, "", 0); err == nil && fileType(st.Mode) == state.BlockDevice {
			m.nodes[0] = state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
		}
	}
	w.set(id, m)
	return nil
}

// unknownAttributes differ from those of every mount.
const unknownAttributes = ^state.Attributes(0)

// forgetAttributes makes the next comparison report a change of the mounts at a path,
// whatever their attributes are. This process has just set them. If somebody changes them
// back before that comparison, it would find no difference from those last seen.
func (w *Watcher) forgetAttributes(point string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, m := range w.mounts {
		if m.point == point {
			m.attributes = unknownAttributes
			w.mounts[id] = m
		}
	}
}

// apply applies one change. The caller holds mu.
func (w *Watcher) apply(c change, changed func(string)) {
	before, found := w.mounts[c.id]
	if c.detached {
		w.drop(c.id)
		if found && !c.own {
			w.notify(before.point, changed)
		}
	}
	if !c.attached {
		return
	}
	e, err := statmount(c.id)
	if err != nil { // it is unmounted again
		return
	}
	w.set(c.id, e.watched())
	if found && !c.detached && before.point != e.point { // it was moved again before this event was read, and the event of that move will find it noted at this path
		w.notify(before.point, changed)
	}
	// A mount of this process's own whose attributes differ from those it was made with
	// was changed before this event was read. compare would not notice that any more,
	// because it compares with what was just noted.
	if !c.own || found && before.attributes != e.attributes {
		w.notify(e.point, changed)
	}
}

// resyncError says that the mounts could not be listed.
type resyncError struct{ error }

func (e resyncError) Unwrap() error { return e.error }

// resync compares all mounts with those last seen. The caller holds mu.
func (w *Watcher) resync(changed func(string)) error {
	now, err := w.source.list()
	if err != nil {
		return resyncError{fmt.Errorf("list the mounts: %w", err)}
	}
	before := w.mounts
	for id, m := range before { // by now it may be covered
		if n := now[id]; m.bindsNode() && n.point == m.point && (n.root == m.root || !n.bindsNode()) {
			n.nodes, n.root = m.nodes, m.root
			now[id] = n
		}
	}
	w.replace(now)
	for id, m := range before {
		if n := now[id]; n.point != m.point || n.attributes != m.attributes || m.what != 0 && n.what != m.what {
			w.notify(m.point, changed)
		}
	}
	for id, m := range now {
		if before[id].point != m.point { // else it was reported above
			w.notify(m.point, changed)
		}
	}
	return nil
}

// notify reports a mount point below the root; for one above it, it reports the root.
func (w *Watcher) notify(point string, changed func(string)) {
	under := func(path, dir string) bool { return strings.HasPrefix(path+"/", strings.TrimSuffix(dir, "/")+"/") }
	if under(w.h.real, point) {
		point = w.h.real
	}
	if under(point, w.h.real) {
		changed(point)
	}
}
