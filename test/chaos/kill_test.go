package chaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/harness"
)

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

// options starts the next process, which dies at a step if one is given.
func (c *chaos) options(fault string) harness.Options {
	c.starts++
	o := harness.Options{Env: c.mkfs.env(c.starts)}
	if fault != "" {
		o.Faults, o.Env = true, append(o.Env, "CSI_NODE_FAULT="+fault+"=die")
	}
	return o
}

// kills ends the plugin about so many times, and looks: the pods have had their
// volumes all the time.
func (c *chaos) kills(kills int) {
	c.t.Helper()
	c.die(true)
	c.meanwhile(func() {
		for left := kills; left > 0 && !c.t.Failed(); {
			left -= c.kill()
		}
		pause(c.moment(), nil)
		c.die(false)
	})
	for _, s := range c.scenes {
		for _, v := range []*volume{s.victim, s.other} {
			if broken := v.broken(); broken != "" {
				c.t.Errorf("volume %s: %s", v.ID, broken)
			}
			v.ask() // the store may be lost, and what is asked for with it
		}
		s.mustBeWhole()
	}
}

func (c *chaos) die(may bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dying = may
}

func (c *chaos) moment() time.Duration {
	return time.Duration(c.random.Int64N(int64(300 * time.Millisecond)))
}

// kill ends the running process at some moment, and begins others that die soon,
// too, until one stays up. It returns how many have died.
func (c *chaos) kill() (died int) {
	c.t.Helper()
	note := func(end string) {
		died++
		c.count(end)
	}
	pause(c.moment(), c.Exited())
	if c.random.IntN(6) == 0 {
		note("SIGTERM")
		c.Terminate()
	} else {
		note("SIGKILL")
		c.Kill()
	}
	c.damage()
	for c.random.IntN(3) == 0 { // not even ready, perhaps
		c.Process = c.Launch(c.options(""))
		pause(c.moment()/2, c.Exited())
		note("SIGKILL at start")
		c.Kill()
	}
	if c.random.IntN(2) == 0 {
		note(c.dieAtStep())
	}
	c.Start(c.options(""))
	return died
}

// dieAtStep runs the plugin until it comes to a step, or for two seconds, and
// returns how it ended.
func (c *chaos) dieAtStep() string {
	c.t.Helper()
	fault := c.faults[0]
	c.Process = c.Launch(c.options(fault))
	pause(2*time.Second, c.Exited())
	select {
	case <-c.Exited():
		c.faults = append(c.faults[1:], fault)
		if state := c.Wait(c.t); state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			c.t.Errorf("the plugin ended by itself: %s\n%s", state, c.Log)
		}
		return fault
	default:
		c.Kill()
		if c.random.IntN(3) == 0 { // it may not come soon
			c.faults = append(c.faults[1:], fault)
		}
		return "SIGKILL before a step"
	}
}

// damage does something to the store of a plugin that is down, now and then.
func (c *chaos) damage() {
	c.t.Helper()
	dir := filepath.Join(c.StateDir, store.Directory)
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	must(c.t, err)
	switch c.random.IntN(12) {
	default:
		return
	case 0:
		c.count("store deleted")
		must(c.t, os.RemoveAll(dir))
	case 1, 2:
		for _, file := range files {
			info, err := os.Stat(file)
			must(c.t, err)
			c.count("record cut")
			must(c.t, os.Truncate(file, c.random.Int64N(max(info.Size(), 1))))
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.damaged = c.now()
}
