package ui

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// The nodes are read while a page is open, as often as the source says, and once for all
// pages. An idle server asks nobody anything.
func TestNodesAreReadWhileAPageIsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		source := one()
		source.Every = 5 * time.Second
		read := source.Read
		source.Read = func(ctx context.Context) (Snapshot, error) {
			reads++
			return read(ctx)
		}
		w := newWatcher(source)
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			w.run(ctx)
		}()
		after := func(wait time.Duration, want int, what string) {
			t.Helper()
			time.Sleep(wait)
			synctest.Wait()
			if reads != want {
				t.Errorf("%s: %d readings, want %d", what, reads, want)
			}
		}
		after(time.Hour, 0, "before a page is open")
		w.join()
		after(0, 1, "when it is opened")
		w.join()
		after(11*time.Second, 3, "with two pages")
		w.leave()
		after(5*time.Second, 4, "with one again")
		w.leave()
		if last, _ := w.last(); last != nil {
			t.Error("what was read is kept for a page that comes later")
		}
		after(time.Hour, 4, "when all are closed")
		w.join()
		after(0, 5, "when one is opened again")
		if last, _ := w.last(); last == nil {
			t.Error("nothing is shown")
		}
		w.leave()
		end()
		<-ended
	})
}
