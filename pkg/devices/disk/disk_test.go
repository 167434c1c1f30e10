package disk

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

const size = 4 << 20

// smallest returns how many bytes a disk must have for a file system.
func smallest(fsType string) int64 {
	if fsType == "btrfs" {
		return 128 << 20
	}
	return size
}

func TestValidate(t *testing.T) {
	b := newBackend(t, t.TempDir())
	type contexts = map[string]string
	for name, c := range map[string]struct {
		volume  devices.Volume
		refused string // a word of the refusal; empty: it is fine
	}{
		"only an id":           {devices.Volume{ID: "a/b"}, ""},
		"a path":               {at("v", "/dev/disk/by-id/x"), ""},
		"an identity":          {devices.Volume{ID: "v", Context: contexts{"backend": "disk", "wwid": "naa.60"}}, ""},
		"published":            {devices.Volume{ID: "v", Context: contexts{}, Publish: contexts{"path": "/dev/vdb"}}, ""},
		"both alike":           {devices.Volume{ID: "v", Context: contexts{"path": "/dev/vdb"}, Publish: contexts{"path": "/dev/vdb"}}, ""},
		"both, not alike":      {devices.Volume{ID: "v", Context: contexts{"path": "/dev/vda"}, Publish: contexts{"path": "/dev/vdb"}}, "publish context"},
		"no id":                {at("", "/dev/vdb"), "volume id"},
		"nothing":              {devices.Volume{ID: "v", Context: contexts{"backend": "disk"}}, "nvmeUUID"},
		"a file":               {at("v", "/etc/passwd"), "/dev"},
		"a relative path":      {at("v", "dev/vdb"), "/dev"},
		"out of /dev":          {at("v", "/dev/../etc/passwd"), "/dev"},
		"/dev itself":          {at("v", "/dev/"), "/dev"},
		"any contents":         {devices.Volume{ID: "v", Context: contexts{"path": "/dev/vdb", "contents": "any"}}, ""},
		"some contents":        {devices.Volume{ID: "v", Context: contexts{"path": "/dev/vdb", "contents": "lvm"}}, "contents"},
		"only contents":        {devices.Volume{ID: "v", Context: contexts{"contents": "any"}}, "names no disk"},
		"an identity of zeros": {devices.Volume{ID: "v", Context: contexts{"wwid": "  "}}, "names nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			err := b.Validate(c.volume)
			if c.refused == "" && err != nil {
				t.Error(err)
			}
			if c.refused != "" {
				wantError(t, err, state.InvalidArgument, c.refused)
			}
		})
	}
}

// A volume may be named by what its disk is, in any spelling, with a path or without.
func TestIdentity(t *testing.T) {
	node, _ := newDisk(t, size)
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	id, b := info.Identities[blockdev.Backing], newBackend(t, t.TempDir())
	v := devices.Volume{ID: "v", Context: map[string]string{"loop": id}}
	for range 2 { // the second time by the hint
		if d := attach(t, b, v, false); d.Path != node || d.Identity != "loop:"+id || d.Size != size {
			t.Errorf("%+v", d)
		}
	}
	require.NoError(t, b.Detach(t.Context(), v))
	v.Context[PathKey] = node
	attach(t, b, v, false)
	require.NoError(t, b.Detach(t.Context(), v))

	other, _ := newDisk(t, size)
	v.Context[PathKey] = other
	wantError(t, b.Attach(t.Context(), v, true), state.FailedPrecondition, other, "another disk", id)
	if d := want(t, b, v, state.DeviceAbsent); d.Missing {
		t.Errorf("%+v", d)
	}
	untouched(t, other)
}

// untouched fails if a disk was made read-only, or is claimed.
func untouched(t testing.TB, node string) {
	t.Helper()
	f, info, err := blockdev.Open(node, unix.O_EXCL)
	require.NoError(t, err)
	if err := f.Close(); err != nil || info.ReadOnly {
		t.Errorf("%+v, %v", info, err)
	}
}

