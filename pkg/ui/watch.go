package ui

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
)

// readTime bounds one reading of all nodes.
const readTime = time.Minute

// watcher reads the source while a page is open: once for all pages.
type watcher struct {
	source Source
	opened chan struct{} // has a value when the first page was opened

	mu       sync.Mutex
	pages    int           // that are open
	reading  *reading      // the last one; nil: none since the first of them was opened
	replaced chan struct{} // closed when there is another
	stories  stories
}

// reading is one reading of the source, as the page gets it. It is not changed.
type reading struct {
	snapshot Snapshot
	at       time.Time
	text     []byte // the JSON of a view
}

// view is what the page shows.
type view struct {
	Title string    `json:"title"`
	Every float64   `json:"everySeconds"`
	Now   time.Time `json:"now"`             // by the clock of this machine
	At    time.Time `json:"at,omitzero"`     // when the nodes were read; zero: they never were
	Error string    `json:"error,omitempty"` // why they could not be read just now
	Notes []string  `json:"notes"`
	Nodes []node    `json:"nodes"`
}

type node struct {
	Name    string         `json:"name"`
	Pod     string         `json:"pod"`   // of the plugin; empty if the page is of one node
	Error   string         `json:"error"` // why it could not be asked; then nothing else is known
	Driver  string         `json:"driver"`
	Version string         `json:"version"`
	Told    []string       `json:"told"`  // of the node as a whole
	Wrong   bool           `json:"wrong"` // something is wrong with the node
	Places  []report.Place `json:"places"`
	Fills   []report.Fill  `json:"fills"`
	Volumes []volume       `json:"volumes"`
}

type volume struct {
	report.Status
	// Is is the condition of the worst part; empty: nothing is asked of the volume, and a
	// call for it was refused.
	Is      report.Condition `json:"is"`
	Refused *report.Refusal  `json:"refused"` // the last call that was refused; nil: none
	Story   []moment         `json:"story"`   // the newest first
}

func newWatcher(source Source) *watcher {
	return &watcher{source: source, opened: make(chan struct{}, 1), replaced: make(chan struct{}), stories: stories{}}
}

// run reads until ctx ends.
func (w *watcher) run(ctx context.Context) {
	for ctx.Err() == nil {
		var rested <-chan time.Time // never, while no page is open
		if w.isWatched() {
			w.read(ctx)
			rested = time.After(w.source.Every)
		}
		select {
		case <-rested:
		case <-w.opened:
		case <-ctx.Done():
		}
	}
}

// join counts a page that is open, until leave.
func (w *watcher) join() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pages++
	if w.pages == 1 {
		select {
		case w.opened <- struct{}{}:
		default: // it is told already
		}
	}
}

// leave forgets what was read when the last page is closed: it is old for the next.
func (w *watcher) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pages--
	if w.pages == 0 {
		w.reading = nil
	}
}

func (w *watcher) isWatched() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pages > 0
}

// last returns the last reading, nil if there is none yet, and a channel that is closed
// when there is another.
func (w *watcher) last() (*reading, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reading, w.replaced
}

// node returns the node of the last reading that knows a volume.
func (w *watcher) node(name, pod, volume string) (report.NodeOf, bool) {
	last, _ := w.last()
	if last == nil {
		return report.NodeOf{}, false
	}
	at := slices.IndexFunc(last.snapshot.Nodes, func(n report.NodeOf) bool {
		return n.Name == name && n.Pod == pod && n.Knows(volume)
	})
	if at < 0 {
		return report.NodeOf{}, false
	}
	return last.snapshot.Nodes[at], true
}

// read reads the source and shows that to all pages. What cannot be read leaves what was
// read before.
func (w *watcher) read(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	snapshot, err := w.source.Read(ctx)
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pages == 0 {
		return
	}
	next := &reading{snapshot: snapshot, at: now}
	v := view{Title: w.source.Title, Every: w.source.Every.Seconds(), Now: now}
	if err != nil {
		v.Error = err.Error()
		next.snapshot, next.at = Snapshot{}, time.Time{}
		if w.reading != nil {
			next.snapshot, next.at = w.reading.snapshot, w.reading.at
		}
	} else {
		w.stories.note(snapshot.Nodes, now)
	}
	v.At, v.Notes, v.Nodes = next.at, next.snapshot.Notes, w.shown(next.snapshot.Nodes)
	if next.text, err = json.Marshal(v); err != nil {
		next.text, _ = json.Marshal(view{Title: v.Title, Every: v.Every, Now: now, Error: err.Error()}) // texts and times: it cannot fail
	}
	w.reading = next
	close(w.replaced)
	w.replaced = make(chan struct{})
}

// shown returns the nodes as the page shows them.
func (w *watcher) shown(nodes []report.NodeOf) []node {
	all := []node{}
	for _, of := range nodes {
		n := node{Name: of.Name, Pod: of.Pod, Error: of.Error, Driver: of.Driver, Version: of.Version, Places: of.Storage, Volumes: []volume{}}
		if of.Error == "" {
			n.Told = of.Told()
			n.Wrong = !of.Running || of.Registration != nil && !of.Registration.Registered || len(of.StorageProblems) > 0 || of.Orphans > 0
		}
		for _, place := range of.Storage {
			n.Fills = append(n.Fills, place.Fills()...)
		}
		refusals := map[string]report.Refusal{}
		for _, r := range of.Refusals {
			refusals[r.Volume] = r
		}
		add := func(s report.Status, is report.Condition) {
			v := volume{Status: s, Is: is}
			r, refused := refusals[s.Volume]
			if refused {
				v.Refused = &r
				delete(refusals, s.Volume)
			}
			v.Story = w.stories.tell(of, s, r)
			n.Volumes = append(n.Volumes, v)
		}
		for _, s := range of.Volumes {
			add(s, s.Worst())
		}
		for _, r := range of.Refusals {
			if _, left := refusals[r.Volume]; left {
				add(report.Status{Volume: r.Volume, Claim: r.Claim, Class: r.Class, Parts: []report.PartStatus{}}, "")
			}
		}
		all = append(all, n)
	}
	return all
}
