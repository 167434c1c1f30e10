package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// bindFreeLoop binds the loop device at a path that the kernel gives next, until
// the test ends. What another test shows or has it leaves alone.
func bindFreeLoop(t *testing.T, path string) {
	t.Helper()
	write(t, path, "")
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(t, err)
	defer func() { must(t, control.Close()) }()
	for index := 0; ; index++ {
		node := fmt.Sprint("/dev/loop", index)
		table, err := os.ReadFile("/proc/self/mountinfo")
		must(t, err)
		if backingOf(node) != "" || strings.Contains(string(table), fmt.Sprintf(" /loop%d ", index)) {
			continue
		}
		if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, index); err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatal(err)
		}
		must(t, unix.Mount(node, path, "", unix.MS_BIND, ""))
		if backingOf(node) == "" {
			t.Cleanup(func() { must(t, machine.Unmount(path)) })
			return
		}
		must(t, machine.Unmount(path)) // somebody was faster
	}
}

// A loop device whose node is bound anywhere on the node, by whomever, may be
// what a pod sees: its number is given to no volume, be it that the bind was
// there when the plugin started, or that it came a moment ago.
func TestBoundNumbersAreNotTaken(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	outside := t.TempDir() // not below the kubelet directory
	bind := func(number int) uint64 {
		path := filepath.Join(outside, fmt.Sprint(number))
		bindFreeLoop(t, path)
		return numberAt(t, path)
	}
	var shown []uint64
	for i := range 3 {
		shown = append(shown, bind(i))
	}
	p.Start(harness.Options{})
	for i := range 3 {
		v := create(t, p, fmt.Sprint("volume-", i), 16*mib, blockAs(multiWriter))
		target := v.Target("pod")
		must(t, v.Up(t.Context(), target))
		if got := numberAt(t, target); slices.Contains(shown, got) {
			t.Errorf("volume %d has the number %#x, which others show", i, got)
		}
		shown = append(shown, numberAt(t, target), bind(10+i))
		defer func() { must(t, v.Unstage(t.Context())) }()
		defer func() { must(t, v.Unpublish(t.Context(), target)) }()
	}
}

// A raw volume's number, whose device was lost while its plugin was not there, is
// not taken by another plugin: the pod would have its data.
func TestAnotherPluginSparesShownNumbers(t *testing.T) {
	t.Parallel()
	p, other := harness.Start(t, harness.Options{}), harness.Start(t, harness.Options{})
	v := create(t, p, "published", 16*mib, blockAs(multiWriter))
	target := v.Target("pod")
	must(t, v.Up(t.Context(), target))
	loop := p.Loops()[0].Path
	p.Kill()
	harness.Command(t, "losetup", "--detach", loop)
	for i := range 3 {
		w := create(t, other, fmt.Sprint("other-", i), 16*mib, blockAs(multiWriter))
		must(t, w.Stage(t.Context()))
		defer func() { must(t, w.Unstage(t.Context())) }()
	}
	for _, l := range other.Loops() {
		if l.Path == loop {
			t.Errorf("another plugin has %s, which %s shows", loop, target)
		}
	}
	p.Start(harness.Options{})
	v.End(target)
}

// A read-only pod's number that was lost, with what it was bound at, while its plugin was
// not there may be another plugin's by then, whose pod keeps its own data.
func TestAnotherPluginsViewIsLeftAlone(t *testing.T) {
	t.Parallel()
	p, other := harness.Start(t, harness.Options{}), harness.Start(t, harness.Options{})
	v, w := create(t, p, "lost", 16*mib, blockAs(multiWriter)), create(t, other, "other", 16*mib, blockAs(multiWriter))
	target, theirs := v.Target("pod"), w.Target("pod")
	must(t, v.Stage(t.Context()))
	must(t, v.PublishReadOnly(t.Context(), target))
	must(t, w.Stage(t.Context()))
	number := numberAt(t, target)
	node := fmt.Sprint("/dev/loop", unix.Minor(number))
	p.Kill()
	must(t, machine.Unmount(target))
	harness.Command(t, "losetup", "--detach", node)
	must(t, w.PublishReadOnly(t.Context(), theirs))
	if numberAt(t, theirs) != number { // somebody else was faster
		t.Log("the number was not free")
	}
	node = fmt.Sprint("/dev/loop", unix.Minor(numberAt(t, theirs)))
	shows := backingOf(node)
	p.Start(harness.Options{})
	_ = v.PublishReadOnly(t.Context(), target) // which is another number by now, and refused
	if now := backingOf(node); now != shows {
		t.Errorf("the other plugin's pod is shown %s, was %s", now, shows)
	}
	must(t, v.Unpublish(t.Context(), target))
	must(t, v.Unstage(t.Context()))
	must(t, w.Unpublish(t.Context(), theirs))
	must(t, w.Unstage(t.Context()))
}

// What a read-only pod has put behind its device while its plugin was not there does not
// stay.
func TestSwappedViewIsPutRight(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 16*mib, blockAs(multiWriter))
	target := v.Target("pod")
	must(t, v.Stage(t.Context()))
	must(t, v.PublishReadOnly(t.Context(), target))
	node := fmt.Sprint("/dev/loop", unix.Minor(numberAt(t, target)))
	shows := backingOf(node)
	p.Kill()
	swapBacking(t, node, 16*mib)
	p.Start(harness.Options{})
	must(t, v.PublishReadOnly(t.Context(), target))
	if now := backingOf(node); now != shows {
		t.Errorf("the pod is shown %s, want %s", now, shows)
	}
	v.End(target)
}

// swapBacking puts a file of so many bytes behind a read-only loop device, as who has that
// for reading can.
func swapBacking(t *testing.T, node string, bytes int64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "own")
	write(t, path, "")
	must(t, os.Truncate(path, bytes))
	own, err := os.Open(path)
	must(t, err)
	defer func() { must(t, own.Close()) }()
	device, err := os.Open(node)
	must(t, err)
	const loopChangeFD = 0x4c06
	must(t, unix.IoctlSetInt(int(device.Fd()), loopChangeFD, int(own.Fd())))
	must(t, device.Close())
	t.Cleanup(func() {
		if backingOf(node) == path { // nobody has put it right
			detach(t, node)
		}
	})
}
