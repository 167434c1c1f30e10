package pool_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// createWith makes a volume of a sector size and returns the path of its data.
func createWith(t testing.TB, p *pool.Pool, id string, how pool.Provisioning, sector int64) string {
	t.Helper()
	_, err := p.Create(t.Context(), pool.Volume{ID: id, Name: id, Bytes: devicestest.Size, Provisioning: how, SectorBytes: sector})
	require.NoError(t, err)
	path, err := p.DataPath(id)
	require.NoError(t, err)
	return path
}

// device is what sysfs says of a loop device.
type device struct {
	sector                      int
	readOnly, detaching, direct bool
}

// asked is what the kernel says of a device.
func asked(t testing.TB, d state.Device) device {
	t.Helper()
	dir := "/sys/block/" + filepath.Base(d.Path)
	sector, err := strconv.Atoi(sysfs(dir + "/queue/logical_block_size"))
	if err != nil || sysfs(dir+"/loop/backing_file") == "" {
		t.Fatalf("%s is not attached: %v", d.Path, err)
	}
	return device{sector, sysfs(dir+"/ro") == "1", sysfs(dir+"/loop/autoclear") == "1", sysfs(dir+"/loop/dio") == "1"}
}

func view(t testing.TB, b *backend, d state.Device) state.Device {
	t.Helper()
	require.NoError(t, b.AttachView(t.Context(), d))
	v, err := b.FindView(t.Context(), d)
	if err != nil || v.State != state.DeviceAttached {
		t.Fatalf("view of %s: %+v, %v", d.Path, v, err)
	}
	return v
}

// poolOn makes a pool on a file system of its own, mounted as asked.
func poolOn(t testing.TB, source, fsType, options string) (*pool.Pool, string) {
	t.Helper()
	machine.Kernel(t)
	mountpoint := t.TempDir()
	if err := unix.Mount(source, mountpoint, fsType, 0, options); err != nil {
		t.Fatalf("mount %s on %s: %v", fsType, mountpoint, err)
	}
	t.Cleanup(func() {
		// A device that was detached goes with the last who has it open: others look at all devices.
		if err := machine.Unmount(mountpoint); err != nil {
			t.Error(err)
		}
	})
	return openPool(t, filepath.Join(mountpoint, "pool"))
}

// disk makes a disk with sectors of so many bytes and a file system on it.
func disk(t testing.TB, sector int, fsType string, bytes int64) string {
	t.Helper()
	machine.Kernel(t)
	path := machine.Losetup(t, "--sector-size", fmt.Sprint(sector), machine.Image(t, bytes))
	machine.Mkfs(t, fsType, "-q", path)
	return path
}

func TestSectorsAreThoseOfTheMetadata(t *testing.T) {
	for sector, wanted := range map[int64]int{0: 512, 512: 512, 4096: 4096} {
		t.Run(fmt.Sprint(sector), func(t *testing.T) {
			p, _ := newPool(t)
			b := newBackend(t, p)
			createWith(t, p, "vol", pool.Thin, sector)
			for _, readOnly := range []bool{true, false} {
				if d := asked(t, attach(t, b, "vol", readOnly)); d.sector != wanted {
					t.Errorf("read-only %t: sectors of %d bytes, want %d", readOnly, d.sector, wanted)
				}
			}
			d := attach(t, b, "vol", false)
			if v := asked(t, view(t, b, d)); v.sector != wanted || !v.readOnly {
				t.Errorf("the view has sectors of %d bytes, want %d; read-only %t", v.sector, wanted, v.readOnly)
			}
		})
	}
}

// TestOtherSectorsAreMended: somebody has changed them (losetup --sector-size).
func TestOtherSectorsAreMended(t *testing.T) {
	b, _ := setup(t, pool.Thick)
	d := attach(t, b, "vol", false)
	f, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_EXCL, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_BLOCK_SIZE, 4096))
	wantError(t, b.Attach(t.Context(), "vol", false), state.FailedPrecondition, d.Path, "sectors of 4096")
	require.NoError(t, f.Close())
	if d := asked(t, attach(t, b, "vol", false)); d.sector != 512 {
		t.Errorf("sectors of %d bytes", d.sector)
	}
}

