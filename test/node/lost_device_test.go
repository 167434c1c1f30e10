package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/report"
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
			backing := backingOf(path)
			detach(t, path)
			// Another test may have it by now, which is told then.
			harness.Eventually(t, path+" is attached again", func() bool {
				return told(p) || backingOf(path) == backing && len(p.Report().Unsettled()) == 0
			})
			if !told(p) {
				if now := sumCached(t, target); now != sum {
					t.Error("the pod's device shows other bytes")
				}
				must(t, publish(ctx, target))
			}
			v.End(target)
		})
	}
}

// Its number is another's by now: the pod's publish is told to be lost, in the
// status, by its health, and to who asks for it again.
func TestLostDeviceWhoseNumberIsTaken(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Flags: []string{"--heal=false"}})
	ctx := t.Context()
	v := create(t, p, "taken", 16*mib, blockAs(multiWriter))
	target := v.Target("pod")
	must(t, v.Up(ctx, target))
	number, path := numberAt(t, target), p.Loops()[0].Path
	detach(t, path)
	harness.Eventually(t, "the loss is noticed", func() bool {
		return slices.ContainsFunc(p.Report().Volumes[0].Parts, func(part driver.PartStatus) bool { return part.Is != report.Settled })
	})
	takeLoop(t, path)
	mustRefuse(t, v.Publish(ctx, target), codes.FailedPrecondition, v.ID, target, "restart the pod")
	if now := numberAt(t, target); now != number {
		t.Errorf("the pod's device was %#x and is %#x", number, now)
	}
	if !told(p) {
		t.Error("the status does not tell")
	}
	health, err := p.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
	must(t, err)
	if text := health.String(); !strings.Contains(text, "restart the pod") {
		t.Errorf("the health does not tell: %s", text)
	}
	v.End(target)
}

// detach takes a device away for which nobody has asked the plugin. Whoever lists
// devices may have it open for a moment.
func detach(t *testing.T, path string) {
	t.Helper()
	if out, err := exec.Command("losetup", "--detach", path).CombinedOutput(); err != nil {
		t.Fatalf("losetup --detach %s: %v: %s", path, err, out)
	}
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
	return string(raw)
}