func TestAnotherDiskAtThePath(t *testing.T) {
	lib := t.TempDir()
	node, file := newDisk(t, size)
	b, v := newBackend(t, lib), at("v", node)
	attach(t, b, v, false)
	number := want(t, b, v, state.DeviceAttached).Number

	unplug(t, node) // while it is attached
	if d := want(t, b, v, state.DeviceAbsent); d.Number != number || d.Missing {
		t.Errorf("its mounts are not known any more: %+v", d)
	}
	other := filepath.Join(t.TempDir(), "other")
	require.NoError(t, os.WriteFile(other, make([]byte, size), 0o600))
	run(t, "losetup", node, other)
	for _, step := range []string{"while it is attached", "when it was detached", "after a restart"} {
		switch step {
		case "when it was detached":
			require.NoError(t, b.Detach(t.Context(), v))
		case "after a restart":
			b = newBackend(t, lib)
		}
		wantError(t, b.Attach(t.Context(), v, true), state.FailedPrecondition, node, "another now")
		want(t, b, v, state.DeviceAbsent)
		untouched(t, node)
		wantError(t, b.Grow(t.Context(), v, 2*size), state.FailedPrecondition, "another now")
		wantError(t, b.Clear(t.Context(), v), state.FailedPrecondition, "another now")
	}
	attach(t, b, at("w", node), false) // as another volume it is welcome
	require.NoError(t, b.Detach(t.Context(), at("w", node)))
	unplug(t, node)
	run(t, "losetup", node, file)
	attach(t, b, v, false) // the right one is back
}

// A disk that comes back with another number is the same disk.
func TestDiskComesBackElsewhere(t *testing.T) {
	node, file := newDisk(t, size)
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	b := newBackend(t, t.TempDir())
	v := devices.Volume{ID: "v", Context: map[string]string{"loop": info.Identities[blockdev.Backing]}}
	attach(t, b, v, true)
	unplug(t, node)
	again := plug(t, file)
	if d := want(t, b, v, state.DeviceAbsent); d.Number != info.Number {
		t.Errorf("%+v", d)
	}
	if d := attach(t, b, v, false); d.Path != again || d.ReadOnly {
		t.Errorf("%+v", d)
	}
}

// A partition stays what it was for a volume when the kernel begins to tell its UUID (Linux
// 6.13), or does not tell it any more, and so do the facts about it.
func TestKernelTellsMoreOfAPartition(t *testing.T) {
	lib := t.TempDir()
	_, file := newDisk(t, 8<<20)
	node, sysfs := newPartition(t, file)
	second, secondSysfs := newPartition(t, file) // another path to it
	tell := func(more string) {
		t.Helper()
		for node, sysfs := range map[string]string{node: sysfs, second: secondSysfs} {
			text := "DEVNAME=" + filepath.Base(node) + "\n" + more
			require.NoError(t, os.WriteFile(filepath.Join(sysfs, filepath.Base(node), "uevent"), []byte(text), 0o600))
		}
	}
	const older, newer = "", "PARTUUID=ABCD-01\n"
	ctx, v, identity := t.Context(), at("v", node), "serial:abc-part1@2048"
	tell(older)
	set := newSet(t, lib)
	attach(t, set, v, false)
	require.NoError(t, set.BeginFormat(ctx, v))
	require.NoError(t, set.EndFormat(ctx, v, "ext4"))
	for _, kernel := range []string{older, newer, newer, older} {
		require.NoError(t, set.Detach(ctx, v))
		tell(kernel)
		set = newSet(t, lib)
		if d := want(t, set, v, state.DeviceAbsent); d.Identity != identity || d.Formatted != "ext4" || d.Err != nil {
			t.Errorf("with %q: %+v", kernel, d)
		}
		if d := attach(t, set, v, false); d.Identity != identity || d.Formatted != "ext4" || d.Err != nil {
			t.Errorf("with %q: %+v", kernel, d)
		}
		wantError(t, set.Attach(ctx, at("w", second), false), state.FailedPrecondition, "the volume v")
	}
	require.NoError(t, set.Detach(ctx, v))

	tell(newer)
	if d := attach(t, set, at("w", second), false); d.Identity != "partUUID:abcd-01" {
		t.Errorf("%+v", d)
	}
	require.NoError(t, set.Detach(ctx, at("w", second)))
	tell(older)
	wantError(t, set.Attach(ctx, at("w", second), false), state.FailedPrecondition, "partUUID:abcd-01", "another now")
}