func TestDirectIOWhereItFits(t *testing.T) {
	const large = 400 << 20 // mkfs.xfs makes nothing under 300 MiB
	for _, tt := range []struct {
		name   string
		pool   func(t *testing.T) (*pool.Pool, string)
		sector int64
		direct bool
	}{
		{"ext4", func(t *testing.T) (*pool.Pool, string) { return poolOn(t, disk(t, 512, "ext4", 64<<20), "ext4", "") }, 512, true},
		{"ext4 on sectors of 4096 bytes", func(t *testing.T) (*pool.Pool, string) { return poolOn(t, disk(t, 4096, "ext4", 64<<20), "ext4", "") }, 4096, true},
		{"volume's sectors smaller than the disk's", func(t *testing.T) (*pool.Pool, string) { return poolOn(t, disk(t, 4096, "ext4", 64<<20), "ext4", "") }, 0, false},
		{"ext4 that journals data", func(t *testing.T) (*pool.Pool, string) {
			return poolOn(t, disk(t, 512, "ext4", 64<<20), "ext4", "data=journal")
		}, 512, false},
		{"xfs", func(t *testing.T) (*pool.Pool, string) { return poolOn(t, disk(t, 512, "xfs", large), "xfs", "") }, 512, true},
		{"xfs on sectors of 4096 bytes", func(t *testing.T) (*pool.Pool, string) { return poolOn(t, disk(t, 4096, "xfs", large), "xfs", "") }, 0, false},
		{"tmpfs", func(t *testing.T) (*pool.Pool, string) { return poolOn(t, "tmpfs", "tmpfs", "size=64m") }, 4096, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, _ := tt.pool(t)
			b := newBackend(t, p)
			data := createWith(t, p, "vol", pool.Thin, tt.sector)
			d := attach(t, b, "vol", false)
			if got := asked(t, d).direct; got != tt.direct {
				t.Errorf("direct I/O: %t, want %t", got, tt.direct)
			}
			v := view(t, b, d)
			junk := bytes.Repeat([]byte("data"), 1<<18)
			f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
			require.NoError(t, err)
			_, err = f.WriteAt(junk, 1<<20)
			require.NoError(t, errors.Join(err, f.Sync(), f.Close()))
			for _, path := range []string{data, d.Path, v.Path} {
				got, err := os.ReadFile(path)
				if err != nil || len(got) != devicestest.Size || !bytes.Equal(got[1<<20:2<<20], junk) {
					t.Errorf("%s does not read what was written: %d bytes, %v", path, len(got), err)
				}
			}
		})
	}
}

// trimmed mounts an ext4 on a device, writes and deletes a file, and trims.
func trimmed(t *testing.T, d state.Device) error {
	t.Helper()
	run(t, "mkfs.ext4", "-q", "-E", "nodiscard", d.Path)
	dir := t.TempDir()
	require.NoError(t, unix.Mount(d.Path, dir, "ext4", 0, ""))
	defer func() {
		if err := machine.Unmount(dir); err != nil {
			t.Error(err)
		}
	}()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("x"), 2<<20), 0o600))
	root, err := os.Open(dir)
	require.NoError(t, err)
	defer root.Close()
	require.NoError(t, errors.Join(unix.Syncfs(int(root.Fd())), os.Remove(file), unix.Syncfs(int(root.Fd()))))
	span := struct{ start, length, shortest uint64 }{length: 1 << 40}
	const fitrim = 0xc0185879 // _IOWR('X', 121, struct fstrim_range), linux/fs.h
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), fitrim, uintptr(unsafe.Pointer(&span))); errno != 0 {
		return errno
	}
	return nil
}

func TestTrimGivesBackTheBlocksOfThinVolumes(t *testing.T) {
	b, data := setup(t, pool.Thin)
	require.NoError(t, trimmed(t, attach(t, b, "vol", false)))
	if got := machine.Allocated(t, data); got >= 2<<20 {
		t.Errorf("%d bytes are allocated after a trim", got)
	}
}

