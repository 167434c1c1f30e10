package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// spareSuffix ends the name of a record's spare file.
	spareSuffix = ".new"
	// successorInfix is part of the names of directories that are to take the store's
	// place, or have lost it. No such name is used twice.
	successorInfix = ".successor-"
)

// directory is the open directory of the records. Every file is opened relative to the
// open directory, not by its path: a system call that a process began before its store
// was taken over reaches no file of the new store.
//
// A record has two files: the current one, which is read, and a spare one. A write goes
// to the spare file, and then the two exchange their names. In both, blocks are reserved
// for the tombstones that will end what the record asks for, so that these can be written
// on a full file system, too.
type directory struct {
	boot  string
	root  *os.Root
	self  *held
	block int64 // the size of a block, where files are overwritten in place (tmpfs); 0: not known
}

// openDirectory opens the directory at the path, and makes it if it is not there.
func openDirectory(path, boot string) (*directory, error) {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	root, err := os.OpenRoot(path + "/") // which is an error if it is no directory, and waits for no pipe
	if err != nil {
		return nil, err
	}
	f, err := root.Open(".")
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	self, err := hold(f)
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	d := &directory{boot, root, self, 0}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(self.Fd()), &fs); err == nil && fs.Type == unix.TMPFS_MAGIC {
		d.block = fs.Bsize
	}
	return d, nil
}

func (d *directory) close() error { return errors.Join(d.self.Close(), d.root.Close()) }

var buffers = sync.Pool{New: func() any { return bytes.NewBuffer(make([]byte, 0, 1<<10)) }} // for most records, and the seal

// put writes a record, or removes the files of an empty one. known says whether the record
// has its files already; a wrong value costs time only. more says whether the record asks
// for more than before: then it is an error, too, if no blocks can be reserved for its end.
// After an error the current file is as it was.
func (d *directory) put(v *state.Volume, known, more bool) error {
	current := fileName(v.ID)
	spare := current + spareSuffix
	if v.Empty() {
		return d.remove(current)
	}
	buffer := buffers.Get().(*bytes.Buffer)
	defer buffers.Put(buffer)
	buffer.Reset()
	text, err := encodeIn(buffer, d.boot, v)
	if err != nil {
		return fmt.Errorf("encoding the record: %w", err)
	}
	if known && more && !d.fits(text) {
		if err := d.reserve(current, 0, text); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := d.write(spare, text, more); err != nil {
		return err
	}
	fresh, err := d.replace(spare, current, known)
	if err != nil || !fresh || !more {
		return err
	}
	if err := d.reserve(spare, unix.O_CREAT, text); err != nil {
		return errors.Join(err, d.remove(current))
	}
	return nil
}

// replace lets the spare and the current file of a record exchange their names. It reports
// whether there was no current file.
func (d *directory) replace(spare, current string, known bool) (fresh bool, err error) {
	dir := int(d.self.Fd())
	if !known {
		if err := rename(dir, spare, current, unix.RENAME_NOREPLACE); err == nil {
			return true, nil
		}
	}
	return exchange(dir, spare, current)
}

// reserveBoth reserves the blocks for the end of a record in both of its files.
func (d *directory) reserveBoth(v *state.Volume) error {
	text, err := encode(d.boot, v)
	if err != nil {
		return err
	}
	for _, name := range []string{fileName(v.ID), fileName(v.ID) + spareSuffix} {
		var st unix.Stat_t
		if err := unix.Fstatat(int(d.self.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && d.block > 0 && st.Blocks*512 >= reservation(text) {
			continue
		}
		flags := 0
		if name != fileName(v.ID) {
			flags = unix.O_CREAT
		}
		err = errors.Join(err, d.reserve(name, flags, text))
	}
	return err
}

// write makes a text the contents of a spare file. must says whether it is an error if no
// blocks can be reserved for the record's end.
func (d *directory) write(name string, text []byte, must bool) error {
	return d.open(name, unix.O_CREAT, func(fd int) error {
		rest := text
		for len(rest) > 0 {
			n, err := rawfile.Retry(func() (int, error) { return unix.Write(fd, rest) })
			if err != nil {
				return os.NewSyscallError("write", err)
			}
			rest = rest[n:]
		}
		err := rawfile.RetryErr(func() error { return unix.Ftruncate(fd, int64(len(text))) }) // which frees the blocks behind it, too
		if err != nil || d.fits(text) {
			return os.NewSyscallError("ftruncate", err)
		}
		if full := d.allocate(fd, text); must {
			return full
		}
		return nil
	})
}

// reserve reserves the blocks for the end of a record in a file.
func (d *directory) reserve(name string, flags int, text []byte) error {
	return d.open(name, flags, func(fd int) error { return d.allocate(fd, text) })
}

// open opens a file for writing. A symbolic link is not followed.
func (d *directory) open(name string, flags int, use func(fd int) error) error {
	fd, err := rawfile.OpenIn(int(d.self.Fd()), name, unix.O_WRONLY|flags, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(use(fd), os.NewSyscallError("close", unix.Close(fd)))
}

// reservation is how many bytes of blocks a record needs: one and a half times its text,
// because a tombstone is longer than the intent that it ends, but by less than half.
func reservation(text []byte) int64 { return int64(len(text) + len(text)/2) }

// fits reports whether the first block of a file has room for the end of a record. A file
// that was ever written to has that block, so nothing needs to be reserved.
func (d *directory) fits(text []byte) bool { return reservation(text) <= d.block }

// allocate reserves the blocks of a record, if the file does not have them. Where the
// file system cannot reserve blocks, there is no error.
func (d *directory) allocate(fd int, text []byte) error {
	err := rawfile.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, reservation(text))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return os.NewSyscallError("fallocate", err)
}

// putAll puts as many records as it can.
func (d *directory) putAll(records map[string]*state.Volume, more bool) (err error) {
	for _, v := range records {
		err = errors.Join(err, d.put(v, false, more))
	}
	return err
}

// remove removes both files of a record.
func (d *directory) remove(current string) error {
	if err := d.root.Remove(current); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	_ = d.root.Remove(current + spareSuffix) // or the next start does
	return nil
}

// exchange exchanges the names of two files, or directories. If to is not there, from is
// renamed to it, and fresh is true. Where the file system cannot exchange names, to is
// replaced.
func exchange(dir int, from, to string) (fresh bool, err error) {
	err = rename(dir, from, to, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = rename(dir, from, to, unix.RENAME_NOREPLACE)
		fresh = err == nil
	}
	if errors.Is(err, unix.EINVAL) { // some network file systems do neither
		err = rename(dir, from, to, 0)
	}
	return fresh, err
}

func rename(dir int, from, to string, flags uint) error {
	return os.NewSyscallError("renameat2", unix.Renameat2(dir, from, dir, to, flags))
}

// replace puts a new directory, with what fill writes to it, in the place of the one
// at the path, in one step.
func replace(path, boot string, fill func(*directory) error) (*directory, error) {
	if err := removeSuccessors(path); err != nil {
		return nil, err
	}
	name, err := os.MkdirTemp(filepath.Dir(path), filepath.Base(path)+successorInfix)
	if err != nil {
		return nil, err
	}
	d, err := openDirectory(name, boot)
	if err != nil {
		return nil, err
	}
	if err = fill(d); err == nil {
		_, err = exchange(unix.AT_FDCWD, name, path)
	}
	if err != nil {
		return nil, errors.Join(err, d.close(), os.RemoveAll(name))
	}
	_ = os.RemoveAll(name) // what was there before, if anything was; or the next start does
	return d, nil
}

// removeSuccessors removes the directories that replace has left because it was cut
// short. The caller must hold the lock of the store.
func removeSuccessors(path string) error {
	entries, err := os.ReadDir(filepath.Dir(path))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), filepath.Base(path)+successorInfix) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(filepath.Dir(path), e.Name())))
		}
	}
	return err
}

