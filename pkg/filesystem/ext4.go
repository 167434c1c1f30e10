package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// ext4 is the kind of ext4; its superblock is that of ext2 and ext3, too,
// which are recognised and not made.
type ext4 struct{}

func (ext4) traits() traits {
	return traits{
		name:         "ext4",
		offset:       ext4Offset,
		programs:     []string{"mkfs.ext4", "e2fsck", "resize2fs"},
		debian:       "e2fsprogs",
		smallest:     2 << 20, // on less, mkfs.ext4 leaves out the journal
		growsMounted: true,
		growsOffline: true,
		capability:   unix.CAP_SYS_RESOURCE, // ext4_resize_begin in fs/ext4/resize.c
	}
}

func (ext4) mountRules() mountRules {
	return mountRules{noRecovery: "noload", logPrefix: "EXT4-fs: "}
}

func (ext4) parse(head []byte) (*superblock, error) {
	s, err := parseExt4(head)
	if s == nil || err != nil {
		return nil, err
	}
	return &superblock{
		fsType:     s.fsType(),
		uuid:       s.uuid,
		bytes:      s.blocks * s.blockSize,
		own:        ownHead,
		needsCheck: s.needsCheck(),
		grown:      s.grown,
		// resize2fs refuses clusters without -f: "has not been fully tested".
		onlyMounted: s.roCompat&roBigalloc != 0,
	}, nil
}

// live has nothing to add: a mounted ext4 keeps its superblock in the page
// cache of the device, from where Probe reads it.
func (ext4) live(*device, string, *superblock) error { return nil }

// format reserves no blocks for root (-m 0) and discards nothing, which would
// punch holes into the file of a thick volume. On a device of zeros it need
// not write empty inode tables and an empty journal: a thin volume of 20 GiB
// takes 4 MiB then, not 450 MiB (e2fsprogs 1.46.6 and later). Else the kernel
// writes the tables in the background after the first mount.
//
// Blocks have 4 KiB, as soon as 2048 of them make room for a journal: mke2fs.conf
// would give anything under 512 MiB blocks of 1 KiB, which it would keep when it
// grows, and with which it grows mounted to 32 GiB only before the kernel must
// convert its group descriptors.
//
// mkfs.ext4 before e2fsprogs 1.47 knows nothing of zeroed devices, says so
// before it writes anything, and is then run without that option.
func (k ext4) format(ctx context.Context, d *device, uuid string, zeroed bool) error {
	const prezeroed = "assume_storage_prezeroed"
	options := []string{"-q", "-m", "0", "-E", "nodiscard"}
	if zeroed {
		options[len(options)-1] += "," + prezeroed + "=1"
	}
	if d.bytes >= 2048*4096 {
		options = append(options, "-b", "4096")
	}
	if uuid != "" {
		options = append(options, "-U", uuid)
	}
	o, err := alone("mkfs.ext4", append(options, d.Name())...).Run(ctx)
	switch {
	case err == nil && o.Code != 0 && zeroed && strings.Contains(o.Output, prezeroed):
		return k.format(ctx, d, uuid, false)
	case err == nil && o.Code != 0:
		return o.Failure()
	}
	return err
}

// check runs e2fsck -p. Its exit code is a sum: 1 repaired, 2 repaired and a
// reboot is due if this is the root file system, 4 left unrepaired, 8 and more
// failed to run (e2fsck(8)).
func (ext4) check(ctx context.Context, path string) error {
	return preen(ctx, path, "-p")
}

func preen(ctx context.Context, path string, options ...string) error {
	o, err := alone("e2fsck", append(options, path)...).Run(ctx)
	o.Output = withoutNames(o.Output, path)
	switch {
	case err != nil:
		return err
	case o.Code >= 8:
		return o.Failure()
	case o.Code&4 != 0:
		return state.Errorf(state.FailedPrecondition,
			"e2fsck found damage that it repairs only with consent; with the volume unstaged everywhere, run e2fsck -f by hand on its data, which `explain` names (the device may be another volume's by then): %s", o.Output)
	case o.Code != 0:
		klog.FromContext(ctx).Info("e2fsck repaired a file system", "device", path, "output", o.Output)
	}
	return nil
}

// e2fsckNames match the names of files in what e2fsck prints: an entry of a directory whose
// begin was cut off, any other, a path before an inode number, and any other path.
var e2fsckNames = []*regexp.Regexp{
	regexp.MustCompile(`^()[^']*?(' (?:in|found)\b)`),
	regexp.MustCompile(`(').*?(' in |' found|'\.|'$)`),
	regexp.MustCompile(`([ (])/.*?( \((?:inode #)?[0-9]+)`),
	regexp.MustCompile(`([ (])/.*?(\)|;|$)`),
}

// withoutNames leaves the names of files out of what e2fsck printed about a device, as they
// are no business of those who read logs, events and bug reports. Inode numbers stay.
func withoutNames(output, device string) string {
	const this = "\x00"
	output = strings.ReplaceAll(output, device, this)
	for _, names := range e2fsckNames {
		output = names.ReplaceAllString(output, "${1}…${2}")
	}
	return strings.ReplaceAll(output, this, device)
}

// grow asks the kernel if the file system is mounted. Else resize2fs does it,
// which demands a full check before.
//
// What an interrupted resize2fs leaves e2fsck -p may refuse to repair. So neither the end of ctx
// nor that of the plugin kills it: a successor sees that it holds the device (O_EXCL) until
// it ends. As the first process of a PID namespace it survives its output's reader (SIGPIPE).
func (ext4) grow(ctx context.Context, d *device, mountpoint string, bytes int64) error {
	if mountpoint == "" {
		if err := preen(ctx, d.Name(), "-f", "-p"); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		resize := alone("resize2fs", d.Name())
		resize.Outlives = true
		return resize.Check(context.WithoutCancel(ctx))
	}
	root, err := d.openRoot(mountpoint)
	if err != nil {
		return err
	}
	return errors.Join(growMountedExt4(root, bytes), root.Close())
}

func growMountedExt4(root *os.File, bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return fmt.Errorf("statfs %s: %w", root.Name(), err)
	}
	blocks := uint64(bytes / st.Bsize)
	const resize = 0x40086610 // EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64)
	if err := ioctl(root, resize, unsafe.Pointer(&blocks)); err != nil {
		return fmt.Errorf("EXT4_IOC_RESIZE_FS to %d blocks at %s (see the kernel's log): %w", blocks, root.Name(), err)
	}
	return nil
}

// ioctl calls ioctl(2) with a pointer to a structure; it blocks as long as the kernel does.
func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	_, err := ioctlValue(f, request, arg)
	return err
}

// ioctlValue is ioctl, and returns what the kernel does.
func ioctlValue(f *os.File, request uintptr, arg unsafe.Pointer) (uintptr, error) {
	value, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
	if errno != 0 {
		return 0, errno
	}
	return value, nil
}
