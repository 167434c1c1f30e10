package reconciler

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// More than a look reads is read once, in the step that sets the mark, and who
// waits is told how far that is.
func TestAProofIsMadeOnceAndTold(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.contents.Kind = state.ContentsUnproven })
		proof := h.k.hang(opProve, "v", false)
		answer := h.begin(stage("v"))
		h.pending(answer)
		h.sleep(time.Minute)
		if s := report.Statuses(h.p.r.Reports()); s[0].Step == nil || s[0].Step.Progress != "proving that it is blank: none read" {
			t.Errorf("the step that runs: %+v", s[0].Step)
		}
		story, err := h.p.r.Explain(context.Background(), "v")
		if told := strings.Join(story.Explanation().Next, " "); err != nil || !strings.Contains(told, "Begin-format for stage has been running for 1m0s: proving that it is blank: none read.") {
			t.Errorf("explained as %q (%v)", told, err)
		}
		h.sleep(time.Minute)
		h.refuse(h.got(answer), state.DeadlineExceeded, "step begin-format for stage has been running", "proving that it is blank: none read")
		proof.open()
		h.ok(stage("v"))
		h.wantCalls(1, opProve, "v")
		h.wantCalls(0, opErase, "v")
	})
	for _, end := range []mode{fails, crashes} {
		bubble(t, func(h *harness) { // after mkfs may have begun, nothing is proven any more
			v := h.volume("v")
			h.k.with(func() { v.contents.Kind = state.ContentsUnproven })
			h.k.fault(&fault{op: opFormat, key: "v", times: 1, mode: end, err: errors.New("boom")})
			_ = h.do(stage("v"))
			if end == crashes {
				<-h.p.done // the caller may be told that it stops before it has stopped
				h.start()
			}
			h.ok(stage("v"))
			h.wantCalls(1, opErase, "v")
		})
	}
}

// Somebody's claim that ends in time is no failure. Nothing is taken for proved after it.
func TestFormatOfAClaimedDevice(t *testing.T) {
	claimed := &state.Unwritten{Err: fmt.Errorf("it is in use (%w)", unix.EBUSY)}
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opFormat, "v", claimTries, claimed)
		h.ok(stage("v"))
		h.wantCalls(1+claimTries, opFormat, "v")
	})
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opFormat, "v", -1, claimed)
		h.refuse(h.do(stage("v")), state.Unavailable, "it is in use")
		h.k.mend()
		h.ok(stage("v"))
	})
	bubble(t, func(h *harness) {
		v := h.volume("v")
		v.noted = true
		h.k.fault(&fault{op: opFormat, key: "v", times: 1, takes: time.Second, mode: fails, err: claimed})
		answer := h.begin(stage("v"))
		h.sleep(time.Second / 2)
		h.k.with(func() {
			v.contents = state.Contents{Kind: state.ContentsOther, Found: "somebody's data"}
			h.k.drift("v")
		})
		h.sleep(time.Second)
		h.refuse(h.got(answer), state.FailedPrecondition, "somebody's data")
		h.wantCalls(1, opFormat, "v")
		h.wantCalls(0, opErase, "v")
	})
	bubble(t, func(h *harness) { // what turns up would be erased as long as the mark is there
		h.volume("v").noted = true
		h.k.fail(opFormat, "v", 1, claimed)
		h.k.fail(opAbandonFormat, "v", 1, errors.New("no room for the note"))
		h.refuse(h.do(stage("v")), state.Unavailable, "it is in use", "the mark stays", "no room for the note")
		h.wantCalls(1, opFormat, "v")
	})
}

// A proof that nobody wants any more is not finished, and leaves no mark.
func TestAProofEndsWithItsIntent(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.contents.Kind, h.k.endless = state.ContentsUnproven, true })
		answer := h.begin(stage("v"))
		h.sleep(time.Minute)
		if s := report.Statuses(h.p.r.Reports()); s[0].Step == nil || s[0].Step.Progress != "proving that it is blank: some read" {
			t.Errorf("the step that runs: %+v", s[0].Step)
		}
		began := time.Now()
		h.ok(unstage("v"))
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the unstage took %s", took)
		}
		h.refuse(h.got(answer), state.Aborted, "superseded")
		h.wantCalls(0, opBeginFormat, "v")
		h.k.with(func() { h.k.endless = false })
		h.ok(stage("v"))
	})
}

// A mark that cannot be taken back, as the storage does not answer, does not hold up a stop.
func TestStopWhileTheMarkIsTakenBack(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.noted, v.zeros = true, true })
		h.k.hang(opAbandonFormat, "v", false)
		answer := h.begin(stage("v"))
		h.p.end()
		h.sleep(abandonTime)
		select {
		case <-h.p.done:
		default:
			t.Error("the worker still waits")
		}
		h.refuse(h.got(answer), state.Unavailable, "is stopping")
	})
}