// The number of a disk that was pulled is given to another, whose mounts are not the volume's.
func TestNumberIsGivenToAnotherDisk(t *testing.T) {
	node, file := newDisk(t, size)
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	b, v := newBackend(t, t.TempDir()), devices.Volume{ID: "v", Context: map[string]string{"loop": info.Identities[blockdev.Backing]}}
	attach(t, b, v, false)
	unplug(t, node)

	other, dir := filepath.Join(t.TempDir(), "other"), t.TempDir()
	require.NoError(t, os.WriteFile(other, make([]byte, size), 0o600))
	run(t, "losetup", node, other)
	run(t, "mkfs.ext4", "-q", node)
	attach(t, b, at("other", node), false)
	run(t, "mount", node, dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	again := plug(t, file)
	if d := want(t, b, v, state.DeviceAbsent); d.Number != (state.DeviceNumber{}) {
		t.Errorf("it is told to be the other disk: %+v", d)
	}
	attach(t, b, at("as another volume", again), false)
	require.NoError(t, b.Detach(t.Context(), at("as another volume", again)))
	if d := attach(t, b, v, false); d.Path != again {
		t.Errorf("%+v", d)
	}
}

func TestReplaced(t *testing.T) {
	const it = "it"
	for name, c := range map[string]struct {
		identity       string // of the claim
		before, now    uint64 // sequence numbers
		tells          string
		size           int64
		partition      int
		replaced, same bool
	}{
		"as it was":                          {identity: it, before: 1, now: 1, tells: it, size: 1, same: true},
		"no medium":                          {identity: it, before: 1, now: 2},
		"the same one, plugged in again":     {identity: it, before: 1, now: 2, tells: it, size: 1},
		"another":                            {identity: it, before: 1, now: 2, tells: "other", size: 1, replaced: true},
		"another, which tells nothing":       {identity: it, before: 1, now: 2, size: 1, replaced: true},
		"it tells something else":            {identity: it, before: 1, now: 1, tells: "other", size: 1, same: true},
		"another partition of the disk":      {identity: it, before: 1, now: 1, tells: "other", size: 1, partition: 1, replaced: true},
		"the same partition":                 {identity: it, before: 1, now: 1, tells: it, size: 1, partition: 1, same: true},
		"another, on an old kernel":          {identity: it, tells: "other", size: 1, replaced: true},
		"as it was, on an old kernel":        {identity: it, tells: it, size: 1, same: true},
		"no identity":                        {before: 1, now: 1, size: 1, same: true},
		"no identity, plugged in again":      {before: 1, now: 2, size: 1, replaced: true},
		"no identity, and the kernel is old": {size: 1, same: true},
		"another, where it told no identity": {before: 1, now: 2, tells: "other", size: 1, replaced: true},
	} {
		t.Run(name, func(t *testing.T) {
			had := claim{Attached: &attachment{Sequence: c.before}}
			if c.identity != "" {
				had.Identity = "serial:" + c.identity
			}
			now := blockdev.Info{Sequence: c.now, Size: c.size, Partition: c.partition, Identities: map[blockdev.IdentityKind]string{blockdev.Serial: c.tells}}
			if replaced, same := had.replaced(now), had.is(now); replaced != c.replaced || same != c.same {
				t.Errorf("replaced: %t, the same: %t", replaced, same)
			}
		})
	}
}

// A disk that is still mounted as what it was is not taken a second time.
func TestDiskIsBackWhileItIsMounted(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			node, file := newDisk(t, smallest(fsType))
			machine.Mkfs(t, fsType, "-q", node)
			link := "/dev/shm/" + filepath.Base(t.TempDir()) + "-" + filepath.Base(node)
			require.NoError(t, os.Symlink(node, link))
			t.Cleanup(func() { require.NoError(t, os.Remove(link)) })
			b, v, dir := newBackend(t, t.TempDir()), at("v", link), t.TempDir()
			attach(t, b, v, false)
			run(t, "mount", node, dir)
			t.Cleanup(func() { run(t, "umount", dir) })
			again := plug(t, file)
			require.NoError(t, errors.Join(os.Remove(link), os.Symlink(again, link)))
			wantError(t, b.Attach(t.Context(), v, false), state.Unavailable, again, "still mounted", dir)
		})
	}
}

