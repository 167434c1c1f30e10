package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/command"
)

const (
	// demoPrefix begins the name of each directory of a demo.
	demoPrefix = "csi-node-demo-"
	// demoCleanLimit bounds the cleaning up, demoCleanInterval is between two
	// looks: the kernel wakes nobody when a device is gone.
	demoCleanLimit    = 30 * time.Second
	demoCleanInterval = 10 * time.Millisecond
	// demoEndLimit bounds the wait for the keeper, which waits for the plugin's helpers.
	demoEndLimit = 2 * demoCleanLimit
)

// newDemoKeeperCommand is the process that a demo starts first and waits for at
// the end. It takes down what there is once all others have ended, however that
// came: nothing that can be done to the demo itself keeps it from that.
func newDemoKeeperCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "keeper DIRECTORY",
		Short:  "Take down a demo's mounts, loop devices and directory",
		Hidden: true,
		Long: `keeper waits for the end of its input and then takes down what a demo in the
directory has left: mounts, loop devices, files. Each demo starts its own.`,
		Example: "  sudo csi-node demo keeper /tmp/csi-node-demo-ABCDEFGHIJ </dev/null",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := args[0]
			if !filepath.IsAbs(dir) || dir != filepath.Clean(dir) || !strings.HasPrefix(filepath.Base(dir), demoPrefix) {
				return command.WrongUse("%s is not the directory of a demo, whose name begins with %s", dir, demoPrefix)
			}
			signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGPIPE)
			// Nobody writes: the input ends with the last process that has its other end.
			if _, err := io.Copy(io.Discard, cmd.InOrStdin()); err != nil {
				return err
			}
			return cleanUpDemo(dir)
		},
	}
}

// demoKeeper is the keeper's process, as the demo sees it.
type demoKeeper struct {
	dir   string
	cmd   *exec.Cmd
	alive *os.File // what the keeper waits for the end of
}

func startDemoKeeper(dir string) (*demoKeeper, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	input, alive, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "demo", "keeper", dir)
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stderr = input, os.Stderr
	// In a session of its own: what ends the demo's does not end it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := errors.Join(cmd.Start(), input.Close()); err != nil {
		return nil, errors.Join(err, alive.Close())
	}
	return &demoKeeper{dir: dir, cmd: cmd, alive: alive}, nil
}

// end has the keeper clean up and waits for it. It cleans up itself when the
// keeper could not, as when somebody has killed that one.
func (k *demoKeeper) end() error {
	limit := time.AfterFunc(demoEndLimit, func() { _ = k.cmd.Process.Kill() }) // an error says that it has ended
	defer limit.Stop()
	if errors.Join(k.alive.Close(), k.cmd.Wait()) == nil {
		return nil
	}
	return cleanUpDemo(k.dir)
}

// cleanUpDemo takes down what is below a demo's directory, and the directory.
// None of the demo's processes is to run any more. Others may look at its mounts:
// those are detached lazily, and so are devices, and both go when the last one
// closes them, which is waited for.
func cleanUpDemo(dir string) error {
	points, err := demoMounts(dir)
	if err != nil {
		return err
	}
	for _, point := range slices.Backward(points) {
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return &os.PathError{Op: "umount", Path: point, Err: err}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), demoCleanLimit)
	defer cancel()
	look := time.NewTicker(demoCleanInterval)
	defer look.Stop()
	for {
		devices, err := demoDevices(dir)
		if err != nil {
			return err
		}
		if len(devices) == 0 {
			return os.RemoveAll(dir)
		}
		for _, device := range devices {
			if err := detachDemoDevice(device, dir); err != nil {
				return err
			}
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return fmt.Errorf("%s is still attached: a process uses what was mounted of it below %s; it goes when that ends", strings.Join(devices, ", "), dir)
		}
	}
}

// demoMounts returns the mount points below a demo's directory in the order of their mounting.
func demoMounts(dir string) ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return nil, err
	}
	var points []string
	for _, info := range infos {
		points = append(points, info.Mountpoint)
	}
	return points, nil
}

// demoDevices returns the loop devices over files below a demo's directory, deleted ones as well.
func demoDevices(dir string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var devices []string
	for _, file := range files {
		if backing, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(backing), dir+"/") { // else it is gone
			devices = append(devices, "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))))
		}
	}
	return devices, nil
}

// detachDemoDevice tells the kernel to detach a device, which must still be the demo's once it is open.
func detachDemoDevice(device, dir string) (err error) {
	f, err := os.Open(device)
	if errors.Is(err, unix.ENXIO) {
		return nil // it is going away
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if now, err := demoDevices(dir); err != nil || !slices.Contains(now, device) {
		return err
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return &os.PathError{Op: "LOOP_CLR_FD", Path: device, Err: err}
	}
	return nil
}

// demoLacks returns what this process or machine lacks for the demo, and what
// to do: nothing is mounted or attached to find out.
func demoLacks() []string {
	if os.Geteuid() != 0 {
		return []string{"it mounts file systems, so it must be run as root (sudo)"}
	}
	var missing []string
	lacks := func(format string, args ...any) { missing = append(missing, fmt.Sprintf(format, args...)) }
	if err := demoCapability(); err != nil {
		lacks("%v (in a container: make it privileged)", err)
	}
	if err := demoLoopDevice(); err != nil {
		lacks("no loop device can be had: %v (modprobe loop; in a container: make it privileged, with the node's /dev)", err)
	}
	for program, debian := range map[string]string{"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"} {
		if _, err := exec.LookPath(program); err != nil {
			lacks("%s was not found (apt-get install %s)", program, debian)
		}
	}
	slices.Sort(missing)
	return missing
}

// demoCapability looks whether file systems may be mounted, and loop devices be
// made writable. The first needs CAP_SYS_ADMIN, and no seccomp or LSM that
// forbids it; the second that capability on the machine, not in a user namespace.
func demoCapability() error {
	var caps [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if caps[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return errors.New("CAP_SYS_ADMIN is missing, without which nobody mounts")
	}
	if ids, err := os.ReadFile("/proc/self/uid_map"); err != nil || !slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"}) {
		return errors.Join(err, errors.New("this root is one of a user namespace, whose CAP_SYS_ADMIN does not count for loop devices"))
	}
	// No kernel has such a file system, and it says so only to who may mount.
	if err := unix.Mount("none", "/", "csi-node-none", 0, ""); !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("mount is forbidden here: %w", err)
	}
	return nil
}

// demoLoopDevice looks whether a free loop device can be opened, as in many a container it cannot.
func demoLoopDevice() (err error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, control.Close()) }()
	for range 16 { // others may take each one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return &os.PathError{Op: "LOOP_CTL_GET_FREE", Path: control.Name(), Err: err}
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		switch {
		case err == nil:
			return device.Close()
		case errors.Is(err, os.ErrNotExist): // the plugin makes its node
			return nil
		case !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENXIO):
			return err
		}
	}
	return nil
}
