package machine

import (
	"os/exec"
	"strings"
	"testing"
)

// mkfsTries bounds how often a mkfs is run again for somebody else's sake.
const mkfsTries = 20

// Mkfs makes a file system of the type with the arguments for its mkfs.
// mkfs.btrfs looks at every loop device of the machine first, and gives up when
// one that another test has goes meanwhile: it is run again then.
func Mkfs(t testing.TB, fsType string, args ...string) {
	t.Helper()
	for try := 1; ; try++ {
		out, err := exec.Command("mkfs."+fsType, args...).CombinedOutput()
		gone := fsType == "btrfs" && strings.Contains(string(out), "cannot check mount status")
		switch {
		case err == nil:
			return
		case !gone || try == mkfsTries:
			t.Fatalf("mkfs.%s %s: %v: %s", fsType, strings.Join(args, " "), err, out)
		}
	}
}
