package lease

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestLease(t *testing.T) {
	for name, flags := range map[string]int{"for reading": os.O_RDONLY, "for writing": os.O_RDWR} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			require.NoError(t, os.WriteFile(path, nil, 0o600))
			f, err := os.OpenFile(path, flags, 0)
			require.NoError(t, err)
			defer f.Close()
			reader, err := os.Open(path)
			require.NoError(t, err)
			if err := Take(f); !errors.Is(err, unix.EAGAIN) {
				t.Errorf("while somebody reads the file: %v", err)
			}
			if alone, err := Alone(f); alone || err != nil {
				t.Errorf("alone while somebody reads the file: %t, %v", alone, err)
			}
			require.NoError(t, reader.Close())
			if alone, err := Alone(f); !alone || err != nil {
				t.Errorf("alone: %t, %v", alone, err)
			}
			if reader, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
				t.Fatalf("who opens it after the question: %v", err)
			}
			require.NoError(t, reader.Close())
			require.NoError(t, Take(f))
			// It is refused without waiting, and the lease is asked back.
			if _, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); !errors.Is(err, unix.EAGAIN) {
				t.Errorf("another open: %v", err)
			}
			require.NoError(t, drop(f)) // the kernel has asked it back
			if reader, err = os.Open(path); err != nil {
				t.Fatal(err)
			}
			require.NoError(t, reader.Close())
		})
	}
}

// Through an overlay the kernel grants a lease on a file that others have open.
func TestOverlayProvesNothing(t *testing.T) {
	machine.Kernel(t)
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, ""))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, sub := range []string{"lower", "upper", "work", "merged"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	merged := filepath.Join(dir, "merged")
	require.NoError(t, unix.Mount("overlay", merged, "overlay", 0, "lowerdir="+dir+"/lower,upperdir="+dir+"/upper,workdir="+dir+"/work"))
	t.Cleanup(func() {
		if err := machine.Unmount(merged); err != nil {
			t.Error(err)
		}
	})
	f, err := os.Create(filepath.Join(merged, "file"))
	require.NoError(t, err)
	defer f.Close()
	if err := Take(f); err == nil {
		t.Error("a lease was granted on a file of an overlay")
	}
}
