package mounts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// MountDevice mounts the file system on a device. It makes the directory, and
// those above it below the root, if they are missing.
//
// flags.Set become attributes of the mount and flags.Super options of the
// superblock, behind those of filesystem.MountOptions; readOnly makes both read-only. An option
// that the kernel refuses is InvalidArgument with the kernel's own words.
// FailedPrecondition: the kernel has no such file system, something is mounted
// at path already, or readOnly was asked of a file system whose log must be
// replayed. A node at device.Path that is not device.Number is never mounted.
//
// A file system that was shut down, or whose device failed, exists as long as anybody
// uses it: it is not mounted once more, and the error names the users.
//
// It blocks while the kernel reads the device and replays the journal. After an
// error nothing is mounted at path, and a directory of that name is gone again
// if it was made here.
func (h *Host) MountDevice(ctx context.Context, device state.Device, path, fsType string, flags state.Flags, readOnly bool) error {
	return h.mountDevice(ctx, device, path, fsType, flags, readOnly, create)
}

func (h *Host) mountDevice(ctx context.Context, device state.Device, path, fsType string, flags state.Flags, readOnly bool, mode createMode) (err error) {
	defer state.Wrap(&err, "mount %s of %s at %s", fsType, device.Path, path)
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := h.Check(path); err != nil {
		return err
	}
	held, err := openDevice(device)
	if err != nil {
		return err
	}
	defer held.Close()
	mnt, err := newMount(device, fsType, flags, readOnly)
	if err != nil {
		return err
	}
	defer func() { unix.Close(mnt) }() // unmounts it, unless it was attached
	if err := verifySuper(mnt, device, fsType); filesystem.IsBroken(err) {
		held.Close()
		unix.Close(mnt)
		mnt = -1 // this process is none of the holders
		kept := "nobody that can be seen from here"
		if holders := Holders(ctx, device.Number); len(holders) > 0 {
			kept = strings.Join(holders, ", ")
		}
		return fmt.Errorf("the file system is broken and kept by %s: once that has ended it is mounted anew (%w)", kept, err)
	} else if err != nil {
		return err
	}
	p, err := h.openFor(path, mode)
	if err != nil {
		return err
	}
	defer p.close()
	if err := h.attach(p, mnt, state.Directory, mode); err != nil {
		return err
	}
	h.setDisk(path, filesystem.IsDiskFilesystem(fsType))
	return nil
}