func TestThickVolumesKeepTheirBlocks(t *testing.T) {
	b, data := setup(t, pool.Thick)
	d := attach(t, b, "vol", false)
	if err := trimmed(t, d); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("FITRIM: %v", err)
	}
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	span := [2]uint64{0, devicestest.Size}
	for name, request := range map[string]uintptr{"BLKDISCARD": unix.BLKDISCARD, "BLKZEROOUT": unix.BLKZEROOUT} {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&span)))
		if refused := errno != 0; refused != (request == unix.BLKDISCARD) {
			t.Errorf("%s: %v", name, errno)
		}
	}
	if err := rawfile.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20); err == nil {
		t.Error("the device took a punch")
	}
	if got := machine.Allocated(t, data); got < devicestest.Size {
		t.Errorf("%d of %d bytes are allocated", got, devicestest.Size)
	}
}

// TestThickDevicesRefuseDiscardsAgain: after a reclaim, and after a crash
// between a device's configuration and its limit.
func TestThickDevicesRefuseDiscardsAgain(t *testing.T) {
	b, data := setup(t, pool.Thick)
	require.NoError(t, b.AttachTakingDiscards(t.Context(), b.loops, data, "vol"))
	b = newBackend(t, b.Pool())
	d := want(t, b, "vol", state.DeviceAttached)
	if !discardIsOff(d.Path) {
		t.Error("after a restart, the device takes discards")
	}
	closeIt := openFile(t, d.Path, os.O_RDONLY)
	defer closeIt()
	wantError(t, b.Detach(t.Context(), "vol"), state.Unavailable)
	attach(t, b, "vol", false)
	if !discardIsOff(d.Path) {
		t.Error("after a reclaim, the device takes discards")
	}
}

func punchFile(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	err = rawfile.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 1<<20, 2<<20)
	require.NoError(t, errors.Join(err, f.Close()))
}

func TestAttachAllocatesWhatAThickVolumeLacks(t *testing.T) {
	b, data := setup(t, pool.Thick)
	punchFile(t, data)
	attach(t, b, "vol", true)
	if got := machine.Allocated(t, data); got >= devicestest.Size {
		t.Errorf("attaching read-only allocated %d bytes", got)
	}
	attach(t, b, "vol", false)
	if got := machine.Allocated(t, data); got < devicestest.Size {
		t.Errorf("%d of %d bytes are allocated", got, devicestest.Size)
	}
}

// TestAttachWithoutRoomForTheBlocks: the data is there, so the volume is shown.
func TestAttachWithoutRoomForTheBlocks(t *testing.T) {
	for _, fsType := range []string{"tmpfs", "ext4"} { // which keeps what it has allocated until it fails
		source := fsType
		if fsType == "ext4" {
			source = disk(t, 512, fsType, 64<<20)
			run(t, "tune2fs", "-m", "0", source)
		}
		p, dir := poolOn(t, source, fsType, map[string]string{"tmpfs": "size=16m"}[fsType])
		b := newBackend(t, p)
		data := create(t, p, "vol", pool.Thick)
		punchFile(t, data)
		var fs unix.Statfs_t
		require.NoError(t, unix.Statfs(dir, &fs))
		other := filepath.Join(filepath.Dir(dir), "other")
		require.NoError(t, os.WriteFile(other, make([]byte, int64(fs.Bavail)*fs.Bsize-1<<20), 0o600))
		run(t, "sync", "--file-system", other)
		before := machine.Allocated(t, data)
		attach(t, b, "vol", false)
		if got := machine.Allocated(t, data); got != before {
			t.Errorf("%s: %d bytes are allocated, %d before: the rest of the room was taken in vain", fsType, got, before)
		}
	}
}

// TestThickVolumeOnAFullBtrfs: what the volume holds is written over in place, also where
// new files are compressed.
func TestThickVolumeOnAFullBtrfs(t *testing.T) {
	p, dir := poolOn(t, disk(t, 512, "btrfs", 128<<20), "btrfs", "")
	run(t, "chattr", "+c", filepath.Join(dir, "tmp"))
	contents, err := unix.Mmap(-1, 0, 32<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(contents)) }()
	_, _ = rand.Read(contents) // never fails
	_, err = p.Create(t.Context(), pool.Volume{ID: "vol", Name: "vol", Bytes: int64(len(contents)), Provisioning: pool.Thick})
	require.NoError(t, err)
	path, err := p.DataPath("vol")
	require.NoError(t, err)
	fill := func(path string, flags int) error {
		f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT|flags, 0o600) // as a loop device writes
		require.NoError(t, err)
		_, err = f.Write(contents)
		return errors.Join(err, f.Sync(), f.Close())
	}
	require.NoError(t, fill(path, 0))
	for i := 0; err == nil; i++ {
		err = fill(filepath.Join(filepath.Dir(dir), fmt.Sprint(i)), os.O_CREATE)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	require.NoError(t, fill(path, 0))
}

