package mounts

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/state"
)

// CheckOptions returns InvalidArgument, with the kernel's words, for an option that the
// kernel refuses for this type of file system whatever is on the device. It mounts nothing.
// Options that depend on the device are refused only by the mount itself.
func (h *Host) CheckOptions(fsType string, flags state.Flags) error {
	if len(flags.Super) == 0 {
		return nil
	}
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil
	}
	defer unix.Close(fs)
	for _, option := range flags.Super {
		if err := setOption(fs, option); isOptionError(err) {
			return fmt.Errorf("mount %s: %w", fsType, optionError(err, contextMessages(fs), "", option))
		}
	}
	return nil
}

// setOption gives one option to the kernel, as mount(8) would: a value may
// stand in double quotes, which keep its commas together.
func setOption(fs int, option string) error {
	if key, value, ok := strings.Cut(option, "="); ok {
		return unix.FsconfigSetString(fs, key, unquote(value))
	}
	return unix.FsconfigSetFlag(fs, option)
}

// unquote takes off the double quotes around a value.
func unquote(value string) string {
	if len(value) >= 2 && value[0] == '"' && value[len(value)-1] == '"' {
		return value[1 : len(value)-1]
	}
	return value
}

// optionErrors are what the kernel answers to an option that is wrong, that it
// does not support, or that does not suit the file system. Anything else, such
// as EIO and ENOMEM, says nothing of an option.
var optionErrors = []error{
	unix.EINVAL, unix.EOPNOTSUPP, unix.ENOSYS, unix.Errno(524), // ENOTSUPP, the kernel's own
	unix.EPERM, unix.ERANGE, unix.EROFS, unix.ENOENT, unix.ENOTBLK,
}

func isOptionError(err error) bool { return slices.Contains(optionErrors, err) }

// optionError is the error of options that the kernel does not take. It tells
// their names, not their values, which may be sensitive (CSI spec v1.13,
// MountVolume).
func optionError(err error, words, logged string, options ...string) error {
	names := optionNames(options)
	words, logged = withoutValues(words, options), withoutValues(logged, options)
	if !isOptionError(err) {
		return fmt.Errorf("set the mount options %s: %w", names, withMessages(err, words))
	}
	said := words
	switch {
	case said == "" && logged == "":
		said = err.Error()
	case said == "":
		said = fmt.Sprintf("%v (%s)", err, logged)
	case logged != "":
		said += " (" + logged + ")"
	}
	return state.Errorf(state.InvalidArgument, "the kernel refuses the mount options %s: %s", names, said)
}

// withoutValues takes the values of options out of what the kernel says: a btrfs
// before Linux 6.8 repeats them.
func withoutValues(text string, options []string) string {
	for _, option := range options {
		if key, value, ok := strings.Cut(option, "="); ok && value != "" {
			for _, value := range []string{value, unquote(value)} {
				text = strings.ReplaceAll(text, key+"="+value, key+"=…")
			}
		}
	}
	return text
}

func optionNames(options []string) string {
	var names []string
	for _, option := range options {
		names = append(names, fmt.Sprintf("%q", state.OptionName(option)))
	}
	return strings.Join(names, ", ")
}

// mountsWithoutOptions reports whether it is the options that are to blame for a mount
// that failed with one of optionErrors: whether the file system can be mounted
// without them. It is not tried if they forbid the writing that a mount does.
func mountsWithoutOptions(device state.Device, fsType string, options []string, readOnly bool) bool {
	if slices.ContainsFunc(options, filesystem.SkipsRecovery) {
		return true
	}
	mnt, err := newMount(device, fsType, state.Flags{}, readOnly)
	if err == nil {
		err = unix.Close(mnt) // unmounts it
	}
	return err == nil
}

// createError is the failure to make a superblock that is not, or not only, due
// to options. The kernel tells the reason in its words or in its log.
func createError(err error, words, logged string, options []string) error {
	for _, text := range []string{words, logged} {
		err = withMessages(err, withoutValues(text, options))
	}
	if words == "" && logged == "" {
		err = withMessages(err, "the kernel's log may say why")
	}
	if len(options) > 0 {
		err = fmt.Errorf("with the mount options %s: %w", optionNames(options), err)
	}
	return err
}
