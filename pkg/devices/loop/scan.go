package loop

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices/internal/lease"
	"github.com/csi-node/csi-node/pkg/state"
)

// lookLimit is how long scans wait for one device that is not known, all of them
// together: the kernel asks the backing's file system, and a dead NFS server
// never answers.
const lookLimit = 2 * time.Second

// look is a question about a device that is under way.
type look struct {
	since  time.Time
	done   chan struct{}
	device *device // nil when the device is not bound
	err    error
}

// scan returns all bound loop devices but those that the index knows and sysfs
// confirms: opening a device that another goroutine detaches would delay that.
// Of the silent ones, which did not answer, nothing is known but their names.
func (b *Backend) scan(ctx context.Context) (all []*device, silent []string, err error) {
	names, err := bound()
	if err != nil {
		return nil, nil, fmt.Errorf("look for loop devices: %w", err)
	}
	known := b.known()
	for _, name := range names {
		if backing, ok := known[name]; ok && backing == backingOf(name) {
			continue
		}
		d, err := b.askWithin(ctx, name)
		switch {
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case err != nil:
			klog.FromContext(ctx).Error(err, "A loop device does not answer, and may show any volume", "device", name, "backing", backingOf(name))
			silent = append(silent, name)
		case d != nil:
			all = append(all, d)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.silent = silent
	return all, silent, nil
}

// silentOnes returns the devices that did not answer the last scan.
func (b *Backend) silentOnes() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.silent
}

// known returns the backings of the devices in the index by their names.
func (b *Backend) known() map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := make(map[string]string, len(b.hints))
	for _, h := range b.hints {
		known[h.name] = h.backing
	}
	return known
}

// askWithin asks about a device on a goroutine that may be lost to a dead
// backing; no device ever has more than one.
func (b *Backend) askWithin(ctx context.Context, name string) (*device, error) {
	b.mu.Lock()
	l := b.looks[name]
	if l == nil {
		l = &look{since: time.Now(), done: make(chan struct{})}
		b.looks[name] = l
		go func() {
			l.device, l.err = ask(name)
			b.mu.Lock()
			delete(b.looks, name)
			b.mu.Unlock()
			close(l.done)
		}()
	}
	b.mu.Unlock()
	limit := time.NewTimer(lookLimit - time.Since(l.since)) // at once for one that hangs
	defer limit.Stop()
	select {
	case <-l.done:
		return l.device, l.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-limit.C:
		return nil, fmt.Errorf("%s does not tell its backing within %s", name, lookLimit)
	}
}

// recall returns the device that the index has for a key, if match still
// accepts it. It is O(1), unless a device did not answer the last scan and may be
// the one: then all are asked again.
func (b *Backend) recall(ctx context.Context, key string, match sought) (*device, error) {
	name := b.hint(key)
	if name == "" {
		if len(match.among(b.silentOnes())) > 0 {
			return b.search(ctx, key, match)
		}
		return nil, nil
	}
	unlock, err := b.nodes.Lock(ctx, name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	d, err := ask(name)
	if err != nil {
		d = b.asBefore(key, name)
	}
	switch {
	case err != nil && d == nil:
		return nil, err
	case d == nil || !match.is(d):
		b.forgetAs(key, name)
		return nil, nil
	}
	b.heard(key, d)
	return d, nil
}

// asBefore returns what a device of the index said last, if it is attached as it
// was then, else nil. A file system that was shut down may fail every question
// about its files (xfs does), that for the tag of a loop device with it.
func (b *Backend) asBefore(key, name string) *device {
	b.mu.Lock()
	was := b.hints[key].was
	b.mu.Unlock()
	f, err := open(name, os.O_RDONLY)
	if err != nil {
		return nil
	}
	defer f.Close()
	if was.name != name || !was.still(f) {
		return nil
	}
	return &was
}

// heard keeps what a device of the index has said.
func (b *Backend) heard(key string, d *device) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.hints[key]; h.name == d.name {
		h.was = *d
		b.hints[key] = h
	}
}

// Held reports whether a device that Find or FindView returned is claimed:
// mounted in whatever namespace, or opened O_EXCL. The question is a claim
// itself, for some microseconds: only who alone acts on the volume may ask.
func (b *Backend) Held(ctx context.Context, d state.Device) (bool, error) {
	name := filepath.Base(d.Path)
	unlock, err := b.nodes.Lock(ctx, name)
	if err != nil {
		return false, err
	}
	defer unlock()
	return probe(name)
}

