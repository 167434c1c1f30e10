package mounts

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// formatted returns a device for each file system that this machine can make.
func formatted(t *testing.T, root string) map[string]state.Device {
	t.Helper()
	devices := map[string]state.Device{"ext4": newDevice(t, root, "ext4"), "xfs": newDevice(t, root, "xfs")}
	if _, err := exec.LookPath("mkfs.btrfs"); err == nil {
		d := newDevice(t, root, "xfs") // as large as btrfs wants it
		machine.Mkfs(t, "btrfs", "-q", "-f", d.Path)
		devices["btrfs"] = d
	}
	return devices
}

// Options of the superblock reach it, whether the VFS or the file system knows them.
func TestSuperblockOptions(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	devices, best := formatted(t, root), h.table
	for _, row := range []struct{ fsTypes, flags, want string }{
		{"ext4 xfs btrfs", "sync", "sync"},
		{"ext4 xfs btrfs", "dirsync", "dirsync"},
		{"ext4 xfs btrfs", "lazytime", "lazytime"},
		{"ext4 xfs btrfs", "lazytime,nolazytime", "-lazytime"},
		{"ext4 xfs btrfs", "sync,async", "-sync"},
		{"ext4 xfs btrfs", "mand", "mand"},
		{"ext4 xfs btrfs", "discard", "discard"},
		{"ext4 xfs btrfs", "discard,nodiscard", "-discard"},
		{"ext4 xfs btrfs", "silent,defaults,nofail,_netdev,x-systemd.automount", "rw"},
		{"ext4 btrfs", "nobarrier", "nobarrier"},
		{"ext4", "barrier=1", "-nobarrier"},
		{"ext4 btrfs", "commit=10", "commit=10"},
		{"ext4 btrfs", "commit=10,commit=7", "commit=7"},
		{"ext4", `commit="7"`, "commit=7"},
		{"ext4", "data=journal", "data=journal"},
		{"ext4", "data=journal,data=ordered", "data=ordered"},
		{"ext4", "data=journal,journal_async_commit", "journal_async_commit"},
		{"ext4", "errors=remount-ro", "errors=remount-ro"},
		{"ext4", "usrquota", "usrquota"},
		{"ext4", "acl,user_xattr,journal_checksum", "rw"},
		{"xfs", "inode32", "inode32"},
		{"xfs", "inode32,inode64", "inode64"},
		{"xfs", "logbufs=4,logbsize=64k", "logbufs=4"},
		{"xfs", "swalloc", "swalloc"},
		{"xfs", "noquota,nouuid", "nouuid"},
		{"btrfs", "compress=zstd:3", "compress=zstd:3"},
		{"btrfs", "noacl", "noacl"},
	} {
		for fsType := range strings.FieldsSeq(row.fsTypes) {
			d, made := devices[fsType]
			if !made {
				continue
			}
			flags, err := state.ParseFlags([]string{row.flags})
			must(t, err)
			if err := h.MountDevice(t.Context(), d, path, fsType, flags, false); err != nil {
				t.Errorf("%s: %v", row.flags, err)
				continue
			}
			word, absent := strings.CutPrefix(row.want, "-")
			if options := superOptions(t, path); filesystem.HasOption(options, word) == absent {
				t.Errorf("%s with %s: the superblock has %s, want %s", fsType, row.flags, options, row.want)
			}
			for _, table := range []table{mountinfoTable{}, best} {
				h.table = table
				seen(t, h, path, fsType, row.flags)
			}
			must(t, h.Unmount(t.Context(), path))
		}
	}
}

// seen fails unless a mount shows the flags that it was made with, and no others.
func seen(t *testing.T, h *Host, path, fsType, with string) {
	t.Helper()
	m, err := h.Look(t.Context(), path, hang.NoLimit)
	must(t, err)
	shown := new(filesystem.Host).Options(m.Mounts[0])
	for flags, want := range map[string]bool{with: true, "sync,dirsync,lazytime,inode32,commit=77": false} {
		f, err := state.ParseFlags([]string{flags})
		must(t, err)
		option := f.Shown(fsType, shown)
		if (option == "") != want && option != "mand" { // of which Linux 5.15 knows nothing any more
			t.Errorf("%s with %s shows %s; asked %s, %q makes the difference", fsType, with, shown, flags, option)
		}
	}
}

func superOptions(t *testing.T, path string) string {
	t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	must(t, err)
	if len(infos) != 1 {
		t.Fatalf("%d mounts at %s", len(infos), path)
	}
	return infos[0].VFSOptions
}

