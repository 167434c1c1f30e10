package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// measureCrowds times the calls of one caller, and repairs, on a node with many mounts and
// loop devices of others, and before and after, which is what they are compared with.
func measureCrowds(t *testing.T, r *report) {
	floor, ours := start(t, floorName), start(t, oursName)
	volumes := []*harness.Volume{floor.formatted("ext4", "ext4"), ours.formatted("ext4", "ext4")}
	const none = "no others"
	var toRepair []*harness.Volume // each is lost once: what is lost again soon is repaired later
	for i := range 5 * r.repairs {
		v := ours.volume(fmt.Sprint("repaired-", i), "ext4")
		ours.must(newSamples().run(t.Context(), life(v, v.Target("pod"))[:3]))
		toRepair = append(toRepair, v)
	}
	measure := func(where string) {
		progress("%s", where)
		for range r.rounds {
			for i, n := range []*node{floor, ours} {
				s := newSamples()
				for range r.cycles {
					n.must(s.run(t.Context(), podWithQuestions(volumes[i], volumes[i].Target("pod"))))
				}
				r.crowd.add(n.name, where, s)
			}
		}
		s := newSamples()
		s.times[repairName] = ours.repairs(toRepair[:r.repairs], allMounts)
		r.crowd.add(oursName, where, s)
		toRepair = toRepair[r.repairs:]
	}
	repaired := toRepair
	measure(none)
	removeMounts := otherMounts(t, r.mounts)
	measure(fmt.Sprint(r.mounts, " mounts"))
	removeMounts()
	measure(none)
	removeLoops := otherLoops(t, r.loops)
	measure(fmt.Sprint(r.loops, " loop devices"))
	removeLoops()
	measure(none)
	for _, v := range repaired {
		ours.must(takeDown(v))
	}
	floor.must(volumes[0].Delete(t.Context()))
	ours.must(volumes[1].Delete(t.Context()))
}

// otherMounts makes mounts that have nothing to do with any driver, and returns what
// removes them, which also happens at the end of the test.
func otherMounts(t *testing.T, count int) (remove func()) {
	t.Helper()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		require.NoError(t, err)
	}
	must(unix.Mount("crowd", dir, "tmpfs", 0, "size=1m"))
	there := true
	remove = func() {
		if there {
			there = false
			must(unix.Unmount(dir, unix.MNT_DETACH)) // and all that is below
		}
	}
	t.Cleanup(remove)
	must(unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	for i := range count {
		must(interrupted.Err())
		path := filepath.Join(dir, strconv.Itoa(i))
		must(os.Mkdir(path, 0o750))
		must(unix.Mount("other", path, "tmpfs", 0, "size=4k"))
	}
	return remove
}

// otherLoops attaches loop devices over files of others, and returns what detaches them.
func otherLoops(t *testing.T, count int) (remove func()) {
	t.Helper()
	dir, ours := t.TempDir(), &bare{devices: map[string]*os.File{}}
	remove = func() {
		for id := range ours.devices {
			require.NoError(t, ours.detach(id, ""))
		}
	}
	t.Cleanup(remove)
	for i := range count {
		require.NoError(t, interrupted.Err())
		path := filepath.Join(dir, strconv.Itoa(i))
		err := os.WriteFile(path, nil, 0o600)
		if err == nil {
			err = os.Truncate(path, 1<<20)
		}
		if err == nil {
			_, err = ours.attach(path, path)
		}
		require.NoError(t, err)
	}
	return remove
}

// held is what a plugin costs that holds so many volumes, each staged and published.
type held struct {
	volumes         int
	cycle           cost // one caller
	calls           *samples
	floor           *samples // of another driver meanwhile, which holds none
	idle            time.Duration
	idleCPU         time.Duration
	rss             int64
	ready, adopted  time.Duration   // after a restart
	repair          []time.Duration // of all mounts
	repairStage     []time.Duration // of the stage, whose binds are left
	repairOnceCount int
	repairOnce      time.Duration
}

