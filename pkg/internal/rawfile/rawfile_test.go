package rawfile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, size := range []int{0, 1, 1 << 10, 1<<10 + 1, 100_000} {
		want := bytes.Repeat([]byte("x"), size)
		require.NoError(t, os.WriteFile(path, want, 0o600))
		if got, err := Read(path); err != nil || !bytes.Equal(got, want) {
			t.Errorf("of %d bytes %d were read: %v", size, len(got), err)
		}
	}
	if _, err := Read("/proc/self/stat"); err != nil { // has no size
		t.Error(err)
	}
	if _, err := Read(path + "2"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := Read(t.TempDir()); err == nil {
		t.Error("a directory was read")
	}
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	f, err := Open(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	require.NoError(t, err)
	defer f.Close()
	if _, err := f.WriteString("text"); err != nil || f.Name() != path {
		t.Errorf("%s: %v", f.Name(), err)
	}
	if _, err := Open(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); !errors.Is(err, os.ErrExist) {
		t.Errorf("made twice: %v", err)
	}
}

func TestOpenIn(t *testing.T) {
	path := t.TempDir()
	dir, err := os.Open(path)
	require.NoError(t, err)
	defer dir.Close()
	fd, err := OpenIn(int(dir.Fd()), "file", os.O_WRONLY|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, unix.Close(fd))
	if _, err := os.Stat(filepath.Join(path, "file")); err != nil {
		t.Error(err)
	}
	require.NoError(t, os.Symlink("file", filepath.Join(path, "link")))
	if _, err := OpenIn(int(dir.Fd()), "link", os.O_WRONLY, 0); err == nil {
		t.Error("a symbolic link was followed")
	}
	if _, err := OpenIn(int(dir.Fd()), "none", os.O_WRONLY, 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}
