package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	freshSuffix = ".new"
	spareName   = "spare"
	spareBytes  = 64 << 10
	// successorInfix is in the names of directories that are to take the store's
	// place, or have lost it. None is ever given twice.
	successorInfix = ".successor-"
)

// directory is the open directory of the records. All is done below the open
// directory, whatever has its name by now: what a process that was taken over
// has left to the kernel reaches no file of another one.
type directory struct {
	path string
	lock *os.File
	root *os.Root

	spare sync.Mutex // guards the file of that name, and short
	short bool       // the spare has not all its blocks
}

// openDirectory takes over the lock of the directory at the path.
func openDirectory(path string, lock *os.File) (*directory, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return &directory{path: path, lock: lock, root: root}, nil
}

func (d *directory) close() error { return errors.Join(d.root.Close(), d.lock.Close()) }

// intact returns an error if the path does not name the directory any more. If
// that cannot be told, the write will tell.
func (d *directory) intact() error {
	if same, err := stillAt(d.lock, d.path); err == nil && !same {
		return fmt.Errorf("%s was taken away while the plugin runs", d.path)
	}
	return nil
}

// put makes a record's file be text, or be gone if the record is empty. What
// asks for more leaves the spare alone.
func (d *directory) put(v *state.Volume, text []byte, more bool) error {
	name := fileName(v.ID)
	if v.Empty() {
		err := d.remove(name)
		_ = d.refill() // or the next time
		return err
	}
	if more {
		if err := d.refill(); err != nil {
			return err
		}
	}
	err := d.root.WriteFile(name+freshSuffix, text, 0o600)
	if err == nil {
		err = d.root.Rename(name+freshSuffix, name)
	}
	if err != nil {
		_ = d.remove(name + freshSuffix) // or the next start does
	}
	if !more && isFull(err) {
		return d.writeSpare(name, text)
	}
	return err
}

// write makes a record's file be as the record is.
func (d *directory) write(boot string, v *state.Volume) error {
	text, err := encode(boot, v)
	if err != nil {
		return err
	}
	return d.put(v, text, false)
}

func (d *directory) remove(name string) error {
	if err := d.root.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// writeSpare writes a file on a full file system: the spare, which owns its
// blocks and its inode, changes places with the file, which is the spare from then on.
func (d *directory) writeSpare(name string, text []byte) error {
	d.spare.Lock()
	defer d.spare.Unlock()
	d.short = true
	f, err := d.root.OpenFile(spareName, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err = f.Write(text); err == nil {
		err = f.Truncate(int64(len(text)))
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = swap(int(d.lock.Fd()), spareName, name)
	}
	_ = d.fill() // or before something new is set up
	return err
}

// refill gives a spare that has given blocks away as many again.
func (d *directory) refill() error {
	d.spare.Lock()
	defer d.spare.Unlock()
	if d.short {
		return d.fill()
	}
	return nil
}

// fill lets the spare own its blocks. A file system that cannot give blocks in
// advance owes nothing.
func (d *directory) fill() error {
	f, err := d.root.OpenFile(spareName, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	for {
		if err = unix.Fallocate(int(f.Fd()), 0, 0, spareBytes); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	d.short = err != nil
	return errors.Join(err, f.Close())
}

// swap gives a file the name of another one, which gets its name if it is there.
func swap(dir int, from, to string) error {
	err := unix.Renameat2(dir, from, dir, to, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = unix.Renameat2(dir, from, dir, to, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// replace puts a directory that fill makes in the place of the one at the path.
func replace(path string, fill func(*directory) error) (*directory, error) {
	name, err := os.MkdirTemp(filepath.Dir(path), filepath.Base(path)+successorInfix)
	if err != nil {
		return nil, err
	}
	lock, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	d, err := openDirectory(name, lock)
	if err != nil {
		return nil, err
	}
	if err = flock(lock, unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = fill(d)
	}
	if err == nil {
		err = swap(unix.AT_FDCWD, name, path)
	}
	if err != nil {
		return nil, errors.Join(err, d.close(), os.RemoveAll(name))
	}
	d.path = path
	_ = os.RemoveAll(name) // what was there before, if anything was; or the next start does
	return d, nil
}

// removeSuccessors removes what never took the place of a directory, or has lost
// it. Who calls it has the store.
func removeSuccessors(path string) error {
	entries, err := os.ReadDir(filepath.Dir(path))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), filepath.Base(path)+successorInfix) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(filepath.Dir(path), e.Name())))
		}
	}
	return err
}

// setAside renames the file at path to a name that tells the time (UTC).
func setAside(path string) (string, error) {
	aside := path + ".corrupt-" + time.Now().UTC().Format("20060102T150405.000000000Z")
	return aside, os.Rename(path, aside)
}

// contents is what was found in a store.
type contents struct {
	records  map[string]*state.Volume
	revision uint64           // the highest
	bad      map[string]error // names or ids of records that cannot be read, and why
	old      []string         // names of files of another boot, or of what was being written
}

func newContents() *contents {
	return &contents{records: map[string]*state.Volume{}, bad: map[string]error{}}
}

// read reads all files of a directory that is locked, as many at once as there
// are processors.
func read(path, bootID string) (*contents, error) {
	c := newContents()
	entries, err := os.ReadDir(path)
	found, workers := make([]file, len(entries)), runtime.GOMAXPROCS(0)
	var group sync.WaitGroup
	for first := range workers {
		group.Go(func() {
			for i := first; i < len(entries); i += workers {
				found[i] = readFile(path, entries[i])
			}
		})
	}
	group.Wait()
	for i, f := range found {
		switch name := entries[i].Name(); {
		case strings.HasSuffix(name, freshSuffix):
			c.old = append(c.old, name)
		case !strings.HasSuffix(name, suffix):
		case f.err != nil:
			c.bad[name] = f.err
		default:
			c.revision = max(c.revision, f.record.Revision)
			if f.boot == bootID {
				c.records[f.record.ID] = f.record
			} else {
				c.old = append(c.old, name)
			}
		}
	}
	return c, err
}

// file is what was read of one.
type file struct {
	boot   string
	record *state.Volume
	err    error
}

func readFile(dir string, e os.DirEntry) (f file) {
	switch {
	case !strings.HasSuffix(e.Name(), suffix):
		return f
	case !e.Type().IsRegular():
		return file{err: fmt.Errorf("it is no regular file (its type is %s)", e.Type())}
	}
	raw, err := os.ReadFile(filepath.Join(dir, e.Name()))
	if err != nil {
		return file{err: err}
	}
	if f.boot, f.record, f.err = decode(raw); f.err == nil && fileName(f.record.ID) != e.Name() {
		f.err = fmt.Errorf("it is the record of %q", f.record.ID)
	}
	return f
}
