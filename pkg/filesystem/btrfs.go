package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// btrfsKind is the kind of btrfs on one device.
type btrfsKind struct{}

func (btrfsKind) traits() traits {
	return traits{
		name:         "btrfs",
		offset:       btrfsOffset,
		programs:     []string{"mkfs.btrfs"},
		debian:       "btrfs-progs",
		smallest:     btrfsSmallest,
		growsMounted: true,
		onlyAsked:    true,
		anyUUID:      true, // with -U mkfs.btrfs opens the other disks of the node, to see that none has it
	}
}

// mountRules: a btrfs is mounted whole (subvolid=5), also if a user has made another
// subvolume the default: a mount that shows another root is not taken for the volume. It
// discards only if asked: since Linux 6.2 it discards by default, which would punch holes
// into the file of a thick volume.
func (btrfsKind) mountRules() mountRules {
	return mountRules{
		always:     []string{"subvolid=5", "nodiscard"},
		noRecovery: "rescue=nologreplay",
		ownNumber:  true,
		logPrefix:  "BTRFS",
		logWord:    "(device <unknown>)",
	}
}

func (btrfsKind) parse(head []byte) (*superblock, error) {
	s, err := parseBtrfs(head)
	if s == nil || err != nil {
		return nil, err
	}
	return &superblock{fsType: "btrfs", uuid: s.uuid, bytes: s.bytes, own: headSize, grown: s.grown}, nil // it leaves out its first MiB
}

// live asks the kernel for the size, which it writes with its next commit.
func (btrfsKind) live(d *device, mountpoint string, sb *superblock) error {
	root, on, err := d.openBtrfs(mountpoint)
	if err != nil {
		return err
	}
	sb.bytes = on.bytes
	return root.Close()
}

// format keeps two copies of the metadata and one of the data, whatever the
// defaults of the mkfs.btrfs at hand, with the checksums that parse can verify.
// It discards nothing (-K), which would punch holes into the file of a thick
// volume. Without -f, mkfs.btrfs itself refuses a device on which libblkid finds
// anything. It does not mix metadata and data (--mixed), which would save room
// only on a small device, and would last when that has grown.
//
// Before it writes anything, mkfs.btrfs looks at every loop device that is mounted
// on the node, and fails when one goes away just then: it is run again.
func (btrfsKind) format(ctx context.Context, d *device, _ string, _ bool) error {
	for try := 1; ; try++ {
		err := alone("mkfs.btrfs", "-q", "-K", "-m", "dup", "-d", "single", "--csum", "crc32c", d.Name()).Check(ctx)
		if err == nil || try == btrfsTries || !strings.Contains(err.Error(), "cannot check mount status") {
			return err
		}
	}
}

// btrfsTries is how often mkfs.btrfs is run when loop devices disappear meanwhile.
const btrfsTries = 5

// check always refuses: a btrfs is consistent after each commit and replays its log at
// mount, and its superblock never asks for a check.
func (btrfsKind) check(context.Context, string) error {
	return state.Errorf(state.FailedPrecondition, "a btrfs is not checked by the plugin; run btrfs scrub while it is mounted, or, with the volume unstaged, btrfs check by hand")
}

// grow asks the kernel, as btrfs filesystem resize does; a btrfs is always mounted here.
func (btrfsKind) grow(_ context.Context, d *device, mountpoint string, bytes int64) error {
	root, on, err := d.openBtrfs(mountpoint)
	if err != nil {
		return err
	}
	return errors.Join(resizeBtrfs(root, on, bytes), root.Close())
}

// openBtrfs opens the root of the btrfs that is mounted at path, which must be
// on the device and on no other.
func (d *device) openBtrfs(path string) (*os.File, btrfsDevice, error) {
	root, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, btrfsDevice{}, err
	}
	on, err := askBtrfs(root)
	if err == nil && on.number != d.number {
		err = fmt.Errorf("what is mounted at %s is on device %s, not %s (%s)", path, on.number, d.number, d.Name())
	}
	if err != nil {
		return nil, on, errors.Join(err, root.Close())
	}
	return root, on, nil
}
