package node

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/harness"
)

// within makes a call with a deadline, and sees that it is answered well before.
func within(t *testing.T, d time.Duration, call func(context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	err := call(ctx)
	if deadline, _ := ctx.Deadline(); time.Until(deadline) <= 0 {
		t.Errorf("answered after the deadline of %s: %v", d, err)
	}
	return err
}

// While the volume's place in the pool does not answer, calls are answered in
// time, with what is waited for; what they ask for is written, and done when the
// place is back.
func TestCallsAreAnsweredWhileThePoolHangs(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	fresh, grown := create(t, p, "fresh", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "grown", 32*mib, blockAs(multiWriter))
	fresh.Capability = mountAs("", multiWriter)
	must(t, grown.Stage(t.Context()))
	revive := []func(){hang(t, filepath.Dir(fresh.Data())), hang(t, filepath.Dir(grown.Data()))}
	pod := fresh.Target("pod")
	for name, call := range map[string]func(context.Context) error{
		"stage":   fresh.Stage,
		"publish": func(ctx context.Context) error { return fresh.Publish(ctx, pod) },
		"expand": func(ctx context.Context) error {
			_, err := grown.Expand(ctx, 64*mib)
			return err
		},
	} {
		err := within(t, 4*time.Second, call)
		mustRefuse(t, err, codes.DeadlineExceeded)
		if !silent.MatchString(err.Error()) { // as the caller's own clock says nothing
			t.Errorf("%s: %v", name, err)
		}
	}
	asked := map[string]bool{}
	for _, v := range p.Status().Volumes {
		for _, part := range v.Parts {
			asked[v.Volume+" "+part.Part] = true
		}
	}
	if !asked[fresh.ID+" stage"] || !asked[grown.ID+" size"] {
		t.Errorf("asked is %v", asked)
	}
	for _, revive := range revive {
		revive()
	}
	harness.Eventually(t, "the stage and the growth are done", func() bool {
		settled := 0
		for _, v := range p.Status().Volumes {
			for _, part := range v.Parts {
				if part.Is == report.Settled && (v.Volume == fresh.ID && part.Part == "stage" || v.Volume == grown.ID && part.Part == "size") {
					settled++
				}
			}
		}
		return settled == 2
	})
	must(t, fresh.Up(t.Context(), pod))
	if bytes, err := grown.Expand(t.Context(), 64*mib); err != nil || bytes != 64*mib {
		t.Errorf("the volume has %d bytes (%v)", bytes, err)
	}
	must(t, grown.Unstage(t.Context()))
	must(t, grown.Delete(t.Context()))
	fresh.End(pod)
}
