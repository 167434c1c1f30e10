package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/require"
)

// A device that somebody keeps open goes when it is closed; what is attached there is not
// taken for another one's.
func TestAwaitDetached(t *testing.T) {
	Kernel(t)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	node := Losetup(t, file)
	f, err := os.Open(node)
	require.NoError(t, err)
	if out, err := exec.Command("losetup", "--detach", node).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	began := time.Now()
	if !AwaitDetached(node, filepath.Join(filepath.Dir(file), "other")) || time.Since(began) > 5*time.Second {
		t.Error("the device of another file was waited for")
	}
	gone := make(chan bool)
	go func() { gone <- AwaitDetached(node, file) }()
	select {
	case <-gone:
		t.Error("it is open, and was taken for gone")
	case <-time.After(50 * time.Millisecond):
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if !<-gone {
		t.Error("it was closed, and did not go")
	}
}
