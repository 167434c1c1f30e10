package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/harness"
)

// within makes a call with a deadline, and sees that it is answered well before.
func within(t *testing.T, d time.Duration, call func(context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	err := call(ctx)
	if deadline, _ := ctx.Deadline(); time.Until(deadline) <= 0 {
		t.Errorf("answered after the deadline of %s: %v", d, err)
	}
	return err
}

// While the volume's place in the pool does not answer, calls are answered in
// time, with what is waited for; what they ask for is written, and done when the
// place is back.
func TestCallsAreAnsweredWhileThePoolHangs(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	fresh, grown := create(t, p, "fresh", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "grown", 32*mib, blockAs(multiWriter))
	fresh.Capability = mountAs("", multiWriter)
	must(t, grown.Stage(t.Context()))
	revive := []func(){hang(t, filepath.Dir(fresh.Data())), hang(t, filepath.Dir(grown.Data()))}
	pod := fresh.Target("pod")
	for name, call := range map[string]func(context.Context) error{
		"stage":   fresh.Stage,
		"publish": func(ctx context.Context) error { return fresh.Publish(ctx, pod) },
		"expand": func(ctx context.Context) error {
			_, err := grown.Expand(ctx, 64*mib)
			return err
		},
	} {
		err := within(t, 4*time.Second, call)
		mustRefuse(t, err, codes.DeadlineExceeded)
		if !silent.MatchString(err.Error()) { // as the caller's own clock says nothing
			t.Errorf("%s: %v", name, err)
		}
	}
	asked := map[string]bool{}
	for _, v := range p.Status().Volumes {
		for _, part := range v.Parts {
			asked[v.Volume+" "+part.Part] = true
		}
	}
	if !asked[fresh.ID+" stage"] || !asked[grown.ID+" size"] {
		t.Errorf("asked is %v", asked)
	}
	for _, revive := range revive {
		revive()
	}
	harness.Eventually(t, "the stage and the growth are done", func() bool {
		settled := 0
		for _, v := range p.Status().Volumes {
			for _, part := range v.Parts {
				if part.Is == report.Settled && (v.Volume == fresh.ID && part.Part == "stage" || v.Volume == grown.ID && part.Part == "size") {
					settled++
				}
			}
		}
		return settled == 2
	})
	must(t, fresh.Up(t.Context(), pod))
	if bytes, err := grown.Expand(t.Context(), 64*mib); err != nil || bytes != 64*mib {
		t.Errorf("the volume has %d bytes (%v)", bytes, err)
	}
	must(t, grown.Unstage(t.Context()))
	must(t, grown.Delete(t.Context()))
	fresh.End(pod)
}

// silent is said of a volume that hangs: by who waits for a look, or by the look
// itself, which gives up on the pool.
var silent = regexp.MustCompile(`has not answered a look for|step look has been running since|the pool has not told of it since`)

// hang lays a file system over a directory whose server never answers, until
// the test ends or revive is called.
func hang(t *testing.T, dir string) (revive func()) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	server := os.NewFile(uintptr(fd), "/dev/fuse")
	must(t, unix.Mount("hung", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	revived := false
	revive = func() {
		if revived {
			return
		}
		revived = true
		// First, as mkfs.btrfs fails wherever a file system without a server is mounted.
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			t.Error(err)
		}
		if err := server.Close(); err != nil { // whoever waits is told that there is no server
			t.Error(err)
		}
	}
	t.Cleanup(revive)
	return revive
}

// A plugin that starts while the disk of the pool does not answer serves: what is staged
// is taken down, and the pool is used, and cleared of remains, when it answers again.
func TestStartWhileThePoolHangs(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"volumes", "tmp"} {
		p := harness.Start(t, harness.Options{})
		v := create(t, p, "v", 32*mib, mountAs("ext4", multiWriter))
		pod := v.Target("pod")
		must(t, v.Up(t.Context(), pod))
		p.Kill()
		remains := filepath.Join(p.PoolDir, "trash", "w~")
		must(t, os.Mkdir(remains, 0o700))
		revive := hang(t, filepath.Join(p.PoolDir, part))
		p.Process = p.Launch(harness.Options{})
		p.AwaitServing(p.Process)
		must(t, v.Unpublish(t.Context(), pod))
		must(t, v.Unstage(t.Context()))
		if devices := v.Devices(); len(devices) > 0 {
			t.Errorf("attached: %v", devices)
		}
		revive()
		must(t, harness.Insist(t.Context(), func(ctx context.Context) error { return v.Up(ctx, pod) }))
		v.EndInTime(pod)
		harness.Eventually(t, "the remains are removed", func() bool {
			_, err := os.Stat(remains)
			return os.IsNotExist(err)
		})
	}
}
