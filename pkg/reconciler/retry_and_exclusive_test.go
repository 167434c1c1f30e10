package reconciler

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func (h *harness) retry(id string) (report.Volume, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return h.p.r.Retry(ctx, id)
}

// exclusive begins an Exclusive whose f blocks until its ctx ends or release is called.
func (h *harness) exclusive(ctx context.Context, id string, f func()) (answer <-chan error, release func()) {
	open, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- h.p.r.Exclusive(ctx, id, func(ctx context.Context, _ *state.Volume, _ state.Actual) error {
			f()
			select {
			case <-open:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	synctest.Wait()
	return done, sync.OnceFunc(func() { close(open) })
}

// forgotten checks that nothing is kept of a volume that has no record.
func (h *harness) forgotten(id string) {
	h.t.Helper()
	synctest.Wait()
	h.p.r.mu.Lock()
	defer h.p.r.mu.Unlock()
	if h.p.r.volumes[id] != nil {
		h.t.Errorf("volume %s: kept in memory", id)
	}
}

func TestRetryMakesAnAttemptAtOnce(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Bind)
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, "", -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.sleep(time.Hour)
		before := len(*times)
		now, err := h.retry("v")
		if err != nil || len(*times) != before+1 {
			t.Fatalf("%d attempts (%v)", len(*times)-before, err)
		}
		if p := now.Parts[0]; p.Is != report.Failing || p.NextTry.IsZero() || p.Refusal == "" {
			t.Errorf("after an attempt that failed: %+v", p)
		}
		h.k.mend()
		now, err = h.retry("v")
		if err != nil || now.Worst() != report.Settled || len(*times) != before+2 {
			t.Errorf("after an attempt that succeeded: %+v (%v)", now, err)
		}
		h.atRest("v")
		changes := h.k.changes()
		if now, err := h.retry("v"); err != nil || now.Worst() != report.Settled || h.k.changes() != changes {
			t.Errorf("of a settled volume: %+v (%v)", now, err)
		}
	})
}

func TestRetryOfAnEnd(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opDetach, "", -1, errBoom)
		h.refuse(h.do(unstage("v")), state.Unavailable)
		h.sleep(time.Hour)
		h.k.mend()
		if now, err := h.retry("v"); err != nil || now.Worst() != report.Settled || len(now.Parts) > 0 {
			t.Errorf("%+v (%v)", now, err)
		}
		h.atRest("v")
	})
}

func TestRetryOfAnUnknownVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		_, err := h.retry("v")
		h.refuse(err, state.NotFound, "v", "nothing is asked")
		h.forgotten("v")
	})
}

// A step that hangs is told; the attempt that was asked for comes after it.
func TestRetryBehindAHungStep(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hung := h.k.hang(opFormat, "v", false)
		answer := h.begin(stage("v"))
		_, err := h.retry("v")
		h.refuse(err, state.DeadlineExceeded, "format for stage", "58s")
		hung.open()
		require.NoError(h.t, h.got(answer))
		h.atRest("v")
	})
}

func TestRetryWhoseAttemptHangs(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, "", 1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		hung := h.k.hang(opBind, "", false)
		_, err := h.retry("v")
		h.refuse(err, state.DeadlineExceeded, "bind for target")
		hung.open()
		h.atRest("v")
	})
}

func TestExclusiveIsAlone(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		answer, release := h.exclusive(context.Background(), "v", func() {})
		before := h.k.changes()
		staged := h.begin(stage("v"))
		h.sleep(10 * time.Second)
		h.pending(staged)
		h.pending(answer)
		h.noStepSince(before)
		release()
		require.NoError(h.t, h.got(answer))
		if err := h.got(staged); err != nil {
			t.Errorf("the request that came meanwhile: %v", err)
		}
		h.atRest("v")
	})
}

func TestExclusiveWaitsForAStep(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hung := h.k.hang(opFormat, "v", false)
		staged := h.begin(stage("v"))
		called := false
		answer, release := h.exclusive(context.Background(), "v", func() { called = true })
		h.sleep(time.Minute)
		if called {
			t.Fatal("called while a step runs")
		}
		release()
		hung.open()
		require.NoError(h.t, h.got(staged))
		if err := h.got(answer); err != nil || !called {
			t.Errorf("called %t: %v", called, err)
		}
		h.atRest("v")
	})
}

