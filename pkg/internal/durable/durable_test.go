package durable

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

// What a crash has left of an earlier write is no part of the file.
func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, contents := range []string{"first", "second, which is longer", "third"} {
		require.NoError(t, os.WriteFile(path+NewSuffix, []byte("left by a process that was killed while it wrote"), 0o600))
		require.NoError(t, Replace(path, []byte(contents)))
		require.NoError(t, SyncDir(filepath.Dir(path)))
		if got, err := os.ReadFile(path); string(got) != contents {
			t.Errorf("it holds %q, not %q (%v)", got, contents, err)
		}
	}
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Mkdir(path, 0o700))
	if err := Replace(path, nil); err == nil {
		t.Error("a directory was replaced")
	}
}
