package state

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// Attributes are the flags of one mount, as against those of its superblock;
// the bits are those of MOUNT_ATTR_* in mount_setattr(2).
type Attributes uint64

const (
	ReadOnly    Attributes = 0x1
	NoSuid      Attributes = 0x2
	NoDev       Attributes = 0x4
	NoExec      Attributes = 0x8
	NoAtime     Attributes = 0x10
	StrictAtime Attributes = 0x20
	NoDirAtime  Attributes = 0x80
	NoSymFollow Attributes = 0x200000

	// AtimeMask covers the access time setting, which is one choice of three;
	// zero is relatime.
	AtimeMask Attributes = 0x70
)

// Flags are mount flags as a CO gives them, sorted out: those that are
// attributes of a mount and those that only the file system's superblock knows.
type Flags struct {
	Set, Clear Attributes // attributes that are to be set, and to be cleared
	Super      []string   // for the superblock, in the order given
}

// Met reports whether a mount with attributes a is as the flags ask.
func (f Flags) Met(a Attributes) bool {
	if f.atime() && a&AtimeMask != f.Set&AtimeMask {
		return false
	}
	return a&f.Set == f.Set && a&f.Clear&^AtimeMask == 0
}

// atime reports whether the flags choose an access time setting.
func (f Flags) atime() bool { return f.Clear&AtimeMask != 0 }

// The words of mount(8) for attributes. A choice of access time clears the
// whole mask first, as mount_setattr(2) demands.
var attributeWords = map[string]Flags{
	"ro": {Set: ReadOnly}, "rw": {Clear: ReadOnly},
	"nosuid": {Set: NoSuid}, "suid": {Clear: NoSuid},
	"nodev": {Set: NoDev}, "dev": {Clear: NoDev},
	"noexec": {Set: NoExec}, "exec": {Clear: NoExec},
	"nodiratime": {Set: NoDirAtime}, "diratime": {Clear: NoDirAtime},
	"nosymfollow": {Set: NoSymFollow}, "symfollow": {Clear: NoSymFollow},
	"noatime": {Set: NoAtime, Clear: AtimeMask}, "atime": {Clear: AtimeMask},
	"strictatime": {Set: StrictAtime, Clear: AtimeMask}, "nostrictatime": {Clear: AtimeMask},
	"relatime": {Clear: AtimeMask}, "norelatime": {Set: StrictAtime, Clear: AtimeMask},
}

// Words that mount(8) keeps to itself and never gives to the kernel.
var userspaceWords = []string{
	"defaults", "_netdev", "nofail", "auto", "noauto", "user", "nouser", "users", "owner", "group", "silent", "loud",
}

// Words that ask for another operation than a mount.
var refusedWords = []string{
	"bind", "rbind", "move", "remount", "shared", "rshared", "slave", "rslave",
	"private", "rprivate", "unbindable", "runbindable", "loop",
}

// Words that name another device, or a part of the file system: a volume is one
// device, and is mounted whole.
var otherDeviceOptions = []string{
	"source", "device", "journal_dev", "journal_path", "logdev", "rtdev", "subvol", "subvolid",
}

// ParseFlags sorts out mount flags. Each may itself be a comma-separated list,
// as in mount -o; a quoted value (context="a:b:c,d") keeps its commas. Of
// flags that contradict each other the last one holds. The error is
// InvalidArgument and names the flag, but not its value, which may be sensitive
// (CSI spec v1.13, MountVolume).
func ParseFlags(flags []string) (Flags, error) {
	var f Flags
	for _, flag := range flags {
		for _, word := range splitOptions(flag) {
			if err := f.add(word); err != nil {
				return Flags{}, Errorf(InvalidArgument, "mount flag %q: %w", OptionName(word), err)
			}
		}
	}
	return f, nil
}

// parseBoth sorts out the mount flags of two requests.
func parseBoth(one, other []string) (a, b Flags, err error) {
	if a, err = ParseFlags(one); err == nil {
		b, err = ParseFlags(other)
	}
	return a, b, err
}

func (f *Flags) add(word string) error {
	name, _, valued := strings.Cut(word, "=")
	a, isAttribute := attributeWords[name]
	switch {
	case strings.ContainsFunc(word, unicode.IsControl):
		return errors.New("it holds a control character")
	case strings.Count(word, `"`)%2 != 0:
		return errors.New("a quote is not closed")
	case isAttribute && valued: // the kernel would take "ro=0" for "ro"
		return errors.New("it takes no value")
	case isAttribute:
		f.Set = f.Set&^a.Clear | a.Set
		f.Clear = f.Clear&^a.Set | a.Clear
	case strings.HasPrefix(name, "X-mount."):
		return errors.New("it asks for more than a mount")
	case slices.Contains(userspaceWords, word), strings.HasPrefix(word, "x-"), strings.HasPrefix(word, "X-"), name == "comment":
	case slices.Contains(refusedWords, name):
		return errors.New("it asks for something else than a new mount: leave it out")
	case slices.Contains(otherDeviceOptions, name):
		return errors.New("a volume is one device, and is mounted whole")
	default:
		f.Super = append(f.Super, word)
	}
	return nil
}

// splitOptions splits at commas that stand outside double quotes.
func splitOptions(s string) []string {
	quoted := false
	return strings.FieldsFunc(s, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}

// OptionName returns an option without its value, for messages: no more of it
// than a line has room for.
func OptionName(option string) string {
	name, _, _ := strings.Cut(option, "=")
	if len(name) > longestName {
		return strings.ToValidUTF8(name[:longestName], "") + "…"
	}
	return name
}

const longestName = 64

func (a Attributes) String() string {
	var words []string
	for _, w := range []struct {
		bit  Attributes
		word string
	}{
		{ReadOnly, "ro"}, {NoSuid, "nosuid"}, {NoDev, "nodev"}, {NoExec, "noexec"},
		{NoAtime, "noatime"}, {StrictAtime, "strictatime"}, {NoDirAtime, "nodiratime"}, {NoSymFollow, "nosymfollow"},
	} {
		if a&w.bit != 0 {
			words = append(words, w.word)
			a &^= w.bit
		}
	}
	if a != 0 {
		words = append(words, fmt.Sprintf("%#x", uint64(a)))
	}
	return strings.Join(words, ",")
}
