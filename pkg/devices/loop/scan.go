package loop

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

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
// A device that does not answer is logged and left out.
func (b *Backend) scan(ctx context.Context) ([]*device, error) {
	names, err := bound()
	if err != nil {
		return nil, fmt.Errorf("look for loop devices: %w", err)
	}
	known := b.known()
	var all []*device
	for _, name := range names {
		if backing, ok := known[name]; ok && backing == backingOf(name) {
			continue
		}
		d, err := b.askWithin(ctx, name)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			klog.FromContext(ctx).Error(err, "Skipped a loop device", "device", name, "backing", backingOf(name))
		case d != nil:
			all = append(all, d)
		}
	}
	return all, nil
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
// accepts it. It is O(1).
func (b *Backend) recall(ctx context.Context, key string, match func(*device) bool) (*device, error) {
	name := b.hint(key)
	if name == "" {
		return nil, nil
	}
	unlock, err := b.nodes.Lock(ctx, name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	d, err := ask(name)
	if err != nil {
		return nil, err
	}
	if d == nil || !match(d) {
		b.forgetAs(key, name)
		return nil, nil
	}
	return d, nil
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
// match accepts, and puts it into the index.
func (b *Backend) search(ctx context.Context, key string, match func(*device) bool) (*device, error) {
	all, err := b.scan(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		if match(d) {
			b.remember(key, d)
			return d, nil
		}
	}
	return nil, nil
}

// current returns the device for a key: the one of the index, else what a
// search finds.
func (b *Backend) current(ctx context.Context, key string, match func(*device) bool) (*device, error) {
	d, err := b.recall(ctx, key, match)
	if d != nil || err != nil {
		return d, err
	}
	return b.search(ctx, key, match)
}

// stands returns what accepts the devices that stand for a volume: ours by the
// tag, and any other over its file, if there is one.
func (b *Backend) stands(volume string, data *file) func(*device) bool {
	return func(d *device) bool { return b.owns(d, volume) || data != nil && d.file() == data.id }
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
