package node

import (
	"context"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// frozenPool gives the plugin a pool on an ext4 of its own. While that is frozen,
// who writes there hangs in the kernel, and SIGKILL does not end it.
func frozenPool(t *testing.T, p *harness.Plugin) (freeze, thaw func()) {
	t.Helper()
	image, disk := filepath.Join(t.TempDir(), "disk.img"), filepath.Join(p.Dir, "disk")
	makeDir(t, disk)
	harness.Command(t, "truncate", "--size=256M", image)
	harness.Command(t, "mkfs.ext4", "-q", image)
	harness.Command(t, "mount", "-o", "loop", image, disk)
	p.PoolDir = filepath.Join(disk, "pool")
	frozen := false
	thaw = func() {
		if frozen {
			frozen = false
			harness.Command(t, "fsfreeze", "--unfreeze", disk)
		}
	}
	t.Cleanup(func() {
		thaw()
		if p.Process != nil {
			p.Signal(t, syscall.SIGTERM)
			p.Wait(t)
		}
		for _, mount := range slices.Backward(p.Mounts()) { // none but the disk, if the test went well
			if mount != disk {
				harness.Command(t, "umount", mount)
			}
		}
		for _, loop := range p.Loops() {
			if strings.HasPrefix(loop.Backing, p.PoolDir) {
				machine.LosetupDetach(t, loop.Path)
			}
		}
		harness.Command(t, "umount", disk)
	})
	return func() { harness.Command(t, "fsfreeze", "--freeze", disk); frozen = true }, thaw
}

// A plugin that was killed while one of its threads hangs in the kernel keeps
// its lock and its sockets. It can do nothing any more, so the next one takes
// over, and serves every volume but the one that hangs.
func TestTakeOverFromAKilledPluginThatHangs(t *testing.T) {
	p := harness.New(t)
	freeze, thaw := frozenPool(t, p)
	address := harness.FreeAddress(t)
	options := harness.Options{Flags: []string{"--http-endpoint", address}}
	p.Start(options)
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	hung := create(t, p, "hung", 32*mib, mountAs("ext4", multiWriter))
	pod := v.Target("pod")
	must(t, v.Up(ctx, pod))
	write(t, filepath.Join(pod, "file"), "kept")
	harness.Command(t, "sync", filepath.Join(pod, "file"))

	freeze()
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := hung.Stage(short); err == nil {
		t.Fatal("a frozen pool took a volume's marks")
	}
	first := p.Process
	first.Signal(t, syscall.SIGKILL)
	harness.Eventually(t, "it is dead and still there", func() bool {
		dead, err := process.Dead(first.PID())
		must(t, err)
		return dead
	})

	second := p.Launch(options)
	t.Cleanup(func() { second.Signal(t, syscall.SIGTERM) })
	serves, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	if err := second.Log.Await(serves, `"Serving"`); err != nil {
		t.Fatalf("the second does not serve: %v\n%s", err, second.Log)
	}
	p.Reconnect()
	p.Process = second
	select {
	case <-first.Exited():
		t.Fatal("the first process has ended: nothing was taken over")
	default:
	}
	must(t, v.Publish(ctx, v.Target("other")))
	mustRead(t, filepath.Join(v.Target("other"), "file"), "kept")
	must(t, v.Unpublish(ctx, v.Target("other")))
	if status := p.Status(); !status.Running || len(status.Volumes) == 0 {
		t.Errorf("status: %+v", status)
	}
	if left, err := filepath.Glob(filepath.Join(p.StateDir, "*.successor*")); err != nil || len(left) > 0 {
		t.Errorf("half a take-over is left: %q (%v)", left, err)
	}

	// Only one can have it: a third waits for the second, which lives.
	third := p.Launch(options)
	waiting, stop := context.WithTimeout(ctx, harness.Patience)
	defer stop()
	must(t, third.Log.Await(waiting, "aiting for another plugin process"))
	third.Signal(t, syscall.SIGTERM)
	third.Wait(t)

	thaw()
	first.Wait(t)
	harness.Eventually(t, "the HTTP endpoint is served once its port is free", func() bool {
		conn, err := net.Dial("tcp", address)
		return err == nil && conn.Close() == nil
	})
	if harness.Metrics(t, address)["go_goroutines"] == 0 {
		t.Error("no metrics")
	}
	must(t, hung.Stage(ctx))
	mustRead(t, filepath.Join(pod, "file"), "kept")
	must(t, hung.Unstage(ctx))
	must(t, hung.Delete(ctx))
	v.End(pod)
}
