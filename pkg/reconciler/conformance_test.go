package reconciler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// small is the size of a volume on the real kernel, in bytes.
const small = 64 << 20

// node is a kernel under the hands of the plugin and of somebody else: the fake,
// or the real one. All is done to volume "v", which is blank at first.
type node interface {
	kernel() Kernel
	path(n int) string // of the stage, for 0, or of a target
	// What others do.
	umount(n int) error
	tmpfs(n int) error
	litter(n int) error
	rmdir(n int) error
	losetupD() error
	hold() error
	release() error
}

// call is one call of a conformance history, on a node that is seen as have.
type call struct {
	Kernel
	ctx   context.Context
	n     node
	have  state.Actual
	words []string // after its name
}

// at is the path that the words name.
func (c call) at() string { return c.n.path(digit(c.words)) }

func (c call) readOnly() bool { return slices.Contains(c.words, "ro") }

func (c call) flags() state.Flags {
	if c.readOnly() {
		return state.Flags{Set: state.ReadOnly}
	}
	return state.Flags{Clear: state.ReadOnly}
}

// dictionary names the calls. Those that begin with "!" are somebody else's.
var dictionary = map[string]func(c call) error{
	"attach":       func(c call) error { return c.Devices.Attach(c.ctx, volumeV, c.readOnly()) },
	"detach":       func(c call) error { return c.Devices.Detach(c.ctx, volumeV) },
	"grow-device":  func(c call) error { return c.Devices.Grow(c.ctx, volumeV, 2*small) },
	"begin-format": func(c call) error { return c.Devices.BeginFormat(c.ctx, volumeV) },
	"end-format":   func(c call) error { return c.Devices.EndFormat(c.ctx, volumeV, "ext4") },
	"erase":        func(c call) error { return c.Devices.Erase(c.ctx, volumeV) },
	"format":       func(c call) error { return c.Filesystems.Format(c.ctx, c.have.Device, "ext4", nil) },
	"check":        func(c call) error { return c.Filesystems.Check(c.ctx, c.have.Device, "ext4") },
	"grow":         func(c call) error { return c.Filesystems.Grow(c.ctx, c.have.Device, "ext4", "") },
	"mount": func(c call) error {
		return c.Mounts.MountDevice(c.ctx, c.have.Device, c.n.path(0), "ext4", state.Flags{}, c.readOnly())
	},
	"bind": func(c call) error {
		return c.Mounts.BindMount(c.ctx, c.n.path(0), c.have.Device.Number, c.at(), c.flags())
	},
	"bind-device": func(c call) error { return c.Mounts.BindDevice(c.ctx, c.have.Device, c.at()) },
	"bind-view":   func(c call) error { return c.Mounts.BindDevice(c.ctx, c.have.View, c.at()) },
	"set":         func(c call) error { return c.Mounts.SetAttributes(c.ctx, c.at(), c.flags()) },
	"unmount":     func(c call) error { return c.Mounts.Unmount(c.ctx, c.at()) },
	"remove":      func(c call) error { return c.Directories.Remove(c.ctx, c.at()) },
	"renew":       func(c call) error { return c.Directories.Renew(c.ctx, c.at()) },
	"attach-view": func(c call) error { return c.Views.AttachView(c.ctx, c.have.Device) },
	"detach-view": func(c call) error { return c.Views.DetachView(c.ctx, c.have.Device) },

	"!umount":    func(c call) error { return c.n.umount(digit(c.words)) },
	"!tmpfs":     func(c call) error { return c.n.tmpfs(digit(c.words)) },
	"!litter":    func(c call) error { return c.n.litter(digit(c.words)) },
	"!rmdir":     func(c call) error { return c.n.rmdir(digit(c.words)) },
	"!losetup-d": func(c call) error { return c.n.losetupD() },
	"!hold":      func(c call) error { return c.n.hold() },
	"!release":   func(c call) error { return c.n.release() },
}

var volumeV = devices.Volume{ID: "v"}

// digit is the number of a target among words; 0, the stage, when there is none.
func digit(words []string) int {
	for _, w := range words {
		if n, err := strconv.Atoi(w); err == nil {
			return n
		}
	}
	return 0
}