// asideName returns the path at which a damaged file is kept, which has
// the time (UTC) in it.
func asideName(path string) string {
	return path + ".corrupt-" + time.Now().UTC().Format("20060102T150405.000000000Z")
}

// contents is what was found in a store.
type contents struct {
	records  map[string]*state.Volume
	revision uint64           // the highest
	bad      map[string]error // names or ids of damaged records, and why
	old      []string         // names of files of another boot, or that nobody needs
	raw      []byte           // of intents.db
}

func newContents() *contents {
	return &contents{records: map[string]*state.Volume{}, bad: map[string]error{}}
}

// read reads all files of a directory. A file that cannot be read is an error, and may be
// sound: only what was read is bad.
func read(path, bootID string) (*contents, error) {
	c, sound := newContents(), map[string]bool{}
	entries, dirErr := os.ReadDir(path) // in the order of their names: a current file comes before its spare one
	for _, e := range entries {
		name := e.Name()
		if current, isSpare := strings.CutSuffix(name, spareSuffix); isSpare && !sound[current] {
			c.old = append(c.old, name)
		}
		if !strings.HasSuffix(name, suffix) {
			continue
		}
		boot, v, damage, err := readFile(path, e)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			return nil, fmt.Errorf("a record cannot be read, and it may be sound: %w. If it stays so, remove the file: what is mounted of its volume is then found without it", err)
		case damage != nil:
			c.bad[name] = damage
		case boot != bootID:
			c.old = append(c.old, name)
			c.revision = max(c.revision, v.Revision)
		default:
			c.records[v.ID], sound[name] = v, true
			c.revision = max(c.revision, v.Revision)
		}
	}
	return c, dirErr
}

func readFile(dir string, e os.DirEntry) (boot string, v *state.Volume, damage, err error) {
	if !e.Type().IsRegular() {
		return "", nil, fmt.Errorf("it is no regular file (its type is %s)", e.Type()), nil
	}
	raw, err := os.ReadFile(filepath.Join(dir, e.Name()))
	if err != nil {
		return "", nil, nil, err
	}
	if boot, v, damage = decode(raw); damage == nil && fileName(v.ID) != e.Name() {
		damage = fmt.Errorf("it is the record of %q", v.ID)
	}
	return boot, v, damage, nil
}
