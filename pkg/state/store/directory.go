package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// nextSuffix is of the file beside a record in which its next text is written.
	nextSuffix = ".new"
	// successorInfix is in the names of directories that are to take the store's
	// place, or have lost it. None is ever given twice.
	successorInfix = ".successor-"
)

// directory is the open directory of the records. Every file is opened below the
// open directory, whatever has its name by now: a system call that a process began
// before its store was taken over reaches no file of the new one.
//
// A record has two files, which change places when it is written: the one that
// counts, and the next, which nobody reads. In both, blocks are reserved for the
// tombstones that will end what the record asks for, so that these can be written
// on a full file system, too.
type directory struct {
	boot  string
	root  *os.Root
	self  *os.File
	tmpfs bool // blocks that a file has are kept for it, and overwritten in place
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
	self, err := root.Open(".")
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	var fs unix.Statfs_t // of a file system that is not known, nothing is taken for granted
	_ = unix.Fstatfs(int(self.Fd()), &fs)
	return &directory{boot, root, self, fs.Type == unix.TMPFS_MAGIC}, nil
}

func (d *directory) close() error { return errors.Join(d.self.Close(), d.root.Close()) }

// put writes a record, or removes the files of an empty one. If the record asks for
// more than before, it is an error, too, that no blocks can be reserved for its end.
// After an error the record's file is as it was.
func (d *directory) put(v *state.Volume, more bool) error {
	name, next := fileName(v.ID), fileName(v.ID)+nextSuffix
	if v.Empty() {
		return d.remove(name)
	}
	text, err := encode(d.boot, v)
	if err != nil {
		return fmt.Errorf("encoding the record: %w", err)
	}
	fresh := false
	if more {
		err := d.reserve(name, 0, text)
		if fresh = errors.Is(err, os.ErrNotExist); err != nil && !fresh {
			return err
		}
	}
	err = d.write(next, text, more)
	if err == nil {
		err = exchange(int(d.self.Fd()), next, name)
	}
	if err == nil && fresh {
		err = d.reserve(next, unix.O_CREAT, text)
	}
	if err != nil && fresh {
		err = errors.Join(err, d.remove(name))
	}
	return err
}

// reserveBoth reserves the blocks for the end of a record in both of its files.
func (d *directory) reserveBoth(v *state.Volume) error {
	text, err := encode(d.boot, v)
	if err != nil {
		return err
	}
	return errors.Join(d.reserve(fileName(v.ID), 0, text), d.reserve(fileName(v.ID)+nextSuffix, unix.O_CREAT, text))
}

// write makes a text the contents of a file that nobody reads meanwhile. If it must
// reserve, it is an error, too, that no blocks can be reserved for the record's end.
func (d *directory) write(name string, text []byte, must bool) error {
	return d.open(name, unix.O_CREAT, func(fd int) error {
		st, err := fstat(fd)
		if err == nil && st.Size > int64(len(text)) { // which frees the blocks behind it, too
			err = uninterrupted("ftruncate", func() error { return unix.Ftruncate(fd, int64(len(text))) })
			if err == nil {
				st, err = fstat(fd)
			}
		}
		if full := d.allocate(fd, st, text); err == nil && must {
			err = full
		}
		for err == nil && len(text) > 0 {
			err = uninterrupted("write", func() error {
				n, err := unix.Write(fd, text)
				text = text[max(n, 0):]
				return err
			})
		}
		return err
	})
}

// reserve reserves the blocks for the end of a record in a file.
func (d *directory) reserve(name string, flags int, text []byte) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.self.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && d.reserved(st, text) {
		return nil
	}
	return d.open(name, flags, func(fd int) error { return d.allocate(fd, st, text) })
}

