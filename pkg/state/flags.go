package state

import (
	"fmt"
	"slices"
	"strings"
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
	Set, Clear Attributes // attributes asked for, and asked away
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
	"defaults", "_netdev", "nofail", "auto", "noauto", "user", "nouser", "users", "owner", "group",
}

// Words that ask for another operation than a mount.
var refusedWords = []string{
	"bind", "rbind", "move", "remount", "shared", "rshared", "slave", "rslave",
	"private", "rprivate", "unbindable", "runbindable", "loop",
}

// ParseFlags sorts out mount flags. Each may itself be a comma-separated list,
// as in mount -o; a quoted value (context="a:b:c,d") keeps its commas. Of
// flags that contradict each other the last one holds. The error is
// InvalidArgument and names the flag.
func ParseFlags(flags []string) (Flags, error) {
	var f Flags
	for _, flag := range flags {
		for _, word := range splitOptions(flag) {
			name, _, _ := strings.Cut(word, "=")
			a, known := attributeWords[word]
			switch {
			case word == "":
			case strings.ContainsAny(word, "\x00\n"):
				return Flags{}, Errorf(InvalidArgument, "mount flag %q: holds a control character", word)
			case known:
				f.Set = f.Set&^a.Clear | a.Set
				f.Clear = f.Clear&^a.Set | a.Clear
			case slices.Contains(userspaceWords, word), strings.HasPrefix(word, "x-"), strings.HasPrefix(word, "X-"), name == "comment":
			case slices.Contains(refusedWords, name):
				return Flags{}, Errorf(InvalidArgument, "mount flag %q: not a flag of a file system", word)
			default:
				f.Super = append(f.Super, word)
			}
		}
	}
	return f, nil
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
