package process

import (
	"bufio"
	"errors"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// ready starts a program, reads the first word that it prints, and returns its directory in /proc.
// It is killed at the end of the test.
func ready(t *testing.T, cmd *exec.Cmd, word any) (proc string) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	_, err = fmt.Fscan(out, word)
	require.NoError(t, err)
	return fmt.Sprint("/proc/", cmd.Process.Pid)
}

// A search that hangs is left behind, with what it has found.
func TestCollectLeavesASearchThatHangs(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	found, complete := Collect(t.Context(), time.Second, t.Name(), func(yield func(string) bool) {
		if yield("first") {
			<-release
		}
	})
	if complete || !slices.Equal(found, []string{"first"}) {
		t.Errorf("%q, complete %t", found, complete)
	}
}

// A search is over when it has as many names as an error text should have.
func TestCollectIsBounded(t *testing.T) {
	found, complete := Collect(t.Context(), time.Second, t.Name(), func(yield func(string) bool) {
		for yield("again") {
		}
	})
	if !complete || len(found) != NameLimit {
		t.Errorf("%d names, complete %t", len(found), complete)
	}
}

// What a pod chose, the name of a program or a path in its own mount namespace, does not reach
// a terminal or break a line of the log.
func TestNamesThatAPodChose(t *testing.T) {
	const bad = "a\n\x1b[1m\xffz"
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), bad)
	text, err := os.ReadFile(sleep)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, text, 0o700))
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", program, "1000")
	require.NoError(t, cmd.Start())
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	proc := fmt.Sprint("/proc/", cmd.Process.Pid)
	for comm := ""; comm != bad+"\n"; time.Sleep(time.Millisecond) { // until it is started, in its namespace
		read, err := os.ReadFile(proc + "/comm")
		require.NoError(t, err)
		comm = string(read)
	}
	want := fmt.Sprintf("%d (a??[1m?z)", cmd.Process.Pid)
	if got := Name(cmd.Process.Pid); got != "process "+want {
		t.Errorf("%q, want %q at its end", got, want)
	}
	for name := range InOtherNamespaces(func(of string) (string, bool, error) { return "/mnt/" + bad, of == proc, nil }) {
		if want := "pid " + want + " with a mount at /mnt/a??[1m?z in its own mount namespace"; name != want {
			t.Errorf("%q, want %q", name, want)
		}
		return
	}
	t.Error("the process was not found")
}

// A namespace whose first process has ended when it is asked is looked at by another one's.
func TestNamespaceOfAProcessThatEnds(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", "sleep 1000 & echo $!; exec sleep 1000")
	var child int
	first := ready(t, cmd, &child)
	both := []string{first, fmt.Sprint("/proc/", child)}
	defer func() { _ = unix.Kill(child, unix.SIGKILL) }()
	asked := 0
	for range InOtherNamespaces(func(proc string) (string, bool, error) {
		if !slices.Contains(both, proc) {
			return "", false, nil
		}
		if asked++; asked > 1 {
			return "/found", true, nil
		}
		pid, err := strconv.Atoi(filepath.Base(proc))
		require.NoError(t, errors.Join(err, unix.Kill(pid, unix.SIGKILL)))
		if pid == cmd.Process.Pid {
			_ = cmd.Wait()
		}
		for proc := proc; err == nil; { // a zombie of init has no namespace either
			_, err = os.Readlink(proc + "/ns/mnt")
		}
		return "", false, os.ErrProcessDone
	}) {
		return
	}
	t.Errorf("the namespace was asked %d times", asked)
}

// A process in a chroot sees a part of its mount namespace: another one's table is looked at, too.
func TestProcessInAChroot(t *testing.T) {
	root := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-c",
		`mount --bind / "$1" && { sleep 1000 & echo $!; exec chroot "$1" sleep 1000; }`, "sh", root)
	var child int
	inChroot := ready(t, cmd, &child)
	defer func() { _ = unix.Kill(child, unix.SIGKILL) }()
	for where := ""; where != root; {
		var err error
		where, err = os.Readlink(inChroot + "/root")
		require.NoError(t, err)
	}
	for range InOtherNamespaces(func(proc string) (string, bool, error) { return "/found", proc == fmt.Sprint("/proc/", child), nil }) {
		return
	}
	t.Error("the process that is in no chroot was not asked")
}

