package chaos

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

// pod stands in for a pod. It counts in a file, or in a block of a device, which
// it has open all the time, and opens the same again by path each time, as a
// container that is restarted does. What it has open must go on whatever is torn
// off; what it finds by path, if it is there, must be what was synced last. A
// reader, at the volume's last target, looks how far the writer has come.
type pod struct {
	*volume
	target string

	open *os.File // since the beginning
	stop chan struct{}
	done chan struct{}

	mu    sync.Mutex
	last  int // that was synced, or seen
	found int // how often it was found by path
}

const (
	pace      = 5 * time.Millisecond // how often a pod does something
	countSize = 20                   // digits of a count
	countAt   = 4096                 // where it is on a device, behind the volume's id
)

// run writes into a volume whose it is and lets a pod live at each of its targets.
func (v *volume) run() pods {
	v.T.Helper()
	must(v.T, v.sign())
	var all pods
	for _, target := range v.targets {
		all = append(all, &pod{volume: v, target: target})
	}
	all.start()
	return all
}

// sign writes the volume's name and a count of nothing into it.
func (v *volume) sign() error {
	f, err := os.OpenFile(v.place(v.targets[0]), os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(v.signature(), 0)
	if err == nil {
		_, err = f.WriteAt(fmt.Appendf(nil, "%0*d", countSize, 0), countAt)
	}
	return errors.Join(err, f.Sync(), f.Close())
}

func (v *volume) signature() []byte { return []byte("volume " + v.ID + "\n") }

// place is the file that pods count in.
func (v *volume) place(path string) string {
	if v.fsType == "" {
		return path
	}
	return filepath.Join(path, "count")
}

// meet opens the place at a path, if it is that of the volume: beneath a mount
// that was torn off is another file or none.
func (v *volume) meet(path string, flags int) *os.File {
	f, err := os.OpenFile(v.place(path), flags, 0)
	if err != nil {
		return nil
	}
	id := make([]byte, len(v.signature()))
	if _, err := f.ReadAt(id, 0); err != nil || !bytes.Equal(id, v.signature()) {
		_ = f.Close() // not written to
		return nil
	}
	return f
}

// count reads a count.
func count(f io.ReaderAt) (int, error) {
	text := make([]byte, countSize)
	if _, err := f.ReadAt(text, countAt); err != nil {
		return 0, err
	}
	return strconv.Atoi(string(text))
}

type pods []*pod

func (all pods) start() {
	for _, p := range all {
		p.start()
	}
}

func (all pods) end() {
	for _, p := range all {
		p.end()
	}
}

// find blocks until each pod finds its volume by path.
func (all pods) find(t testing.TB) {
	t.Helper()
	for _, p := range all {
		p.find(t)
	}
}

func (p *pod) flags() int {
	if p.readOnly(p.target) {
		return os.O_RDONLY
	}
	return os.O_RDWR
}

// start lets a pod live until end.
func (p *pod) start() {
	p.T.Helper()
	if p.open = p.meet(p.target, p.flags()); p.open == nil {
		p.T.Fatalf("volume %s is not at %s", p.ID, p.target)
	}
	p.stop, p.done = make(chan struct{}), make(chan struct{})
	go func() {
		defer close(p.done)
		for {
			p.turn()
			select {
			case <-p.stop:
				return
			case <-time.After(pace):
			}
		}
	}()
}

// end stops the pod if it lives, which closes what it has open.
func (p *pod) end() {
	if p.stop != nil {
		close(p.stop)
		<-p.done
		_ = p.open.Close() // synced, or told
		p.stop = nil
	}
}

func (p *pod) turn() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.work(p.open)
	if f := p.meet(p.target, p.flags()); f != nil {
		p.work(f)
		_ = f.Close() // synced, or told
		p.found++
	}
}

// work counts one further, or looks how far another has come.
func (p *pod) work(f *os.File) {
	now, err := count(f)
	switch {
	case err != nil:
		p.T.Errorf("%s of volume %s cannot be read: %v", f.Name(), p.ID, err)
		return
	case p.readOnly(p.target):
		if p.fsType != "" && now < p.last { // a view of a device has a page cache of its own
			p.T.Errorf("%s of volume %s is at %d, and was at %d", f.Name(), p.ID, now, p.last)
		}
		p.last = now
		return
	case now != p.last:
		p.T.Errorf("%s of volume %s is at %d, and %d was synced", f.Name(), p.ID, now, p.last)
	}
	_, err = f.WriteAt(fmt.Appendf(nil, "%0*d", countSize, p.last+1), countAt)
	if err = errors.Join(err, f.Sync()); err != nil {
		p.T.Errorf("%s of volume %s cannot be written: %v", f.Name(), p.ID, err)
		return
	}
	p.last++
}

// find blocks until the pod finds the volume by path, in a turn that has yet to
// begin.
func (p *pod) find(t testing.TB) {
	t.Helper()
	times := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.found
	}
	before := times()
	harness.Eventually(t, fmt.Sprintf("the pod finds volume %s at %s", p.ID, p.target), func() bool { return times() > before+1 })
}
