package hang

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// asUnanswered returns err, which must be an *Unanswered with a cause.
func asUnanswered(t *testing.T, err error, cause error) *Unanswered {
	t.Helper()
	late, is := err.(*Unanswered)
	if !is || !errors.Is(err, cause) {
		t.Fatalf("%v, not unanswered because of %v", err, cause)
	}
	return late
}

func TestCallThatHangsIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Calls[int]
		ctx, cancel := context.WithCancel(t.Context())
		release, made := make(chan struct{}), 0
		hang := func() (int, error) { made++; <-release; return 1, nil }
		errs := make(chan error)
		go func() { _, err := c.Do(ctx, "key", NoLimit, hang); errs <- err }()
		synctest.Wait()
		cancel()
		if late := asUnanswered(t, <-errs, context.Canceled); late.Earlier {
			t.Error("the caller's own call is told as an earlier one")
		}

		// Another key is served; this one waits without a call of its own.
		if v, err := c.Do(t.Context(), "other", NoLimit, func() (int, error) { return 2, nil }); v != 2 || err != nil {
			t.Errorf("%d, %v", v, err)
		}
		_, err := c.Do(ctx, "key", NoLimit, hang)
		if late := asUnanswered(t, err, context.Canceled); !late.Earlier || made != 1 {
			t.Errorf("%+v after %d calls", late, made)
		}

		// The one that waits goes on by itself, with a call of its own.
		values := make(chan int)
		go func() {
			v, err := c.Do(t.Context(), "key", NoLimit, func() (int, error) { return 3, nil })
			if err != nil {
				t.Error(err)
			}
			values <- v
		}()
		synctest.Wait()
		close(release)
		if v := <-values; v != 3 {
			t.Errorf("the one that waited has %d", v)
		}
		synctest.Wait()
		if len(c.running) != 0 {
			t.Errorf("%d calls are kept", len(c.running))
		}
	})
}

// However many ask, one call is made.
func TestCallsThatHangDoNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Calls[int]
		release, made := make(chan struct{}), 0
		defer close(release)
		for range 50 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := c.Do(ctx, "key", NoLimit, func() (int, error) { made++; <-release; return 0, nil })
			asUnanswered(t, err, context.DeadlineExceeded)
			cancel()
		}
		synctest.Wait()
		if made != 1 {
			t.Errorf("%d calls hang", made)
		}
	})
}

// The first caller waits until the limit, the later ones do not wait again.
func TestLimitCountsFromTheBeginningOfTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Calls[int]
		const limit = 2 * time.Second
		release := make(chan struct{})
		defer close(release)
		for _, want := range []time.Duration{limit, 0} {
			start := time.Now()
			_, err := c.Do(t.Context(), "key", limit, func() (int, error) { <-release; return 0, nil })
			asUnanswered(t, err, context.DeadlineExceeded)
			if waited := time.Since(start); waited != want {
				t.Errorf("waited for %s, want %s", waited, want)
			}
		}
	})
}

func TestJoinSharesTheCallThatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Calls[int]
		release, owners := make(chan struct{}), make(chan bool)
		for range 3 {
			go func() {
				v, own, err := c.Join(t.Context(), "key", NoLimit, func() (int, error) { <-release; return 1, nil })
				if v != 1 || err != nil {
					t.Errorf("%d, %v", v, err)
				}
				owners <- own
			}()
		}
		synctest.Wait()
		close(release)
		own := 0
		for range 3 {
			if <-owners {
				own++
			}
		}
		if own != 1 {
			t.Errorf("%d calls were made", own)
		}
	})
}

// What a call itself returns is told as it is, though another call hangs behind it.
func TestUnansweredOfAnotherCallIsNotOnesOwn(t *testing.T) {
	var inner, outer Calls[int]
	release := make(chan struct{})
	defer close(release)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, own, err := outer.Join(t.Context(), "key", NoLimit, func() (int, error) {
		_, err := inner.Do(ended, "key", NoLimit, func() (int, error) { <-release; return 0, nil })
		return 0, errors.Join(err)
	})
	if _, is := err.(*Unanswered); is || !own || !errors.Is(err, context.Canceled) {
		t.Errorf("own %t, %v", own, err)
	}
}
