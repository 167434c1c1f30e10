package loop

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// lookLimit bounds the wait of all scans together for one device that is not in the index:
// the kernel asks the backing's file system, and a dead NFS server never answers.
const lookLimit = 2 * time.Second

// scan asks all bound loop devices except those whose index entry sysfs confirms: opening
// a device that another goroutine detaches would delay the detach. If only is set, it
// selects the other devices to ask by the name of their backing, which is "" if sysfs does
// not tell it. silent are the names of the devices that did not answer, now or before.
func (s *Devices) scan(ctx context.Context, only func(backing string) bool) (all []*Device, silent []string, err error) {
	names, err := bound()
	if err != nil {
		return nil, nil, fmt.Errorf("look for loop devices: %w", err)
	}
	known := s.known()
	for _, name := range names {
		backing := backingOf(name)
		if was, ok := known[name]; ok && was == backing {
			s.setUnresponsive(name, false)
			continue
		}
		if only != nil && !only(backing) {
			continue
		}
		d, err := s.askWithin(ctx, name)
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		news := s.setUnresponsive(name, err != nil)
		switch {
		case err != nil && news:
			klog.FromContext(ctx).Error(err, "A loop device does not answer, and may show any volume; that is not said again until it answers", "device", name, "backing", backing)
		case news:
			klog.FromContext(ctx).Info("A loop device answers again", "device", name, "backing", backing)
		}
		if err == nil && d != nil {
			all = append(all, d)
		}
	}
	return all, s.unresponsiveDevices(), nil
}

// setUnresponsive notes whether a device answers, and reports whether that is news.
func (s *Devices) setUnresponsive(name string, silent bool) (news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	news = s.unresponsive[name] != silent
	if silent {
		s.unresponsive[name] = true
	} else {
		delete(s.unresponsive, name)
	}
	return news
}

// unresponsiveDevices returns the devices that did not answer when they were last asked, and
// are bound still.
func (s *Devices) unresponsiveDevices() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.unresponsive, func(name string, _ bool) bool { return isFree(name) })
	return slices.Sorted(maps.Keys(s.unresponsive))
}

// known returns the backings of the devices in the index by their names.
func (s *Devices) known() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := make(map[string]string, len(s.index))
	for _, h := range s.index {
		known[h.name] = h.backing
	}
	return known
}

// askWithin asks about a device whose backing may be dead, and does not wait for it
// for longer than lookLimit.
func (s *Devices) askWithin(ctx context.Context, name string) (*Device, error) {
	d, _, err := s.looks.Join(ctx, name, lookLimit, func() (*Device, error) { return ask(name) })
	if _, late := err.(*hang.Unanswered); !late {
		return d, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("%s does not tell its backing within %s", name, lookLimit)
}

// Recall returns the device that the index has for a target, if it is still the target's:
// the plugin's, or a foreign one over the file. It is O(1), unless a device did not answer
// when it was last asked and may be the one: then they are asked again.
func (s *Devices) Recall(ctx context.Context, t Target) (*Device, error) {
	name := s.Seen(t.key())
	if name == "" {
		if len(t.candidates(s.unresponsiveDevices())) > 0 {
			return s.search(ctx, t)
		}
		return nil, nil
	}
	d, err := s.askIndexed(ctx, t.key(), name)
	if d != nil && err == nil && s.forged(ctx, t, d) { // it may have kept the target's own out of the index
		s.forgetAs(t.key(), name)
		return s.search(ctx, t)
	}
	if d == nil || err != nil || t.is(d) {
		return d, err
	}
	if t.File != nil || t.isView() { // else it may be a foreign one over the file, which is not known now
		s.forgetAs(t.key(), name)
	}
	return nil, nil
}

// askIndexed asks the device that the index has for a key. The entry is dropped if the
// device is not bound.
func (s *Devices) askIndexed(ctx context.Context, key, name string) (*Device, error) {
	unlock, err := s.nodes.Lock(ctx, name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	d, err := ask(name)
	switch {
	case err != nil:
		d = s.lastAnswer(key, name)
	case d != nil:
		d = s.restored(ctx, key, d)
	}
	switch {
	case err != nil && d == nil:
		return nil, err
	case d == nil:
		s.forgetAs(key, name)
		return nil, nil
	}
	s.updateIndex(key, d)
	return d, nil
}

// lastAnswer returns what a device of the index said last, if it has not been attached
// anew since, else nil. A file system that was shut down may fail every question about its
// files (xfs does); then a loop device over one of them cannot tell its tag either.
func (s *Devices) lastAnswer(key, name string) *Device {
	s.mu.Lock()
	was := s.index[key].was
	s.mu.Unlock()
	f, err := open(name, os.O_RDONLY)
	if err != nil {
		return nil
	}
	defer f.Close()
	if was.name != name || !was.still(int(f.Fd())) {
		return nil
	}
	return &was
}

// updateIndex keeps what a device of the index has said, unless somebody has made it say so.
func (s *Devices) updateIndex(key string, d *Device) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.index[key]; h.name == d.name && !d.altered(&h.was) && !d.swappedSince(&h.was) {
		h.was = *d
		s.index[key] = h
	}
}

// Claim opens a device O_EXCL and lets do use it. It fails while anybody else has
// it mounted or claimed for longer than a moment, and if the device shows another file by now.
func (s *Devices) Claim(ctx context.Context, d *Device, mode int, do func(*os.File) error) (err error) {
	done, err := s.Turn(ctx, d.name)
	if err != nil {
		return err
	}
	defer done()
	f, err := claim(ctx, d, mode)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s is %w: it is mounted or claimed, perhaps by a mkfs that has not ended", d, errHeld)
	}
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(f, &err)
	now, err := identify(int(f.Fd()), d.name)
	switch {
	case err != nil:
		return err
	case !now.same(d):
		return fmt.Errorf("%s does not show the volume any more", d.Path())
	}
	return do(f)
}

// Turn waits for the turn to open a block device O_EXCL, by its name in sysfs. Until the
// turn ends, nobody else in this process opens the device O_EXCL.
func (s *Devices) Turn(ctx context.Context, name string) (done func(), err error) {
	return s.nodes.Lock(ctx, name)
}

// forgetAs removes an entry of the index unless it was replaced meanwhile.
func (s *Devices) forgetAs(key, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.index[key].name == name {
		delete(s.index, key)
	}
}

// search looks through the devices that the index does not know for one that
// stands for the target, and puts it into the index. Without a file only the
// devices are asked whose backing has the target's name, of which there are few.
// Unavailable: none of those that answer is it, and others do not.
func (s *Devices) search(ctx context.Context, t Target) (*Device, error) {
	var only func(string) bool
	if t.File == nil {
		only = func(backing string) bool { return backing == "" || t.mayShow(backing) }
	}
	all, silent, err := s.scan(ctx, only)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		if t.is(d) && !s.forged(ctx, t, d) {
			s.remember(t.key(), d)
			return d, nil
		}
	}
	if maybe := t.candidates(silent); len(maybe) > 0 {
		return nil, state.Errorf(state.Unavailable, "%s does not answer, so whether it shows the data is not known: see to the disk behind it", strings.Join(maybe, ", "))
	}
	return nil, nil
}

// Current returns the device that stands for a target: the one of the index, else
// what a search finds, unless there is a proof that it would find none.
func (s *Devices) Current(ctx context.Context, t Target) (*Device, error) {
	d, err := s.Recall(ctx, t)
	if d != nil || err != nil || t.nobodyHasItOpen() {
		return d, err
	}
	return s.search(ctx, t)
}
