package mounttable

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"github.com/csi-node/csi-node/test/require"
)

// A line that is too long for the parser does not hide the others, nor what is short in itself.
func TestLongLines(t *testing.T) {
	const before, after = "20 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n", "22 20 8:2 /b /b\\040c rw - xfs /dev/b rw,noquota\n"
	long := func(words ...string) string {
		return "21 20 0:7 /" + words[0] + " /" + words[1] + " rw,nosuid shared:2 master:1 - tmpfs " + words[2] + " rw," + words[3] + "\n"
	}
	huge := strings.Repeat("x", 1<<20)
	named := strings.Repeat(`\040`, 3000) + strings.Repeat("y", 1000) // may be in a path that can be named
	for title, line := range map[string]string{
		"root":        long(huge, "m", "s", "o"),
		"mount point": long("r", huge, "s", "o"),
		"source":      long("r", "m", huge, "o"),
		"options":     long("r", "m", "s", huge),
		"all":         long(huge, huge, huge, huge),
		"some":        long(huge, named, "s", "o"),
	} {
		t.Run(title, func(t *testing.T) {
			proc := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(proc, "mountinfo"), []byte(before+line+after), 0o600))
			infos, err := Of(proc, nil)
			require.NoError(t, err)
			want, err := mountinfo.GetMountsFromReader(strings.NewReader(before+after), nil)
			require.NoError(t, err)
			if len(infos) != 3 || !reflect.DeepEqual([]*mountinfo.Info{infos[0], infos[2]}, want) {
				t.Fatalf("%d mounts, and not those beside the long one", len(infos))
			}
			i := infos[1]
			if i.ID != 21 || i.Parent != 20 || i.Minor != 7 || i.Options != "rw,nosuid" || i.Optional != "shared:2 master:1" || i.FSType != "tmpfs" {
				t.Errorf("%d in %d, of 0:%d, %s, %s, %s", i.ID, i.Parent, i.Minor, i.Options, i.Optional, i.FSType)
			}
			for _, path := range []string{i.Root, i.Mountpoint} {
				if len(path) > 4001 && len(path) < 4096 {
					t.Errorf("%d bytes are left of a path, which may be named", len(path))
				}
			}
			if title == "some" && len(i.Mountpoint) != 4001 {
				t.Errorf("%d bytes are left of 4001", len(i.Mountpoint))
			}
		})
	}
}

// A table is read as the parser itself does it.
func TestOwn(t *testing.T) {
	want, err := mountinfo.GetMounts(nil)
	require.NoError(t, err)
	infos, err := Own(nil)
	require.NoError(t, err)
	if len(infos) == 0 || !reflect.DeepEqual(infos[0], want[0]) {
		t.Errorf("%d mounts, want %d", len(infos), len(want))
	}
	if infos, err := Own(func(*mountinfo.Info) (skip, stop bool) { return false, true }); err != nil || len(infos) != 1 {
		t.Errorf("%d mounts, %v", len(infos), err)
	}
}

// That a process has ended is told from mounts that cannot be read.
func TestEnded(t *testing.T) {
	child := exec.Command("true")
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	zombie := fmt.Sprint("/proc/", child.Process.Pid)
	_, err = io.Copy(io.Discard, out) // until it ends
	for err == nil {
		_, err = os.Readlink(zombie + "/ns/mnt")
	}
	broken := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(broken, "mountinfo"), []byte("20 1 8:1\n"), 0o600))
	for title, proc := range map[string]string{"a zombie": zombie, "none": "/proc/0", "a table that is none": broken} {
		if _, err := Of(proc, nil); err == nil || errors.Is(err, os.ErrProcessDone) != (proc != broken) {
			t.Errorf("%s: %v", title, err)
		}
	}
	_ = child.Wait()
}