// forgetAs removes a hint unless it has been renewed meanwhile.
func (b *Backend) forgetAs(key, name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hints[key].name == name {
		delete(b.hints, key)
	}
}

// probe reports whether a device is claimed: mounted in whatever namespace,
// or opened O_EXCL (open(2): EBUSY). The claim that the probe is itself lasts
// as long as the call.
func probe(name string) (held bool, err error) {
	f, err := open(name, os.O_RDONLY|unix.O_EXCL)
	switch {
	case errors.Is(err, unix.EBUSY):
		return true, nil
	case errors.Is(err, unix.ENXIO): // it is being cleared
		return false, nil
	case err != nil:
		return false, err
	}
	return false, f.Close()
}

// search looks through all devices that the index does not know for one that
// match accepts, and puts it into the index. Unavailable: none of those that
// answer is it, and others do not.
func (b *Backend) search(ctx context.Context, key string, match sought) (*device, error) {
	all, silent, err := b.scan(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		if match.is(d) {
			b.remember(key, d)
			return d, nil
		}
	}
	if maybe := match.among(silent); len(maybe) > 0 {
		return nil, state.Errorf(state.Unavailable, "%s does not answer, so whether it shows the data is not known: see to the disk behind it", strings.Join(maybe, ", "))
	}
	return nil, nil
}

// current returns the device for a key: the one of the index, else what a
// search finds, unless there is a proof that it would find none.
func (b *Backend) current(ctx context.Context, key string, match sought) (*device, error) {
	d, err := b.recall(ctx, key, match)
	if d != nil || err != nil || match.unopened() {
		return d, err
	}
	return b.search(ctx, key, match)
}

// sought is what a device is looked for by.
type sought struct {
	// is accepts a device by what it says.
	is func(*device) bool
	// named accepts a device that says nothing, by the name of its backing, which
	// is "" where sysfs does not tell that either.
	named func(backing string) bool
	// data is the file that the device is to show, at path; nil when it is known
	// by something else.
	data *file
	path string
}

// among describes those of the devices that do not answer which may be the one.
func (s sought) among(silent []string) (maybe []string) {
	if len(silent) == 0 {
		return nil
	}
	open := s.data != nil && !s.unopened()
	for _, name := range silent {
		if backing := backingOf(name); open || s.named(backing) {
			maybe = append(maybe, fmt.Sprintf("/dev/%s (backing %s)", name, backing))
		}
	}
	return maybe
}

// unopened reports whether a lease proves that nobody has the file open, no
// device either. It has the file open itself, for microseconds.
func (s sought) unopened() bool {
	if s.data == nil {
		return false
	}
	f, err := openData(s.path, s.data.id, os.O_RDONLY)
	if err != nil {
		return false
	}
	defer f.Close()
	return lease.Take(f) == nil && lease.Drop(f) == nil
}

// stands returns what accepts the devices that stand for a volume: ours by the
// tag, and any other over its file, if there is one. One that says nothing is
// known by the directory of the volume, whatever became of the file and wherever
// that was mounted for who attached it.
func (b *Backend) stands(volume string, data *file) sought {
	path, err := b.pool.DataPath(volume)
	dir := filepath.Dir(path)
	place := "/" + filepath.Base(filepath.Dir(dir)) + "/" + filepath.Base(dir) + "/"
	return sought{
		is:    func(d *device) bool { return b.owns(d, volume) || data != nil && d.file() == data.id },
		named: func(backing string) bool { return err == nil && strings.Contains(backing, place) },
		data:  data,
		path:  path,
	}
}

// owns reports whether the plugin attached the device for the volume.
func (b *Backend) owns(d *device, volume string) bool { return d.tag() == b.tag(volume) && d.whole() }

// own returns the device of the index that the plugin attached for a volume.
func (b *Backend) own(ctx context.Context, volume string) (*device, error) {
	data, err := b.data(volume)
	if err != nil {
		return nil, err
	}
	d, err := b.recall(ctx, b.tag(volume), b.stands(volume, data))
	if d == nil || err != nil || !b.owns(d, volume) {
		return nil, err
	}
	return d, nil
}

// data looks at a volume's data; nil when there is none.
func (b *Backend) data(volume string) (*file, error) {
	path, err := b.pool.DataPath(volume)
	if err != nil {
		return nil, err
	}
	return statFile(path)
}

func foreign(volume string, d *device) error {
	return state.Errorf(state.FailedPrecondition, "volume %s: its data is in use by %s, which the plugin did not attach: detach it (losetup -d %s)", volume, d, d.path())
}
