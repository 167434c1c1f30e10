package chaos

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// life is a volume that is created, used and deleted again and again, as by
// kubelet: one call at a time for the stage, one for each target. What is known
// of it is what was answered OK; only its own goroutine changes that.
type life struct {
	*volume
	random  *rand.Rand
	created bool
	staged  bool
	shown   map[string]bool // targets that are published
	size    int64           // bytes that it must have
	formats int             // how often mkfs had been run when it was first staged

	sums map[int][sha256.Size]byte // of the files, or the blocks, that were written and synced
	did  []string                  // lately
}

// slots is how many files or blocks a volume holds, slotBytes the most bytes of
// each.
const (
	slots     = 24
	slotBytes = 64 << 10
)

// complain fails the test and tells what was asked of the volume lately.
func (l *life) complain(format string, args ...any) {
	l.t.Helper()
	l.t.Errorf("volume %s: %s, after\n%s", l.id, fmt.Sprintf(format, args...), strings.Join(l.did[max(len(l.did)-30, 0):], "\n"))
}

// call makes a call until its answer is final, now and then impatiently at
// first, and reports whether it was OK.
func (l *life) call(what string, call func(context.Context) error) bool {
	l.t.Helper()
	if l.random.IntN(4) == 0 {
		ctx, cancel := context.WithTimeout(l.t.Context(), time.Duration(l.random.Int64N(int64(50*time.Millisecond))))
		_ = call(ctx) // whatever comes of it
		cancel()
	}
	err := insist(l.t.Context(), call)
	l.did = append(l.did, fmt.Sprintf("%s %s: %s", time.Now().Format("05.000"), what, status.Code(err)))
	if err != nil {
		l.complain("%s answers %v", what, err)
	}
	return err == nil
}

// step does one thing that makes sense now.
func (l *life) step() {
	switch {
	case !l.created:
		l.create()
	case !l.staged && l.random.IntN(4) == 0:
		l.end()
	case !l.staged:
		l.stage()
	default:
		l.use()
	}
}

func (l *life) create() {
	if l.call("create", l.volume.create) {
		l.created, l.size, l.formats = true, l.bytes, 0
		l.sums = map[int][sha256.Size]byte{}
	}
}

func (l *life) end() {
	if l.call("delete", l.volume.delete) {
		l.created = false
	}
}

func (l *life) stage() { l.staged = l.call("stage", l.volume.stage) }

// use does something with a volume that is staged.
func (l *life) use() {
	switch l.random.IntN(10) {
	case 0, 1: // all pods start
		l.publish(l.targets)
	case 2:
		l.publish(l.targets[l.random.IntN(len(l.targets)):][:1])
	case 3:
		l.unpublish(l.targets[l.random.IntN(len(l.targets)):][:1])
	case 4: // all pods end
		if l.unpublish(l.targets); l.random.IntN(2) == 0 && len(l.shown) == 0 && l.call("unstage", l.volume.unstage) {
			l.staged = false
		}
	case 5:
		l.grow()
	default:
		l.write()
		l.read()
	}
}

// publish publishes at several targets at once.
func (l *life) publish(targets []string) {
	l.each("publish", targets, l.volume.publish, func(target string) { l.shown[target] = true })
}

func (l *life) unpublish(targets []string) {
	l.each("unpublish", targets, l.volume.unpublish, func(target string) { delete(l.shown, target) })
}

func (l *life) each(what string, targets []string, call func(context.Context, string) error, done func(string)) {
	errs := make([]error, len(targets))
	var group sync.WaitGroup
	for i, target := range targets {
		group.Go(func() {
			errs[i] = insist(l.t.Context(), func(ctx context.Context) error { return call(ctx, target) })
		})
	}
	group.Wait()
	for i, target := range targets {
		l.did = append(l.did, fmt.Sprintf("%s %s %s: %s", time.Now().Format("05.000"), what, target[len(l.KubeletDir):], status.Code(errs[i])))
		if errs[i] != nil {
			l.complain("%s at %s answers %v", what, target, errs[i])
			continue
		}
		done(target)
	}
}

// grow asks for a little more. A mounted ext4 grows only by who has
// CAP_SYS_RESOURCE: then its device has grown, which it fills another time.
func (l *life) grow() {
	size := l.size + int64(1+l.random.IntN(4))*mib
	if size > 2*l.bytes {
		return
	}
	var refused error
	ok := l.call(fmt.Sprint("expand to ", size), func(ctx context.Context) error {
		err := l.expand(ctx, size)
		if l.fsType == "ext4" && status.Code(err) == codes.FailedPrecondition && strings.Contains(status.Convert(err).Message(), "CAP_SYS_RESOURCE") {
			refused, err = err, nil
		}
		return err
	})
	if ok && refused == nil {
		l.size = size
	}
}

// writable returns a published target that pods may write to, if there is one.
func (l *life) writable() string {
	for _, target := range l.targets {
		if l.shown[target] && !l.readOnly(target) {
			return target
		}
	}
	return ""
}

// write writes a file, or a block, and remembers it once it is synced.
func (l *life) write() {
	path := l.writable()
	if path == "" {
		return
	}
	slot, data := l.random.IntN(slots), make([]byte, 1+l.random.IntN(slotBytes))
	if l.fsType == "" {
		data = make([]byte, slotBytes) // else what is beyond it is of the write before
	}
	seed := [32]byte{}
	for i := range seed {
		seed[i] = byte(l.random.Uint32())
	}
	_, _ = rand.NewChaCha8(seed).Read(data) // never fails
	file, flags, offset := l.slot(path, slot)
	f, err := os.OpenFile(file, os.O_WRONLY|flags, 0o640)
	if err == nil {
		_, err = f.WriteAt(data, offset)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		l.complain("writing: %v", err)
		return
	}
	if l.fsType != "" { // its name, too
		dir, err := os.Open(path)
		must(l.t, err, dir.Sync(), dir.Close())
	}
	l.sums[slot] = sha256.Sum256(data)
}

// slot is where a file or a block is, and how it is opened to be written anew.
func (l *life) slot(path string, slot int) (file string, flags int, offset int64) {
	if l.fsType == "" {
		return path, 0, int64(slot) * slotBytes
	}
	return filepath.Join(path, fmt.Sprint("slot-", slot)), os.O_CREATE | os.O_TRUNC, 0
}

// read compares all that was written with what there is now.
func (l *life) read() {
	path := l.writable()
	if path == "" && l.fsType != "" && l.staged {
		path = l.staging
	}
	if path == "" {
		return
	}
	for slot, want := range l.sums {
		file, _, offset := l.slot(path, slot)
		data, err := readAt(file, offset, l.fsType == "")
		if err != nil || sha256.Sum256(data) != want {
			l.complain("slot %d at %s has %d other bytes than were synced (%v)", slot, path, len(data), err)
		}
	}
}

// readAt reads a whole file, or one block of a device.
func readAt(path string, offset int64, block bool) ([]byte, error) {
	if !block {
		return os.ReadFile(path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	data := make([]byte, slotBytes)
	_, err = f.ReadAt(data, offset)
	return data, errors.Join(err, f.Close())
}
