//go:build vm

package life

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
	"github.com/csi-node/csi-node/test/vm"
)

// node is a node with its storage on a disk.
type node struct {
	*harness.Plugin
	storage
	t      *testing.T
	device string
}

// start opens the storage on a disk, and starts a plugin on it, as after a boot: the store is
// empty. A blank disk has no storage yet.
func start(t *testing.T, device string, blank bool) *node {
	t.Helper()
	p := harness.New(t)
	s, o := mine().open(t, p, device, blank)
	p.Start(o)
	return &node{p, s, t, device}
}

// in is the node for a subtest.
func (n *node) in(t *testing.T) *node { return &node{n.Plugin, n.storage, t, n.device} }

// mustBeSwept fails if anything is left in the storage that is no volume, is
// attached, or is asked for.
func (n *node) mustBeSwept() {
	n.t.Helper()
	if _, err := n.Controller.ListVolumes(n.t.Context(), &csi.ListVolumesRequest{}); err != nil { // looks at all of it
		n.t.Error(err)
	}
	if records, left := n.Status().Volumes, n.left(n.t); len(records) > 0 || len(left) > 0 {
		n.t.Errorf("nothing is asked for, and there are records %+v, and %q", records, left)
	}
}

// mustBeEmpty fails if anything is left after every volume was deleted.
func (n *node) mustBeEmpty() {
	n.t.Helper()
	n.mustBeSwept()
	if left := n.volumes(n.t); len(left) > 0 {
		n.t.Errorf("left are the volumes %q", left)
	}
}

// spec is a volume to make.
type spec struct {
	name         string
	fsType       string // "" is a raw block volume
	class        map[string]string
	bytes, grown int64
}

// formatted is what the storage knows that the volume is formatted as.
func (s spec) formatted() string {
	if layer := s.class[luks.EncryptionKey]; layer != "" {
		return layer
	}
	return s.fsType
}

// volume is a volume of the node, published for one pod. A call that fails fails
// the test.
type volume struct {
	spec
	*harness.Volume
	node *node
	pod  string // the target path
}

// of is the volume of a spec on the node.
func (n *node) of(s spec) *volume {
	n.t.Helper()
	v := &volume{spec: s, Volume: harness.NewVolume(n.t, n.Plugin, n.id(s.name), harness.Shared(s.fsType)), node: n}
	v.pod = v.Target("pod")
	v.Secrets = map[string]string{luks.PassphraseKey: "of the volume " + s.name}
	return v
}

func (v *volume) create() {
	v.T.Helper()
	req := v.CreateRequest(v.bytes, v.class)
	req.Name = v.name
	resp, err := v.Controller.CreateVolume(v.T.Context(), req)
	must(v.T, err)
	if got := resp.GetVolume(); got.GetVolumeId() != v.ID || got.GetCapacityBytes() < v.bytes {
		v.T.Fatalf("made %v", got)
	}
	v.Context = resp.GetVolume().GetVolumeContext()
}

// stage stages the volume and publishes it.
func (v *volume) stage() {
	v.T.Helper()
	must(v.T, v.Up(v.T.Context(), v.pod))
}

func (v *volume) unstage() {
	v.T.Helper()
	must(v.T, v.Down(v.T.Context(), v.pod))
}

func (v *volume) grow() {
	v.T.Helper()
	got, err := v.ExpandAt(v.T.Context(), v.pod, v.grown)
	must(v.T, err)
	if got < v.grown {
		v.T.Fatalf("grown to %d bytes, not %d", got, v.grown)
	}
}

func (v *volume) delete() {
	v.T.Helper()
	must(v.T, v.Delete(v.T.Context()))
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
		return v.pod, int64(file[0]-'a') * v.bytes
	}
	return filepath.Join(v.pod, file), 0
}

// write writes a file through the pod's mount and syncs it, as a database would.
func (v *volume) write(file string) {
	v.T.Helper()
	path, offset := v.at(file)
	flags := os.O_WRONLY
	if v.fsType != "" {
		flags |= os.O_CREATE | os.O_TRUNC
	}
	f, err := os.OpenFile(path, flags, 0o600)
	must(v.T, err)
	_, err = f.WriteAt(v.contents(file), offset)
	must(v.T, errors.Join(err, f.Sync(), f.Close()))
	if v.fsType != "" {
		dir, err := os.Open(filepath.Dir(path))
		must(v.T, err)
		must(v.T, errors.Join(dir.Sync(), dir.Close()))
	}
}

func (v *volume) mustHold(file string) {
	v.T.Helper()
	path, offset := v.at(file)
	f, err := os.Open(path)
	must(v.T, err)
	defer func() { _ = f.Close() }() // only read from
	want := v.contents(file)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(io.NewSectionReader(f, offset, int64(len(want))), got); err != nil || !bytes.Equal(got, want) {
		v.T.Errorf("lost: %s, which was synced (%v)", file, err)
	}
}

// survive holds the volume against what was promised, and takes it through the
// rest of its life.
func (v *volume) survive(p vm.Promises) {
	facts, err := v.node.facts(v.node.t, v.name)
	switch {
	case os.IsNotExist(err) && p.Created && !p.DeleteBegun:
		v.T.Fatal("lost: the volume, which was created")
	case err == nil && (p.Deleted || !p.CreateBegun):
		v.T.Errorf("there is a volume which %+v", p)
	case err != nil && !os.IsNotExist(err):
		v.T.Error(err)
	case err == nil && facts.bytes < p.Bytes:
		v.T.Errorf("lost: its size is %d bytes, and %d were promised", facts.bytes, p.Bytes)
	case err == nil && p.Staged && v.fsType != "" && facts.formatted != v.formatted():
		v.T.Errorf("the volume was staged, and its format is not known: %+v", facts)
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
	if facts.formatting {
		v.mustBeFormattedAnew()
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
func (v *volume) mustBeFormattedAnew() {
	v.T.Helper()
	facts, err := v.node.facts(v.node.t, v.name)
	if err != nil || facts.formatting || facts.formatted != v.formatted() {
		v.T.Errorf("a format that was cut was not begun anew: %+v (%v)", facts, err)
	}
	if strings.Contains(v.Log.String(), `step="erase"`) {
		fmt.Println(vm.Erased, v.node.device, v.name)
	}
}

// mustHaveRoom fails unless the pod sees the size that the volume has grown to.
func (v *volume) mustHaveRoom() {
	v.T.Helper()
	// A file system keeps some of it for itself, but has more than it began with.
	if total := v.Total(v.pod); total < v.grown*2/3 {
		v.T.Errorf("the pod sees %d bytes of %d", total, v.grown)
	}
}

var must = require.NoError
