package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/csi-node/csi-node/test/harness"
)

// A volume whose disk does not answer is told as it was seen last, and no other
// volume waits for it. Once the disk answers again, so does the volume.
func TestStatsOfAHungDisk(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	seen, unseen, well := create(t, p, "seen", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "unseen", 32*mib, blockAs(multiWriter)), create(t, p, "well", 32*mib, mountAs("ext4", multiWriter))
	pods := map[*volume]string{}
	for _, v := range []*volume{seen, unseen, well} {
		pods[v] = v.Target("pod")
		must(t, v.Up(ctx, pods[v]))
	}
	stats := func(v *volume, path string) (*csi.NodeGetVolumeStatsResponse, []string, error) {
		var header metadata.MD
		resp, err := v.Node.NodeGetVolumeStats(ctx, v.StatsRequest(path), grpc.Header(&header))
		return resp, header.Get("csi-node-stats-age"), err
	}
	before, age, err := stats(seen, pods[seen])
	if must(t, err); len(age) > 0 {
		t.Errorf("what was seen now has the age %q", age)
	}

	revive := []func(){hang(t, filepath.Dir(seen.Data())), hang(t, filepath.Dir(unseen.Data()))}
	for _, path := range []string{pods[seen], seen.Staging} {
		resp, age, err := stats(seen, path)
		must(t, err)
		if len(age) != 1 || fmt.Sprint(resp) != fmt.Sprint(before) {
			t.Errorf("%s: %v of age %q, and it was %v", path, resp, age, before)
		}
	}
	must(t, p.Log.Await(ctx, "told its last known usage"))
	_, _, err = stats(unseen, pods[unseen])
	mustRefuse(t, err, codes.DeadlineExceeded, unseen.ID, pods[unseen])
	if !silent.MatchString(err.Error()) {
		t.Error(err)
	}
	for _, v := range []*volume{seen, unseen} {
		health, err := v.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
		must(t, err)
		if e := health.GetVolumeHealth().GetHealthStatuses(); len(e) != 1 || e[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE || e[0].GetReason() != "DoesNotAnswer" {
			t.Errorf("the health of %s is %v", v.ID, e)
		}
	}
	if _, age, err := stats(well, pods[well]); err != nil || len(age) > 0 {
		t.Errorf("another volume: age %q, %v", age, err)
	}

	for _, revive := range revive {
		revive()
	}
	for v, path := range pods {
		// The look that hung ends with an error, and another may share it.
		patience, cancel := context.WithTimeout(ctx, harness.Patience)
		defer cancel()
		resp, age, err := stats(v, path)
		for (err != nil || len(age) > 0) && patience.Err() == nil {
			resp, age, err = stats(v, path)
		}
		if must(t, err); len(age) > 0 || resp.GetUsage()[0].GetTotal() != v.Total(path) {
			t.Errorf("%s is back and tells %v of age %q", v.ID, resp, age)
		}
	}
	must(t, seen.Down(ctx, pods[seen]))
	_, _, err = stats(seen, pods[seen])
	mustRefuse(t, err, codes.NotFound, seen.ID)
	must(t, unseen.Down(ctx, pods[unseen]))
	well.End(pods[well])
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