// TestNextUserOfTheDevice: whoever gets the number next can write to it, in
// sectors of the usual size.
func TestNextUserOfTheDevice(t *testing.T) {
	p, dir := newPool(t)
	b := newBackend(t, p)
	createWith(t, p, "vol", pool.Thick, 4096)
	other := filepath.Join(dir, "other")
	require.NoError(t, os.WriteFile(other, make([]byte, devicestest.Size), 0o600))
	for _, readOnly := range []bool{false, true} {
		for taken := false; !taken; {
			d := attach(t, b, "vol", readOnly)
			require.NoError(t, b.Detach(t.Context(), "vol"))
			out, err := exec.Command("losetup", d.Path, other).CombinedOutput()
			if taken = err == nil; taken {
				if now := asked(t, d); now.readOnly || now.sector != 512 || now.detaching {
					t.Errorf("the next user's device: %+v", now)
				}
				losetupDetach(t, d.Path)
			} else if !bytes.Contains(out, []byte("busy")) && !bytes.Contains(out, []byte("No such")) { // another test has the number
				t.Fatalf("losetup %s: %v: %s", d.Path, err, out)
			}
		}
	}
}

// TestThinVolumeIsGivenNoLimitedDevice: such as a thick volume leaves.
func TestThinVolumeIsGivenNoLimitedDevice(t *testing.T) {
	b, data := setup(t, pool.Thin)
	other := filepath.Join(filepath.Dir(data), "other")
	require.NoError(t, os.WriteFile(other, make([]byte, devicestest.Size), 0o600))
	path := machine.Losetup(t, other)
	require.NoError(t, os.WriteFile("/sys/block/"+filepath.Base(path)+"/queue/discard_max_bytes", []byte("0"), 0))
	run(t, "losetup", "--detach", path)
	t.Cleanup(func() { leaveAsNew(t, path) })
	if d := attach(t, b, "vol", false); discardIsOff(d.Path) {
		t.Errorf("%s refuses the discards of a thin volume; the limit was set on %s", d.Path, path)
	}
}

// TestThinVolumeIsGivenNoDeviceLimitedSince: that the device passed discards on at the last
// attach says nothing of this one.
func TestThinVolumeIsGivenNoDeviceLimitedSince(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	path := attach(t, b, "vol", false).Path
	require.NoError(t, os.WriteFile("/sys/block/"+filepath.Base(path)+"/queue/discard_max_bytes", []byte("0"), 0))
	t.Cleanup(func() { leaveAsNew(t, path) })
	require.NoError(t, b.Detach(t.Context(), "vol"))
	if d := attach(t, b, "vol", false); discardIsOff(d.Path) {
		t.Errorf("%s refuses the discards of a thin volume; the limit was set on %s", d.Path, path)
	}
}

// elsewhere runs the test in a process with a mount namespace of its own,
// prepared by prepare. It returns false in the process that started that one.
func elsewhere(t *testing.T, prepare func()) bool {
	t.Helper()
	machine.Kernel(t)
	const name = "CSI_NODE_TEST_ELSEWHERE"
	if os.Getenv(name) == t.Name() {
		prepare()
		return true
	}
	args := machine.InNamespace("private", t.TempDir(), `exec "$@"`, os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), name+"="+t.Name())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("elsewhere: %v:\n%s", err, out)
	}
	return false
}

// ownDev gives the process a /dev like that of a container, without loop devices.
func ownDev(t *testing.T) func() {
	return func() {
		t.Helper()
		require.NoError(t, unix.Mount("tmpfs", "/dev", "tmpfs", 0, "mode=755"))
		for path, number := range map[string][2]uint32{"/dev/null": {1, 3}, "/dev/loop-control": {10, 237}} {
			require.NoError(t, unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(number[0], number[1]))))
		}
	}
}