// measureHeld measures what the number of volumes that are held makes of everything.
func measureHeld(t *testing.T, r *report) {
	floor, ours := start(t, floorName), start(t, oursName)
	floorVolume, volume := floor.formatted("ext4", "ext4"), ours.formatted("ext4", "ext4")
	var all []*harness.Volume
	t.Cleanup(func() {
		if wasInterrupted() {
			return // the harness removes what is there
		}
		progress("taking %d volumes down", len(all))
		ours.must(parallel(all, takeDown))
		floor.must(floorVolume.Delete(context.Background()))
		ours.must(volume.Delete(context.Background()))
	})
	for _, count := range r.held {
		progress("making %d volumes", count-len(all))
		var more []*harness.Volume
		for i := len(all); i < count; i++ {
			more = append(more, ours.volume(fmt.Sprint("held-", i), "ext4"))
		}
		all = append(all, more...)
		ours.must(parallel(more, func(v *harness.Volume) error {
			return newSamples().run(t.Context(), life(v, v.Target("pod"))[:3])
		}))
		h := held{volumes: count, calls: newSamples(), floor: newSamples(), idle: r.idle}

		progress("%d volumes held: calls", count)
		ownBefore, helpersBefore := ours.cpu()
		for range r.rounds {
			for range r.cycles {
				floor.must(h.floor.run(t.Context(), podWithQuestions(floorVolume, floorVolume.Target("pod"))))
				ours.must(h.calls.run(t.Context(), podWithQuestions(volume, volume.Target("pod"))))
			}
		}
		own, helpers := ours.cpu()
		h.cycle = cost{cycles: r.rounds * r.cycles, own: own - ownBefore, helpers: helpers - helpersBefore}

		progress("%d volumes held: %s at rest", count, r.idle)
		ours.AwaitRest()
		idleBefore, _ := ours.cpu()
		select {
		case <-time.After(r.idle):
		case <-interrupted.Done():
			t.Fatal("interrupted")
		}
		idleAfter, _ := ours.cpu()
		h.idleCPU, h.rss = idleAfter-idleBefore, ours.rss()

		progress("%d volumes held: repairs", count)
		h.measureRepairs(ours, all, r)

		progress("%d volumes held: restart", count)
		ours.Terminate()
		start := time.Now()
		ours.start()
		h.ready = time.Since(start)
		ours.AwaitRest()
		h.adopted = time.Since(start)
		r.heldCosts = append(r.heldCosts, h)
	}
}

// parallel does something for each volume, eight at a time.
func parallel(volumes []*harness.Volume, do func(*harness.Volume) error) error {
	var group errgroup.Group
	group.SetLimit(8)
	for _, v := range volumes {
		group.Go(func() error { return do(v) })
	}
	return group.Wait()
}

// takeDown ends a volume that is published once.
func takeDown(v *harness.Volume) error {
	ctx := context.Background()
	return errors.Join(v.Unpublish(ctx, v.Target("pod")), v.Unstage(ctx), v.Delete(ctx))
}

// measureRepairs takes mounts away behind the plugin's back, of one volume after the
// other and then of many at once, and waits for them.
func (h *held) measureRepairs(n *node, all []*harness.Volume, r *report) {
	// A part that is lost again soon is repaired later: each size has volumes of its own to lose.
	once := all[len(all)-min(len(all), 2*r.repairs):]
	h.repair = n.repairs(once[:len(once)/2], allMounts)
	h.repairStage = n.repairs(once[len(once)/2:], stageAlone)
	if h.volumes == r.scale.held[len(r.scale.held)-1] {
		rest := all[min(r.repairs, len(all)-len(once)) : len(all)-len(once)]
		var stages []string
		for _, v := range rest[:min(len(rest), r.repairsOnce)] {
			stages = append(stages, v.Staging)
		}
		n.AwaitRest()
		h.repairOnceCount, h.repairOnce = len(stages), n.repair(stages)
	}
}

// repairName is the row of repairs in the table of crowds.
const repairName = "repair of a stage and two binds"

// What is lost of a volume with two binds.
func allMounts(v *harness.Volume, first, second string) []string {
	return []string{v.Staging, first, second}
}
func stageAlone(v *harness.Volume, _, _ string) []string { return []string{v.Staging} }

// repairs takes mounts of each volume with two binds away, and returns how long their repair
// takes.
func (n *node) repairs(volumes []*harness.Volume, lost func(v *harness.Volume, first, second string) []string) (took []time.Duration) {
	n.t.Helper()
	for _, v := range volumes {
		second := v.Target("second")
		n.must(v.Publish(n.t.Context(), second))
		n.AwaitRest()
		took = append(took, n.repair(lost(v, v.Target("pod"), second)))
		n.must(v.Unpublish(n.t.Context(), second))
	}
	return took
}

// repair unmounts paths, and returns how long it takes from the last one's loss until
// all are mounted again.
func (n *node) repair(paths []string) time.Duration {
	n.t.Helper()
	for _, path := range paths {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			n.t.Fatalf("unmount %s: %v", path, err)
		}
	}
	start := time.Now()
	for deadline := start.Add(harness.Patience); len(paths) > 0; {
		var s unix.Statx_t
		err := unix.Statx(unix.AT_FDCWD, paths[0], unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &s)
		switch {
		case err == nil && s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0:
			paths = paths[1:]
		case wasInterrupted(), time.Now().After(deadline):
			n.t.Fatalf("%s is not mounted again: %v", paths[0], err)
		}
	}
	return time.Since(start)
}
