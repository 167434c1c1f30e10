package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

// Dead ones that hang are made by test/node, with a disk that takes no writes.
func TestWhoIsNotDead(t *testing.T) {
	child := exec.Command("sleep", "100")
	require.NoError(t, child.Start())
	defer func() { _ = child.Wait() }() // tells of the kill
	defer func() { _ = child.Process.Kill() }()
	for title, pid := range map[string]int{"itself": os.Getpid(), "its parent": os.Getppid(), "a child that sleeps": child.Process.Pid, "one that is not seen": 0, "none": 1 << 30} {
		if dead, err := Dead(pid); err != nil || dead {
			t.Errorf("%s: %v, %v", title, dead, err)
		}
	}
}

// A process whose threads have all ended holds nothing any more.
func TestZombieIsGone(t *testing.T) {
	child := exec.Command("sleep", "100")
	require.NoError(t, child.Start())
	fd, err := unix.PidfdOpen(child.Process.Pid, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, child.Process.Kill())
	for { // until it has ended; it is not waited for
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if err == nil && n == 1 {
			break
		}
	}
	if dead, err := Dead(child.Process.Pid); err != nil || dead {
		t.Errorf("a zombie: %v, %v", dead, err)
	}
	_ = child.Wait() // tells of the kill
}

// What Dead goes by, in files as the kernel writes them.
func TestThreads(t *testing.T) {
	const pending, none = "0000000000000100", "0000000000000000"
	for title, test := range map[string]struct {
		state, flags    string
		private, shared string
		want            thread
	}{
		"runs":                      {"R", "4194304", none, none, thread{}},
		"hangs, and was not killed": {"D", "4194304", none, none, thread{}},
		"another signal":            {"D", "4194304", "0000000000004000", "0000000000000001", thread{}},
		"hangs and was killed":      {"D", "4194304", pending, none, thread{ends: true}},
		"killed as a process":       {"D", "4194304", none, pending, thread{ends: true}},
		"hangs on its way out":      {"D", "4194308", none, none, thread{ends: true}},
		"a zombie":                  {"Z", "4194304", none, none, thread{ended: true}},
	} {
		t.Run(title, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range map[string]string{
				"stat":   fmt.Sprintf("7 (a) R 4) %s 1 7 7 0 -1 %s 100 0 0 0", test.state, test.flags),
				"status": fmt.Sprintf("Name:\ta\nState:\t%s\nSigPnd:\t%s\nShdPnd:\t%s\n", test.state, test.private, test.shared),
			} {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
			}
			if got, err := look(dir); err != nil || got != test.want {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}
