package lvm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// kubelet's loop device over a raw volume, which it attaches by a bind of the node, is no disk of the
// node: what is on it is the pod's.
func TestLoopOverRawVolumeIsNoDisk(t *testing.T) {
	node := machine.Losetup(t, machine.Image(t, 8<<20))
	if _, fit := candidate(filepath.Base(node)); !fit || nested(filepath.Base(node)) {
		t.Error("a loop device of a file is no disk")
	}
	bound := filepath.Join(t.TempDir(), "uid")
	require.NoError(t, os.WriteFile(bound, nil, 0o600))
	require.NoError(t, unix.Mount(node, bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(bound, 0)) })
	for _, by := range []string{bound, node} {
		over := machine.Losetup(t, by)
		if _, fit := candidate(filepath.Base(over)); fit && !nested(filepath.Base(over)) {
			t.Errorf("%s over %s is a disk", over, by)
		}
		machine.LosetupDetach(t, over)
	}
}

// Which devices are looked at is known without a question to any of them: one may hang.
func TestCandidateIsNotAsked(t *testing.T) {
	machine.Kernel(t)
	node := machine.Losetup(t, machine.Image(t, 8<<20))
	require.NoError(t, errors.Join(os.Rename(node, node+"-away"), os.WriteFile(node, nil, 0o600))) // what would ask it fails
	t.Cleanup(func() { require.NoError(t, os.Rename(node+"-away", node)) })
	if path, fit := candidate(filepath.Base(node)); !fit || path != node {
		t.Errorf("%s (%s) is no candidate", node, path)
	}
}

// Where a group takes no more volumes the claim is made on another node.
func TestNoRoom(t *testing.T) {
	for _, said := range []string{
		"Volume group \"vg0\" has insufficient free space (3 extents): 4 required.",
		"VG vg0 1 metadata on /dev/sda (1044992 bytes) exceeds maximum metadata size (1044480 bytes)",
		"Maximum number of logical volumes (255) reached in volume group vg0",
	} {
		require.Class(t, noRoom(errors.New(said)), state.ResourceExhausted, said)
	}
	if err := noRoom(errors.New("device is busy")); state.ClassOf(err) == state.ResourceExhausted {
		t.Errorf("%v counts as no room", err)
	}
}

// A volume that is being deleted is not what CreateVolume made.
func TestCreateOfAVolumeThatIsBeingDeleted(t *testing.T) {
	b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
	report := reportOf(t, 1)
	began, release := make(chan struct{}), make(chan struct{})
	b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
		if args[0] == "lvremove" {
			close(began)
			<-release
			report = reportOf(t, 0)
		}
		return report, nil
	}
	_, err := b.ListVolumes(t.Context())
	require.NoError(t, err)
	ended := make(chan error)
	go func() { ended <- b.DeleteVolume(t.Context(), devices.Volume{ID: volumeID{group, "pvc-0"}.String()}) }()
	<-began
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if made, err := b.CreateVolume(short, devices.CreateRequest{Name: "pvc-0", Size: devices.SizeRange{Required: 1}}); err == nil {
		t.Errorf("created is %+v", made)
	}
	close(release)
	require.NoError(t, <-ended)
}
