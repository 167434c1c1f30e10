package mounts

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// Watcher tells where mounts come and go in this mount namespace, or change
// their attributes. It costs nothing while none does.
type Watcher struct {
	h      *Host
	source newsSource
	// ear hears that something has changed of which the source does not tell:
	// attributes. It is nil if the source hears that itself.
	ear newsSource

	mu     sync.Mutex
	mounts map[uint64]known // by id
}

// known is what was seen of a mount last.
type known struct {
	point      string
	attributes state.Attributes
}

func (e entry) known() known { return known{e.point, e.attributes} }

// newsSource is where the news of mounts comes from.
type newsSource interface {
	name() string
	// next blocks until something has changed or the source is closed. all
	// says that what has changed is not known.
	next() (changes []change, all bool, err error)
	// list returns the mounts of the namespace by their ids.
	list() (map[uint64]known, error)
	// find returns the id of the mount that a descriptor is of, and what list
	// would tell of it if it is cheap to know; ENOENT if it has gone.
	find(fd int, point string) (uint64, known, error)
	close() error
}

// change is one mount that came or went, or did both.
type change struct {
	id         uint64
	came, went bool
	own        bool // this process did it
}

// NewWatcher begins to collect news: by fanotify (Linux 6.15), else by poll(2)
// of /proc/self/mountinfo, which the kernel wakes at every change, and which is
// then read as a whole. fanotify does not tell of attributes: the same poll is
// kept beside it, after which only the mounts below the root are asked for
// theirs. Run, or else Close, ends it.
func (h *Host) NewWatcher() (*Watcher, error) {
	var s newsSource
	s, err := newFanotify()
	if err != nil {
		if s, err = newMountinfoPoll(); err != nil {
			return nil, fmt.Errorf("watch the mount table: %w", err)
		}
	}
	return h.watch(s)
}

// watch lists the mounts after the source has begun, so that none is missed.
func (h *Host) watch(s newsSource) (*Watcher, error) {
	w := &Watcher{h: h, source: s}
	var err error
	if _, deaf := s.(*fanotify); deaf {
		if w.ear, err = newMountinfoPoll(); err != nil {
			return nil, errors.Join(fmt.Errorf("watch the attributes of mounts: %w", err), s.close())
		}
	}
	w.mu.Lock() // what this process mounts meanwhile is noted after the list
	h.mu.Lock()
	h.watchers[w] = true
	h.mu.Unlock()
	w.mounts, err = s.list()
	w.mu.Unlock()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("list the mounts: %w", err), w.Close())
	}
	return w, nil
}

// Source names where the news comes from: "fanotify" or "mountinfo".
func (w *Watcher) Source() string { return w.source.name() }

// Run calls changed, in turn, with each path below the Host's root at which a
// mount came or went by another process's doing, or whose directory above was
// hidden or uncovered so, and where the attributes of a mount changed. Where the
// kernel does not tell who did it, as it never does of attributes, that is by
// anybody's doing. It returns nil when ctx ends, and closes the Watcher.
func (w *Watcher) Run(ctx context.Context, changed func(path string)) error {
	listening, hush := context.WithCancel(ctx)
	closeOnce := sync.OnceValue(w.Close)
	stop := context.AfterFunc(listening, func() { _ = closeOnce() }) // its error comes again below
	defer stop()
	var ear sync.WaitGroup
	defer ear.Wait()
	defer hush()
	if w.ear != nil {
		ear.Go(func() { w.listen(listening, changed) })
	}
	for {
		changes, all, err := w.source.next()
		if err == nil && all {
			if err := w.resync(changed); err != nil { // the next change asks again
				klog.FromContext(ctx).Error(err, "Changes of the mount table are missed")
			}
		}
		if err != nil {
			if ctx.Err() != nil {
				err = nil
			}
			return errors.Join(err, closeOnce())
		}
		for _, c := range changes {
			w.apply(c, changed)
		}
	}
}

// Close ends a Watcher that is not run.
func (w *Watcher) Close() error {
	w.h.mu.Lock()
	delete(w.h.watchers, w)
	w.h.mu.Unlock()
	if w.ear == nil {
		return w.source.close()
	}
	return errors.Join(w.source.close(), w.ear.close())
}

// rest is how long the ear does not listen after it has heard something: what
// changes meanwhile it hears then.
const rest = time.Second

// listen asks for the attributes of the mounts whenever something has changed.
func (w *Watcher) listen(ctx context.Context, changed func(string)) {
	for {
		if _, _, err := w.ear.next(); err != nil {
			if ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Changed attributes of mounts are noticed late from now on")
			}
			return
		}
		w.compare(changed)
		pause := time.NewTimer(rest)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return
		}
	}
}

// compare asks each mount below the root for its attributes.
func (w *Watcher) compare(changed func(string)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	root := strings.TrimSuffix(w.h.real, "/") + "/"
	for id, before := range w.mounts {
		if !strings.HasPrefix(before.point, root) {
			continue
		}
		now, err := statmount(id)
		if err != nil || now.attributes == before.attributes { // it has gone: the source tells
			continue
		}
		w.mounts[id] = known{before.point, now.attributes}
		w.tell(before.point, changed)
	}
}

// made takes note of a mount that this process has just made. The news of it may
// be read so late that it has gone again, by another's doing: then nobody would
// know any more where it was.
func (w *Watcher) made(fd int, point string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	id, m, err := w.source.find(fd, point)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil // whoever made it looks again
	case err != nil:
		return fmt.Errorf("which mount was made at %s: %w", point, err)
	}
	if _, found := w.mounts[id]; !found {
		w.mounts[id] = m
	}
	return nil
}

func (w *Watcher) apply(c change, changed func(string)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before, found := w.mounts[c.id]
	if c.went {
		delete(w.mounts, c.id)
		if found && !c.own {
			w.tell(before.point, changed)
		}
	}
	if !c.came {
		return
	}
	e, err := statmount(c.id)
	if err != nil { // it has gone again
		return
	}
	w.mounts[c.id] = e.known()
	if found && !c.went && before.point != e.point { // it was moved on before this was read, and the news of that will find it here
		w.tell(before.point, changed)
	}
	if !c.own {
		w.tell(e.point, changed)
	}
}

// resync compares all mounts with those known.
func (w *Watcher) resync(changed func(string)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, err := w.source.list()
	if err != nil {
		return fmt.Errorf("list the mounts: %w", err)
	}
	before := w.mounts
	w.mounts = now
	for id, m := range before {
		if now[id] != m {
			w.tell(m.point, changed)
		}
	}
	for id, m := range now {
		if before[id].point != m.point { // else it was told above
			w.tell(m.point, changed)
		}
	}
	return nil
}

// tell passes on a mount point below the root; one above it is told as the root.
func (w *Watcher) tell(point string, changed func(string)) {
	under := func(path, dir string) bool { return strings.HasPrefix(path+"/", strings.TrimSuffix(dir, "/")+"/") }
	if under(w.h.real, point) {
		point = w.h.real
	}
	if under(point, w.h.real) {
		changed(point)
	}
}
