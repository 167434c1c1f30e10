package filesystem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// mountRules are what must be known about a kind of file system to mount it.
type mountRules struct {
	always     []string // options, set before those that were asked for
	noRecovery string   // the option with which a read-only mount leaves the log alone
	// ownNumber: it gives itself a number, which is not that of its device.
	ownNumber bool
	// logPrefix begins the messages in the kernel's log that name no device yet,
	// which is while options are parsed, and logWord is in them.
	logPrefix, logWord string
}

// rules are the mountRules by type. There are none for other types.
var rules = func() map[string]mountRules {
	all := map[string]mountRules{}
	for _, k := range kinds {
		all[k.traits().name] = k.mountRules()
	}
	return all
}()

// MountOptions returns the options of a mount: those that a file system of the type
// always gets, and those that were asked for. state.ParseFlags has refused the options
// that would mount something else.
func MountOptions(fsType string, asked []string) []string {
	return slices.Concat(rules[fsType].always, asked)
}

// SkipsRecovery reports whether an option makes a mount leave the log alone. All
// kinds take such options for read-only mounts only, or for a file system whose log
// is empty.
func SkipsRecovery(option string) bool {
	return slices.Contains([]string{"noload", "norecovery", "nologreplay", "rescue"}, state.OptionName(option))
}

// ExplainMount says in plain words why a mount failed, if the reason is the log of the
// file system or a mounted copy of it; otherwise it returns nil. said is the kernel's
// own messages.
func ExplainMount(fsType string, cause error, said string, asked []string, readOnly bool) error {
	reason := cause
	if said != "" {
		reason = fmt.Errorf("%w (%s)", cause, said)
	}
	noRecovery, without := rules[fsType].noRecovery, slices.IndexFunc(asked, SkipsRecovery)
	switch {
	case without >= 0 && !readOnly && cause == unix.EINVAL:
		return state.Errorf(state.InvalidArgument, "the kernel refuses the mount option %q for a mount that may write: %w", asked[without], reason)
	case without < 0 && readOnly && noRecovery != "" && (cause == unix.EROFS || strings.Contains(said, "log replay required")): // EIO of a btrfs
		return state.Errorf(state.FailedPrecondition, "the file system was not unmounted cleanly, so its log must be replayed, and read-only access writes nothing: "+
			"stage the volume once for writing, or ask for the mount flag %q, which shows what is there without the log: %w", noRecovery, reason)
	case cause == unix.EEXIST: // a btrfs
		return fmt.Errorf("this node has a copy of the file system mounted, and Linux before 6.7 mounts but one of them at a time: %w", reason)
	}
	return nil
}

// IsDiskFilesystem reports whether a type of file system is one that the plugin makes on devices.
func IsDiskFilesystem(fsType string) bool {
	_, known := rules[fsType]
	return known
}

// HasOwnNumber reports whether a mounted file system of the type shows a device
// number of its own, and not that of its device.
func HasOwnNumber(fsType string) bool { return rules[fsType].ownNumber }

// VerifyDevice makes sure that a mounted file system of a type that HasOwnNumber is
// on the device: the kernel mounts what it takes for the same file system, and tells
// which device that is. root is any open file or directory on it.
func VerifyDevice(root *os.File, device state.Device) error {
	on, err := askBtrfs(root)
	if err == nil && on.number != device.Number {
		err = fmt.Errorf("the kernel mounted device %s instead, which holds a copy of the file system: unmount that first", on.number)
	}
	return err
}

// VerifyAlive finds a file system that was shut down: an ext4 then answers statx(2),
// and refuses fsync(2). Other errors of fsync(2) do not matter for a mount.
func VerifyAlive(root *os.File) error {
	if err := unix.Fsync(int(root.Fd())); IsBroken(err) {
		return fmt.Errorf("fsync: %w", err)
	}
	return nil
}

// IsBroken reports whether an error tells of a file system that does not work any
// more: it was shut down, or its device failed.
func IsBroken(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && mountutils.IsCorruptedMnt(errno)
}

// HasOption reports whether one of comma-separated options is option.
func HasOption(options, option string) bool {
	for o := range strings.SplitSeq(options, ",") {
		if o == option {
			return true
		}
	}
	return false
}

// ShowsShutdown reports whether the options of a mounted superblock tell that it
// was shut down.
func ShowsShutdown(options string) bool { return HasOption(options, "shutdown") }

// ShowsEmergency reports whether the options of a mounted superblock tell that it
// refuses writes. Since Linux 6.15 an ext4 that has met an error does so without
// setting the flag of the superblock (ext4_show_options).
func ShowsEmergency(options string) bool { return HasOption(options, "emergency_ro") }

// RefusesWrites reports whether nothing can be written at a path: its file system, or the
// mount of that, is read-only, or it has met an error. From Linux 6.12 to 6.14, and where
// that was ported back, an ext4 that has met an error does not tell.
func RefusesWrites(path string) (bool, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return false, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	if fs.Flags&unix.ST_RDONLY != 0 || fs.Type != unix.EXT4_SUPER_MAGIC {
		return fs.Flags&unix.ST_RDONLY != 0, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return ShowsEmergency(ext4Options(devnode.NumberOf(st.Dev))), nil
}

func inSysfs(device state.DeviceNumber) string { return "/sys/dev/block/" + device.String() }

// ext4Options returns the options of the ext4 that is mounted from a device, separated by
// commas; none if the kernel does not tell.
func ext4Options(device state.DeviceNumber) string {
	place, err := os.Readlink(inSysfs(device))
	if err != nil {
		return ""
	}
	text, err := os.ReadFile(filepath.Join("/proc/fs/ext4", filepath.Base(place), "options"))
	if err != nil {
		return ""
	}
	return strings.Join(strings.Fields(string(text)), ",")
}

// Options returns all that the kernel shows of the options of a superblock that
// was seen mounted, separated by commas. The mount table leaves out the defaults
// of an ext4; /proc/fs/ext4 has them. On a device that takes no discards the
// options about them make no difference, so both count as shown.
func (h *Host) Options(m state.Mount) string {
	all := m.Options
	if m.FSType == "ext4" {
		all += "," + ext4Options(m.Device)
	}
	if most, err := os.ReadFile(inSysfs(m.Device) + "/queue/discard_max_bytes"); err == nil && strings.TrimSpace(string(most)) == "0" {
		all += ",discard,nodiscard"
	}
	return all
}
