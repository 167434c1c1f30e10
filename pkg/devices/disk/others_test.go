package disk

import (
	"context"
	"errors"
	"fmt"
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

// Who works on a partition by one path keeps others from the disk by another path, and the other way
// round.
func TestTurnsOfADiskAndItsPartition(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	part, _ := newPartition(t, file)
	other, _ := newPartition(t, file)
	b := newBackend(t, t.TempDir())
	look := func(node string) blockdev.Info {
		info, err := blockdev.Look(node)
		require.NoError(t, err)
		return info
	}
	for _, one := range [][2]string{{part, strings.TrimSuffix(other, "p1")}, {strings.TrimSuffix(other, "p1"), part}, {part, other}} {
		done, err := b.turn(t.Context(), look(one[0]))
		require.NoError(t, err)
		short, stop := context.WithTimeout(t.Context(), claimInterval)
		if end, err := b.turn(short, look(one[1])); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s during the turn of %s: %v", one[1], one[0], err)
			end()
		}
		stop()
		done()
	}
}

// What programs have of a partition in memory they would write back after a clearing.
func TestClearWhileAPartitionIsOpen(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	disk := plug(t, file, "--partscan")
	b, v := newBackend(t, t.TempDir()), at("v", disk)
	attach(t, b, v, false) // so that it is known which disk is to be cleared
	require.NoError(t, b.Detach(t.Context(), v))
	run(t, "addpart", disk, "1", "2048", "2048")
	part, err := os.OpenFile(disk+"p1", os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = part.Close() }) // again, perhaps
	_, err = part.WriteString("data")
	require.NoError(t, errors.Join(err, part.Sync()))
	err = b.Clear(t.Context(), v)
	if wantError(t, err, state.FailedPrecondition, filepath.Base(disk)+"p1", "is open"); !errors.As(err, new(*state.Unwritten)) {
		t.Errorf("something may have been written: %v", err)
	}
	if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw[1<<20:]), "data") {
		t.Errorf("it was cleared (%v)", err)
	}
	require.NoError(t, part.Close())
	require.NoError(t, b.Clear(t.Context(), v))
	if raw, err := os.ReadFile(file); err != nil || strings.Trim(string(raw), "\x00") != "" {
		t.Errorf("it was not cleared (%v)", err)
	}
}

// withFiles calls f while the process can open no more files than those.
func withFiles(t *testing.T, files int, f func()) {
	t.Helper()
	var was unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: was.Max}))
	var open []*os.File
	for {
		f, err := os.Open("/dev/null")
		if err != nil {
			break
		}
		open = append(open, f)
	}
	for i, file := range open {
		if i < files {
			_ = file.Close()
		}
	}
	defer func() {
		for _, file := range open {
			_ = file.Close() // some for the second time
		}
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was))
	}()
	f()
}

// A process that has no files left does not take what it could not look at for free.
func TestNoFilesLeft(t *testing.T) {
	b := newBackend(t, t.TempDir())
	node, _ := newDisk(t, size)
	used, _ := newDisk(t, size)
	over := plug(t, used)
	v := at("v", node)
	require.NoError(t, os.MkdirAll(string(b.claims), 0o700))
	var attachErr error
	for files := 0; state.ClassOf(attachErr) != state.FailedPrecondition; files++ {
		withFiles(t, files, func() { attachErr = b.Attach(t.Context(), at("under", used), false) })
		if attachErr == nil {
			t.Fatalf("with %d files to open the disk under %s is taken", files, over)
		}
	}
	attach(t, b, v, true)
	detachErr := errors.New("none yet")
	for files := 0; detachErr != nil; files++ {
		want(t, b, v, state.DeviceAttached)
		withFiles(t, files, func() { detachErr = b.Detach(t.Context(), v) })
	}
	want(t, b, v, state.DeviceAbsent)
	untouched(t, node)
}

// A note that cannot be read just now may tell of a disk that is to be given up.
func TestDetachWithANoteThatCannotBeRead(t *testing.T) {
	b, v, node := attached(t, true)
	path := b.claims.Path("v")
	require.NoError(t, errors.Join(os.Rename(path, path+".away"), os.Mkdir(path, 0o700)))
	wantError(t, b.Detach(t.Context(), v), state.Unavailable, path)
	require.NoError(t, errors.Join(os.Remove(path), os.Rename(path+".away", path)))
	require.NoError(t, b.Detach(t.Context(), v))
	untouched(t, node)
}