// conformance holds the histories that both kernels must tell alike.
var conformance = map[string]string{
	"the life of a mount volume":           "attach; begin-format; format; end-format; mount; bind 1; bind 2 ro; unmount 1; remove 1; unmount 2; remove 2; unmount; renew; detach",
	"the life of a block volume":           "attach; bind-device 1; attach-view; bind-view 2; unmount 2; remove 2; detach-view; unmount 1; remove 1; detach",
	"attached twice, detached twice":       "attach; attach; detach; detach",
	"attached read-only":                   "attach ro; bind-device 1; unmount 1; detach",
	"attached otherwise while mounted":     "attach; begin-format; format; end-format; mount; attach ro; unmount; detach",
	"mounted read-only":                    "attach; begin-format; format; end-format; detach; attach ro; mount ro; bind 1 ro; unmount 1; unmount; detach",
	"a writable mount of read-only":        "attach; begin-format; format; end-format; detach; attach ro; mount; detach",
	"detached while mounted":               "attach; begin-format; format; end-format; mount; detach; bind 1; unmount; detach; unmount 1; detach",
	"detached beneath a bound node":        "attach; bind-device 1; !losetup-d; unmount 1; remove 1",
	"detached beneath its view":            "attach; attach-view; detach; detach-view; detach",
	"two views":                            "attach; attach-view; attach-view; detach-view; detach-view; detach",
	"detached by somebody while mounted":   "attach; begin-format; format; end-format; mount; !losetup-d; attach; !losetup-d; unmount; detach",
	"detached by somebody beneath a view":  "attach; attach-view; !losetup-d; detach-view",
	"held":                                 "attach; !hold; detach; !release; detach",
	"held, and detached by somebody":       "attach; !hold; !losetup-d; attach; !losetup-d; !release",
	"formatted twice":                      "attach; begin-format; format; format; end-format; begin-format; format; erase; detach",
	"a format that was interrupted":        "attach; begin-format; format; erase; format; end-format; mount; unmount; detach",
	"formatted while held":                 "attach; begin-format; !hold; format; erase; !release; format; end-format; detach",
	"erased without a mark":                "attach; erase; begin-format; format; end-format; erase; mount; unmount; detach",
	"checked":                              "attach; begin-format; format; end-format; check; mount; check; unmount; detach",
	"grown while detached":                 "grow-device; attach; begin-format; format; end-format; mount; unmount; detach",
	"grown while unmounted":                "attach; begin-format; format; end-format; grow-device; grow; mount; unmount; detach",
	"grown beneath a view":                 "attach; attach-view; grow-device; detach-view; detach",
	"mounted before it is formatted":       "attach; mount; begin-format; mount; detach",
	"mounted twice":                        "attach; begin-format; format; end-format; mount; mount; bind 1; bind 1; unmount 1; unmount; detach",
	"bound from nothing":                   "attach; begin-format; format; end-format; bind 1; mount; bind 1; unmount; bind 2; unmount 1; detach",
	"attributes":                           "attach; begin-format; format; end-format; mount; bind 1 ro; set 1; set 1 ro; set 2; unmount 1; set; set 0 ro; unmount; detach",
	"nothing to unmount":                   "unmount; unmount 1; remove 1; renew; detach; detach-view",
	"removed while mounted":                "attach; begin-format; format; end-format; mount; bind 1; remove 1; renew; renew 1; unmount 1; remove 1; remove 1; unmount; detach",
	"removed while not empty":              "!litter 1; remove 1; !litter; renew; attach; begin-format; format; end-format; mount; unmount; detach",
	"mounted over what is not empty":       "attach; begin-format; format; end-format; mount; !litter 1; bind 1; bind-device 1; unmount; detach",
	"mounts of somebody else":              "attach; begin-format; format; end-format; !tmpfs 1; mount; bind 1; bind-device 1; remove 1; !umount 1; bind 1; !tmpfs 1; !umount 1; unmount 1; unmount; detach",
	"a stage beneath somebody else's":      "attach; begin-format; format; end-format; mount; !tmpfs; bind 1; !umount; bind 1; !umount; unmount 1; detach",
	"unmounted by somebody":                "attach; begin-format; format; end-format; mount; bind 1; !umount; detach; !umount 1; detach",
	"directories removed by somebody":      "attach; begin-format; format; end-format; mount; bind 1; unmount 1; !rmdir 1; bind 1; !umount 1; !rmdir 1; remove 1; unmount; !rmdir; renew; mount; unmount; detach",
	"a node is bound over a directory":     "attach; bind-device 1; unmount 1; begin-format; format; end-format; mount; bind 1; remove 1; bind 1; unmount 1; bind-device 1; unmount; detach",
	"a view of a device that has gone":     "attach; attach-view; detach-view; detach; attach-view; attach; attach-view; detach-view; detach",
	"steps for a device that is not there": "format; check; grow; mount; bind-device 1; erase; begin-format; end-format; detach",
}