func TestNodesAreMade(t *testing.T) {
	if !elsewhere(t, ownDev(t)) {
		return
	}
	b, _ := setup(t, pool.Thin)
	umask := unix.Umask(0o077)
	d := attach(t, b, "vol", false)
	v := view(t, b, d)
	unix.Umask(umask)
	disk := "0"
	if out, err := exec.Command("getent", "group", "disk").Output(); err == nil {
		disk = strings.Split(string(out), ":")[2]
	}
	for _, d := range []state.Device{d, v} {
		var st unix.Stat_t
		require.NoError(t, unix.Stat(d.Path, &st))
		if st.Mode != unix.S_IFBLK|0o660 || st.Uid != 0 || fmt.Sprint(st.Gid) != disk || devnode.NumberOf(st.Rdev) != d.Number {
			t.Errorf("%s: mode %o, owner %d:%d, device %s; want device %s and group %s", d.Path, st.Mode, st.Uid, st.Gid, devnode.NumberOf(st.Rdev), d.Number, disk)
		}
	}
	require.NoError(t, os.Remove(d.Path))
	if again := want(t, b, "vol", state.DeviceAttached); again != d {
		t.Errorf("%+v, before %+v", again, d)
	}
	require.NoError(t, b.DetachView(t.Context(), d))
	require.NoError(t, b.Detach(t.Context(), "vol"))
}

func TestWrongNodesAreLeftAlone(t *testing.T) {
	if !elsewhere(t, ownDev(t)) {
		return
	}
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	for name, put := range map[string]func() error{
		"a file with data":       func() error { return os.WriteFile(d.Path, []byte("data"), 0o600) },
		"a pipe":                 func() error { return unix.Mkfifo(d.Path, 0o600) },
		"a link":                 func() error { return os.Symlink("/dev/null", d.Path) },
		"a character device":     func() error { return unix.Mknod(d.Path, unix.S_IFCHR|0o600, int(unix.Mkdev(7, d.Number.Minor))) },
		"the node of another":    func() error { return unix.Mknod(d.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, d.Number.Minor+1<<10))) },
		"the node of other kind": func() error { return unix.Mknod(d.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(8, d.Number.Minor))) },
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.Remove(d.Path))
			require.NoError(t, put())
			before, err := os.Lstat(d.Path)
			require.NoError(t, err)
			_, err = b.Find(t.Context(), "vol")
			wantError(t, err, state.Unavailable, "vol", d.Path, "remove it")
			wantError(t, b.Detach(t.Context(), "vol"), state.Unavailable, d.Path)
			if after, err := os.Lstat(d.Path); err != nil || !os.SameFile(before, after) || before.Mode() != after.Mode() {
				t.Errorf("%s was touched: %v, %v", d.Path, after, err)
			}
		})
	}
	require.NoError(t, os.Remove(d.Path))
	if again := want(t, b, "vol", state.DeviceAttached); again != d {
		t.Errorf("after its removal: %+v, before %+v", again, d)
	}
}

// TestReadOnlySysfs: nothing can refuse discards there, and a thick volume is
// attached all the same.
func TestReadOnlySysfs(t *testing.T) {
	if !elsewhere(t, func() {
		require.NoError(t, unix.Mount("", "/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	}) {
		return
	}
	number := machine.FreeLoop(t) // of a device that has refused none yet
	b, data := setup(t, pool.Thick)
	b.loops.Reserve(loop.Numbers{Published: func(string, bool) []state.DeviceNumber { return []state.DeviceNumber{number} }})
	d := attach(t, b, "vol", false)
	run(t, "blkdiscard", d.Path)
	if got := machine.Allocated(t, data); got != 0 {
		t.Errorf("%d bytes are allocated after a discard, so something refuses it after all", got)
	}
	require.NoError(t, b.Detach(t.Context(), "vol"))
	attach(t, b, "vol", false)
	if got := machine.Allocated(t, data); got < devicestest.Size {
		t.Errorf("%d of %d bytes are allocated", got, devicestest.Size)
	}
}
