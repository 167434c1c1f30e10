// Package process tells which other processes keep something: who uses a block
// device (users.go), who has a lock, and whether a process that has one can ever
// run again. One that was killed and hangs in the kernel keeps its locks, sockets
// and ports for as long as that lasts (process.go).
package process

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/state"
)

// Dead reports whether a process was killed and can run no instruction of its
// own again, though it is still there: each of its threads has ended, is ending,
// or is in the kernel with a SIGKILL pending, which ends it before it would
// return from there. A system call of such a thread may still complete. A process
// that is gone, or that is not seen from this PID namespace, is not Dead.
//
// A process that was just killed and is about to end is Dead, too.
func Dead(pid int) (bool, error) {
	if pid <= 0 {
		return false, nil
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", pid))
	if err != nil {
		return false, err
	}
	left := false
	for _, dir := range threads {
		t, err := look(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH): // it has ended meanwhile
		case err != nil:
			return false, err
		case t.ended:
		case t.ends:
			left = true
		default:
			return false, nil
		}
	}
	return left, nil
}

// Peer returns the process that listens on the other side of a connection to a unix socket
// (unix(7), SO_PEERCRED); 0 if it is not visible in this PID namespace.
func Peer(conn net.Conn) (int, error) {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(controlErr, err); err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

// thread is what Dead must know of one.
type thread struct {
	ended bool // its state is Z or X
	ends  bool // a SIGKILL is pending, or the thread is on its way out
}

// exiting is PF_EXITING of a thread's flags (proc(5), stat, field 9).
const exiting = 4

// look reads stat and status of proc(5) in the directory of a thread.
func look(dir string) (t thread, err error) {
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return t, err
	}
	// pid (comm) state ppid pgrp session tty tpgid flags …; comm may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 7 {
		return t, fmt.Errorf("%s/stat reads %q", dir, stat)
	}
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	if err != nil {
		return t, fmt.Errorf("%s/stat: %w", dir, err)
	}
	t.ended = fields[0] == "Z" || fields[0] == "X"
	t.ends = flags&exiting != 0
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return t, err
	}
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		if key != "SigPnd" && key != "ShdPnd" {
			continue
		}
		signals, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err != nil {
			return t, fmt.Errorf("%s/status: %w", dir, err)
		}
		t.ends = t.ends || signals&(1<<(unix.SIGKILL-1)) != 0
	}
	return t, nil
}

// LockHolder returns the process that locked an open file with flock(2); 0 if
// nobody did, or nobody who is seen from this PID namespace. A lock that was
// inherited counts as that of the process which took it.
func LockHolder(f *os.File) (int, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var file string
	if controlErr := conn.Control(func(fd uintptr) { file, err = lockedFile(int(fd)) }); errors.Join(controlErr, err) != nil {
		return 0, errors.Join(controlErr, err)
	}
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return 0, err
	}
	defer locks.Close() // only read from
	scanner := bufio.NewScanner(locks)
	for scanner.Scan() { // 1: FLOCK  ADVISORY  WRITE 1234 00:1a:5678 0 EOF
		words := strings.Fields(scanner.Text())
		if len(words) < 6 || words[1] != "FLOCK" || words[5] != file {
			continue // those who wait have an arrow for a second word
		}
		pid, err := strconv.Atoi(words[4])
		if err != nil {
			return 0, fmt.Errorf("/proc/locks: %q: %w", scanner.Text(), err)
		}
		return max(pid, 0), nil
	}
	return 0, scanner.Err()
}

// lockedFile is what /proc/locks calls an open file. Its device is that of the superblock,
// which stat(2) does not tell of a file on a btrfs.
func lockedFile(fd int) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_MNT_ID, &st); err != nil {
		return "", os.NewSyscallError("statx", err)
	}
	major, minor := st.Dev_major, st.Dev_minor
	mounts, err := mounttable.Own(func(m *mountinfo.Info) (skip, stop bool) {
		found := uint64(m.ID) == st.Mnt_id
		return !found, found
	})
	if err != nil {
		return "", err
	}
	for _, m := range mounts {
		major, minor = uint32(m.Major), uint32(m.Minor)
	}
	return fmt.Sprintf("%02x:%02x:%d", major, minor, st.Ino), nil
}

// Name describes a process to a person: its number and its command, or that it is not
// visible.
func Name(pid int) string {
	if pid <= 0 {
		return "a process that is not seen from here"
	}
	return nameOf(fmt.Sprintf("/proc/%d", pid))
}

// nameOf is Name for a directory in /proc.
func nameOf(proc string) string { return "process " + named(proc) }

// shortName is nameOf for a list of users.
func shortName(proc string) string { return "pid " + named(proc) }

// named returns the number of a process and its command, if it has not ended.
func named(proc string) string {
	pid := filepath.Base(proc)
	comm, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil {
		return pid
	}
	return fmt.Sprintf("%s (%s)", pid, state.Plain(strings.TrimSuffix(string(comm), "\n")))
}
