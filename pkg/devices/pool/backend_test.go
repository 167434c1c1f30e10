package pool_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestForeignDeviceIsReportedAndLeftAlone(t *testing.T) {
	for name, losetup := range map[string]func(t *testing.T, data string) string{
		"same path": func(t *testing.T, data string) string { return machine.Losetup(t, data) },
		"hard link": func(t *testing.T, data string) string {
			link := filepath.Join(filepath.Dir(data), "link")
			require.NoError(t, os.Link(data, link))
			return machine.Losetup(t, link)
		},
		"a part, read-only": func(t *testing.T, data string) string {
			return machine.Losetup(t, "-r", "-o", "4096", data)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, data := setup(t, pool.Thin)
			path := losetup(t, data)
			want(t, b, "vol", state.DeviceAbsent) // Find looks at the index only

			wantError(t, b.Attach(t.Context(), "vol", false), state.FailedPrecondition, path, "losetup -d")
			if d := want(t, b, "vol", state.DeviceForeign); !strings.Contains(d.Holder, path) || d.Number != (state.DeviceNumber{}) {
				t.Errorf("foreign: %+v", d)
			}
			want(t, newBackend(t, b.Pool()), "vol", state.DeviceForeign) // New finds it

			wantError(t, b.Delete(t.Context(), "vol"), state.FailedPrecondition, path)
			require.NoError(t, b.Detach(t.Context(), "vol"))
			require.NoError(t, b.Grow(t.Context(), "vol", 2*devicestest.Size))
			want(t, b, "vol", state.DeviceForeign)
			losetupDetach(t, path)
			want(t, b, "vol", state.DeviceAbsent)
			attach(t, b, "vol", false)
		})
	}
}

func TestDetachOfOpenDeviceNamesTheOpener(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	before := attach(t, b, "vol", false)
	closeIt := openFile(t, before.Path, os.O_RDONLY)
	wantError(t, b.Detach(t.Context(), "vol"), state.Unavailable, before.Path, fmt.Sprintf("process %d (", os.Getpid()))
	if d := want(t, b, "vol", state.DeviceDetaching); d.Number != before.Number || d.Size != before.Size {
		t.Errorf("detaching: %+v, before %+v", d, before)
	}
	want(t, newBackend(t, b.Pool()), "vol", state.DeviceDetaching)
	closeIt()
	machine.AwaitDetached(before.Path, before.Backing)
	want(t, b, "vol", state.DeviceAbsent)
	require.NoError(t, b.Detach(t.Context(), "vol"))
}

func TestDetachWaitsForShortOpens(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	closeIt := openFile(t, d.Path, os.O_RDONLY)
	cleared := make(chan struct{})
	go func() {
		defer close(cleared)
		for { // until LOOP_CLR_FD was called
			if sysfs("/sys/block/"+filepath.Base(d.Path)+"/loop/autoclear") != "0" {
				return
			}
		}
	}()
	go func() { <-cleared; closeIt() }()
	require.NoError(t, b.Detach(t.Context(), "vol"))
	want(t, b, "vol", state.DeviceAbsent)
	<-cleared
}

func TestAttachReclaimsDetachingDevice(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	before := attach(t, b, "vol", false)
	closeIt := openFile(t, before.Path, os.O_RDONLY)
	run(t, "losetup", "-d", before.Path) // sets autoclear
	want(t, b, "vol", state.DeviceDetaching)
	if d := attach(t, b, "vol", false); d != before {
		t.Errorf("reclaimed: %+v, before %+v", d, before)
	}
	closeIt()
	if d := want(t, b, "vol", state.DeviceAttached); d != before {
		t.Errorf("after the last close: %+v, before %+v", d, before)
	}
}

func TestAttachReclaimsDetachingView(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	require.NoError(t, b.AttachView(t.Context(), d))
	view, err := b.FindView(t.Context(), d)
	require.NoError(t, err)
	closeIt := openFile(t, view.Path, os.O_RDONLY)
	run(t, "losetup", "-d", view.Path)
	require.NoError(t, b.AttachView(t.Context(), d))
	closeIt()
	if now, err := b.FindView(t.Context(), d); err != nil || now != view {
		t.Errorf("after the last close: %+v, %v; before %+v", now, err, view)
	}
}

