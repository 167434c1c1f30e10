package machine

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// Losetup is losetup --find --show with those options, and the file to attach as
// the last argument: it returns the path of the device, which is detached when the test
// ends if it is over that file still.
//
// The device has a number of its own, far from those that the kernel offers, and
// that nobody had before. An offered one may be shown in another test by a node
// that is bound there, whose device it has lost and is to get again. And two that
// are offered the same one disturb each other: the loser has claimed the winner's
// device for a moment, which then can be neither mounted nor formatted.
func Losetup(t testing.TB, args ...string) string {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	require.NoError(t, err)
	defer control.Close()
	options, file := args[:len(args)-1], args[len(args)-1]
	for number := 1<<16 + os.Getpid()%1024*512; ; number++ {
		switch err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number); {
		case errors.Is(err, unix.EEXIST):
			continue
		case err != nil:
			t.Fatalf("LOOP_CTL_ADD %d: %v", number, err)
		}
		node := fmt.Sprintf("/dev/loop%d", number)
		t.Cleanup(func() { removeLoop(t, number) })
		out, err := exec.Command("losetup", append(append([]string{}, options...), node, file)...).CombinedOutput()
		switch {
		case err == nil:
			backing, err := backingOf(node)
			require.NoError(t, err)
			t.Cleanup(func() {
				// Once the mount that the file is in was taken away, its path begins there.
				shown, err := backingOf(node)
				if err == nil && strings.HasSuffix(backing, shown) {
					_, err = Detach(node, shown)
				}
				if err != nil {
					t.Error(err)
				}
				AwaitDetached(node, shown)
			})
			return node
		// When all others are in use, somebody who asks for any free device gets this one first.
		case !strings.Contains(string(out), "busy"):
			t.Fatalf("losetup %q %s %s: %v: %s", options, node, file, err, out)
		}
	}
}

// LosetupDetach runs losetup --detach, which is no error when the device has gone
// already, and waits for those who have the device open for a moment, because they
// look at every one of the node: it goes with the last. Who keeps it open for
// longer than ten seconds is left to the caller.
func LosetupDetach(t testing.TB, node string) {
	t.Helper()
	backing, err := backingOf(node)
	if err != nil {
		t.Error(err)
	}
	if out, err := exec.Command("losetup", "--detach", node).CombinedOutput(); err != nil && !strings.Contains(string(out), "No such device") {
		t.Errorf("losetup --detach %s: %v: %s", node, err, out)
	}
	if AwaitDetached(node, backing) {
		return
	}
	var st unix.Stat_t
	if err := unix.Stat(node, &st); err != nil {
		t.Errorf("%s, which is being detached: %v", node, err)
		return
	}
	number := state.DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
	t.Logf("%s is detached, and still in use: it is open in %s", node, process.Openers(context.Background(), number))
}

// Detach tells the kernel to let go of a loop device that is over backing. Another
// process may have been given a device that has gone meanwhile, and it keeps what it
// shows now: was is false then. While it is open here it can't be given away.
func Detach(node, backing string) (was bool, err error) {
	f, err := os.Open(node)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	shown, err := backingOf(node)
	if err == nil && (shown == "" || shown != strings.TrimSuffix(backing, " (deleted)")) {
		return false, nil
	}
	if err == nil {
		err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	}
	if err != nil {
		return false, fmt.Errorf("detach %s: %w", node, err)
	}
	return true, nil
}

// backingOf returns the path of the file behind a loop device, which may be deleted; empty if
// nothing is attached.
func backingOf(node string) (string, error) {
	text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(node), "loop/backing_file"))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) { // the latter, if it goes just now
		err = nil
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), " (deleted)"), err
}

// AwaitDetached waits, for ten seconds at most, until a device over backing has gone that goes
// when the last one closes it, and reports whether it has. What somebody else has attached
// there since is none of it.
func AwaitDetached(node, backing string) bool {
	for since := time.Now(); time.Since(since) < 10*time.Second; time.Sleep(time.Millisecond) {
		shown, err := backingOf(node)
		if err != nil || shown == "" || shown != strings.TrimSuffix(backing, " (deleted)") {
			return true
		}
		going, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(node), "loop/autoclear"))
		if err != nil || string(going) != "1\n" { // it has gone meanwhile, or nobody has detached it
			return true
		}
	}
	return false
}

// RemoveNewLoops removes, when the test has ended, the loop devices that the node has
// got meanwhile and that are free: thousands of them make each look at all of them
// slow. Others who ask for a free device at that moment may have theirs removed.
func RemoveNewLoops(t testing.TB) {
	loops := func() map[int]bool {
		nodes, err := filepath.Glob("/sys/block/loop*")
		require.NoError(t, err)
		numbers := map[int]bool{}
		for _, node := range nodes {
			if n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(node), "loop")); err == nil {
				numbers[n] = true
			}
		}
		return numbers
	}
	before := loops()
	t.Cleanup(func() {
		var removals sync.WaitGroup
		turns := make(chan struct{}, 64) // each waits tens of milliseconds for the kernel
		for n := range loops() {
			if !before[n] {
				turns <- struct{}{}
				removals.Go(func() {
					removeLoop(t, n)
					<-turns
				})
			}
		}
		removals.Wait()
	})
}

// removeLoop removes a device that was added, unless somebody has it or looks at it.
func removeLoop(t testing.TB, number int) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer control.Close()
	err = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODEV) {
		t.Errorf("LOOP_CTL_REMOVE %d: %v", number, err)
	}
}

// Bound reports whether a node of the block device is bound anywhere, by this test
// or another: a free loop device that is has a number that somebody waits for.
func Bound(device state.DeviceNumber) (bool, error) {
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("devtmpfs"))
	if err != nil {
		return false, err
	}
	for _, m := range table {
		if m.Root == "/" {
			continue
		}
		var st unix.Stat_t
		switch err := unix.Lstat("/dev"+m.Root, &st); {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR): // its node was removed, and so has no number to give
		case err != nil:
			return false, err
		case st.Mode&unix.S_IFMT == unix.S_IFBLK && unix.Major(st.Rdev) == device.Major && unix.Minor(st.Rdev) == device.Minor:
			return true, nil
		}
	}
	return false, nil
}

// FreeLoop returns the number of a loop device that nobody else uses, and that there is none
// of yet. When the test ends it is removed.
func FreeLoop(t testing.TB) state.DeviceNumber {
	t.Helper()
	Kernel(t)
	minor := uint32(20000+rand.IntN(40000)) << partitionBits(t) // the kernel gives the lowest number that is free
	t.Cleanup(func() { RemoveLoops(t, minor) })
	return state.DeviceNumber{Major: 7, Minor: minor}
}

// RemoveLoops removes the loop devices with the minor numbers that are there, unless
// somebody has them or looks at them.
func RemoveLoops(t testing.TB, minors ...uint32) {
	t.Helper()
	for _, minor := range minors {
		removeLoop(t, int(minor>>partitionBits(t)))
	}
}

// partitionBits is for how many bits of a minor number a loop device's partitions are.
func partitionBits(t testing.TB) int {
	t.Helper()
	text, err := os.ReadFile("/sys/module/loop/parameters/max_part")
	if errors.Is(err, os.ErrNotExist) {
		return 0
	}
	parts, parseErr := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	require.NoError(t, errors.Join(err, parseErr))
	return bits.Len64(parts)
}
