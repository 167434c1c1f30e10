package node

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

var must = require.NoError

// mustRefuse fails unless err has the code and its message all of the words.
func mustRefuse(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if got := status.Code(err); got != code {
		t.Fatalf("got %v, want code %s", err, code)
	}
	for _, word := range words {
		if !strings.Contains(status.Convert(err).Message(), word) {
			t.Errorf("the message does not say %q: %v", word, err)
		}
	}
}

func mustBeGone(t testing.TB, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", path, err)
	}
}

func mustHaveNoRecord(t testing.TB, p *harness.Plugin) {
	t.Helper()
	if volumes := p.Status().Volumes; len(volumes) > 0 {
		t.Errorf("`csi-node status` still shows %+v", volumes)
	}
}

// mustHaveNoLoop fails unless all of the plugin's loop devices are detached.
func mustHaveNoLoop(t testing.TB, p *harness.Plugin) {
	t.Helper()
	if loops := p.Loops(); len(loops) > 0 {
		t.Errorf("attached: %+v", loops)
	}
}

// mustHoldAsBefore ends the test unless a file still has the sum that it had.
func mustHoldAsBefore(t testing.TB, path, before string) {
	t.Helper()
	if digest.Of(t, path) != before {
		t.Fatalf("%s has changed", path)
	}
}

// mountsAt counts the mounts stacked at a path.
func mountsAt(p *harness.Plugin, path string) int {
	n := 0
	for _, mount := range p.Mounts() {
		if mount == path {
			n++
		}
	}
	return n
}

func makeDir(t testing.TB, path string) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o750))
}

func write(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o640))
}

func mustRead(t testing.TB, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || string(got) != want {
		t.Errorf("%s reads %.40q (%v), want %.40q", path, got, err, want)
	}
}

// snapshot is what a refused request must not change: mounts, loop devices,
// and everything below the kubelet and the pool directory.
func snapshot(t testing.TB, p *harness.Plugin) []string {
	t.Helper()
	all := p.Mounts()
	attached := map[string]bool{} // what is mounted is written to at any time
	for _, loop := range p.Loops() {
		all = append(all, fmt.Sprintf("%+v", loop))
		attached[loop.Backing] = true
	}
	for _, root := range []string{p.KubeletDir, p.PoolDir} {
		must(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return err
			}
			line := fmt.Sprintf("%s %s", info.Mode(), path)
			if info.Mode().IsRegular() {
				line += fmt.Sprintf(" %d bytes", info.Size())
			}
			if info.Mode().IsRegular() && !attached[path] {
				line += fmt.Sprintf(" of %s", info.ModTime())
			}
			all = append(all, line)
			return nil
		}))
	}
	return all
}

func mustEqual(t testing.TB, before, after []string) {
	t.Helper()
	for _, line := range after {
		if !slices.Contains(before, line) {
			t.Errorf("new: %s", line)
		}
	}
	for _, line := range before {
		if !slices.Contains(after, line) {
			t.Errorf("gone: %s", line)
		}
	}
	if len(before) != len(after) {
		t.Errorf("there were %d things, there are %d", len(before), len(after))
	}
}

// mayResize reports whether the tests, and so the plugin, may grow a mounted ext4.
func mayResize(t testing.TB) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	must(t, unix.Capget(&header, &data[0]))
	return data[unix.CAP_SYS_RESOURCE/32].Effective&(1<<(unix.CAP_SYS_RESOURCE%32)) != 0
}
