package chaos

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/harness"
)

// Whenever, however often and at whichever step the plugin dies, even if its
// store is damaged before it is back: once it stays up, each volume is as the
// answers say, no synced byte is lost, no volume was formatted twice, nobody
// lives on, and in the end nothing is left.
func TestKills(t *testing.T) {
	random := chance(t)
	p := harness.New(t)
	c := &crash{Plugin: p, t: t, random: random, mkfs: wrapMkfs(t, p, ""), ends: map[string]int{}}
	for _, kind := range []struct {
		fsType, provisioning string
		bytes                int64
	}{
		{"ext4", "thick", 32 * mib}, {"ext4", "thin", 32 * mib}, {"xfs", "thin", 320 * mib}, {"xfs", "thick", 320 * mib},
		{"", "thick", 16 * mib}, {"", "thin", 16 * mib},
	} {
		name := fmt.Sprintf("%s-%s", kind.fsType, kind.provisioning)
		if kind.fsType == "" {
			name = "block-" + kind.provisioning
		}
		v := newVolume(t, p, name, kind.fsType, kind.provisioning, kind.bytes, 3)
		c.lives = append(c.lives, &life{volume: v, random: rand.New(rand.NewPCG(random.Uint64(), 0)), shown: map[string]bool{}})
	}
	harness.FaultsBinary(t) // is built before anybody waits
	c.Start(c.options(""))
	before := tree(t, p)
	for c.faults = steps(random); c.kills < *killsFlag && !t.Failed(); {
		c.round(min(8, *killsFlag-c.kills))
		t.Logf("%d of %d kills", c.kills, *killsFlag)
	}
	t.Logf("%v", c.ends)
	if t.Failed() {
		return // what is left is a consequence
	}
	for _, l := range c.lives {
		if l.created {
			l.down()
		}
	}
	if mounts, loops := p.Mounts(), p.Loops(); len(mounts)+len(loops) > 0 {
		t.Errorf("left: %q, %+v", mounts, loops)
	}
	if volumes := p.Report().Volumes; len(volumes) > 0 {
		t.Errorf("`csi-node status` still shows %+v", volumes)
	}
	if after := tree(t, p); !slices.Equal(before, after) {
		t.Errorf("the directories are\n%q\nand were\n%q", after, before)
	}
}

// steps returns, in an order that is drawn, the faults by which the plugin dies
// before or after each step that volumes come to in their lives.
func steps(random *rand.Rand) []string {
	var faults []string
	for _, step := range []reconciler.Action{
		reconciler.Attach, reconciler.BeginFormat, reconciler.Format, reconciler.Erase, reconciler.Mount, reconciler.MarkRaw, reconciler.Bind, reconciler.AttachView,
		reconciler.GrowDevice, reconciler.GrowFilesystem, reconciler.Unbind, reconciler.RemoveTarget, reconciler.Unmount, reconciler.DetachView, reconciler.Detach,
	} {
		for _, moment := range []reconciler.Moment{reconciler.Before, reconciler.After} {
			faults = append(faults, fmt.Sprintf("%s:%s", moment, step))
		}
	}
	random.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	return faults
}

// crash is one run of the test.
type crash struct {
	*harness.Plugin
	t      *testing.T
	random *rand.Rand // of the test's own goroutine
	lives  []*life
	mkfs   *mkfsLog
	faults []string // the next one first
	starts int
	kills  int
	ends   map[string]int // how processes have ended, and what befell the store
}

// options starts the next process, which dies at a step if one is given.
func (c *crash) options(fault string) harness.Options {
	c.starts++
	o := harness.Options{Env: c.mkfs.env(c.starts)}
	if fault != "" {
		o.Faults, o.Env = true, append(o.Env, "CSI_NODE_FAULT="+fault+"=die")
	}
	return o
}

// round ends the plugin so many times while the volumes live their lives, lets
// them come to a pause, and looks.
func (c *crash) round(kills int) {
	c.t.Helper()
	stop := make(chan struct{})
	var group sync.WaitGroup
	for _, l := range c.lives {
		group.Go(func() {
			for !c.t.Failed() {
				select {
				case <-stop:
					return
				default:
					l.step()
				}
			}
		})
	}
	for range kills {
		c.kill()
	}
	pause(c.moment(), nil)
	close(stop)
	group.Wait()
	c.AwaitRest()
	c.look()
	c.Discard()
}

func (c *crash) moment() time.Duration {
	return time.Duration(c.random.Int64N(int64(300 * time.Millisecond)))
}

