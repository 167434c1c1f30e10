package node

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/test/harness"
)

// A file system on sectors of either size is staged again with the same ones.
// What it frees goes back to the pool if the volume is thin; a thick one keeps
// every block that it was promised, through mkfs, discards and unstaging.
func TestSectorsAndDiscards(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range []string{"ext4", "xfs"} {
		for _, how := range []pool.Provisioning{pool.Thin, pool.Thick} {
			for _, sector := range []int64{512, 4096} {
				t.Run(fmt.Sprint(fsType, " ", how, " ", sector), func(t *testing.T) {
					ctx, size := t.Context(), smallest(fsType)
					v := createWithSectors(t, p, fmt.Sprint(fsType, how, sector), mountAs(fsType, multiWriter), size, sector, how)
					pod := v.Target("pod")
					must(t, v.Up(ctx, pod))
					write(t, filepath.Join(pod, "file"), "kept")
					write(t, filepath.Join(pod, "large"), strings.Repeat("freed", 2*mib))
					before := trim(t, v, pod, false)
					must(t, os.Remove(filepath.Join(pod, "large")))
					if how == pool.Thin { // xfs frees in the background
						harness.Eventually(t, "the pool gets back most of 10 MB", func() bool { return before-trim(t, v, pod, false) >= 8*mib })
					} else if after := trim(t, v, pod, true); after < size {
						t.Errorf("%d of %d bytes are allocated", after, size)
					}
					must(t, v.Down(ctx, pod))

					must(t, v.Up(ctx, pod))
					mustRead(t, filepath.Join(pod, "file"), "kept")
					if got := sectorsOf(t, p.Loops()[0].Path); got != int(sector) {
						t.Errorf("staged again on sectors of %d bytes", got)
					}
					v.End(pod)
				})
			}
		}
	}
}

// trim gives back what the file system at path does not use, and returns how
// many bytes of the volume's file are allocated then; a thick volume refuses.
func trim(t *testing.T, v *volume, path string, refused bool) int64 {
	t.Helper()
	root, err := os.Open(path)
	must(t, err)
	must(t, unix.Syncfs(int(root.Fd())))
	must(t, root.Close())
	out, err := exec.Command("fstrim", path).CombinedOutput()
	if refused && (err == nil || !bytes.Contains(out, []byte("not supported"))) {
		t.Errorf("fstrim of a thick volume: %v: %s", err, out)
	}
	return allocated(t, v.Data())
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return st.Blocks * 512 // see stat(2)
}

func sectorsOf(t *testing.T, path string) int {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKSSZGET)
	must(t, err)
	must(t, f.Close())
	return n
}

// Blocks that a thick volume has lost are there again when it is staged.
func TestThickVolumeGetsItsBlocksBack(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx, size := t.Context(), int64(32*mib)
	v := createAs(t, p, "holes", size, blockAs(multiWriter), "thick")
	f, err := os.OpenFile(v.Data(), os.O_RDWR, 0)
	must(t, err)
	must(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, mib, 8*mib))
	must(t, f.Close())
	if got := allocated(t, v.Data()); got >= size {
		t.Fatalf("%d bytes are allocated after a punch", got)
	}
	must(t, v.Stage(ctx))
	if got := allocated(t, v.Data()); got < size {
		t.Errorf("%d of %d bytes are allocated", got, size)
	}
	v.End()
}