// A disk without a node in /dev is there all the same.
func TestDetachWithoutANode(t *testing.T) {
	b, v, node := attached(t, true)
	release := devicestest.Hold(t, node)
	require.NoError(t, os.Remove(node))
	wantError(t, b.Detach(t.Context(), v), state.Unavailable, node, "in use")
	want(t, b, v, state.DeviceAttached)
	release()
	require.NoError(t, os.Remove(node))
	require.NoError(t, b.Detach(t.Context(), v))
	untouched(t, node)
}

// The read-only mode that Attach has set is noted until it is taken back, and no longer.
func TestSwitchToReadWrite(t *testing.T) {
	b, v, node := attached(t, true)
	attach(t, b, v, false)
	run(t, "blockdev", "--setro", node) // somebody else's
	require.NoError(t, b.Detach(t.Context(), v))
	if info, err := blockdev.Look(node); err != nil || !info.ReadOnly {
		t.Errorf("%+v, %v", info, err)
	}

	protected := at("protected", plug(t, machine.Image(t, size), "--read-only"))
	attach(t, b, protected, true)
	c, _, err := b.known(protected)
	require.NoError(t, err)
	c.Attached.ReadOnly = true // else the switch could not be stopped half-way
	require.NoError(t, b.claims.Write("protected", c))
	wantError(t, b.Attach(t.Context(), protected, false), state.FailedPrecondition, "takes no writes")
	if c, _, err := b.known(protected); err != nil || !c.Attached.ReadOnly {
		t.Errorf("what has become of the mode is not known: %+v, %v", c.Attached, err)
	}
}

// A loop device over a disk is seen though the node by which it was made is another file now.
func TestLoopDeviceOverANodeThatWasMadeAgain(t *testing.T) {
	b := newBackend(t, t.TempDir())
	node, _ := newDisk(t, size)
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	over := machine.Losetup(t, node)
	require.NoError(t, os.Remove(node))
	if loops, err := info.Loops(); err != nil || len(loops) != 1 {
		t.Errorf("without a node: %q, %v", loops, err)
	}
	require.NoError(t, unix.Mknod(node, unix.S_IFBLK|0o660, int(unix.Mkdev(info.Number.Major, info.Number.Minor))))
	wantError(t, b.Attach(t.Context(), at("v", node), false), state.FailedPrecondition, over)
	machine.LosetupDetach(t, over)
	attach(t, b, at("v", node), false)
}

// What shows the disk of a volume, by however many loop devices, is no other disk.
func TestLoopDevicesOverAVolume(t *testing.T) {
	b := newBackend(t, t.TempDir())
	node, _ := newDisk(t, 8<<20)
	over := plug(t, node, "--partscan")
	run(t, "addpart", over, "1", "2048", "2048")
	t.Cleanup(func() { run(t, "delpart", over, "1") })
	second := plug(t, over)
	c := claimOf(at("v", node), spec{}, "")
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	c.Identity, c.Attached = info.Identity(), &attachment{Boot: b.boot, Number: info.Number, Path: node, Sequence: info.Sequence}
	require.NoError(t, b.claims.Write("v", c)) // as it was before the loop devices were made
	for _, other := range []string{over, over + "p1", second} {
		w := at("w", other)
		w.Context[ContentsKey] = anyContents
		wantError(t, b.Attach(t.Context(), w, false), state.FailedPrecondition, other, "the volume v")
	}
}

// A partition of what the plugin has attached for a volume is that volume's.
func TestPartitionOfAnOwnLoopDevice(t *testing.T) {
	machine.Kernel(t)
	loops, err := loop.New(t.Context())
	require.NoError(t, err)
	loops.Reserve(loop.Numbers{Bound: machine.Bound})
	file := machine.Image(t, 8<<20)
	id, err := loop.StatFile(file)
	require.NoError(t, err)
	target := loop.Target{Tag: loop.Tag("place", "vol"), File: id, Path: file, Place: "place"}
	require.NoError(t, loops.Attach(t.Context(), loop.Request{
		Target: target, Shape: loop.Shape{Sector: 512}, Open: func() (*os.File, error) { return os.OpenFile(file, os.O_RDWR, 0) },
	}))
	t.Cleanup(func() { require.NoError(t, loops.Detach(context.Background(), target)) })
	d, err := loops.Current(t.Context(), target)
	require.NoError(t, err)
	f, err := os.OpenFile(d.Path(), os.O_RDWR, 0)
	require.NoError(t, err)
	status, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	require.NoError(t, err)
	status.Flags |= unix.LO_FLAGS_PARTSCAN
	require.NoError(t, errors.Join(unix.IoctlLoopSetStatus64(int(f.Fd()), status), f.Close()))
	run(t, "addpart", d.Path(), "1", "2048", "2048")
	t.Cleanup(func() { run(t, "delpart", d.Path(), "1") })
	b := newBackend(t, t.TempDir())
	wantError(t, b.Attach(t.Context(), at("w", d.Path()+"p1"), false), state.FailedPrecondition, d.Path()+"p1", "a volume of its own")
}