// endsFirstThread names a file that this program then has open, in all its threads but the first,
// which has ended.
const endsFirstThread = "TEST_ENDS_FIRST_THREAD"

func init() {
	path := os.Getenv(endsFirstThread)
	if path == "" {
		return
	}
	runtime.LockOSThread() // to the first thread, while the program starts
	opened := make(chan error)
	go func() {
		runtime.LockOSThread()
		_, err := unix.Open(path, unix.O_RDONLY, 0)
		opened <- err
		fmt.Println("ready")
		time.Sleep(time.Minute)
		os.Exit(0)
	}()
	if err := <-opened; err != nil {
		panic(err)
	}
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
}

// A process whose first thread has ended has its files in the others.
func TestFirstThreadHasEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "open")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), endsFirstThread+"="+path)
	proc := ready(t, cmd, new(string))
	for err := error(nil); err == nil; { // until it has ended
		_, err = os.Readlink(proc + "/ns/mnt")
	}
	for of := range all() {
		fds, _ := filepath.Glob(of + "/fd/*")
		if strings.HasPrefix(of, proc+"/") && slices.ContainsFunc(fds, func(fd string) bool {
			at, _ := os.Readlink(fd)
			return at == path
		}) {
			return
		}
	}
	t.Error("its files are not found")
}

// A mapping whose path is of any length does not hide those after it.
func TestMappingOfALongPath(t *testing.T) {
	dir, deep := t.TempDir(), t.TempDir()
	require.NoError(t, unix.Mount("test", dir, "tmpfs", 0, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	fd, err := unix.Open(deep, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	for range 300 {
		name := strings.Repeat("d", 250)
		require.NoError(t, unix.Mkdirat(fd, name, 0o700))
		next, err := unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		require.NoError(t, errors.Join(err, unix.Close(fd)))
		fd = next
	}
	mapped := func(dir int, name string) {
		f, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		require.NoError(t, err)
		require.NoError(t, unix.Ftruncate(f, 4096))
		memory, err := unix.Mmap(f, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		require.NoError(t, errors.Join(err, unix.Close(f)))
		t.Cleanup(func() { require.NoError(t, unix.Munmap(memory)) })
	}
	var st unix.Stat_t
	require.NoError(t, unix.Stat(dir, &st))
	of := files{device: devnode.NumberOf(st.Dev)}
	mapped(unix.AT_FDCWD, dir+"/f")
	for range 4 { // of which one comes before it
		mapped(fd, "f")
	}
	require.NoError(t, unix.Close(fd))
	if !of.mappedIn("/proc/self") {
		t.Error("it is not found")
	}
}

// A namespace whose mounts cannot be read may have any.
func TestMountsThatCannotBeRead(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", "echo ready; exec sleep 1000")
	proc := ready(t, cmd, new(string))
	for title, names := range map[string]iter.Seq[string]{
		"mounts": InOtherNamespaces(func(of string) (string, bool, error) {
			if of == proc {
				return "", false, bufio.ErrTooLong
			}
			return "", false, nil
		}),
		"users": Users(state.DeviceNumber{Minor: 1 << 19}, func(of string) ([]Mount, error) {
			if of == proc {
				return nil, bufio.ErrTooLong
			}
			return nil, nil
		}),
	} {
		found := slices.Collect(names)
		if len(found) != 1 || !strings.HasPrefix(found[0], fmt.Sprintf("pid %d (", cmd.Process.Pid)) || !strings.HasSuffix(found[0], ") with mounts that cannot be read") {
			t.Errorf("%s: %q", title, found)
		}
	}
}
