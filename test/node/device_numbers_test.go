package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	if out, err := exec.Command("losetup", "--detach", loop).CombinedOutput(); err != nil {
		t.Fatalf("losetup --detach %s: %v: %s", loop, err, out)
	}
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
