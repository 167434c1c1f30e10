package filesystem

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// A journal that waits to be replayed is no obstacle.
func TestGrowExt4AfterCrash(t *testing.T) {
	h := newHost(t)
	crashed := resize(t, attach(t, crash(t, formatted(t, h, "ext4", 64*mib), "ext4")), 256*mib)
	must0(t, h.Grow(t.Context(), crashed, "ext4", ""))
	b, err := os.ReadFile(filepath.Join(mount(t, crashed, "ext4"), "file"))
	if string(b) != "data" {
		t.Errorf("%q, %v", b, err)
	}
}

// A mounted ext4 grows by block groups, an xfs by allocation groups, and a btrfs by sectors, and to
// no less than 256 MiB. Whether an ext4 does depends on this process's capabilities.
func TestGrowMounted(t *testing.T) {
	h := newHost(t)
	const block, most = 4096, 300 * mib
	type sizes []struct{ device, size int64 }
	for fsType, row := range map[string]struct {
		device state.Device
		sizes  sizes
	}{
		"ext4": {formatted(t, h, "ext4", 64*mib), sizes{
			{512 * mib, 512 * mib},
			{512*mib + 4096, 512 * mib},        // too little for a group
			{513*mib + 512, 512 * mib},         // still too little
			{640*mib + 512, 640 * mib},         // no whole page
			{4<<30 + 64*mib, 4<<30 + 64*mib},   // many groups at once
			{16<<30 + 64*mib, 16<<30 + 64*mib}, // more descriptor blocks
		}},
		"xfs": {formatted(t, h, "xfs", most), sizes{
			{most, most},
			{most + block - 512, most},
			{most + 63*block, most},
			{most + 64*block, most + 64*block},
			{most + 64*block + 3584, most + 64*block},
			{most + 65*block, most + 65*block},
			{375*mib + 63*block, 375 * mib},
			{450 * mib, 450 * mib},
		}},
		"btrfs": {attach(t, mkfsBtrfs(t)), sizes{
			{128 * mib, 128 * mib},
			{256*mib - 512, 128 * mib},
			{256 * mib, 256 * mib},
			{256*mib + 3584, 256 * mib},
			{256*mib + 4096, 256*mib + 4096},
			{256*mib + 8192 + 512, 256*mib + 8192},
			{2<<30 + 4096, 2<<30 + 4096},
		}},
	} {
		t.Run(fsType, func(t *testing.T) {
			device, dir := row.device, mount(t, row.device, fsType)
			for _, c := range row.sizes {
				device = resize(t, device, c.device)
				before := probe(t, h, device, dir)
				if before.Growable != (c.size > before.Size) {
					t.Errorf("on %d bytes, before: %+v", c.device, before)
				}
				err := h.Grow(t.Context(), device, fsType, dir)
				if before.Growable && !before.GrowsMounted {
					wantClass(t, err, state.FailedPrecondition, "CAP_SYS_RESOURCE")
					return
				}
				must0(t, err)
				if fsType == "xfs" {
					command(t, "xfs_growfs", "-d", dir) // must find nothing left to do
				}
				if after := probe(t, h, device, dir); after.Growable || after.Size != c.size {
					t.Errorf("on %d bytes: %+v", c.device, after)
				}
			}
			unmount(t, dir)
			if c := probe(t, h, device, ""); c.Growable || c.Size != row.sizes[len(row.sizes)-1].size {
				t.Errorf("unmounted: %+v", c)
			}
			verify(t, device, fsType)
		})
	}
}

func TestGrowRefuses(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 300*mib))
	wantClass(t, h.Grow(t.Context(), device, "ext4", ""), state.FailedPrecondition, "holds a blank device")
	wantClass(t, h.Grow(t.Context(), device, "vfat", ""), state.InvalidArgument)
	must0(t, h.Format(t.Context(), device, "xfs", nil))
	device = resize(t, device, 400*mib)
	wantClass(t, h.Grow(t.Context(), device, "xfs", ""), state.FailedPrecondition, "only while it is mounted")
	device.ReadOnly = true
	wantClass(t, h.Grow(t.Context(), device, "xfs", mount(t, device, "xfs")), state.FailedPrecondition, "read-only")
}

// TestGrowableExt4IsExact compares what the superblock's arithmetic says with
// what resize2fs does, at sizes around the boundaries of block groups.
func TestGrowableExt4IsExact(t *testing.T) {
	machine.Kernel(t)
	h := newHost(t)
	for name, c := range map[string]struct {
		options []string
		start   int64 // bytes to format
		block   int64
		group   int64 // blocks
		groups  []int64
	}{
		"1 KiB blocks":           {[]string{"-b", "1024"}, 8 * mib, 1024, 8192, []int64{1, 2, 3, 4, 5, 9, 26, 33}},
		"4 KiB blocks":           {[]string{"-b", "4096"}, 64 * mib, 4096, 32768, []int64{1, 2, 3, 4}},
		"no resize inode":        {[]string{"-b", "1024", "-O", "^resize_inode"}, 8 * mib, 1024, 8192, []int64{1, 3, 33}},
		"no 64 bit":              {[]string{"-b", "1024", "-O", "^64bit"}, 8 * mib, 1024, 8192, []int64{1, 3, 65}},
		"sparse_super2":          {[]string{"-b", "1024", "-O", "sparse_super2"}, 40 * mib, 1024, 8192, []int64{5, 6, 9}},
		"a copy in every group":  {[]string{"-b", "1024", "-O", "^sparse_super,^resize_inode"}, 8 * mib, 1024, 8192, []int64{2, 4}},
		"small groups, 2 groups": {[]string{"-b", "1024", "-g", "1024"}, 4 * mib, 1024, 1024, []int64{5, 6, 7, 9, 10, 27}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fresh := newImage(t, c.start)
			command(t, "mkfs.ext4", append(append([]string{"-q"}, c.options...), fresh)...)
			head, err := os.ReadFile(fresh)
			must0(t, err)
			s, err := parseExt4(head)
			must0(t, err)
			overhead := 2 + s.inodesPerGroup*s.inodeSize/s.blockSize
			for _, groups := range c.groups {
				edges := []int64{0, overhead + 50, overhead + 50 + 1 + s.reservedGDT + (groups*s.descSize+s.blockSize)/s.blockSize}
				for _, edge := range edges {
					for _, off := range []int64{-5, -4, -1, 0, 1, 3, 4, 5, 8} {
						size := (s.firstBlock + groups*c.group + edge + off) * c.block
						if size > c.start {
							growExactly(t, h, fresh, size)
						}
					}
				}
			}
		})
	}
}