func TestExclusiveIsToldWhatIs(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		look := func() (want *state.Volume, have state.Actual) {
			err := h.p.r.Exclusive(context.Background(), "v", func(_ context.Context, w *state.Volume, a state.Actual) error {
				want, have = w, a
				return errBoom
			})
			if !errors.Is(err, errBoom) {
				t.Errorf("got %v, not the error of the function", err)
			}
			return want, have
		}
		if want, have := look(); want.ID != "v" || len(want.Parts()) > 0 || have.Device.State != state.DeviceAbsent || have.Device.Size != gib {
			t.Errorf("of a volume that nobody asked for: %+v, %+v", want, have.Device)
		}
		h.forgotten("v")
		h.ok(stage("v"))
		if want, have := look(); want.Stage == nil || have.Device.Number != v.device.number || !have.Device.Held {
			t.Errorf("of a staged volume: %+v, %+v", want, have.Device)
		}
		h.atRest("v")
		h.k.fail(opFind, "v", 1, errors.New("no look"))
		err := h.p.r.Exclusive(context.Background(), "v", func(context.Context, *state.Volume, state.Actual) error {
			t.Error("called without a look")
			return nil
		})
		h.refuse(err, state.Unavailable, "no look")
	})
}

func TestExclusiveOfACallerWhoLeaves(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		first, release := h.exclusive(context.Background(), "v", func() {})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		second, _ := h.exclusive(ctx, "v", func() { t.Error("called for somebody who has left") })
		h.sleep(2 * time.Second)
		h.refuse(h.got(second), state.DeadlineExceeded, "v")
		release()
		require.NoError(h.t, h.got(first))
		h.forgotten("v")

		// Once it is called, the caller stays to its end.
		ctx, cancel = context.WithCancel(context.Background())
		third, release := h.exclusive(ctx, "v", func() {})
		cancel()
		h.pending(third)
		release()
		require.NoError(h.t, h.got(third))
		h.forgotten("v")
	})
}

// A caller who leaves during the look, which may hang, has f not called later.
func TestExclusiveOfACallerWhoLeavesDuringTheLook(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hung := h.k.hang(opFind, "v", true)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		answer, _ := h.exclusive(ctx, "v", func() { t.Error("called for somebody who has left") })
		h.sleep(time.Minute)
		h.refuse(h.got(answer), state.DeadlineExceeded, "v")
		hung.open()
		h.sleep(time.Minute)
		h.forgotten("v")
	})
}

func TestExclusiveWhenThePluginStops(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		running, _ := h.exclusive(context.Background(), "v", func() {})
		waiting, _ := h.exclusive(context.Background(), "v", func() { t.Error("called while the plugin stops") })
		h.stop()
		if err := h.got(running); !errors.Is(err, context.Canceled) {
			t.Errorf("the one that runs: %v", err)
		}
		h.refuse(h.got(waiting), state.Unavailable, "stopping")
		late, _ := h.exclusive(context.Background(), "v", func() { t.Error("called after the plugin has stopped") })
		h.refuse(h.got(late), state.Unavailable, "stopping")
		h.start()
		h.ok(stage("v"))
	})
}

// Jobs of one volume are never two at a time, and none is lost.
func TestManyJobs(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		inside, jobs := 0, 0
		var group sync.WaitGroup
		for i := range 20 {
			group.Go(func() {
				err := h.p.r.Exclusive(context.Background(), "v", func(context.Context, *state.Volume, state.Actual) error {
					inside++ // no lock: the race detector watches
					if inside != 1 {
						t.Error("two at a time")
					}
					time.Sleep(time.Millisecond)
					inside--
					jobs++
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
			group.Go(func() {
				r := stage("v")
				if i%2 == 1 {
					r = unstage("v")
				}
				_ = h.do(r) // superseded by others
			})
			group.Go(func() { _, _ = h.retry("v") })
		}
		group.Wait()
		if jobs != 20 {
			t.Errorf("%d jobs", jobs)
		}
		h.ok(stage("v"))
		h.atRest("v")
	})
}
