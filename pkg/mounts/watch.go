package mounts

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"k8s.io/klog/v2"
)

// Watcher tells where mounts come and go in this mount namespace. It costs
// nothing while none does.
type Watcher struct {
	h      *Host
	source newsSource
	points map[uint64]string // the mount point of each mount, by its id
}

// newsSource is where the news of mounts comes from.
type newsSource interface {
	name() string
	// next blocks until something has changed or the source is closed. all
	// says that what has changed is not known.
	next() (changes []change, all bool, err error)
	// list returns the mount points of the namespace by the ids of the mounts.
	list() (map[uint64]string, error)
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
// then read as a whole. Run, or else Close, ends it.
func (h *Host) NewWatcher() (*Watcher, error) {
	var s newsSource
	s, err := newFanotify()
	if err != nil {
		if s, err = newMountinfoPoll(pollEvery); err != nil {
			return nil, fmt.Errorf("watch the mount table: %w", err)
		}
	}
	return h.watch(s)
}

// watch lists the mounts after the source has begun, so that none is missed.
func (h *Host) watch(s newsSource) (*Watcher, error) {
	points, err := s.list()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("list the mounts: %w", err), s.close())
	}
	return &Watcher{h: h, source: s, points: points}, nil
}

// Source names where the news comes from: "fanotify" or "mountinfo".
func (w *Watcher) Source() string { return w.source.name() }

// Run calls changed, in turn, with each path below the Host's root at which a
// mount came or went by another process's doing, or whose directory above was
// hidden or uncovered so. Where the kernel does not tell who did it, that is by
// anybody's doing. It returns nil when ctx ends, and closes the Watcher.
func (w *Watcher) Run(ctx context.Context, changed func(path string)) error {
	closeOnce := sync.OnceValue(w.source.close)
	stop := context.AfterFunc(ctx, func() { _ = closeOnce() }) // its error comes again below
	defer stop()
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
func (w *Watcher) Close() error { return w.source.close() }

func (w *Watcher) apply(c change, changed func(string)) {
	before, known := w.points[c.id]
	if c.went {
		delete(w.points, c.id)
		if known && !c.own {
			w.tell(before, changed)
		}
	}
	if !c.came {
		return
	}
	e, err := statmount(c.id)
	if err != nil { // it has gone again
		return
	}
	w.points[c.id] = e.point
	if known && !c.went && before != e.point { // it was moved on before this was read, and the news of that will find it here
		w.tell(before, changed)
	}
	if !c.own {
		w.tell(e.point, changed)
	}
}

// resync compares all mounts with those known.
func (w *Watcher) resync(changed func(string)) error {
	now, err := w.source.list()
	if err != nil {
		return fmt.Errorf("list the mounts: %w", err)
	}
	before := w.points
	w.points = now
	for id, point := range before {
		if now[id] != point {
			w.tell(point, changed)
		}
	}
	for id, point := range now {
		if before[id] != point {
			w.tell(point, changed)
		}
	}
	return nil
}

// tell spells a mount point as requests may.
func (w *Watcher) tell(point string, changed func(string)) {
	rel, below := strings.CutPrefix(point+"/", strings.TrimSuffix(w.h.real, "/")+"/")
	if !below {
		if !strings.HasPrefix(w.h.real+"/", strings.TrimSuffix(point, "/")+"/") {
			return
		}
		rel = "" // at the root or above
	}
	rel = strings.TrimSuffix("/"+rel, "/")
	changed(strings.TrimSuffix(w.h.root, "/") + rel)
	if w.h.root != w.h.real {
		changed(strings.TrimSuffix(w.h.real, "/") + rel)
	}
}