// growExactly copies a file system onto a device of so many bytes, lets
// resize2fs do what it will, and compares with what was foretold.
func growExactly(t *testing.T, h *Host, fresh string, size int64) {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	command(t, "cp", "--sparse=always", fresh, image)
	must0(t, os.Truncate(image, size))
	device := state.Device{Path: image}
	before := probe(t, h, device, "")
	d, err := open(device, 0)
	must0(t, err)
	defer d.Close()
	_, sb, _ := h.recognise(d)
	foretold := sb.grown(size)
	if before.Growable != (foretold > before.Size) {
		t.Errorf("%d bytes: growable %t, to %d", size, before.Growable, foretold)
	}
	must0(t, ext4{}.grow(t.Context(), d, "", foretold))
	after := probe(t, h, device, "")
	if after.Size != foretold || after.Growable {
		t.Errorf("%d bytes: grew from %d to %d bytes, foretold %d; growable %t", size, before.Size, after.Size, foretold, after.Growable)
	}
	must0(t, os.Remove(image))
}

// resize2fs is not believed that the file system has grown.
func TestGrowVerified(t *testing.T) {
	h := newHost(t)
	device := formatted(t, h, "ext4", 64*mib)
	device = resize(t, device, 128*mib)
	script(t, "resize2fs", "exit 0")
	wantClass(t, h.Grow(t.Context(), device, "ext4", ""), state.Unavailable, "fewer than the device allows")
}

// growsDevice makes this test program a plugin that grows the unmounted ext4 on a device, and
// can be killed.
const growsDevice = "FILESYSTEM_TEST_GROWS_DEVICE"

// A resize2fs that was begun ends, whatever becomes of the plugin: what it leaves in the middle
// may be beyond repair.
func TestGrowIsNotCutShort(t *testing.T) {
	if path := os.Getenv(growsDevice); path != "" {
		t.Fatal(newHost(t).Grow(t.Context(), deviceOf(t, path, ""), "ext4", ""))
	}
	real, err := exec.LookPath("resize2fs")
	must0(t, err)
	h := newHost(t)
	for name, interrupt := range map[string]func(t *testing.T, device state.Device) (begin, end func()){
		"the plugin stops": func(t *testing.T, device state.Device) (begin, end func()) {
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			return func() { go func() { done <- h.Grow(ctx, device, "ext4", "") }() }, func() {
				stop()
				select {
				case err := <-done:
					t.Errorf("it does not wait for resize2fs: %v", err)
				case <-time.After(200 * time.Millisecond):
				}
			}
		},
		"the plugin is killed": func(t *testing.T, device state.Device) (begin, end func()) {
			self, err := os.Executable()
			must0(t, err)
			plugin := exec.Command(self, "-test.run=^TestGrowIsNotCutShort$")
			return func() {
					plugin.Env = append(os.Environ(), growsDevice+"="+device.Path)
					must0(t, plugin.Start())
				}, func() {
					must0(t, plugin.Process.Kill())
					if err := plugin.Wait(); err == nil {
						t.Error("the plugin ended well")
					}
				}
		},
	} {
		t.Run(name, func(t *testing.T) {
			device := resize(t, formatted(t, h, "ext4", 64*mib), 256*mib)
			line, may := machine.NewFIFO(t), filepath.Join(t.TempDir(), "may")
			script(t, "resize2fs", fmt.Sprintf(`exec 9>%s; echo started >&9; i=0; until [ -e %s ] || [ $i = 1200 ]; do sleep 0.05; i=$((i+1)); done
exec %s "$@"`, line.Path, may, real))
			begin, end := interrupt(t, device)
			begin()
			line.WaitFor(t, "started")
			end()
			must0(t, os.WriteFile(may, nil, 0o600))
			line.WaitForEnd(t)
			command(t, "e2fsck", "-f", "-n", device.Path)
			if c := probe(t, h, device, ""); c.Growable || c.NeedsCheck || c.Size != 256*mib {
				t.Errorf("it is left as %+v", c)
			}
		})
	}
}

// Without the capability the operator is told which one is missing.
func TestGrowNamesTheCapability(t *testing.T) {
	h := newHost(t)
	h.growsMounted["ext4"] = false
	device := formatted(t, h, "ext4", 64*mib)
	dir := mount(t, device, "ext4")
	device = resize(t, device, 128*mib)
	wantClass(t, h.Grow(t.Context(), device, "ext4", dir), state.FailedPrecondition, "CAP_SYS_RESOURCE")
}