// The node of a disk that was pulled is gone, and a btrfs on it is known by the node all the same.
func TestBtrfsOfADiskThatIsGone(t *testing.T) {
	node, file := newDisk(t, smallest("btrfs"))
	machine.Mkfs(t, "btrfs", "-q", node)
	b, v, dir := newBackend(t, t.TempDir()), at("v", node), t.TempDir()
	number := attach(t, b, v, false).Number
	gone := "/dev/shm/" + filepath.Base(node)
	require.NoError(t, unix.Mknod(gone, unix.S_IFBLK|0o600, int(unix.Mkdev(number.Major, number.Minor))))
	run(t, "mount", gone, dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	require.NoError(t, os.Remove(gone))
	c, _, err := b.known(v)
	require.NoError(t, err)
	c.Attached.Path, c.Attached.Number.Minor = gone, 1<<20-1 // a number that no device has
	require.NoError(t, b.claims.Write("v", c))

	again := plug(t, file)
	v.Context[PathKey] = again
	wantError(t, b.Attach(t.Context(), v, false), state.Unavailable, again, "still mounted", dir)
	wantError(t, b.Attach(t.Context(), at("w", again), false), state.FailedPrecondition, "the volume v")
}

func TestInUse(t *testing.T) {
	lib := t.TempDir()
	b := newBackend(t, lib)
	t.Run("claimed", func(t *testing.T) {
		node, _ := newDisk(t, size)
		devicestest.Hold(t, node)
		wantError(t, b.Attach(t.Context(), at("claimed", node), true), state.FailedPrecondition, node, "in use")
	})
	t.Run("mounted", func(t *testing.T) {
		node, _ := newDisk(t, size)
		run(t, "mkfs.ext4", "-q", node)
		dir := t.TempDir()
		run(t, "mount", node, dir)
		t.Cleanup(func() { run(t, "umount", dir) })
		wantError(t, b.Attach(t.Context(), at("mounted", node), true), state.FailedPrecondition, node, "mounted at "+dir)
		wantError(t, b.Unused(t.Context(), at("mounted", node)), state.FailedPrecondition, "mounted at "+dir)
		wantError(t, b.Clear(t.Context(), at("mounted", node)), state.FailedPrecondition, "mounted at "+dir)
	})
	t.Run("under a loop device", func(t *testing.T) { // which does not claim it: its file system would be mounted twice
		node, _ := newDisk(t, size)
		over := plug(t, node)
		wantError(t, b.Attach(t.Context(), at("under", node), true), state.FailedPrecondition, node, "in use", over)
		untouched(t, node)
		unplug(t, over)
		attach(t, b, at("under", node), false)
		over = plug(t, node)
		wantError(t, b.Attach(t.Context(), at("over", over), false), state.FailedPrecondition, over, "the volume under")
		unplug(t, over)
		require.NoError(t, b.Detach(t.Context(), at("under", node)))
	})
	t.Run("under another plugin's view", func(t *testing.T) { // its pod would be shown this volume
		node, _ := newDisk(t, size)
		other := newBackend(t, t.TempDir())
		theirs := attach(t, other, at("theirs", node), false)
		loops, err := loop.New(t.Context())
		require.NoError(t, err)
		loops.Reserve(loop.Numbers{Bound: machine.Bound})
		views := blockdev.New(loops, nil)
		require.NoError(t, views.AttachView(t.Context(), theirs))
		view, err := views.FindView(t.Context(), theirs)
		require.NoError(t, err)
		wantError(t, b.Attach(t.Context(), at("mine", node), false), state.FailedPrecondition, node, "in use", view.Path, "goes with its pod")
		wantError(t, b.Clear(t.Context(), at("mine", node)), state.FailedPrecondition, node, "in use", view.Path, "goes with its pod")
		untouched(t, node)
		attach(t, other, at("theirs", node), true)
		require.NoError(t, other.claims.Remove("theirs")) // what is noted of it is lost
		wantError(t, other.Attach(t.Context(), at("theirs", node), false), state.FailedPrecondition, "in use", view.Path)
		other.volume = func(number state.DeviceNumber) string {
			return map[state.DeviceNumber]string{view.Number: "theirs"}[number]
		}
		wantError(t, other.Attach(t.Context(), at("another", node), false), state.FailedPrecondition, "in use", view.Path)
		attach(t, other, at("theirs", node), false)
		require.NoError(t, views.DetachView(t.Context(), theirs))
		attach(t, b, at("mine", node), false)
		require.NoError(t, b.Detach(t.Context(), at("mine", node)))
	})
	t.Run("another volume's", func(t *testing.T) {
		node, file := newDisk(t, size)
		attach(t, b, at("first", node), false)
		wantError(t, b.Attach(t.Context(), at("second", node), false), state.FailedPrecondition, "the volume first")
		wantError(t, newBackend(t, lib).Clear(t.Context(), at("second", node)), state.FailedPrecondition, "the volume first")
		copied := plug(t, file) // another way to the same data
		wantError(t, b.Attach(t.Context(), at("second", copied), true), state.FailedPrecondition, "the volume first")
		untouched(t, copied)
		require.NoError(t, b.Detach(t.Context(), at("first", node)))
		attach(t, b, at("second", node), false)
		wantError(t, b.Attach(t.Context(), at("first", node), false), state.FailedPrecondition, "the volume second")
		unplug(t, node) // and with it the second's hold on it
		attach(t, b, at("third", copied), false)
	})
	t.Run("partitioned", func(t *testing.T) {
		_, file := newDisk(t, 8<<20)
		disk := plug(t, file, "--partscan")
		run(t, "addpart", disk, "1", "2048", "2048") // sectors; the kernel here may not know any table
		wantError(t, b.Attach(t.Context(), at("whole", disk), true), state.FailedPrecondition, filepath.Base(disk)+"p1")
		untouched(t, disk)

		part := devices.Volume{ID: "part", Context: map[string]string{PathKey: disk + "p1"}}
		d := attach(t, b, part, false)
		if d.Path != disk+"p1" || d.Size != 1<<20 {
			t.Errorf("%+v", d)
		}
		if info, err := blockdev.Look(d.Path); err != nil || info.Partition != 1 || info.Parent != filepath.Base(disk) {
			t.Errorf("%+v, %v", info, err)
		}
		release := devicestest.Hold(t, d.Path)
		wantError(t, b.Unused(t.Context(), at("whole", disk)), state.FailedPrecondition, "in use")
		release()
		require.NoError(t, b.Detach(t.Context(), part))
		if err := b.Clear(t.Context(), at("whole", disk)); err != nil { // an operator's word, for the table as well
			t.Fatal(err)
		}
		attach(t, b, at("whole", disk), false)
		require.NoError(t, b.Detach(t.Context(), at("whole", disk)))
		run(t, "addpart", disk, "1", "2048", "2048") // a virtual machine has made a table on its disk
		attach(t, b, at("whole", disk), false)
		run(t, "delpart", disk, "1")
	})
}

// A disk that LVM or RAID may put to use at any time is nobody's volume, unless pods of this
// very volume have made it so.
func TestMemberOfAnother(t *testing.T) {
	lib := t.TempDir()
	b := newBackend(t, lib)
	for name, label := range map[string]struct {
		at   int64
		text string
	}{"LVM2": {512, "LABELONE"}, "RAID": {4096, "\xfc\x4e\x2b\xa9"}, "GPT": {512, "EFI PART"}} {
		t.Run(name, func(t *testing.T) {
			node, file := newDisk(t, size)
			mark := func() {
				f, err := os.OpenFile(node, os.O_WRONLY, 0)
				require.NoError(t, err)
				_, err = f.WriteAt([]byte(label.text), label.at)
				require.NoError(t, errors.Join(err, f.Sync(), f.Close()))
			}
			mark()
			before, err := os.ReadFile(file)
			require.NoError(t, err)
			v := at("v-"+name, node)
			for _, readOnly := range []bool{true, false} {
				wantError(t, b.Attach(t.Context(), v, readOnly), state.FailedPrecondition, node, name, "clear-device", "contents: any")
			}
			want(t, b, v, state.DeviceAbsent)
			untouched(t, node)
			if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
				t.Errorf("it was changed (%v)", err)
			}
			require.NoError(t, b.Clear(t.Context(), v)) // an operator's word
			attach(t, b, v, false)
			mark() // as a pod does
			require.NoError(t, b.Detach(t.Context(), v))
			b = newBackend(t, lib)
			attach(t, b, v, false) // and it is known for the volume's
			require.NoError(t, b.Detach(t.Context(), v))
			elsewhere := newBackend(t, t.TempDir())
			wantError(t, elsewhere.Attach(t.Context(), v, false), state.FailedPrecondition, name)
			v.Publish = map[string]string{ContentsKey: "any"}
			attach(t, elsewhere, v, false)
			require.NoError(t, elsewhere.Detach(t.Context(), v))
			v.Publish = nil
			attach(t, elsewhere, v, false)
			require.NoError(t, elsewhere.Detach(t.Context(), v))
		})
	}
}

