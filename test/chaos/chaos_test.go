package chaos

import (
	"context"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

// Whatever is asked of a node, by however many callers at once and for however
// short a time; whenever, however often and at whichever step the plugin dies, and
// even if its store is damaged before it is back; whatever a saboteur does to its
// mounts and devices: when it is quiet, each volume is as the last answer about it
// says. No pod loses a synced byte or sees a wrong one, no volume is formatted
// twice, and in the end plain calls leave nothing.
func TestChaos(t *testing.T) {
	c := begin(t)
	kills, acts := *killsFlag, *actsFlag
	for kills+acts > 0 && !t.Failed() {
		if c.random.IntN(kills+acts) < kills {
			c.kills(min(kills, 8))
			kills -= min(kills, 8)
		} else {
			c.acts(min(acts, 4*len(c.scenes)))
			acts -= min(acts, 4*len(c.scenes))
		}
		t.Logf("%d kills and %d acts to come", kills, acts)
	}
	if t.Failed() {
		return // what is left is a consequence
	}
	c.end()

	// The last process meets many calls, and nothing else.
	address := harness.FreeAddress(t)
	o := c.options("")
	o.Flags = []string{"--http-endpoint", address}
	c.Restart(o)
	goroutines := func() float64 { return harness.Metrics(t, address)["go_goroutines"] }
	atFirst := goroutines()
	for calls := *callsFlag; calls > 0 && !t.Failed(); calls -= gust {
		c.calls(min(calls, gust))
	}
	if t.Failed() {
		return
	}
	c.restage()
	c.end()
	harness.Eventually(t, "no more goroutines than before the calls, but for those that wait for the next", func() bool { return goroutines() <= atFirst+keptWorkers })
	t.Logf("%v", c.tally)
}

const (
	callers = 32
	gust    = 250 // calls between two judgements
	// keptWorkers are the reconciler's goroutines that wait for more to do.
	keptWorkers = 8
)

// chaos is one run of the test.
type chaos struct {
	*harness.Plugin
	t      *testing.T
	random *rand.Rand // of the test's own goroutine
	began  time.Time

	fleet  []*member // volumes that calls come for at random
	scenes []*scene  // volumes in use by pods, some of which a saboteur is at
	mkfs   *mkfsLog
	faults []string // of which the plugin dies, the next one first
	before []string // the directories, when there was no volume

	mu      sync.Mutex
	dying   bool           // the plugin may end at any moment
	damaged time.Duration  // when the store was last damaged, since the run began
	starts  int            // processes
	tally   map[string]int // the answers, how processes have ended, and what befell the store
}

// begin starts the plugin, and the pods.
func begin(t *testing.T) *chaos {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-chaos.seed %d -chaos.calls %d -chaos.kills %d -chaos.acts %d", seed, *callsFlag, *killsFlag, *actsFlag)
	p := harness.New(t)
	c := &chaos{Plugin: p, t: t, random: rand.New(rand.NewPCG(seed, 0)), began: time.Now(), mkfs: wrapMkfs(t, p), tally: map[string]int{}}
	c.faults = steps(c.random)
	harness.FaultsBinary(t) // is built before anybody waits
	for _, v := range []*volume{
		newVolume(t, p, "ext4-thick", "ext4", "thick", 32*mib, 3), newVolume(t, p, "ext4-thin", "ext4", "thin", 32*mib, 3),
		newVolume(t, p, "xfs-thick", "xfs", "thick", 320*mib, 3), newVolume(t, p, "xfs-thin", "xfs", "thin", 320*mib, 3),
		newVolume(t, p, "block-thick", "", "thick", 16*mib, 3), newVolume(t, p, "block-thin", "", "thin", 16*mib, 3),
	} {
		c.fleet = append(c.fleet, newMember(c, v))
	}
	var victims []*scene
	if *killsFlag+*actsFlag > 0 {
		for i, fsType := range []string{"ext4", "", "ext4", ""} {
			victims = append(victims, nameScene(t, p, []string{"one", "two", "three", "four"}[i], fsType))
		}
	}
	c.Start(c.options(""))
	c.before = c.tree()
	for _, s := range victims {
		s.live()
		s.hasty = true
		c.scenes = append(c.scenes, s)
	}
	return c
}

// calls lets all callers make so many calls between them, and judges; then calls that
// contradict each other race for one part of each volume.
func (c *chaos) calls(calls int) {
	c.t.Helper()
	var group sync.WaitGroup
	for caller := range callers {
		random := c.fork()
		share := (calls + caller) / callers
		group.Go(func() {
			for range share {
				c.callAtRandom(c.t.Context(), random)
			}
		})
	}
	group.Wait()
	c.settle()
	for _, m := range c.fleet {
		random := c.fork()
		group.Go(func() {
			for range gust / 50 {
				m.race(random)
			}
		})
	}
	group.Wait()
}

// meanwhile lets the volumes of the fleet live their lives, disturbed by calls at
// random, while something else happens to the plugin; then it judges.
func (c *chaos) meanwhile(happens func()) {
	c.t.Helper()
	ctx, stop := context.WithCancel(c.t.Context())
	defer stop()
	var group sync.WaitGroup
	again := func(step func()) {
		group.Go(func() {
			for ctx.Err() == nil && !c.t.Failed() {
				step()
			}
		})
	}
	for _, m := range c.fleet {
		random := c.fork()
		again(func() {
			m.live(ctx, random)
			pause(time.Duration(random.Int64N(int64(100*time.Millisecond))), ctx.Done())
		})
	}
	for range 2 {
		random := c.fork()
		again(func() {
			c.callAtRandom(ctx, random)
			pause(time.Duration(random.Int64N(int64(40*time.Millisecond))), ctx.Done())
		})
	}
	happens()
	stop()
	group.Wait()
	c.settle()
}

// acts lets a saboteur do so many things to his victims, one after the other to each.
func (c *chaos) acts(acts int) {
	c.t.Helper()
	c.meanwhile(func() {
		var group sync.WaitGroup
		for i, s := range c.scenes {
			random, share := c.fork(), (acts+i)/len(c.scenes)
			group.Go(func() {
				for range share {
					if a := s.draw(random); !c.t.Failed() {
						s.undergo(a)
					}
				}
			})
		}
		group.Wait()
	})
}

// settle asks for half of the parts once more, so that an answer decides what they must
// be, and then judges all.
func (c *chaos) settle() {
	c.t.Helper()
	c.AwaitRest() // what is refused is refused by now
	for _, m := range c.fleet {
		m.finishUnstage()
	}
	c.askAlone()
	c.AwaitRest()
	c.judge()
	c.Discard()
}

// end takes everything down and fails if anything is left.
func (c *chaos) end() {
	c.t.Helper()
	for _, s := range c.scenes {
		s.end()
	}
	c.scenes = nil
	for _, m := range c.fleet {
		m.clear()
		m.insist(ask{verb: remove})
	}
	if mounts, loops := c.Mounts(), c.Loops(); len(mounts)+len(loops) > 0 {
		c.t.Errorf("left: %q, %+v", mounts, loops)
	}
	if volumes := c.Status().Volumes; len(volumes) > 0 {
		c.t.Errorf("`csi-node status` still shows %+v", volumes)
	}
	if after := c.tree(); !slices.Equal(c.before, after) {
		c.t.Errorf("the directories are\n%q\nand were\n%q", after, c.before)
	}
}

// tree lists what is in the kubelet directory and in the pool.
func (c *chaos) tree() []string {
	c.t.Helper()
	var all []string
	for _, root := range []string{c.KubeletDir, c.PoolDir} {
		must(c.t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			all = append(all, path)
			return err
		}))
	}
	return all
}

// fork draws a source of chance for another goroutine.
func (c *chaos) fork() *rand.Rand { return rand.New(rand.NewPCG(c.random.Uint64(), 0)) }

// now is the time since the run began.
func (c *chaos) now() time.Duration { return time.Since(c.began) }

func (c *chaos) count(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tally[what]++
}
