package node

import (
	"context"
	"regexp"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// A format that takes longer than its callers wait is done once, and each
// caller is told before its deadline what is going on.
func TestSlowMkfsIsDoneOnce(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]string{"exec": byExec, "grandchild": byGrandchild} {
		t.Run(name, func(t *testing.T) {
			p, w, slow := startWithMkfs(t, then)
			swift := create(t, p, "swift", smallest("xfs"), mountAs("xfs", multiWriter))
			told := regexp.MustCompile(`step format .* running since [0-9T:-]+Z`)

			patient := w.stageInto(slow)
			for range 2 {
				var calls errgroup.Group
				for range 3 {
					calls.Go(func() error {
						// The plugin keeps a tenth for the way back.
						ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
						defer cancel()
						err := slow.Stage(ctx)
						if status.Code(err) != codes.DeadlineExceeded || !told.MatchString(status.Convert(err).Message()) {
							t.Errorf("while mkfs runs, NodeStageVolume answers %v", err)
						}
						return nil
					})
				}
				must(t, swift.Stage(t.Context()))
				must(t, swift.Unstage(t.Context()))
				must(t, calls.Wait())
			}
			if helpers := p.Helpers(t); len(helpers) == 0 {
				t.Error("no helper process is running")
			}
			w.open()
			must(t, <-patient)
			must(t, slow.Stage(t.Context()))
			w.mustHaveRun(1)
			if helpers := p.Helpers(t); len(helpers) > 0 {
				t.Errorf("still running after the format: %v", helpers)
			}
			must(t, swift.Delete(t.Context()))
			slow.End()
		})
	}
}

// A volume may be unstaged while it is being formatted: the stage call that is
// superseded is told so, and the volume can be staged again.
func TestUnstageDuringMkfs(t *testing.T) {
	t.Parallel()
	p, w, v := startWithMkfs(t, byExec)
	staged, unstaged := w.stageInto(v), make(chan error, 1)
	go func() { unstaged <- v.Unstage(t.Context()) }()
	harness.Eventually(t, "the unstage is asked for", func() bool {
		for _, part := range p.Status().Volumes[0].Parts {
			if part.Asked == "gone" {
				return true
			}
		}
		return false
	})
	w.open()
	mustRefuse(t, <-staged, codes.Aborted, v.ID)
	must(t, <-unstaged)
	mustHaveNoLoop(t, p)
	must(t, v.Stage(t.Context()))
	w.mustHaveRun(1)
	v.End()
}