// Of a partition the mode is lost when its table is read again: who has it for reading has a
// view of it, as of a disk that takes commands.
func TestReadOnlyPartition(t *testing.T) {
	machine.Kernel(t)
	whole, divided := plug(t, machine.Image(t, size)), plug(t, machine.Image(t, size), "--partscan")
	b := newBackend(t, t.TempDir())
	run(t, "addpart", divided, "1", "2048", "2048") // sectors; the kernel here may not know any table
	for node, needsView := range map[string]bool{divided + "p1": true, whole: false} {
		v := at(filepath.Base(node), node)
		attach(t, b, v, true)
		if d := want(t, b, v, state.DeviceAttached); !d.ReadOnly || d.Commands != needsView {
			t.Errorf("%s: %+v", node, d)
		}
		require.NoError(t, b.Detach(t.Context(), v))
	}
}

func TestReadOnly(t *testing.T) {
	b := newBackend(t, t.TempDir())
	node, file := newDisk(t, size)
	v := at("v", node)
	attach(t, b, v, true)
	if err := os.WriteFile(node, make([]byte, 512), 0); !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		t.Errorf("written to: %v", err)
	}
	require.NoError(t, b.Detach(t.Context(), v))
	untouched(t, node)

	// Somebody else's mode is none of ours to take back.
	run(t, "blockdev", "--setro", node)
	attach(t, b, v, true)
	require.NoError(t, b.Detach(t.Context(), v))
	if info, err := blockdev.Look(node); err != nil || !info.ReadOnly {
		t.Errorf("%+v, %v", info, err)
	}

	protected := plug(t, file, "--read-only")
	unplug(t, node)
	p := at("protected", protected)
	wantError(t, b.Attach(t.Context(), p, false), state.FailedPrecondition, protected, "takes no writes")
	want(t, b, p, state.DeviceAbsent)
	attach(t, b, p, true)
	require.NoError(t, b.Detach(t.Context(), p))
	want(t, b, p, state.DeviceAbsent)
	err := b.Clear(t.Context(), p)
	if wantError(t, err, state.FailedPrecondition, protected, "takes no writes"); !errors.As(err, new(*state.Unwritten)) {
		t.Errorf("something may have been written: %v", err)
	}
}

