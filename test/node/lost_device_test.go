package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// A raw volume's device that is detached behind the plugin's back is attached
// again, with the number that the pod has, and nobody calls.
func TestLostDeviceComesBack(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, readOnly := range []bool{false, true} {
		t.Run(fmt.Sprint("read-only ", readOnly), func(t *testing.T) {
			ctx, size := t.Context(), int64(16*mib)
			v := create(t, p, fmt.Sprint("lost-", readOnly), size, blockAs(multiWriter))
			target, publish := v.Target("pod"), v.Publish
			if readOnly {
				publish = v.PublishReadOnly
			}
			must(t, v.Stage(ctx))
			must(t, publish(ctx, target))
			sum, number := sumCached(t, target), numberAt(t, target)
			path := fmt.Sprint("/dev/loop", unix.Minor(number))
			if comesBack(t, p, path) {
				if now := sumCached(t, target); now != sum {
					t.Error("the pod's device shows other bytes")
				}
				must(t, publish(ctx, target))
			}
			v.End(target)
		})
	}
}

// A pod keeps the device number that it was started with. When the device was
// lost and its number is another's, the publish is not healed behind the pod's
// back: it is told to be lost, in the status, by its health, and to who asks for it
// again. The next pod gets the volume.
func TestLostDeviceWhoseNumberIsTaken(t *testing.T) {
	t.Parallel()
	for name, killed := range map[string]bool{"noticed": false, "found at the start": true} {
		t.Run(name, func(t *testing.T) {
			p := harness.Start(t, harness.Options{Flags: []string{"--heal=false"}})
			ctx, size := t.Context(), int64(16*mib)
			v := create(t, p, "taken", size, blockAs(multiWriter))
			target := v.Target("pod")
			must(t, v.Up(ctx, target))
			writeAt(t, target, []byte("kept"), size-512)
			before, path := numberAt(t, target), p.Loops()[0].Path
			if killed {
				p.Kill()
			}
			detach(t, path)
			if !killed {
				harness.Eventually(t, "the loss is noticed", func() bool { return v.Unsettled() != "" })
			}
			takeLoop(t, path)
			if killed {
				p.Start(harness.Options{})
			}
			mustRefuse(t, v.Publish(ctx, target), codes.Unavailable, v.ID, target, "restart the pod",
				fmt.Sprintf("%d:%d", unix.Major(before), unix.Minor(before)))
			if now := numberAt(t, target); now != before {
				t.Errorf("the pod's device was %#x and is %#x", before, now)
			}
			if !told(p) {
				t.Error("the status does not tell")
			}
			health, err := p.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
			must(t, err)
			if text := health.String(); !strings.Contains(text, "restart the pod") {
				t.Errorf("the health does not tell: %s", text)
			}
			next := v.Target("next-pod")
			must(t, v.Publish(ctx, next))
			if now := numberAt(t, next); now == before {
				t.Errorf("the volume has the number %#x, which another's device has", now)
			}
			readAt(t, next, []byte("kept"), size-512)
			v.End(target, next)
		})
	}
}

// comesBack detaches a published device, and reports whether it is attached again. It is not
// where another test has it by then, which is told.
func comesBack(t *testing.T, p *harness.Plugin, path string) bool {
	t.Helper()
	backing, was := backingOf(path), sequenceOf(path)
	detach(t, path)
	harness.Eventually(t, path+" is attached again", func() bool {
		return told(p) || sequenceOf(path) != was && backingOf(path) == backing && len(p.Report().Unsettled()) == 0
	})
	return !told(p)
}

// sequenceOf changes whenever a disk is attached or detached.
func sequenceOf(path string) string {
	sequence, _ := os.ReadFile(filepath.Join("/sys/block", filepath.Base(path), "diskseq"))
	return string(sequence)
}

// detach takes a device away for which nobody has asked the plugin. Whoever lists
// devices may have it open for a moment.
func detach(t *testing.T, path string) {
	t.Helper()
	harness.Command(t, "losetup", "--detach", path)
}

// told reports whether the status says of a publish that its number is another's.
func told(p *harness.Plugin) bool {
	return strings.Contains(fmt.Sprint(p.Report().Volumes), "restart the pod")
}

// backingOf is what a loop device shows, "" for none.
func backingOf(path string) string {
	raw, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(path), "loop/backing_file"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

// takeLoop makes a free loop device another's until the test ends. The plugins
// of other tests may have it for a while before.
func takeLoop(t *testing.T, path string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "another")
	must(t, os.WriteFile(file, make([]byte, mib), 0o600))
	harness.Eventually(t, path+" is taken", func() bool {
		out, err := exec.CommandContext(t.Context(), "losetup", path, file).CombinedOutput()
		if err != nil && !bytes.Contains(out, []byte("busy")) && !bytes.Contains(out, []byte("No such")) {
			t.Fatalf("losetup %s: %v: %s", path, err, out)
		}
		return err == nil
	})
	t.Cleanup(func() {
		out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "losetup", "--detach", path).CombinedOutput()
		if err != nil {
			t.Errorf("losetup --detach %s: %v: %s", path, err, out)
		}
	})
}

// numberAt is the number of the device node at a path.
func numberAt(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return st.Rdev
}