func TestDetachRefusesStackedDevice(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	before := attach(t, b, "vol", false)
	over := machine.Losetup(t, before.Path)
	wantError(t, b.Detach(t.Context(), "vol"), state.Unavailable, over)
	if d := want(t, b, "vol", state.DeviceAttached); d != before {
		t.Errorf("after the refusal: %+v, before %+v", d, before)
	}
	view, err := b.FindView(t.Context(), before)
	if err != nil || view.State != state.DeviceAbsent {
		t.Errorf("a foreign device passes for a view: %+v, %v", view, err)
	}
	losetupDetach(t, over)
	require.NoError(t, b.Detach(t.Context(), "vol"))
}

func TestMountedDeviceIsHeldInAnyNamespace(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	before := attach(t, b, "vol", false)
	run(t, "mkfs.ext4", "-q", before.Path)
	dir := t.TempDir()
	args := machine.InNamespace("private", dir, `mount "$1" "$2" && echo mounted && read -r line; umount "$2"`, before.Path, dir)
	cmd := exec.Command(args[0], args[1:]...)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	end := sync.OnceFunc(func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}

	if d := want(t, b, "vol", state.DeviceAttached); !d.Held {
		t.Errorf("mounted elsewhere: %+v", d)
	}
	wantError(t, b.Detach(t.Context(), "vol"), state.Unavailable, before.Path, "mounted")
	wantError(t, b.Delete(t.Context(), "vol"), state.FailedPrecondition, before.Path)
	if d := want(t, b, "vol", state.DeviceAttached); d.Number != before.Number {
		t.Errorf("after the refusal: %+v, before %+v", d, before)
	}
	end()
	if d := want(t, b, "vol", state.DeviceAttached); d.Held {
		t.Errorf("unmounted: %+v", d)
	}
	require.NoError(t, b.Detach(t.Context(), "vol"))
}

func TestDeviceOutlivesItsData(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, data string){
		"volume deleted": func(t *testing.T, data string) {
			require.NoError(t, os.RemoveAll(filepath.Dir(data)))
		},
		"data deleted": func(t *testing.T, data string) {
			require.NoError(t, os.Remove(data))
		},
		"data replaced": func(t *testing.T, data string) {
			require.NoError(t, os.Rename(data, data+".old"))
			require.NoError(t, os.WriteFile(data, make([]byte, devicestest.Size), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, data := setup(t, pool.Thin)
			before := attach(t, b, "vol", false)
			lose(t, data)
			for _, b := range []*backend{b, newBackend(t, b.Pool())} {
				if d := want(t, b, "vol", state.DeviceAttached); !d.Missing || d.Number != before.Number {
					t.Errorf("device without its data: %+v", d)
				}
				if err := b.Attach(t.Context(), "vol", false); !state.ClassOf(err).Final() {
					t.Errorf("Attach: %v", err)
				}
				wantError(t, b.Delete(t.Context(), "vol"), state.FailedPrecondition, before.Path)
			}
			require.NoError(t, b.Detach(t.Context(), "vol"))
			require.NoError(t, b.Delete(t.Context(), "vol"))
			if d := want(t, b, "vol", state.DeviceAbsent); !d.Missing {
				t.Errorf("deleted: %+v", d)
			}
		})
	}
}

func TestTruncatedDataIsNotAttached(t *testing.T) {
	b, data := setup(t, pool.Thick)
	require.NoError(t, os.Truncate(data, devicestest.Size/2))
	if d := want(t, b, "vol", state.DeviceAbsent); d.Size != devicestest.Size/2 || d.Capacity != devicestest.Size {
		t.Errorf("truncated: %+v", d)
	}
	wantError(t, b.Attach(t.Context(), "vol", false), state.FailedPrecondition, data, "truncated")
	wantError(t, b.Grow(t.Context(), "vol", 2*devicestest.Size), state.FailedPrecondition, data, "truncated")
}

// The device keeps its size when its data is truncated, so Find tells what is missing.
func TestTruncationBehindTheDeviceIsSeen(t *testing.T) {
	b, data := setup(t, pool.Thick)
	attach(t, b, "vol", false)
	if d := want(t, b, "vol", state.DeviceAttached); d.Lacks != 0 {
		t.Errorf("whole: %+v", d)
	}
	require.NoError(t, os.Truncate(data, devicestest.Size/2))
	if d := want(t, b, "vol", state.DeviceAttached); d.Size != devicestest.Size || d.Lacks != devicestest.Size/2 {
		t.Errorf("truncated: %+v", d)
	}
	require.NoError(t, os.Truncate(data, 2*devicestest.Size))
	if d := want(t, b, "vol", state.DeviceAttached); d.Lacks != 0 {
		t.Errorf("longer than the volume: %+v", d)
	}
}