// A detach that is stopped while it waits for somebody's claim has not given the disk up.
func TestDetachIsStopped(t *testing.T) {
	b := newBackend(t, t.TempDir())
	node, _ := newDisk(t, size)
	v := at("v", node)
	attach(t, b, v, true)
	claim, _, err := blockdev.Open(node, os.O_RDONLY|unix.O_EXCL)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), claimTime/2)
	defer cancel()
	wantError(t, b.Detach(ctx, v), state.DeadlineExceeded, "in use")
	require.NoError(t, claim.Close())
	want(t, b, v, state.DeviceAttached)
	require.NoError(t, b.Detach(t.Context(), v))
	if info, err := blockdev.Look(node); err != nil || info.ReadOnly {
		t.Errorf("%+v, %v", info, err)
	}
}

// A disk may yet be on its way to the node, which is told apart from what is wrong.
func TestDiskThatIsNotThere(t *testing.T) {
	node, file := newDisk(t, size)
	unplug(t, node)
	b, v := newBackend(t, t.TempDir()), at("v", node)
	if d := want(t, b, v, state.DeviceAbsent); d.Missing {
		t.Errorf("%+v", d)
	}
	for id, path := range map[string]string{"empty": node, "none": node + "-none"} {
		err := b.Attach(t.Context(), at(id, path), false)
		wantError(t, err, state.Unavailable, path, "not there")
		if !errors.Is(err, devices.ErrNoDevice) {
			t.Error("not told as a disk that is not there:", err)
		}
	}
	run(t, "losetup", node, file)
	attach(t, b, v, false)
}

func TestGrowTellsToGrowTheDisk(t *testing.T) {
	node, file := newDisk(t, size)
	b, v := newBackend(t, t.TempDir()), at("v", node)
	attach(t, b, v, false)
	wantError(t, b.Grow(t.Context(), v, 2*size), state.ResourceExhausted, node, "make the disk larger first")
	require.NoError(t, os.Truncate(file, 2*size))
	require.NoError(t, b.Grow(t.Context(), v, 2*size))
	if d := want(t, b, v, state.DeviceAttached); d.Size != 2*size {
		t.Errorf("%+v", d)
	}
}

// A note of another boot holds no disk, and still says which it is.
func TestReboot(t *testing.T) {
	lib := t.TempDir()
	node, _ := newDisk(t, size)
	b, v := newBackend(t, lib), at("v", node)
	attach(t, b, v, true)
	b = newBackend(t, lib)
	b.boot = "another"
	if d := want(t, b, devices.Volume{ID: "v"}, state.DeviceAbsent); d.Missing || d.Identity == "" || d.Number != (state.DeviceNumber{}) {
		t.Errorf("%+v", d)
	}
	attach(t, b, at("w", node), false)
}

// A damaged note stops what is asked for, and no teardown.
func TestDamagedNote(t *testing.T) {
	lib := t.TempDir()
	node, _ := newDisk(t, size)
	b, v := newBackend(t, lib), at("v", node)
	d := attach(t, b, v, false)
	path := b.claims.Path("v")
	require.NoError(t, os.WriteFile(path, []byte("{}"), 0o600))
	if now := want(t, b, v, state.DeviceAbsent); now.Err == nil || !strings.Contains(now.Err.Error(), path) || now.Number != d.Number || now.Missing {
		t.Errorf("%+v", now)
	}
	wantError(t, b.Attach(t.Context(), v, false), state.Internal, path)
	wantError(t, b.Clear(t.Context(), v), state.Internal, path)
	require.NoError(t, b.Detach(t.Context(), v))
	other, _ := newDisk(t, size)
	attach(t, b, at("other", other), false)
}

