package uevents

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var must = require.NoError

// heard runs a Listener until the test ends.
func heard(t *testing.T, l *Listener) (events <-chan Event) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	some, ended := make(chan Event), make(chan error, 1)
	go func() {
		ended <- l.Run(ctx, func(e Event) {
			select {
			case some <- e:
			case <-ctx.Done():
			}
		}, func() {})
	}()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
	})
	return some
}

// loopDevice attaches a file until the test ends.
func loopDevice(t *testing.T) (path string, number state.DeviceNumber, detach func()) {
	t.Helper()
	machine.Kernel(t)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	path = machine.Losetup(t, file)
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return path, devnode.NumberOf(st.Rdev), func() { machine.LosetupDetach(t, path) }
}

func TestDetachIsHeard(t *testing.T) {
	l, err := Listen()
	must(t, err)
	events := heard(t, l)
	_, number, detach := loopDevice(t)
	detached := make(chan struct{})
	go func() { defer close(detached); detach() }()
	for e := range events {
		if e.Number == number && e.Gone {
			break
		}
	}
	<-detached
}

func TestGrowthIsHeard(t *testing.T) {
	path, number, _ := loopDevice(t)
	l, err := Listen()
	must(t, err)
	backing, err := os.ReadFile("/sys/block/" + filepath.Base(path) + "/loop/backing_file")
	must(t, err)
	must(t, os.Truncate(strings.TrimSpace(string(backing)), 2<<20))
	machine.Command(t, "losetup", "--set-capacity", path)
	events := heard(t, l)
	for e := range events {
		if e.Number == number && e.Resized {
			return
		}
	}
}

// What does not fit into the socket's buffer is told as lost, and whatever comes
// after that is told again, at once too.
func TestLostEventsAreTold(t *testing.T) {
	machine.Kernel(t)
	l, err := Listen()
	must(t, err)
	must(t, l.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }))
	must(t, err)
	path, number, detach := loopDevice(t)
	for range 100 {
		must(t, os.WriteFile("/sys/block/"+filepath.Base(path)+"/uevent", []byte("change"), 0))
	}
	ctx, told := context.WithTimeout(t.Context(), time.Minute)
	defer told()
	lost := 0
	must(t, l.Run(ctx, func(e Event) {
		if e.Number == number && e.Gone {
			told()
		}
	}, func() {
		if lost++; lost == 1 {
			detach()
		} else {
			told() // the detach was lost, or something before it
		}
	}))
	if !errors.Is(ctx.Err(), context.Canceled) || lost == 0 {
		t.Errorf("events were told as lost %d times, and the detach after the first was not told (%v)", lost, ctx.Err())
	}
}

// In a user namespace no event arrives, and that is said.
func TestUserNamespaceIsToldApart(t *testing.T) {
	const child = "CSI_NODE_TEST_USERNS"
	if os.Getenv(child) != "" {
		_, err := Listen()
		if state.ClassOf(err) != state.FailedPrecondition {
			t.Errorf("in a user namespace: %v", err)
		}
		return
	}
	machine.Kernel(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// Whoever may send to the group is not the kernel.
func TestProcessesAreNotBelieved(t *testing.T) {
	for pid, want := range map[uint32]bool{0: true, 1: false} {
		if got := fromKernel(&unix.SockaddrNetlink{Pid: pid}); got != want {
			t.Errorf("a message of port %d is believed: %t", pid, got)
		}
	}
	if fromKernel(nil) {
		t.Error("a message of nobody is believed")
	}
}

func TestParse(t *testing.T) {
	const detach = "change@/devices/virtual/block/loop3\x00ACTION=change\x00DEVPATH=/devices/virtual/block/loop3\x00SUBSYSTEM=block\x00" +
		"DISK_MEDIA_CHANGE=1\x00MAJOR=7\x00MINOR=3\x00DEVNAME=loop3\x00DEVTYPE=disk\x00DISKSEQ=12\x00SEQNUM=4711\x00"
	loop3 := state.DeviceNumber{Major: 7, Minor: 3}
	for message, want := range map[string]Event{
		detach: {Number: loop3, Appeared: true, Gone: true}, // the same is said of one that is attached
		strings.Replace(detach, "DISK_MEDIA_CHANGE", "RESIZE", 1):                                           {Number: loop3, Appeared: true, Resized: true},
		strings.Replace(detach, "DISK_MEDIA_CHANGE=1\x00", "", 1):                                           {Number: loop3, Appeared: true},
		strings.Replace(strings.Replace(detach, "DISK_MEDIA_CHANGE=1\x00", "", 1), "=change", "=remove", 1): {Number: loop3, Gone: true},
	} {
		if e, ok := parse([]byte(message)); !ok || e != want {
			t.Errorf("%q is %+v (%t), want %+v", message, e, ok, want)
		}
	}
	for _, message := range []string{
		"", "libudev\x00", "\x00\x00=",
		strings.Replace(detach, "=block", "=net", 1),
		strings.Replace(detach, "MINOR=3\x00", "", 1),
		strings.Replace(detach, "MINOR=3", "MINOR=x", 1),
	} {
		if e, ok := parse([]byte(message)); ok {
			t.Errorf("%q is %+v", message, e)
		}
	}
}