// A pod can make any partition of its raw disk, also one with the UUID of another.
func TestPartitionOfARawVolume(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	_, ownFile := newDisk(t, 8<<20)
	uuid := fmt.Sprintf("%08x-01", os.Getpid()) // no disk of another process has it
	pods, podsDir := newPartition(t, file)
	own, ownDir := newPartition(t, ownFile)
	tell := func(node, dir, more string) {
		uevent := filepath.Join(dir, filepath.Base(node), "uevent")
		require.NoError(t, os.WriteFile(uevent, []byte("DEVNAME="+filepath.Base(node)+"\n"+more), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(ownDir, "serial"), []byte("def\n"), 0o600))
	tell(pods, podsDir, "PARTUUID="+uuid+"\n")
	tell(own, ownDir, "")
	set, vm, w := newSet(t, t.TempDir()), at("vm", strings.TrimSuffix(pods, "p1")), at("w", pods)
	byUUID := devices.Volume{ID: "by-uuid", Context: map[string]string{"partUUID": uuid}}
	attach(t, set, byUUID, false) // it is the backend's to find again by where it was
	require.NoError(t, set.Detach(t.Context(), byUUID))
	vm.Context[ContentsKey] = anyContents
	attach(t, set, vm, false)
	require.NoError(t, set.BeginRaw(t.Context(), vm))
	require.NoError(t, set.Detach(t.Context(), vm))
	for _, v := range []devices.Volume{w, {ID: "another", Context: byUUID.Context}} {
		wantError(t, set.Attach(t.Context(), v, false), state.FailedPrecondition, pods, "somebody's", "raw block volume vm")
	}
	tell(own, ownDir, "PARTUUID="+uuid+"\n")
	if d := attach(t, set, devices.Volume{ID: "another", Context: byUUID.Context}, false); d.Path != own {
		t.Errorf("%+v", d)
	}
	attach(t, set, vm, false) // its own pods' partitions do not matter to it
}

// Another disk that does not answer keeps nobody waiting: of others, the node is not asked.
func TestOtherDisksAreNotAsked(t *testing.T) {
	_, file := newDisk(t, 8<<20)
	part, _ := newPartition(t, file)
	other, _ := newPartition(t, file)
	disk := strings.TrimSuffix(other, "p1")
	b, whole := newBackend(t, t.TempDir()), at("whole", disk)
	whole.Context[ContentsKey] = anyContents
	silent := func(f func()) {
		t.Helper()
		require.NoError(t, errors.Join(os.Rename(disk, disk+"-away"), os.WriteFile(disk, nil, 0o600))) // what would ask it fails
		defer func() { require.NoError(t, os.Rename(disk+"-away", disk)) }()
		f()
	}
	attach(t, b, whole, false)
	silent(func() {
		wantError(t, b.Attach(t.Context(), at("part", part), false), state.FailedPrecondition, "the volume whole")
	})
	require.NoError(t, b.Detach(t.Context(), whole))
	showRaw(t, disk, func(target string) {
		silent(func() {
			wantError(t, b.Attach(t.Context(), at("part", part), false), state.FailedPrecondition, target)
		})
	})
}

// One device that cannot be looked at keeps nobody from another that is there, and makes none absent.
func TestSearchBesideADeviceThatCannotBeRead(t *testing.T) {
	node, file := newDisk(t, 8<<20)
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	_, dir := newPartition(t, file)
	serial := filepath.Join(dir, "serial") // to read it is EISDIR, as any error of a driver
	require.NoError(t, errors.Join(os.Remove(serial), os.Mkdir(serial, 0o700)))
	b := newBackend(t, t.TempDir())
	by := func(id, kind, value string) devices.Volume {
		return devices.Volume{ID: id, Context: map[string]string{kind: value}}
	}
	attach(t, b, by("v", "loop", info.Identities[blockdev.Backing]), false)
	wantError(t, b.Attach(t.Context(), by("w", "wwid", "naa.60"), false), state.Unavailable, "serial")
}