// openDevice opens a device, and makes sure that its node was not made anew for another one:
// mounting that would already write to it. The kernel is told what to mount by the path, and
// as long as the device is open, no other gets its number; an open loop device that shows
// nothing could still be given another file.
func openDevice(device state.Device) (*os.File, error) {
	f, err := rawfile.Open(device.Path, os.O_RDONLY, 0)
	if err != nil {
		return nil, cmp.Or(verifyNode(device), err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(f.Fd()), &st); err == nil {
		err = verifyNumber(device, devnode.NumberOf(st.Rdev), st.Mode&unix.S_IFMT == unix.S_IFBLK)
	}
	if size, seekErr := f.Seek(0, io.SeekEnd); err == nil && size == 0 {
		err = cmp.Or(seekErr, fmt.Errorf("%s is empty now: it is being detached", device.Path))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// verifyNode makes sure that the node of a device is at its path.
func verifyNode(device state.Device) error {
	number, ok := devnode.NumberAt(device.Path)
	return verifyNumber(device, number, ok)
}

// verifyNumber is about what is at the path of a device: whether that is a block device, and which.
func verifyNumber(device state.Device, number state.DeviceNumber, ok bool) error {
	switch {
	case !ok:
		return fmt.Errorf("%s is no block device now: it should be device %s", device.Path, device.Number)
	case number != device.Number:
		return fmt.Errorf("%s is device %s now, not %s", device.Path, number, device.Number)
	}
	return nil
}

// verifySuper makes sure that a mount shows the device.
func verifySuper(mnt int, device state.Device, fsType string) (err error) {
	st, err := statx(mnt, "", 0)
	if err != nil {
		return fmt.Errorf("statx: %w", err)
	}
	if ownNumber := filesystem.HasOwnNumber(fsType); ownNumber || device.Held { // held: the kernel may have shown the superblock that is in use
		root, err := openRoot(mnt, device)
		if err != nil {
			return err
		}
		defer root.Close() // only read from
		if device.Held {
			if err := filesystem.VerifyAlive(root); err != nil {
				return err
			}
		}
		if ownNumber {
			return filesystem.VerifyDevice(root, device)
		}
	}
	if number := (state.DeviceNumber{Major: st.Dev_major, Minor: st.Dev_minor}); number != device.Number {
		return fmt.Errorf("%s became device %s while it was mounted, it should be %s", device.Path, number, device.Number)
	}
	return verifyNode(device)
}

// openRoot opens the root of a mount that is attached nowhere yet.
func openRoot(mnt int, device state.Device) (*os.File, error) {
	fd, err := openat2(mnt, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open its root: %w", err)
	}
	return os.NewFile(uintptr(fd), device.Path), nil
}

// newMount creates a mount that is attached nowhere yet (fsopen(2), Linux 5.2).
func newMount(device state.Device, fsType string, flags state.Flags, readOnly bool) (int, error) {
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	switch {
	case err == unix.ENODEV:
		return -1, state.Errorf(state.FailedPrecondition, "this node's kernel has no file system %q: load its module", fsType)
	case err != nil:
		return -1, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "source", device.Path); err != nil {
		return -1, fmt.Errorf("set the source: %w", withMessages(err, contextMessages(fs)))
	}
	attributes := flags.Set
	if readOnly {
		attributes |= state.ReadOnly
		if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
			return -1, fmt.Errorf("set read-only: %w", withMessages(err, contextMessages(fs)))
		}
	}
	options := filesystem.MountOptions(fsType, flags.Super)
	log := filesystem.OpenKernelLog()
	defer log.Close()
	for _, option := range options {
		if err := setOption(fs, option); err != nil {
			return -1, optionError(err, contextMessages(fs), log.About(fsType, device.Path), option)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		words, logged := contextMessages(fs), log.About(fsType, device.Path)
		if err := filesystem.ExplainMount(fsType, err, join(words, logged), flags.Super, readOnly); err != nil {
			return -1, err
		}
		if len(flags.Super) > 0 && isOptionError(err) && mountsWithoutOptions(device, fsType, flags.Super, readOnly) {
			return -1, optionError(err, words, logged, flags.Super...)
		}
		return -1, createError(err, words, logged, flags.Super)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(attributes))
	if err != nil {
		return -1, fmt.Errorf("fsmount with attributes %q: %w", attributes, withMessages(err, contextMessages(fs)))
	}
	return mnt, nil
}

// contextMessages reads what a file system context has to say: one message a read,
// "e " before an error, "w " before a warning, until ENODATA.
func contextMessages(fs int) string {
	var words []string
	buf := make([]byte, 4<<10)
	for {
		n, err := rawfile.Retry(func() (int, error) { return unix.Read(fs, buf) })
		if err != nil || n <= 0 {
			return strings.Join(words, "; ")
		}
		if text := strings.TrimSpace(string(buf[:n])); !strings.HasPrefix(text, "i ") {
			words = append(words, text[min(2, len(text)):])
		}
	}
}

// join puts together what the kernel said here and there.
func join(words, logged string) string {
	return strings.Join(slices.DeleteFunc([]string{words, logged}, func(s string) bool { return s == "" }), "; ")
}

func withMessages(err error, words string) error {
	if words == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, words)
}

// attach puts a mount on a place, which it makes if it may and it is missing,
// and takes it away again on an error. Nothing may be mounted there: mounts would
// stack. The watchers know of it before it returns.
func (h *Host) attach(p *place, mnt int, kind state.FileType, mode createMode) (err error) {
	made := false
	if mode == create {
		if made, err = p.make(kind); err != nil {
			return err
		}
	}
	defer func() {
		if err != nil && made {
			err = errors.Join(err, p.unlink(kind))
		}
	}()
	target, err := p.openUnmounted(kind, made)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	return h.move(mnt, target, p, kind)
}

// move moves a mount to the open target, and tells the watchers. They are stopped meanwhile,
// or this call would have to wait until they have read the event of it.
func (h *Host) move(mnt, target int, p *place, kind state.FileType) error {
	watchers := h.openWatchers()
	for _, w := range watchers {
		w.mu.Lock()
		defer w.mu.Unlock()
	}
	if err := unix.MoveMount(mnt, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	for _, w := range watchers {
		if err := w.made(mnt, p.real, kind); err != nil { // it is mounted, and its event may be enough
			klog.Background().Error(err, "If somebody else unmounts this soon, that is noticed late", "path", p.path)
		}
	}
	return nil
}

// openUnmounted opens (O_PATH) a directory or file on which nothing is mounted. It was made
// just now, or else what it is must be found out.
func (p *place) openUnmounted(kind state.FileType, made bool) (int, error) {
	fd, err := openat2(p.dir, p.name, unix.O_PATH|unix.O_NOFOLLOW, unix.RESOLVE_NO_XDEV)
	switch {
	case err == unix.EXDEV:
		return -1, state.Errorf(state.FailedPrecondition, "%s is a mount point already, and binding twice stacks two mounts: unmount it first", p.path)
	case err != nil:
		return -1, fmt.Errorf("open %s: %w", p.path, err)
	case made:
		return fd, nil
	}
	st, err := statx(fd, "", 0)
	switch {
	case err != nil:
		err = fmt.Errorf("statx: %w", err)
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		err = refuseLink(p.path)
	case fileType(st.Mode) != kind:
		err = state.Errorf(state.FailedPrecondition, "%s is %s, not %s", p.path, fileType(st.Mode), kind)
	default:
		return fd, nil
	}
	unix.Close(fd)
	return -1, err
}