func TestInterruptedGrowthReachesTheDevice(t *testing.T) {
	b, _ := setup(t, pool.Thick)
	attach(t, b, "vol", false)
	if err := b.Pool().Grow(t.Context(), "vol", 2*devicestest.Size); err != nil { // and then the crash
		t.Fatal(err)
	}
	b = newBackend(t, b.Pool())
	if d := want(t, b, "vol", state.DeviceAttached); d.Size != devicestest.Size || d.Capacity != 2*devicestest.Size {
		t.Errorf("half grown: %+v", d)
	}
	require.NoError(t, b.Grow(t.Context(), "vol", 2*devicestest.Size))
	if d := want(t, b, "vol", state.DeviceAttached); d.Size != 2*devicestest.Size {
		t.Errorf("grown: %+v", d)
	}
}

func TestInterruptedGrowthReachesTheView(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	require.NoError(t, b.AttachView(t.Context(), d))
	require.NoError(t, b.Pool().Grow(t.Context(), "vol", 2*devicestest.Size))
	run(t, "losetup", "--set-capacity", d.Path) // and then the crash
	for _, b := range []*backend{b, newBackend(t, b.Pool())} {
		if d := want(t, b, "vol", state.DeviceAttached); d.Size != devicestest.Size || d.Capacity != 2*devicestest.Size {
			t.Errorf("half grown: %+v", d)
		}
	}
	require.NoError(t, b.Grow(t.Context(), "vol", 2*devicestest.Size))
	if d := want(t, b, "vol", state.DeviceAttached); d.Size != 2*devicestest.Size {
		t.Errorf("grown: %+v", d)
	}
	if view, err := b.FindView(t.Context(), d); err != nil || view.Size != 2*devicestest.Size {
		t.Errorf("view: %+v, %v", view, err)
	}
}

func TestEraseKeepsTheProvisioning(t *testing.T) {
	for _, how := range []pool.Provisioning{pool.Thick, pool.Thin} {
		t.Run(string(how), func(t *testing.T) {
			b, data := setup(t, how)
			d := attach(t, b, "vol", false)
			run(t, "dd", "if=/dev/urandom", "of="+d.Path, "bs=1M", "count=2", "conv=fsync")
			require.NoError(t, b.BeginFormat(t.Context(), "vol"))
			require.NoError(t, b.Erase(t.Context(), "vol"))
			if allocated := machine.Allocated(t, data); how == pool.Thick && allocated < devicestest.Size || how == pool.Thin && allocated >= 1<<20 {
				t.Errorf("%d of %d bytes are allocated", allocated, devicestest.Size)
			}
			onDisk, err := os.ReadFile(data)
			require.NoError(t, err)
			if strings.Trim(string(onDisk), "\x00") != "" {
				t.Error("the file holds more than zeros")
			}
		})
	}
}