// The fake kernel, on which histories are played, answers as the real one does,
// and then looks the same.
func TestFakeKernelIsLikeTheRealOne(t *testing.T) {
	for name, text := range conformance {
		t.Run(name, func(t *testing.T) {
			imagined, real := newFakeNode(), newRealNode(t)
			for i, line := range strings.Split(text, "; ") {
				words := strings.Fields(line)
				do := dictionary[words[0]]
				if do == nil {
					t.Fatalf("unknown call %q", line)
				}
				told := func(n node) (string, error) {
					err := do(call{n.kernel(), t.Context(), n, lookAt(t, n), words[1:]})
					if err != nil {
						return "refused\n", err
					}
					return "done\n", nil
				}
				fakeAnswer, fakeErr := told(imagined)
				realAnswer, realErr := told(real)
				a, b := fakeAnswer+portrait(lookAt(t, imagined)), realAnswer+portrait(lookAt(t, real))
				// Others look at every loop device of the node, and have this one open for a moment; or they
				// make a mount namespace, and hold what is mounted then.
				disturbed := func() bool {
					return strings.Contains(b, state.DeviceDetaching.String()) || strings.Contains(b, "held true")
				}
				for since := time.Now(); a != b && disturbed() && time.Since(since) < 10*time.Second; {
					b = realAnswer + portrait(lookAt(t, real))
				}
				if a != b {
					t.Fatalf("call %d of %q: %s\nthe fake (%v):\n%s\nthe kernel (%v):\n%s", i+1, text, line, fakeErr, a, realErr, b)
				}
			}
		})
	}
}

// lookAt is what the worker of a volume would see that is staged and published
// at two targets.
func lookAt(t *testing.T, n node) state.Actual {
	t.Helper()
	want := &state.Volume{ID: "v", Stage: &state.Stage{Path: n.path(0), Capability: mountCapability()}, Targets: map[string]*state.Target{}}
	for i := 1; i <= 2; i++ {
		want.Targets[n.path(i)] = &state.Target{Path: n.path(i), Capability: mountCapability()}
	}
	r := New(Config{Store: newFakeStore(), Kernel: n.kernel()})
	defer r.queue.ShutDown()
	have, err := r.observeAlone(klog.NewContext(t.Context(), klog.Logger{}), want)
	require.NoError(t, err)
	have.Stage.Mounts = append([]state.Mount(nil), have.Stage.Mounts...)
	var targets state.Mountpoints
	targets.Set("1", have.Targets.At(n.path(1)))
	targets.Set("2", have.Targets.At(n.path(2)))
	return state.Actual{Device: have.Device, View: have.View, Contents: have.Contents, Stage: have.Stage, Targets: targets}
}

// portrait is what matters of a look, without numbers and paths.
func portrait(have state.Actual) string {
	var b strings.Builder
	d, v, c := have.Device, have.View, have.Contents
	fmt.Fprintf(&b, "device %s", d.State)
	if d.Present() {
		fmt.Fprintf(&b, " held %t ro %t", d.Held, d.ReadOnly)
	}
	fmt.Fprintf(&b, " full size %t, mark %t, formatted %q\nview %s", d.Size >= d.Capacity, d.Formatting, d.Formatted, v.State)
	if v.Present() {
		fmt.Fprintf(&b, " ro %t held %t", v.ReadOnly, v.Held)
	}
	fmt.Fprintf(&b, "\ncontents %s %q growable %t check %t unread %t\n", c.Kind, c.FSType, c.Growable, c.NeedsCheck, c.Err != nil)
	for i, m := range []state.Mountpoint{have.Stage, have.Targets.At("1"), have.Targets.At("2")} {
		fmt.Fprintf(&b, "at %d: %s, empty %t, unseen %t\n", i, m.File, m.Empty, m.Err != nil)
		for _, mount := range m.Mounts {
			which := "something else"
			switch mount.Device {
			case d.Number:
				which = "the device"
			case v.Number:
				which = "the view"
			}
			if mount.Device == (state.DeviceNumber{}) {
				which = "something else"
			}
			fmt.Fprintf(&b, "   %s node %t ro %t super ro %t corrupt %t\n", which, mount.Node, mount.Attributes&state.ReadOnly != 0, mount.SuperReadOnly && !mount.Node, mount.Corrupt)
		}
	}
	return b.String()
}

// fakeNode is the fake kernel.
type fakeNode struct {
	*process
	v *fakeVolume
}

func newFakeNode() *fakeNode {
	k := newFakeKernel()
	k.obeys = true
	v := &fakeVolume{capacity: small, size: small, fakeData: fakeData{contents: state.Contents{Kind: state.ContentsBlank}}}
	k.volumes["v"] = v
	return &fakeNode{process: &process{k: k, end: func() {}}, v: v}
}

func (n *fakeNode) path(i int) string { return pathOf("v", i) }