// kill ends the running process at some moment, and begins others that die soon,
// too, until one stays up.
func (c *crash) kill() {
	c.t.Helper()
	pause(c.moment(), c.Exited())
	if c.random.IntN(6) == 0 {
		c.note("SIGTERM")
		c.Terminate()
	} else {
		c.note("SIGKILL")
		c.Kill()
	}
	c.damage()
	for c.random.IntN(3) == 0 { // not even ready, perhaps
		c.Process = c.Launch(c.options(""))
		pause(c.moment()/2, c.Exited())
		c.note("SIGKILL at start")
		c.Kill()
	}
	if c.random.IntN(2) == 0 {
		c.dieAtStep()
	}
	c.Start(c.options(""))
}

// dieAtStep runs the plugin until it comes to a step, or for two seconds.
func (c *crash) dieAtStep() {
	c.t.Helper()
	c.Process = c.Launch(c.options(c.faults[0]))
	pause(2*time.Second, c.Exited())
	select {
	case <-c.Exited():
		c.note(c.faults[0])
		c.faults = append(c.faults[1:], c.faults[0])
		if state := c.Wait(c.t); state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			c.t.Errorf("the plugin ended by itself: %s\n%s", state, c.Log)
		}
	default:
		c.note("SIGKILL before a step")
		c.Kill()
		if c.random.IntN(3) == 0 { // it may not come soon
			c.faults = append(c.faults[1:], c.faults[0])
		}
	}
}

func (c *crash) note(end string) {
	c.kills++
	c.ends[end]++
}

// damage does something to the store of a plugin that is down, now and then.
func (c *crash) damage() {
	c.t.Helper()
	dir := filepath.Join(c.StateDir, store.Directory)
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	must(c.t, err)
	switch c.random.IntN(12) {
	case 0:
		c.ends["store deleted"]++
		must(c.t, os.RemoveAll(dir))
	case 1, 2:
		for _, file := range files {
			info, err := os.Stat(file)
			must(c.t, err)
			c.ends["record cut"]++
			must(c.t, os.Truncate(file, c.random.Int64N(max(info.Size(), 1))))
		}
	}
}

// look holds everything that is there against what was answered.
func (c *crash) look() {
	c.t.Helper()
	mounts := mountsOf(c.t, c.Plugin)
	runs := c.mkfs.runs()
	for _, l := range c.lives {
		l.look(mounts)
		l.lookAtFormats(runs)
		l.read()
	}
	for path := range mounts {
		if !slices.ContainsFunc(c.lives, func(l *life) bool { return path == l.staging || slices.Contains(l.targets, path) }) {
			c.t.Errorf("a mount at %s, where nothing was asked for", path)
		}
	}
	c.mkfs.check()
	for _, v := range c.Report().Volumes {
		if v.Worst() != report.Settled {
			c.t.Errorf("at rest, volume %s is not settled: %+v", v.Volume, v.Parts)
		}
	}
}

func (l *life) look(mounts mountTable) {
	l.t.Helper()
	if facts := l.facts(); (facts != nil) != l.created {
		l.complain("created: %t, and the pool has %+v", l.created, facts)
	}
	devices := slices.DeleteFunc(l.Loops(), func(loop harness.Loop) bool { return loop.Backing != l.data() })
	if len(devices) > 1 || (len(devices) == 1) != l.staged {
		l.complain("staged: %t, and its devices are %+v", l.staged, devices)
		return
	}
	if info, err := os.Stat(l.data()); l.created && (err != nil || info.Size() < l.size) {
		l.complain("it must have %d bytes, and its file is %+v (%v)", l.size, info, err)
	}
	shows := func(path string, want bool) {
		if wrong := l.wrong(mounts, path, want); wrong != "" {
			l.complain("%s", wrong)
		}
	}
	shows(l.staging, l.staged && l.fsType != "")
	for _, target := range l.targets {
		shows(target, l.shown[target])
		if _, err := os.Lstat(target); (err == nil) != l.shown[target] {
			l.complain("published: %t, and at %s: %v", l.shown[target], target, err)
		}
	}
}

// lookAtFormats fails the test if mkfs was run again once the volume was staged.
func (l *life) lookAtFormats(runs map[string][]mkfsRun) {
	l.t.Helper()
	facts := l.facts()
	if !l.staged || facts == nil || l.fsType == "" {
		return
	}
	now := len(runs[facts.Created])
	if l.formats == 0 {
		l.formats = now
	}
	if now == 0 || now != l.formats {
		l.complain("mkfs was run %d times, and %d times before it was first staged: %+v", now, l.formats, runs[facts.Created])
	}
}

// tree lists what is in the kubelet directory and in the pool.
func tree(t testing.TB, p *harness.Plugin) []string {
	t.Helper()
	var all []string
	for _, root := range []string{p.KubeletDir, p.PoolDir} {
		must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			all = append(all, path)
			return err
		}))
	}
	return all
}
