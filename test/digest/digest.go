// Package digest tells whether the bytes of a large file or device have changed.
package digest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

// Of returns a digest of all bytes of a file.
func Of(t testing.TB, path string) string {
	t.Helper()
	return OfRange(t, path, 0, -1)
}

// OfRange returns a digest of the bytes of a file from start on, up to end or, if that is
// negative, to the file's end. Zeros do not count, so that holes need not be read: most
// files of volumes are mostly holes, and an emulated processor is slow.
func OfRange(t testing.TB, path string, start, end int64) string {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { _ = f.Close() }() // only read from
	if end < 0 {
		end, err = f.Seek(0, io.SeekEnd)
		require.NoError(t, err)
	}
	sum, zeros, block := sha256.New(), make([]byte, 64<<10), make([]byte, 64<<10)
	fmt.Fprintln(sum, end-start)
	for at := start; at < end; {
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // nothing but a hole is left
			break
		}
		require.NoError(t, err)
		at = data - (data-start)%int64(len(block))
		n, err := f.ReadAt(block[:min(int64(len(block)), end-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if !bytes.Equal(block[:n], zeros[:n]) {
			fmt.Fprintln(sum, at-start)
			sum.Write(block[:n])
		}
		at += int64(len(block))
	}
	return fmt.Sprintf("%x", sum.Sum(nil))
}
