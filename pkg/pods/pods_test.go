package pods

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestGone(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	real, link := filepath.Join(root, "real"), filepath.Join(root, "link")
	for _, dir := range []string{"pods/alive/volumes", "pods/other"} {
		require.NoError(t, os.MkdirAll(filepath.Join(real, dir), 0o700))
	}
	require.NoError(t, os.Symlink("real", link))
	d, err := New(link)
	require.NoError(t, err)
	for path, want := range map[string]bool{
		"pods/dead/volumes/kubernetes.io~csi/v/mount":                 true,
		"pods/alive/volumes/kubernetes.io~csi/v/mount":                false,
		"plugins/kubernetes.io/csi/volumeDevices/publish/v/dead":      true,
		"plugins/kubernetes.io/csi/volumeDevices/publish/v/alive":     false,
		"plugins/kubernetes.io/csi/volumeDevices/publish/v/dead/more": false,
		"plugins/kubernetes.io/csi/volumeDevices/publish/dead":        false,
		"pods/dead/mount":        false,
		"pods/dead/other/x/y":    false,
		"pods//volumes/x":        false,
		"elsewhere/dead/volumes": false,
		"pods/" + strings.Repeat("x", 256) + "/volumes/x/y": false, // ENAMETOOLONG
	} {
		for _, spelling := range []string{real, link} {
			if got := d.Gone(filepath.Join(spelling) + "/" + path); got != want {
				t.Errorf("%s below %s: gone %v", path, spelling, got)
			}
		}
	}
	if d.Gone("/elsewhere/pods/dead/volumes/x/mount") {
		t.Error("a path elsewhere is taken for a pod's")
	}
}

// No pod is gone while the directory of all pods is not the one that was first seen.
func TestNothingIsGoneInADirectoryThatIsNotTrusted(t *testing.T) {
	machine.Kernel(t)
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	d, err := New(root)
	require.NoError(t, err)
	pods, dead := filepath.Join(root, "pods"), filepath.Join(root, "pods/dead/volumes/v/mount")
	check := func(what string, want bool) {
		t.Helper()
		if d.Gone(dead) != want {
			t.Errorf("%s: gone %v", what, !want)
		}
	}
	check("no directory of pods", false)
	require.NoError(t, os.Mkdir(pods, 0o700))
	check("an empty directory", false)
	require.NoError(t, os.Mkdir(filepath.Join(pods, "other"), 0o700))
	check("another pod is there", true)
	require.NoError(t, unix.Mount("elsewhere", pods, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(pods, unix.MNT_DETACH) })
	require.NoError(t, os.Mkdir(filepath.Join(pods, "other"), 0o700))
	check("another disk", false)
	require.NoError(t, machine.Unmount(pods))
	check("the first disk again", true)
	require.NoError(t, os.WriteFile(filepath.Join(pods, "dead"), nil, 0o600))
	check("something of that name", false)
}

// The directory of all pods may be made after the start. It is first seen with whichever pod is
// asked for, also one that is there.
func TestFirstSeenWithALivePod(t *testing.T) {
	machine.Kernel(t)
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	d, err := New(root)
	require.NoError(t, err)
	pods := filepath.Join(root, "pods")
	target := func(uid string) string { return filepath.Join(pods, uid, "volumes/v/mount") }
	require.NoError(t, os.MkdirAll(filepath.Join(pods, "alive"), 0o700))
	if d.Gone(target("alive")) {
		t.Error("a pod that is there is gone")
	}
	require.NoError(t, unix.Mount("elsewhere", pods, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(pods, unix.MNT_DETACH) })
	require.NoError(t, os.Mkdir(filepath.Join(pods, "other"), 0o700))
	if d.Gone(target("dead")) {
		t.Error("another disk is believed")
	}
}

// New looks at the directory of all pods. When Gone is first called, its disk may not
// be there any more.
func TestFirstSeenAtTheStart(t *testing.T) {
	machine.Kernel(t)
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	pods := filepath.Join(root, "pods")
	require.NoError(t, os.MkdirAll(filepath.Join(pods, "beneath"), 0o700))
	require.NoError(t, unix.Mount("disk", pods, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(pods, unix.MNT_DETACH) })
	require.NoError(t, os.Mkdir(filepath.Join(pods, "other"), 0o700))
	d, err := New(root)
	require.NoError(t, err)
	require.NoError(t, machine.Unmount(pods))
	if d.Gone(filepath.Join(root, "pods/dead/volumes/v/mount")) {
		t.Error("gone from a directory that is beneath the first one")
	}
}