func (n *fakeNode) umount(i int) error {
	if len(n.k.mounts[n.path(i)]) == 0 {
		return errors.New("nothing is mounted")
	}
	n.k.unmount(n.path(i))
	return nil
}

func (n *fakeNode) tmpfs(i int) error {
	n.k.push(n.path(i), fakeMount{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}})
	return nil
}

func (n *fakeNode) litter(i int) error {
	n.k.litter(n.path(i))
	return nil
}

func (n *fakeNode) rmdir(i int) error {
	n.k.rmdir(n.path(i))
	return nil
}

func (n *fakeNode) losetupD() error {
	n.k.losetupD(n.v)
	return nil
}

func (n *fakeNode) hold() error {
	n.v.held = true
	return nil
}

func (n *fakeNode) release() error {
	n.v.held = false
	n.k.autoclear(n.v)
	return nil
}

// realNode is the kernel of this machine, with a pool of its own.
type realNode struct {
	t     *testing.T
	root  string
	data  string
	parts Kernel
	held  *os.File
}

func newRealNode(t *testing.T) *realNode {
	t.Helper()
	machine.Kernel(t)
	must := func(err error) {
		t.Helper()
		require.NoError(t, err)
	}
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(err)
	n := &realNode{t: t, root: root}
	p, err := pool.Open(filepath.Join(root, "pool"))
	must(err)
	_, err = p.Create(t.Context(), pool.Volume{ID: "v", Name: "v", Bytes: small, Provisioning: pool.Thin})
	must(err)
	n.data, err = p.DataPath("v")
	must(err)
	loops, err := loop.New(t.Context())
	must(err)
	b, err := pool.NewBackend(t.Context(), p, loops)
	must(err)
	// What another package's test waits for to get again is not taken.
	loops.Reserve(loop.Numbers{Bound: machine.Bound})
	fs, err := filesystem.New(1)
	must(err)
	m, err := mounts.New(root)
	must(err)
	n.parts = Kernel{Devices: devices.NewSet("pool", map[string]devices.Backend{"pool": b}), Views: blockdev.New(loops, b.VolumeAt), Filesystems: fs, Mounts: m, Existing: m.Existing(), Directories: m}
	for i := range 3 {
		must(os.MkdirAll(filepath.Dir(n.path(i)), 0o750))
	}
	t.Cleanup(n.clean)
	return n
}

// clean takes down what a failed history has left: its mounts, its devices.
func (n *realNode) clean() {
	if err := n.release(); err != nil {
		n.t.Error(err)
	}
	for i := range 3 {
		for n.umount(2-i) == nil { // EINVAL: no more
		}
	}
	for _, device := range n.devices(n.data) {
		for _, view := range n.devices(device) {
			n.detach(view, device)
		}
		n.detach(device, n.data)
	}
}

// devices lists the loop devices over a file.
func (n *realNode) devices(over string) []string {
	out, err := exec.Command("losetup", "--noheadings", "--output", "NAME", "--associated", over).Output()
	if err != nil {
		n.t.Errorf("losetup: %v", err)
	}
	return strings.Fields(string(out))
}

func (n *realNode) detach(device, backing string) {
	if _, err := machine.Detach(device, backing); err != nil {
		n.t.Error(err)
	}
}

func (n *realNode) kernel() Kernel { return n.parts }

func (n *realNode) path(i int) string {
	if i == 0 {
		return filepath.Join(n.root, "stage", "v")
	}
	return filepath.Join(n.root, "pods", strconv.Itoa(i), "v")
}

func (n *realNode) umount(i int) error {
	return machine.Unmount(n.path(i))
}

func (n *realNode) tmpfs(i int) error {
	if err := os.Mkdir(n.path(i), 0o750); err != nil && !os.IsExist(err) {
		return err
	}
	return unix.Mount("tmpfs", n.path(i), "tmpfs", 0, "size=1m")
}

func (n *realNode) litter(i int) error {
	if err := os.Mkdir(n.path(i), 0o750); err != nil && !os.IsExist(err) {
		return err
	}
	return os.WriteFile(filepath.Join(n.path(i), "litter"), []byte("x"), 0o600)
}

func (n *realNode) rmdir(i int) error { return os.Remove(n.path(i)) }

func (n *realNode) losetupD() error {
	for _, device := range n.devices(n.data) {
		n.detach(device, n.data)
	}
	return nil
}

// hold claims the device as a mkfs does.
func (n *realNode) hold() error {
	d, err := n.parts.Devices.Find(n.t.Context(), volumeV)
	if err != nil {
		return err
	}
	n.held, err = os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	return err
}

func (n *realNode) release() error {
	if n.held == nil {
		return nil
	}
	err := n.held.Close()
	n.held = nil
	return err
}
