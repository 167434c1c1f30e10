// Package rawfile opens and reads files without the Go runtime's poller, which is of no use
// for them: device nodes, sysfs, files on disks. Package os makes each one non-blocking and
// offers it to epoll first, which refuses most of them and wakes a thread for the rest: six
// system calls more for an open, eight for a read. What package os does for its callers and
// package unix does not is here, too: see Retry.
package rawfile

import (
	"bytes"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ResolveCached is RESOLVE_CACHED of openat2(2), Linux 5.12: EAGAIN where a path is not in
// the kernel's caches, so that no disk and no server is asked about it.
const ResolveCached = 0x20

// Open is os.OpenFile.
func Open(path string, flags int, mode uint32) (*os.File, error) {
	fd, err := open(unix.AT_FDCWD, path, flags, mode)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// OpenIn opens a file in an open directory, and returns its descriptor. A symbolic link is
// not followed.
func OpenIn(dir int, name string, flags int, mode uint32) (fd int, err error) {
	return open(dir, name, flags|unix.O_NOFOLLOW, mode)
}

var pages = sync.Pool{New: func() any { return new([4 << 10]byte) }}

// ReadAttribute reads a file of sysfs: one read gets all of it, which is a page at most
// (Documentation/filesystems/sysfs.rst of Linux).
func ReadAttribute(path string) ([]byte, error) {
	fd, err := open(unix.AT_FDCWD, path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	page := pages.Get().(*[4 << 10]byte)
	defer pages.Put(page)
	n, err := Retry(func() (int, error) { return unix.Read(fd, page[:]) })
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	return bytes.Clone(page[:n]), nil
}

// Read is os.ReadFile for small files.
func Read(path string) ([]byte, error) {
	fd, err := open(unix.AT_FDCWD, path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	contents := make([]byte, 0, 1<<10)
	for {
		if len(contents) == cap(contents) {
			contents = append(contents, 0)[:len(contents)]
		}
		n, err := Retry(func() (int, error) { return unix.Read(fd, contents[len(contents):cap(contents)]) })
		switch {
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		case n == 0:
			return contents, nil
		default:
			contents = contents[:len(contents)+n]
		}
	}
}

func open(dir int, path string, flags int, mode uint32) (int, error) {
	fd, err := Retry(func() (int, error) { return unix.Openat(dir, path, flags|unix.O_CLOEXEC, mode) })
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// WriteBack writes what the page cache holds of a file or a device, and waits for that. Nothing
// of it need be durable then: the disk is not flushed (sync_file_range(2)).
func WriteBack(f *os.File) error {
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	return RetryErr(func() error { return unix.SyncFileRange(int(f.Fd()), 0, 0, all) })
}

// Fallocate is fallocate(2), which some file systems let a signal interrupt.
func Fallocate(fd int, mode uint32, offset, bytes int64) error {
	return RetryErr(func() error { return unix.Fallocate(fd, mode, offset, bytes) })
}

// PathError tells which system call failed with an open file; nil: none did.
func PathError(op string, f *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: f.Name(), Err: err}
}

// CloseAfter closes f and joins the error, if any, to *err. It is to be deferred.
func CloseAfter(f *os.File, err *error) { *err = errors.Join(*err, f.Close()) }

// Retry makes a system call until no signal interrupts it, such as those by which the Go
// runtime preempts goroutines. Package os does so by itself.
func Retry[T any](call func() (T, error)) (T, error) {
	for {
		if v, err := call(); err != unix.EINTR {
			return v, err
		}
	}
}

// RetryErr is Retry for a call that returns only an error.
func RetryErr(call func() error) error {
	_, err := Retry(func() (struct{}, error) { return struct{}{}, call() })
	return err
}