func TestOwnsAndLists(t *testing.T) {
	b := newBackend(t, t.TempDir())
	for _, id := range []string{"b", "a"} {
		node, _ := newDisk(t, size)
		attach(t, b, at(id, node), false)
	}
	if err := b.Detach(t.Context(), devices.Volume{ID: "b"}); err != nil { // by the id alone
		t.Fatal(err)
	}
	for id, want := range map[string]bool{"a": true, "b": true, "c": false} {
		if owns, err := b.Owns(t.Context(), id); owns != want || err != nil {
			t.Errorf("owns %s: %t, %v", id, owns, err)
		}
	}
	all, err := b.Attached(t.Context())
	if err != nil || len(all) != 1 || all[0].Volume != "a" || !all[0].Device.Attached() {
		t.Errorf("%+v, %v", all, err)
	}
}

// A link that leads elsewhere, or nowhere, changes nothing for a disk that is attached:
// it can be given up.
func TestLinkIsMovedWhileAttached(t *testing.T) {
	node, _ := newDisk(t, size)
	other, _ := newDisk(t, size)
	link := "/dev/shm/" + filepath.Base(t.TempDir()) + "-" + filepath.Base(node)
	t.Cleanup(func() { _ = os.Remove(link) }) // it may be gone
	for name, target := range map[string]string{"elsewhere": other, "to no disk": "/dev/null", "nowhere": "/dev/nothing", "in a circle": link} {
		t.Run(name, func(t *testing.T) {
			b, v := newBackend(t, t.TempDir()), at("v", link)
			require.NoError(t, errors.Join(os.RemoveAll(link), os.Symlink(node, link)))
			attach(t, b, v, true)
			require.NoError(t, errors.Join(os.Remove(link), os.Symlink(target, link)))
			if d := want(t, b, v, state.DeviceAttached); d.Path != node {
				t.Errorf("%+v", d)
			}
			require.NoError(t, b.Detach(t.Context(), v))
			want(t, b, v, state.DeviceAbsent)
			untouched(t, node)
			attach(t, b, at("w", node), false) // nobody has it any more
		})
	}
}

// A volume whose note was lost is known by the disk that it names, if that is mounted.
func TestNoteIsLost(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			lib := t.TempDir()
			node, _ := newDisk(t, smallest(fsType))
			machine.Mkfs(t, fsType, "-q", node)
			b, v := newBackend(t, lib), at("v", node)
			number := attach(t, b, v, false).Number
			dir := t.TempDir()
			run(t, "mount", node, dir)
			t.Cleanup(func() { run(t, "umount", dir) })
			require.NoError(t, os.RemoveAll(filepath.Join(lib, "disks")))
			if d := want(t, newBackend(t, lib), v, state.DeviceAbsent); d.Number != number {
				t.Errorf("its mounts are not known: %+v", d)
			}
		})
	}
}

// A disk and its partitions are not two volumes at a time, though nobody has claimed either.
func TestDiskAndItsPartition(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	disk := plug(t, file, "--partscan")
	b := newBackend(t, t.TempDir())
	whole, part := at("whole", disk), at("part", disk+"p1")
	attach(t, b, whole, false)
	run(t, "addpart", disk, "1", "2048", "2048") // as a virtual machine does, and then the node's kernel has looked
	wantError(t, b.Attach(t.Context(), part, false), state.FailedPrecondition, "the volume whole")
	require.NoError(t, b.Detach(t.Context(), whole))
	attach(t, b, part, false)
	wantError(t, b.Attach(t.Context(), whole, false), state.FailedPrecondition, "the volume part")
	wantError(t, b.Clear(t.Context(), whole), state.FailedPrecondition, "the volume part")
	require.NoError(t, b.Detach(t.Context(), part))
	run(t, "delpart", disk, "1")
}

