package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

const raceRounds = 500

// Calls that contradict or repeat each other, made at once, with deadlines and
// cancellations that cut them off anywhere, leave the node as one of them asks.
func TestRaces(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	t.Run("volumes", func(t *testing.T) {
		for i, access := range []string{"mount", "block"} {
			t.Run(access, func(t *testing.T) {
				t.Parallel()
				raceOver(t, p, access, uint64(time.Now().UnixNano())+uint64(i))
			})
		}
	})
	if mounts, loops := p.Mounts(), p.Loops(); len(mounts)+len(loops) > 0 {
		t.Errorf("left: %q, %+v", mounts, loops)
	}
	mustHaveNoRecord(t, p)
}

func raceOver(t *testing.T, p *harness.Plugin, access string, seed uint64) {
	t.Logf("seed %d", seed)
	v := create(t, p, "volume-"+access, 32*mib, mountAs("ext4", multiWriter))
	if access == "block" {
		v.Capability = blockAs(multiWriter)
	}
	r := &races{t: t, v: v, target: v.Target("pod"), random: rand.New(rand.NewPCG(seed, 0))}
	rounds := raceRounds / 2
	if testing.Short() {
		rounds /= 10
	}
	for round := range rounds {
		if r.round(); t.Failed() {
			t.Fatalf("in round %d of seed %d: %q", round, seed, r.done)
		}
	}
	must(t, v.Unpublish(t.Context(), r.target))
	must(t, v.Unstage(t.Context()))
	mustBeGone(t, r.target)
	must(t, v.Delete(t.Context()))
}

// races is one volume that calls race over.
type races struct {
	t      *testing.T
	v      *volume
	target string
	random *rand.Rand
	done   []string // what the last round did
}

// act is one call of a round.
type act struct {
	name string
	want bool // there, or gone
	call func(context.Context) error
}

func (r *races) acts() (stage, unstage, publish, unpublish act) {
	return act{"stage", true, r.v.Stage},
		act{"unstage", false, r.v.Unstage},
		act{"publish", true, func(ctx context.Context) error { return r.v.Publish(ctx, r.target) }},
		act{"unpublish", false, func(ctx context.Context) error { return r.v.Unpublish(ctx, r.target) }}
}

// round lets two to four calls on the target, or the stage, race, and then
// makes one call alone.
func (r *races) round() {
	r.t.Helper()
	stage, unstage, publish, unpublish := r.acts()
	r.done = nil
	if r.random.IntN(3) == 0 { // over the stage
		r.alone(unpublish)
		r.race(stage, unstage)
		r.alone([]act{stage, unstage}[r.random.IntN(2)])
		return
	}
	r.alone(stage)
	if r.random.IntN(2) == 0 {
		r.race(publish, publish)
	} else {
		r.race(publish, unpublish)
	}
	r.alone([]act{publish, unpublish}[r.random.IntN(2)])
}

// race runs calls drawn from two at once. What is there afterwards must be what
// one of those asks that may stand.
func (r *races) race(one, other act) {
	r.t.Helper()
	draw := []act{one, other}
	for range r.random.IntN(3) {
		draw = append(draw, []act{one, other}[r.random.IntN(2)])
	}
	outcomes := make([]codes.Code, len(draw))
	var calls sync.WaitGroup
	for i, a := range draw {
		ctx, cancel, how := r.patience()
		calls.Go(func() {
			defer cancel()
			err := a.call(ctx)
			outcomes[i] = status.Code(err)
			if !retried(err) {
				r.t.Errorf("%s: %v", a.name, err)
			}
		})
		r.done = append(r.done, a.name+" "+how)
	}
	calls.Wait()
	sure, may := map[bool]bool{}, map[bool]bool{}
	for i, a := range draw {
		r.done[len(r.done)-len(draw)+i] += " → " + outcomes[i].String()
		switch outcomes[i] {
		case codes.OK:
			sure[a.want] = true
		case codes.Aborted: // superseded, or refused
		default:
			may[a.want] = true
		}
	}
	if len(may) > 0 || len(sure) != 1 {
		return // either may come of it; the call that follows tells
	}
	r.see(one, sure[true])
}

// alone makes a call, as kubelet does until it is answered OK, and sees that it is true.
func (r *races) alone(a act) {
	r.t.Helper()
	harness.Eventually(r.t, a.name+" alone is answered OK", func() bool {
		err := a.call(r.t.Context())
		r.done = append(r.done, fmt.Sprintf("%s alone → %s", a.name, status.Code(err)))
		if err != nil && status.Code(err) != codes.Aborted { // one that was cut off may reach the plugin late
			r.t.Fatalf("%s alone: %v", a.name, err)
		}
		return err == nil
	})
	r.see(a, a.want)
}

// retried reports whether an answer is one that a race may end with.
func retried(err error) bool {
	switch status.Code(err) {
	case codes.OK, codes.Aborted, codes.DeadlineExceeded, codes.Canceled:
		return true
	}
	return false
}

// see checks the mounts of the target or the stage.
func (r *races) see(of act, there bool) {
	r.t.Helper()
	path, want := r.target, 0
	isStage := of.name == "stage" || of.name == "unstage"
	if isStage {
		path = r.v.Staging
	}
	if there {
		want = 1
	}
	if isStage && r.v.Capability.GetBlock() != nil {
		if loops := len(r.v.Devices()); loops != want {
			r.t.Errorf("after %s: %d devices for the volume, want %d", of.name, loops, want)
		}
		return
	}
	if n := mountsAt(r.v.Plugin, path); n != want {
		r.t.Errorf("after %s: %d mounts at %s, want %d", of.name, n, path, want)
	}
	if !there && !isStage {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			r.t.Errorf("after %s: %s is still there (%v)", of.name, path, err)
		}
	}
}

// patience draws how long a caller waits, and how it gives up.
func (r *races) patience() (context.Context, context.CancelFunc, string) {
	ctx := r.t.Context()
	wait := time.Duration(r.random.Int64N(int64(8 * time.Millisecond)))
	switch r.random.IntN(4) {
	case 0:
		ctx, cancel := context.WithTimeout(ctx, wait)
		return ctx, cancel, "until " + wait.String()
	case 1:
		ctx, cancel := context.WithCancel(ctx)
		timer := time.AfterFunc(wait, cancel)
		return ctx, func() { timer.Stop(); cancel() }, "cancelled after " + wait.String()
	}
	ctx, cancel := context.WithCancel(ctx)
	return ctx, cancel, "to its end"
}
