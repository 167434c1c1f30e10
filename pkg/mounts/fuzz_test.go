package mounts

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"k8s.io/mount-utils"

	"github.com/csi-node/csi-node/pkg/state"
)

// FuzzMountinfo reads a table that is anything, also one that leads in a circle.
func FuzzMountinfo(f *testing.F) {
	own, err := os.ReadFile("/proc/self/mountinfo")
	must(f, err)
	f.Add(own, uint64(1))
	f.Add([]byte("5 7 7:1 / /x rw - ext4 /dev/loop1 rw\n7 5 7:1 / /x rw - ext4 /dev/loop1 rw\n"), uint64(5))
	f.Add([]byte("5 4 7:1 / /x\\040y ro,noatime shared:1 - ext4 /dev/loop1 ro\n6 5 0:5 /loop1 /x\\040y rw - devtmpfs  rw\n"), uint64(6))
	f.Fuzz(func(t *testing.T, text []byte, id uint64) {
		infos, err := mountinfo.GetMountsFromReader(bytes.NewReader(text), nil)
		if err != nil {
			return
		}
		stack, err := stackOf(infos, id)
		known := slices.ContainsFunc(infos, func(i *mountinfo.Info) bool { return uint64(i.ID) == id })
		if err != nil && err != unix.ENOENT || err == nil && (!known || stack[0].id != id || len(stack) > len(infos)) {
			t.Fatalf("mount %d: a stack of %d from a table of %d: %+v (%v)", id, len(stack), len(infos), stack, err)
		}
		for _, e := range stack {
			if e.point != stack[0].point {
				t.Errorf("mount %d at %q is in the stack at %q", e.id, e.point, stack[0].point)
			}
		}
	})
}

// entryParts makes an entry as the kernel could have it: no NUL in any string.
func entryParts(id, parent uint64, major, minor uint32, root, point, fsType, source, options string, attributes uint64, readOnly bool) entry {
	clean := func(s string) string { return strings.ReplaceAll(s, "\x00", "") }
	word := func(s string) string { // that the kernel does not escape
		return strings.Map(func(r rune) rune {
			if r <= ' ' || r == '\\' || r == 0x7f {
				return 'x'
			}
			return r
		}, strings.ToValidUTF8(s, "x"))
	}
	if readOnly {
		options = "ro," + options
	} else {
		for strings.Contains(options, "ro") { // also in what is left of rroo
			options = strings.ReplaceAll(options, "ro", "")
		}
		options = "rw," + options
	}
	a := state.Attributes(attributes) & knownAttributes
	switch a & state.AtimeMask {
	case 0, state.NoAtime, state.StrictAtime:
	default:
		a = a &^ state.AtimeMask // it is one of three
	}
	return entry{
		id: id >> 33, parent: parent >> 33, device: state.DeviceNumber{Major: major >> 1, Minor: minor >> 1}, // what an int holds
		root: clean(root), point: clean(point), fsType: word(fsType) + "x", source: clean(source), options: word(options),
		attributes: a, readOnly: readOnly,
	}
}

func addEntries(f *testing.F) {
	f.Add(uint64(77)<<33, uint64(30)<<33, uint32(14), uint32(2), "/", "/var/lib/kubelet/pods/1", "ext4", "/dev/loop1", "seclabel", uint64(0), false)
	f.Add(uint64(1)<<63, uint64(1)<<63, uint32(0), uint32(99), "/a b\t\n\\#", "/x\\040y\nz", "fuse.sshfs", "", "user_id=0", uint64(0x20008f), true)
	f.Add(uint64(0), ^uint64(0), ^uint32(0), ^uint32(0), "//deleted", "/é\xff", "btrfs", "a:/b c", "subvol=/x,emergency_ro", uint64(0x20), false)
	f.Add(uint64(0), uint64(0), uint32(0), uint32(0), "/", "/", "ext4", "/dev/loop1", "rroo", uint64(0x20), false)
}