// What others show raw, which claims nothing, is theirs: other drivers' volumes, and the
// plugin's own loop devices before they are shown.
func TestRawDevicesOfOthers(t *testing.T) {
	b := newBackend(t, t.TempDir())
	node, _ := newDisk(t, size)
	showRaw(t, node, func(target string) {
		wantError(t, b.Attach(t.Context(), at("v", node), false), state.FailedPrecondition, target)
	})
	attach(t, b, at("v", node), false)

	loops, err := loop.New(t.Context())
	require.NoError(t, err)
	views := blockdev.New(loops, nil)
	d := want(t, b, at("v", node), state.DeviceAttached)
	require.NoError(t, views.AttachView(t.Context(), d))
	view, err := views.FindView(t.Context(), d)
	require.NoError(t, err)
	wantError(t, b.Attach(t.Context(), at("w", view.Path), true), state.FailedPrecondition, view.Path, "a volume of its own")
	require.NoError(t, views.DetachView(t.Context(), d))
}

// showRaw calls f while a device node is bound, as raw volumes are shown to pods.
func showRaw(t *testing.T, node string, f func(target string)) {
	t.Helper()
	target := filepath.Join(t.TempDir(), "r w") // mountinfo escapes it
	require.NoError(t, os.WriteFile(target, nil, 0o600))
	run(t, "mount", "--bind", node, target)
	defer run(t, "umount", target)
	f(target)
}

// A disk that another driver shows raw is neither taken nor cleared, nor is one of which it
// shows a partition, or a partition of one that it shows. What is over a disk keeps it from
// being cleared, too.
func TestClearWhatOthersShowRaw(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	disk := plug(t, file, "--partscan")
	run(t, "addpart", disk, "1", "2048", "2048")
	defer run(t, "delpart", disk, "1")
	b := newBackend(t, t.TempDir())
	volumes := map[string]devices.Volume{}
	for _, node := range []string{disk, disk + "p1"} {
		v := at(filepath.Base(node), node)
		v.Context[ContentsKey] = anyContents
		attach(t, b, v, false) // so that it is known which disk is to be cleared
		require.NoError(t, b.Detach(t.Context(), v))
		volumes[node] = v
	}
	for _, shown := range []string{disk, disk + "p1"} {
		showRaw(t, shown, func(target string) {
			for node, v := range volumes {
				t.Run(filepath.Base(node)+" while it is "+filepath.Base(shown), func(t *testing.T) {
					wantError(t, b.Attach(t.Context(), v, false), state.FailedPrecondition, target)
					wantError(t, b.Unused(t.Context(), v), state.FailedPrecondition, target)
					wantError(t, b.Clear(t.Context(), v), state.FailedPrecondition, target)
				})
			}
		})
	}
	for _, shown := range [][]string{{disk}, {disk + "p1"}, {"--offset", "1048576", disk}} {
		over := machine.Losetup(t, shown...)
		for _, v := range volumes {
			wantError(t, b.Attach(t.Context(), v, false), state.FailedPrecondition, over)
			wantError(t, b.Clear(t.Context(), v), state.FailedPrecondition, over)
		}
		machine.LosetupDetach(t, over)
	}
	for _, v := range volumes {
		require.NoError(t, b.Unused(t.Context(), v))
	}
}

// A partition by one path to a disk, and the disk by another path, are no two volumes.
func TestPartitionByAnotherPath(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	part, _ := newPartition(t, file)
	other, _ := newPartition(t, file)
	b := newBackend(t, t.TempDir())
	v, whole := at("part", part), at("whole", strings.TrimSuffix(other, "p1"))
	whole.Context[ContentsKey] = anyContents
	attach(t, b, whole, false) // so that it is known which disk is to be cleared
	require.NoError(t, b.Detach(t.Context(), whole))
	attach(t, b, v, false)
	wantError(t, b.Attach(t.Context(), whole, false), state.FailedPrecondition, "the volume part")
	wantError(t, b.Clear(t.Context(), whole), state.FailedPrecondition, "the volume part")
	require.NoError(t, b.Detach(t.Context(), v))
	attach(t, b, whole, false)
	wantError(t, b.Attach(t.Context(), v, false), state.FailedPrecondition, "the volume whole")
	require.NoError(t, b.Detach(t.Context(), whole))
}

// A name that no path can have is refused before anything is kept of the volume.
func TestPathsThatCannotBe(t *testing.T) {
	b := newBackend(t, t.TempDir())
	for _, path := range []string{"/dev/a\x00b", "/dev/" + strings.Repeat("x/", 3000) + "x"} {
		wantError(t, b.Validate(at("v", path)), state.InvalidArgument, "path")
	}
	v := at("v", "/dev/"+strings.Repeat("x", 300)) // longer than a name may be
	if d := want(t, b, v, state.DeviceAbsent); d.Err == nil {
		t.Errorf("%+v", d)
	}
	require.NoError(t, b.Detach(t.Context(), v))
}
