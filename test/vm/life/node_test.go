//go:build vm

package life

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/vm"
)

// node is a node with its pool on a disk.
type node struct {
	*harness.Plugin
	t      *testing.T
	device string
}

// start mounts a disk and starts a plugin on it, as after a boot: the store is empty.
func start(t *testing.T, device string) *node {
	t.Helper()
	p := harness.New(t)
	disk := filepath.Join(p.Dir, "disk")
	must(t, os.Mkdir(disk, 0o755))
	must(t, unix.Mount(device, disk, "ext4", 0, ""))
	t.Cleanup(func() {
		if !t.Failed() { // else it is in use, and the harness takes it down
			p.Terminate()
			must(t, unix.Unmount(disk, 0))
		}
	})
	p.PoolDir = filepath.Join(disk, "pool")
	p.Start(harness.Options{})
	return &node{Plugin: p, t: t, device: device}
}

// in is the node for a subtest.
func (n *node) in(t *testing.T) *node { return &node{n.Plugin, t, n.device} }

// mustBeSwept fails if anything is left in the pool that is no volume, is
// attached, or is asked for.
func (n *node) mustBeSwept() {
	n.t.Helper()
	for _, dir := range []string{"tmp", "trash"} {
		left, err := os.ReadDir(filepath.Join(n.PoolDir, dir))
		must(n.t, err)
		if len(left) > 0 {
			n.t.Errorf("left in the pool's %s: %v", dir, left)
		}
	}
	if records, loops := n.Status().Volumes, n.Loops(); len(records) > 0 || len(loops) > 0 {
		n.t.Errorf("nothing is asked for, and there are records %+v and loop devices %+v", records, loops)
	}
}

// mustBeEmpty fails if anything is left after every volume was deleted.
func (n *node) mustBeEmpty() {
	n.t.Helper()
	n.mustBeSwept()
	left, err := os.ReadDir(filepath.Join(n.PoolDir, "volumes"))
	must(n.t, err)
	if len(left) > 0 {
		n.t.Errorf("left in the pool: %v", left)
	}
}

// spec is a volume to make.
type spec struct {
	name         string
	fsType       string // "" is a raw block volume
	provisioning string
	bytes, grown int64
}

// volume is a volume and how kubelet calls the plugin for it. A call that fails
// fails the test.
type volume struct {
	spec
	*node
}

func (v *volume) capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}}
	if v.fsType == "" {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.fsType}}
	}
	return c
}

func (v *volume) staging() string { return filepath.Join(v.KubeletDir, "staging", v.name) }
func (v *volume) target() string  { return filepath.Join(v.KubeletDir, "pod", v.name) }

func (v *volume) create() {
	v.t.Helper()
	resp, err := v.Controller.CreateVolume(v.t.Context(), &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.bytes},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability()}, Parameters: map[string]string{"provisioning": v.provisioning},
	})
	must(v.t, err)
	if id := resp.GetVolume().GetVolumeId(); id != v.name {
		v.t.Fatalf("volume %s was created as %s", v.name, id)
	}
}

// stage stages the volume and publishes it.
func (v *volume) stage() {
	v.t.Helper()
	for _, path := range []string{v.staging(), v.target()} {
		must(v.t, os.MkdirAll(filepath.Dir(path), 0o750))
	}
	_, err := v.Node.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.name, StagingTargetPath: v.staging(), VolumeCapability: v.capability()})
	must(v.t, err)
	_, err = v.Node.NodePublishVolume(v.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: v.name, StagingTargetPath: v.staging(), TargetPath: v.target(), VolumeCapability: v.capability()})
	must(v.t, err)
}

func (v *volume) unstage() {
	v.t.Helper()
	_, err := v.Node.NodeUnpublishVolume(v.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.name, TargetPath: v.target()})
	must(v.t, err)
	_, err = v.Node.NodeUnstageVolume(v.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.name, StagingTargetPath: v.staging()})
	must(v.t, err)
}

func (v *volume) grow() {
	v.t.Helper()
	resp, err := v.Node.NodeExpandVolume(v.t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: v.name, VolumePath: v.target(), StagingTargetPath: v.staging(), VolumeCapability: v.capability(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: v.spec.grown}})
	must(v.t, err)
	if got := resp.GetCapacityBytes(); got < v.spec.grown {
		v.t.Fatalf("grown to %d bytes, not %d", got, v.spec.grown)
	}
}

func (v *volume) delete() {
	v.t.Helper()
	_, err := v.Controller.DeleteVolume(v.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.name})
	must(v.t, err)
}

