// Package machine says whether this machine can run the tests that need the
// kernel: those that mount, and that attach loop devices. A test that does
// begins with Kernel; it is left out where that cannot be, and by this package
// alone. make test counts what was left out, and with CI=true nothing is. The
// rest of it mounts, attaches and runs programs for tests that share the machine.
package machine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// LeftOut begins the message of a test that was left out; what is missing follows.
const LeftOut = "left out: "

// Tools are the programs that the plugin and the tests of it run. hack/install-deps
// installs them.
var Tools = []string{"mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "losetup", "mount"}

// Kernel leaves the test out if the machine cannot run it; with CI=true it fails instead.
func Kernel(t testing.TB) {
	t.Helper()
	missing := Missing()
	switch {
	case missing == "":
	case os.Getenv("CI") == "true":
		t.Fatalf("with CI=true nothing is left out, and here is %s", missing)
	default:
		t.Skip(LeftOut + missing)
	}
}

// Missing says in a few words what this machine lacks, "" if nothing.
var Missing = sync.OnceValue(func() string {
	if err := privileges(); err != nil {
		return err.Error()
	}
	var missing []string
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	if len(missing) > 0 {
		return "no " + strings.Join(missing, ", ")
	}
	return ""
})

func privileges() error {
	if os.Geteuid() != 0 {
		return errors.New("no root")
	}
	header, sets := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if sets[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return errors.New("no CAP_SYS_ADMIN")
	}
	// The root of a user namespace may mount no disk: the first one maps every id to itself.
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	if strings.Join(strings.Fields(string(ids)), " ") != "0 0 4294967295" {
		return errors.New("no CAP_SYS_ADMIN outside of a user namespace")
	}
	if err := loopDevices(); err != nil {
		return fmt.Errorf("no loop devices: %w", err)
	}
	return nil
}

// loopDevices opens a free loop device: its node may be missing, and a container may be kept from it.
func loopDevices() error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	for range 100 {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
		}
		device, err := os.OpenFile("/dev/loop"+strconv.Itoa(number), os.O_RDWR, 0)
		switch {
		case err == nil:
			return device.Close()
		case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOENT) && !exists(number):
			// Another test has removed it since.
		default:
			return err
		}
	}
	return errors.New("each one that was free was gone at once")
}

// exists reports whether there is a loop device with the number.
func exists(number int) bool {
	_, err := os.Stat("/sys/block/loop" + strconv.Itoa(number))
	return err == nil
}
