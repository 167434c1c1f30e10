package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A process with this in its environment is to enter a mount namespace of its own.
const enterNamespace = "CSI_NODE_TEST_NAMESPACE"

// InNamespace returns the arguments of a shell that runs a script with args in a
// mount namespace of its own, private or slave. It has what is mounted at and below
// keep, but not what other tests have mounted: a copy keeps a file system in use
// that its owner has unmounted. They have copies for no longer than it takes to
// unmount those, so this very program does that, in the place of unshare(1).
func InNamespace(propagation, keep, script string, args ...string) []string {
	self, err := os.Executable()
	if err != nil {
		panic(err) // /proc is needed by all tests that come here
	}
	return append([]string{"env", enterNamespace + "=" + propagation, self, keep, "sh", "-c", script, "sh"}, args...)
}

func init() {
	propagation, ok := os.LookupEnv(enterNamespace)
	if !ok {
		return
	}
	fmt.Fprintln(os.Stderr, enter(propagation, os.Args[1], os.Args[2:]))
	os.Exit(1)
}

// Apart runs the tests of a package in a mount namespace of their own, if the
// machine can: for tests whose mounts would disturb those of other packages, as
// dead file systems do (mkfs.btrfs asks all that are mounted).
func Apart(m *testing.M) {
	const apart = "CSI_NODE_TEST_APART"
	if os.Getenv(apart) == "" && Missing() == "" {
		err := os.Setenv(apart, "1")
		if err == nil {
			err = enter("private", "/", append([]string{os.Args[0]}, os.Args[1:]...))
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// enter makes the namespace and becomes the program. It returns only an error.
func enter(propagation, keep string, args []string) error {
	program, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	if err := os.Unsetenv(enterNamespace); err != nil {
		return err
	}
	flags := map[string]uintptr{"private": unix.MS_PRIVATE, "slave": unix.MS_SLAVE}[propagation]
	runtime.LockOSThread() // the namespace is the thread's, and then the program's
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", flags|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make / %s: %w", propagation, err)
	}
	table, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(table) {
		if below(m.Mountpoint, os.TempDir()) && m.Mountpoint != keep && !below(m.Mountpoint, keep) && !below(keep, m.Mountpoint) {
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // it may have gone with one above
		}
	}
	return fmt.Errorf("exec %s: %w", program, unix.Exec(program, args, os.Environ()))
}

func below(p, dir string) bool { return strings.HasPrefix(p, path.Clean(dir)+"/") }