// open opens a file for writing. A symbolic link is not followed.
func (d *directory) open(name string, flags int, use func(fd int) error) error {
	fd, err := rawfile.OpenIn(int(d.self.Fd()), name, unix.O_WRONLY|flags, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(use(fd), os.NewSyscallError("close", unix.Close(fd)))
}

// reservation is how many bytes of blocks a record needs: half as much again as its
// text, because a tombstone is longer than what it ends, but not by so much.
func reservation(text []byte) int64 { return int64(len(text) + len(text)/2) }

// reserved reports whether a file is known to have the blocks that a record needs.
func (d *directory) reserved(st unix.Stat_t, text []byte) bool {
	return d.tmpfs && st.Blocks*512 >= reservation(text)
}

// allocate reserves the blocks of a record, if the file does not have them. Where the
// file system cannot reserve blocks, there is no error.
func (d *directory) allocate(fd int, st unix.Stat_t, text []byte) error {
	if d.reserved(st, text) {
		return nil
	}
	err := uninterrupted("fallocate", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, reservation(text)) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

func fstat(fd int) (st unix.Stat_t, err error) {
	err = os.NewSyscallError("fstat", unix.Fstat(fd, &st))
	return st, err
}

// uninterrupted makes a system call until no signal interrupts it.
func uninterrupted(name string, call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return os.NewSyscallError(name, err)
		}
	}
}

// putAll puts as many records as it can.
func (d *directory) putAll(records map[string]*state.Volume, more bool) (err error) {
	for _, v := range records {
		err = errors.Join(err, d.put(v, more))
	}
	return err
}

// remove removes both files of a record.
func (d *directory) remove(name string) error {
	if err := d.root.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	_ = d.root.Remove(name + nextSuffix) // or the next start does
	return nil
}

func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// exchange gives two files, or directories, the names of each other. The second one
// need not be there; where the file system cannot exchange names, it is replaced.
func exchange(dir int, from, to string) error {
	err := unix.Renameat2(dir, from, dir, to, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = unix.Renameat2(dir, from, dir, to, unix.RENAME_NOREPLACE)
	}
	if errors.Is(err, unix.EINVAL) { // some network file systems do neither
		err = unix.Renameat(dir, from, dir, to)
	}
	return os.NewSyscallError("renameat2", err)
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
		err = exchange(unix.AT_FDCWD, name, path)
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

// asideName returns the path at which a file that cannot be read is kept, which has
// the time (UTC) in it.
func asideName(path string) string {
	return path + ".corrupt-" + time.Now().UTC().Format("20060102T150405.000000000Z")
}

// contents is what was found in a store.
type contents struct {
	records  map[string]*state.Volume
	revision uint64           // the highest
	bad      map[string]error // names or ids of records that cannot be read, and why
	old      []string         // names of files of another boot, or that nobody needs
	raw      []byte           // of intents.db
}

func newContents() *contents {
	return &contents{records: map[string]*state.Volume{}, bad: map[string]error{}}
}

// read reads all files of a directory.
func read(path, bootID string) (*contents, error) {
	c, sound := newContents(), map[string]bool{}
	entries, err := os.ReadDir(path) // in the order of their names: a record stands before its next file
	for _, e := range entries {
		name := e.Name()
		if record, next := strings.CutSuffix(name, nextSuffix); next && !sound[record] {
			c.old = append(c.old, name)
		}
		if !strings.HasSuffix(name, suffix) {
			continue
		}
		boot, v, err := readFile(path, e)
		switch {
		case err != nil:
			c.bad[name] = err
		case boot != bootID:
			c.old = append(c.old, name)
			c.revision = max(c.revision, v.Revision)
		default:
			c.records[v.ID], sound[name] = v, true
			c.revision = max(c.revision, v.Revision)
		}
	}
	return c, err
}

func readFile(dir string, e os.DirEntry) (boot string, v *state.Volume, err error) {
	if !e.Type().IsRegular() {
		return "", nil, fmt.Errorf("it is no regular file (its type is %s)", e.Type())
	}
	raw, err := os.ReadFile(filepath.Join(dir, e.Name()))
	if err != nil {
		return "", nil, err
	}
	if boot, v, err = decode(raw); err == nil && fileName(v.ID) != e.Name() {
		err = fmt.Errorf("it is the record of %q", v.ID)
	}
	return boot, v, err
}