// A thick volume that lost blocks, as by a discard, can be erased though the pool is full.
func TestEraseInAFullPool(t *testing.T) {
	b, dir := onDisk(t, "mkfs.ext4", "-q", "-F", "-m", "0")
	create(t, b.Pool(), "thick", pool.Thick)
	require.NoError(t, b.BeginFormat(t.Context(), "thick"))
	data, err := os.OpenFile(filepath.Join(dir, "volumes/thick/data"), os.O_RDWR, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Fallocate(int(data.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, devicestest.Size))
	require.NoError(t, data.Close())
	for _, unit := range []string{"1M", "1k"} {
		_ = exec.Command("dd", "if=/dev/zero", "of="+filepath.Join(dir, unit), "bs="+unit).Run() // until there is no space left
	}
	attach(t, b, "thick", false)
	require.NoError(t, b.Erase(t.Context(), "thick"))
	require.NoError(t, b.Detach(t.Context(), "thick"))
}

// TestWriteProtectedDeviceIsReadOnly: BLKROSET counts, whoever did it.
func TestWriteProtectedDeviceIsReadOnly(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	t.Cleanup(func() { run(t, "blockdev", "--setrw", d.Path) }) // it outlives the backing
	run(t, "blockdev", "--setro", d.Path)
	if d := want(t, b, "vol", state.DeviceAttached); !d.ReadOnly {
		t.Errorf("after blockdev --setro: %+v", d)
	}
	attach(t, b, "vol", false)
	if d := want(t, b, "vol", state.DeviceAttached); d.ReadOnly {
		t.Errorf("after attaching read-write: %+v", d)
	}
}

func TestLongIDsAreToldApart(t *testing.T) {
	p, _ := newPool(t)
	b := newBackend(t, p)
	long := strings.Repeat("a", 127)
	numbers := map[state.DeviceNumber]bool{}
	for _, id := range []string{long + "1", long + "2"} {
		create(t, p, id, pool.Thin)
		numbers[attach(t, b, id, false).Number] = true
	}
	b = newBackend(t, p)
	for _, id := range []string{long + "1", long + "2"} {
		numbers[want(t, b, id, state.DeviceAttached).Number] = true
	}
	if len(numbers) != 2 {
		t.Errorf("two volumes on the devices %v", numbers)
	}
}

// TestPoolsDoNotShareDevices: the same id in two pools is two volumes, even
// when the data of one is gone.
func TestPoolsDoNotShareDevices(t *testing.T) {
	one, data := setup(t, pool.Thin)
	two, _ := setup(t, pool.Thin)
	attach(t, two, "vol", false)
	want(t, newBackend(t, one.Pool()), "vol", state.DeviceAbsent)
	require.NoError(t, os.Remove(data))
	one = newBackend(t, one.Pool())
	want(t, one, "vol", state.DeviceAbsent)
	require.NoError(t, one.Detach(t.Context(), "vol"))
	want(t, two, "vol", state.DeviceAttached)
}

// TestTwoBackendsRaceForFreeDevices: GET_FREE names the same device to both.
func TestTwoBackendsRaceForFreeDevices(t *testing.T) {
	const volumes = 16
	var group sync.WaitGroup
	var mu sync.Mutex
	seen := map[state.DeviceNumber]string{}
	for range 2 {
		p, dir := newPool(t)
		b := newBackend(t, p)
		for i := range volumes {
			id := fmt.Sprintf("vol-%d", i)
			create(t, p, id, pool.Thin)
			group.Go(func() {
				if err := b.Attach(t.Context(), id, false); err != nil {
					t.Error(err)
					return
				}
				d, err := b.Find(t.Context(), id)
				if err != nil || d.State != state.DeviceAttached {
					t.Errorf("%+v, %v", d, err)
				}
				mu.Lock()
				defer mu.Unlock()
				if other := seen[d.Number]; other != "" {
					t.Errorf("%s is the device of %s and of %s", d.Path, other, dir+id)
				}
				seen[d.Number] = dir + id
			})
		}
	}
	group.Wait()
	if len(seen) != 2*volumes {
		t.Errorf("%d devices for %d volumes", len(seen), 2*volumes)
	}
}

func TestPoolWithoutItsDiskIsNoMissingVolume(t *testing.T) {
	b, data := setup(t, pool.Thin)
	dir := filepath.Dir(filepath.Dir(filepath.Dir(data)))
	require.NoError(t, os.Rename(dir, dir+".away"))
	d := want(t, b, "vol", state.DeviceAbsent)
	wantError(t, d.Err, state.Unavailable, dir, "mount")
	if d.Missing {
		t.Errorf("missing: %+v", d)
	}
	wantError(t, b.Attach(t.Context(), "vol", false), state.Unavailable, dir)
	wantError(t, b.Delete(t.Context(), "vol"), state.Unavailable, dir)
}

func TestDescriptorsDoNotLeak(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(entries)
	}
	cycle := func() {
		d := attach(t, b, "vol", false)
		closeIt := openFile(t, d.Path, os.O_RDONLY|unix.O_EXCL)
		if b.Detach(t.Context(), "vol") == nil || b.Attach(t.Context(), "vol", true) == nil {
			t.Error("a held device went")
		}
		closeIt()
		for _, err := range []error{
			b.AttachView(t.Context(), d), b.DetachView(t.Context(), d),
			b.Grow(t.Context(), "vol", devicestest.Size), b.Detach(t.Context(), "vol"),
		} {
			require.NoError(t, err)
		}
	}
	cycle()
	before := count()
	cycle()
	if after := count(); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}