// Whatever is wrong with an option, and whenever the kernel finds out: it is the
// caller's mistake, in the kernel's words, and nothing stays mounted. No value
// is told that the kernel itself does not tell.
func TestRefusedOptions(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	devices := formatted(t, root)
	for _, row := range []struct{ fsTypes, flags, words string }{
		{"ext4 xfs btrfs", "nonsense", "Unknown parameter 'nonsense'"},
		{"ext4 xfs btrfs", "nonsense=s3cret", "Unknown parameter 'nonsense'"},
		{"ext4 xfs btrfs", "noatime,=x", "Unknown parameter ''"},
		{"ext4 xfs btrfs", "lazytime,discard=1", "value for 'discard'"},
		{"ext4 btrfs", "commit", "Bad value for 'commit'"},
		{"ext4 btrfs", "commit=s3cret", "Bad value for 'commit'"},
		{"ext4", "discard=", "discard"},
		{"ext4", "comm\xffit=" + strings.Repeat("9", 300), "comm"},
		{"ext4", "errors=s3cret", "Bad value for 'errors'"},
		{"ext4", "data=s3cret", "Bad value for 'data'"},
		{"ext4", "inode_readahead_blks=3", "power of 2"},
		// Refused only when the superblock is made.
		{"ext4", "journal_async_commit", "can't mount with journal_async_commit in data=ordered mode"},
		{"ext4", "data=journal,delalloc", "can't mount with both data=… and delalloc"},
		{"ext4", "dax", "DAX unsupported by block device"},
		{"ext4", "prjquota", "invalid argument"},
		{"ext4", "sb=4096", "Can't find ext4 filesystem"},
		{"xfs", "norecovery", "no-recovery mounts must be read-only"},
		{"xfs", "logbufs=99", "invalid logbufs value"},
		{"xfs", "logbsize=3", "invalid logbufsize"},
		{"xfs", "sunit=8", "sunit and swidth must be specified together"},
		{"xfs", "sunit=7,swidth=3", "multiple of the stripe unit"},
		{"xfs", "allocsize=3", "invalid log iosize"},
		{"btrfs", "compress=s3cret2", "compress"},
		{"btrfs", "norecovery", "norecovery"},
		{"btrfs", "thread_pool=0", "thread_pool"},
	} {
		for fsType := range strings.FieldsSeq(row.fsTypes) {
			d, made := devices[fsType]
			if !made {
				continue
			}
			t.Run(fsType+" "+row.flags, func(t *testing.T) {
				flags, err := state.ParseFlags([]string{row.flags})
				must(t, err)
				err = h.MountDevice(t.Context(), d, path, fsType, flags, false)
				words := row.words
				if fsType == "btrfs" && kernelBefore(t, 6, 8) { // which reads its options only at the mount
					words = "BTRFS"
				}
				wantClass(t, err, state.InvalidArgument, "the kernel refuses", words, path, d.Path)
				if strings.Contains(err.Error(), "=s3cret") {
					t.Errorf("the value is told: %v", err)
				}
				wantFile(t, h, path, state.NoFile)
				wantFree(t, d)
			})
		}
	}
}

// What is wrong with the file system is not laid at the options' door.
func TestOptionsAreNotBlamedForTheRest(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	flags, err := state.ParseFlags([]string{"discard,lazytime"})
	must(t, err)
	blank, other, cut := newDevice(t, root, ""), newDevice(t, root, "xfs"), newDevice(t, root, "ext4")
	backing := run(t, "losetup", "--noheadings", "--output", "BACK-FILE", cut.Path)
	must(t, os.Truncate(backing, 2<<10)) // the superblock stays, all else cannot be read
	run(t, "blockdev", "--flushbufs", cut.Path)
	for name, d := range map[string]state.Device{"blank": blank, "another file system": other, "cannot be read": cut} {
		t.Run(name, func(t *testing.T) {
			wantClass(t, h.MountDevice(t.Context(), d, path, "ext4", flags, false), state.Unavailable, `"discard", "lazytime"`)
			wantFile(t, h, path, state.NoFile)
			wantFree(t, d)
		})
	}
}

func TestValuesAreNotRepeated(t *testing.T) {
	const said = "btrfs: unrecognized mount option 'key=s3cret'; 'other=\"a,b\"' or other=a,b; key is 1"
	for _, err := range []error{
		optionError(unix.EINVAL, said, said, "key=s3cret", `other="a,b"`),
		createError(unix.EIO, said, said, []string{"key=s3cret", `other="a,b"`}),
	} {
		if text := err.Error(); strings.Contains(text, "s3cret") || strings.Contains(text, "a,b") || !strings.Contains(text, "unrecognized mount option 'key=…'") {
			t.Error(err)
		}
	}
}

// A label in quotes reaches the kernel without them, commas and all. Where no
// policy is loaded SELinux takes no labels: then the kernel says so of the
// option, and of no other.
func TestMountLabelInQuotes(t *testing.T) {
	for value, want := range map[string]string{
		`"system_u:object_r:t:s0:c1,c2"`: "system_u:object_r:t:s0:c1,c2", `plain`: "plain", `""`: "", `"`: `"`, `"open`: `"open`, `a"b"`: `a"b"`,
	} {
		mustBe(t, value, unquote(value), want)
	}
	h, root := newHost(t)
	flags, err := state.ParseFlags([]string{`context="system_u:object_r:container_file_t:s0:c1,c2",noatime`})
	must(t, err)
	if len(flags.Super) != 1 {
		t.Fatalf("%q", flags.Super)
	}
	d, path := newDevice(t, root, "ext4"), filepath.Join(root, "stage")
	if err := h.MountDevice(t.Context(), d, path, "ext4", flags, false); err != nil {
		wantClass(t, err, state.InvalidArgument, `"context"`)
		return
	}
	mustBe(t, "attributes", wantMount(t, h, path, d.Number).Attributes, state.NoAtime)
}
