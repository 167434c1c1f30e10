package mounts

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/btrfs"
	"github.com/csi-node/csi-node/pkg/state"
)

// dialect is what a kind of file system is told beyond what was asked for.
type dialect struct {
	always     []string          // options, set before those that were asked for
	refused    map[string]string // options that would mount something else, and why
	noRecovery string            // the option with which a read-only mount leaves the log alone
}

// dialects by file system type.
//
// An xfs is mounted with nouuid, always: a volume that was restored from a copy
// of another has the same UUID, and the kernel mounts but one of them. The
// check that is lost guards against one disk seen twice; a volume's file
// backs no more than one writable device.
//
// A btrfs is mounted whole (subvolid=5), whatever subvolume a user has made the
// default: a mount that shows another root is nobody's volume. It discards only
// when asked: since Linux 6.2 it would by itself, and punch holes into the file
// of a thick volume.
var dialects = map[string]dialect{
	"ext4": {noRecovery: "noload"},
	"xfs":  {always: []string{"nouuid"}, noRecovery: "norecovery"},
	"btrfs": {
		always:     []string{"subvolid=5", "nodiscard"},
		refused:    map[string]string{"subvol": onlyWhole, "subvolid": onlyWhole, "device": "a volume is one device"},
		noRecovery: "rescue=nologreplay",
	},
}

const onlyWhole = "a volume is mounted whole, with all subvolumes"

// options returns what to tell the kernel: what is always told, and what was
// asked for. InvalidArgument: an option that would mount something else.
func (d dialect) options(asked []string) ([]string, error) {
	for _, option := range asked {
		key, _, _ := strings.Cut(option, "=")
		if why := d.refused[key]; why != "" {
			return nil, state.Errorf(state.InvalidArgument, "the mount option %q is not taken: %s", option, why)
		}
	}
	return slices.Concat(d.always, asked), nil
}

// recoveryOptions are the options that make a mount leave the log alone, by
// their beginnings; all kinds take them for read-only mounts only, or for a
// file system whose log is empty.
var recoveryOptions = []string{"noload", "norecovery", "nologreplay", "rescue="}

// explain says in plain words why a mount failed, over the log of the file system
// or over a copy of it; nil when it is something else. said is all that the
// kernel had to say.
func (d dialect) explain(cause error, said string, asked []string, readOnly bool) error {
	without := slices.IndexFunc(asked, func(option string) bool {
		return slices.ContainsFunc(recoveryOptions, func(o string) bool { return strings.HasPrefix(option, o) })
	})
	switch {
	case without >= 0 && !readOnly && cause == unix.EINVAL:
		return state.Errorf(state.InvalidArgument, "the kernel refuses the mount option %q for a mount that may write: %w", asked[without], withWords(cause, said))
	case without < 0 && readOnly && d.noRecovery != "" && (cause == unix.EROFS || strings.Contains(said, "log replay required")): // EIO of a btrfs
		return state.Errorf(state.FailedPrecondition, "the file system was not unmounted cleanly, so its log must be replayed, and read-only access writes nothing: "+
			"stage the volume once for writing, or ask for the mount flag %q, which shows what is there without the log: %w", d.noRecovery, withWords(cause, said))
	case cause == unix.EEXIST: // a btrfs
		return fmt.Errorf("this node has a copy of the file system mounted, and Linux before 6.7 mounts but one of them at a time: %w", withWords(cause, said))
	}
	return nil
}

// verifyBtrfs makes sure that a btrfs is on the device: the kernel mounts what
// it takes for the same file system, and tells which device that is.
func verifyBtrfs(mnt int, device state.Device) (err error) {
	fd, err := openat2(mnt, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	root := os.NewFile(uintptr(fd), device.Path)
	defer func() { err = errors.Join(err, root.Close()) }()
	on, err := btrfs.Ask(root)
	if err == nil && on.Number != device.Number {
		err = fmt.Errorf("the kernel mounted device %s instead, which holds a copy of the file system: unmount that first", on.Number)
	}
	return err
}
