package ui

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
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

// What is wrong with a node is shown at once, and not among what more there is.
func TestWrongNodes(t *testing.T) {
	w := &watcher{}
	for title, test := range map[string]struct {
		node  report.Node
		wrong bool
	}{
		"well":           {report.Node{Running: true, Registration: &report.Registration{Registered: true}}, false},
		"down":           {report.Node{}, true},
		"not registered": {report.Node{Running: true, Registration: &report.Registration{}}, true},
		"no pool":        {report.Node{Running: true, StorageProblems: []report.StorageProblem{{Reason: report.PoolUnusable}}}, true},
		"no records":     {report.Node{Running: true, Orphans: 1}, true},
	} {
		if got := w.shown([]report.NodeOf{{Name: "n", Node: test.node}})[0]; got.Wrong != test.wrong || len(got.Told) != 1 {
			t.Errorf("%s: %+v", title, got)
		}
	}
}