// FuzzMountinfoLine prints a mount as the kernel does and reads it back
// (show_mountinfo in fs/proc_namespace.c), also with k8s.io/mount-utils, which
// leaves escaped what was escaped.
func FuzzMountinfoLine(f *testing.F) {
	addEntries(f)
	f.Fuzz(func(t *testing.T, id, parent uint64, major, minor uint32, root, point, fsType, source, options string, attributes uint64, readOnly bool) {
		want := entryParts(id, parent, major, minor, root, point, fsType, source, options, attributes, readOnly)
		line := fmt.Sprintf("%d %d %d:%d %s %s %s shared:7 master:3 - %s %s %s\n", want.id, want.parent, want.device.Major, want.device.Minor,
			escaped(want.root, " \t\n\\"), escaped(want.point, " \t\n\\"), mountOptions(want.attributes),
			escaped(want.fsType, " \t\n\\#"), escaped(want.source, " \t\n\\#"), want.options)
		infos, err := mountinfo.GetMountsFromReader(strings.NewReader(line), nil)
		if err != nil || len(infos) != 1 {
			t.Fatalf("%q is read as %v (%v)", line, infos, err)
		}
		if got := entryOf(infos[0]); got != want {
			t.Errorf("%q is read as\n%+v, was\n%+v", line, got, want)
		}
		if want.source == "" || want.root == "" || want.point == "" || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\n' || r > '~' }) {
			return // mount-utils splits at any white space, of which it takes two for one
		}
		path := filepath.Join(t.TempDir(), "mountinfo")
		must(t, os.WriteFile(path, []byte(line), 0o600))
		others, err := mount.ParseMountInfo(path)
		if err != nil || len(others) != 1 {
			t.Fatalf("%q is read by mount-utils as %+v (%v)", line, others, err)
		}
		if o := others[0]; o.ID != int(want.id) || o.ParentID != int(want.parent) || o.Minor != int(want.device.Minor) || o.FsType != escaped(want.fsType, " \t\n\\#") ||
			o.MountPoint != escaped(want.point, " \t\n\\") {
			t.Errorf("%q is read by mount-utils as %+v", line, o)
		}
	})
}

// escaped is mangle_path of the kernel.
func escaped(s, what string) string {
	var b strings.Builder
	for i := range len(s) {
		if strings.IndexByte(what, s[i]) >= 0 {
			fmt.Fprintf(&b, "\\%03o", s[i])
		} else {
			b.WriteByte(s[i])
		}
	}
	return b.String()
}

// mountOptions is show_mnt_opts of the kernel.
func mountOptions(a state.Attributes) string {
	words := []string{"rw"}
	if a&state.ReadOnly != 0 {
		words[0] = "ro"
	}
	for _, w := range []struct {
		bit  state.Attributes
		word string
	}{{state.NoSuid, "nosuid"}, {state.NoDev, "nodev"}, {state.NoExec, "noexec"}, {state.NoAtime, "noatime"}, {state.NoDirAtime, "nodiratime"}} {
		if a&w.bit != 0 {
			words = append(words, w.word)
		}
	}
	if a&state.AtimeMask == 0 {
		words = append(words, "relatime")
	}
	if a&state.NoSymFollow != 0 {
		words = append(words, "nosymfollow")
	}
	return strings.Join(words, ",")
}

// FuzzStatmount writes a mount as statmount(2) does and decodes it.
func FuzzStatmount(f *testing.F) {
	addEntries(f)
	f.Fuzz(func(t *testing.T, id, parent uint64, major, minor uint32, root, point, fsType, source, options string, attributes uint64, readOnly bool) {
		want := entryParts(id, parent, major, minor, root, point, fsType, source, options, attributes, readOnly)
		want.id, want.unique, want.parent = id, id, parent
		strs := []byte{0}
		put := func(s string) uint32 {
			at := len(strs)
			strs = append(append(strs, s...), 0)
			return uint32(at)
		}
		h := statmountHeader{mask: statmountAll, major: want.device.Major, minor: want.device.Minor, id: id, parent: parent,
			attributes: uint64(want.attributes) | 0x100000, // idmapped, which has no name here
			root:       put(want.root), point: put(want.point), fsType: put(want.fsType), source: put(want.source), options: put(want.options)}
		if readOnly {
			h.superFlags = superReadOnly
		}
		words := make([]uint64, (statmountSize+len(strs)+7)/8)
		whole := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)
		copy(whole, unsafe.Slice((*byte)(unsafe.Pointer(&h)), unsafe.Sizeof(h)))
		copy(whole[statmountSize:], strs)
		if got := decode(words); got != want {
			t.Errorf("decoded as\n%+v, was\n%+v", got, want)
		}
	})
}

// FuzzStatmountBytes decodes what no kernel has written.
func FuzzStatmountBytes(f *testing.F) {
	f.Add(bytes.Repeat([]byte{0xff}, 200), []byte("ext4"))
	f.Add(make([]byte, 200), []byte{})
	f.Fuzz(func(t *testing.T, head, strs []byte) {
		words := make([]uint64, (statmountSize+len(strs)+7)/8)
		whole := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)
		copy(whole[:statmountSize], head)
		copy(whole[statmountSize:], strs)
		if e := decode(words); strings.Contains(e.point+e.root+e.fsType+e.source+e.options, "\x00") {
			t.Errorf("%+v", e)
		}
	})
}