// contents are what a file of the volume holds.
func (v *volume) contents(file string) []byte {
	data := make([]byte, 3*mib)
	_, _ = rand.NewChaCha8(sha256.Sum256([]byte(v.name + "/" + file))).Read(data) // never fails
	return data
}

// at is where a file is: in a raw block volume, "a" at its beginning and "b"
// where it has grown.
func (v *volume) at(file string) (path string, offset int64) {
	if v.fsType == "" {
		return v.target(), int64(file[0]-'a') * v.bytes
	}
	return filepath.Join(v.target(), file), 0
}

// write writes a file through the pod's mount and syncs it, as a database would.
func (v *volume) write(file string) {
	v.t.Helper()
	path, offset := v.at(file)
	flags := os.O_WRONLY
	if v.fsType != "" {
		flags |= os.O_CREATE | os.O_TRUNC
	}
	f, err := os.OpenFile(path, flags, 0o600)
	must(v.t, err)
	_, err = f.WriteAt(v.contents(file), offset)
	must(v.t, errors.Join(err, f.Sync(), f.Close()))
	if v.fsType != "" {
		dir, err := os.Open(filepath.Dir(path))
		must(v.t, err)
		must(v.t, errors.Join(dir.Sync(), dir.Close()))
	}
}

func (v *volume) mustHold(file string) {
	v.t.Helper()
	path, offset := v.at(file)
	f, err := os.Open(path)
	must(v.t, err)
	defer func() { _ = f.Close() }() // only read from
	want := v.contents(file)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(io.NewSectionReader(f, offset, int64(len(want))), got); err != nil || !bytes.Equal(got, want) {
		v.t.Errorf("lost: %s, which was synced (%v)", file, err)
	}
}

// survive holds the volume against what was promised, and takes it through the
// rest of its life.
func (v *volume) survive(p vm.Promises) {
	dir := filepath.Join(v.PoolDir, "volumes", v.name)
	facts, err := readFacts(dir)
	switch {
	case os.IsNotExist(err) && p.Created && !p.DeleteBegun:
		v.t.Fatal("lost: the volume, which was created")
	case err == nil && (p.Deleted || !p.CreateBegun):
		v.t.Errorf("there is a volume which %+v", p)
	case err != nil && !os.IsNotExist(err):
		v.t.Error(err)
	case err == nil && facts.Bytes < p.Bytes:
		v.t.Errorf("lost: its size is %d bytes, and %d were promised", facts.Bytes, p.Bytes)
	case err == nil && p.Staged && v.fsType != "" && facts.Formatted != v.fsType:
		v.t.Errorf("the volume was staged, and its format is not known: %+v", facts)
	}
	switch {
	case !p.CreateBegun:
		return
	case p.DeleteBegun: // the CO goes on with it
		v.delete()
		return
	}
	v.create()
	v.stage()
	for _, file := range p.Files {
		v.mustHold(file)
	}
	if facts.Formatting {
		v.mustBeFormattedAnew(dir)
	}
	v.grow()
	v.mustHaveRoom()
	v.write("b")
	v.mustHold("b")
	v.unstage()
	v.delete()
}

// mustBeFormattedAnew fails unless the mark is gone. That what mkfs had left
// was erased goes to the console; there may have been nothing.
func (v *volume) mustBeFormattedAnew(dir string) {
	v.t.Helper()
	facts, err := readFacts(dir)
	if err != nil || facts.Formatting || facts.Formatted != v.fsType {
		v.t.Errorf("a format that was cut was not begun anew: %+v (%v)", facts, err)
	}
	if strings.Contains(v.Log.String(), `step="erase"`) {
		fmt.Println(vm.Erased, v.device, v.name)
	}
}

// mustHaveRoom fails unless the pod sees the size that the volume has grown to.
func (v *volume) mustHaveRoom() {
	v.t.Helper()
	resp, err := v.Node.NodeGetVolumeStats(v.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.name, VolumePath: v.target()})
	must(v.t, err)
	// A file system keeps some of it for itself, but has more than it began with.
	if total := resp.GetUsage()[0].GetTotal(); total < v.spec.grown*2/3 {
		v.t.Errorf("the pod sees %d bytes of %d", total, v.spec.grown)
	}
}

// readFacts reads what the pool knows of a volume.
func readFacts(dir string) (pool.Volume, error) {
	var facts pool.Volume
	raw, err := os.ReadFile(filepath.Join(dir, "volume.json"))
	if err == nil {
		err = json.Unmarshal(raw, &facts)
	}
	return facts, err
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
