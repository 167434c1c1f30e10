package reconciler

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// What was brought about when nobody waited any more does not exist for the CO, which would
// never remove it if it were answered a final code: it gives way, until a caller is told of it.
func TestUnconfirmedGivesWay(t *testing.T) {
	for name, row := range map[string]struct {
		before        []request
		hangs         op
		first, second request
		at            string
	}{
		"stage":   {nil, opFormat, stage("v"), stage("v", stageNoatime), stagePath("v")},
		"publish": {[]request{stage("v")}, opBind, publish("v", 1), publish("v", 1, publishNoatime), targetPath("v", 1)},
	} {
		for _, told := range []bool{false, true} {
			for _, restarted := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/told=%t/restarted=%t", name, told, restarted), func(t *testing.T) {
					bubble(t, func(h *harness) {
						h.volume("v")
						h.ok(row.before...)
						hang := h.k.hang(row.hangs, "", true)
						h.refuse(h.within(time.Second, row.first), state.DeadlineExceeded)
						hang.open()
						synctest.Wait()
						h.atRest("v")
						if intent := h.store.Get("v").Intent(row.first.part); !intent.Accepted || !intent.Unconfirmed {
							t.Fatalf("nobody was told, and the record has %+v", intent)
						}
						if told {
							h.ok(row.first)
						}
						if restarted {
							h.kill()
							h.start()
						}
						if told {
							h.refuse(h.do(row.second), state.AlreadyExists)
							h.mustShow(row.at, state.NoAtime, false)
							return
						}
						h.ok(row.second)
						h.atRest("v")
						h.mustShow(row.at, state.NoAtime, true)
						h.wantCalls(1, opFormat, "v")
						h.refuse(h.do(row.first), state.AlreadyExists)
					})
				})
			}
		}
	}
}

// What is asked for later takes the place of what is not done yet, whose caller is told.
func TestLaterRequestSupersedes(t *testing.T) {
	for name, row := range map[string]struct {
		before        []request
		hangs         op
		first, second request
	}{
		"publish by unpublish": {[]request{stage("v")}, opBind, publish("v", 1), unpublish("v", 1)},
		"unpublish by publish": {[]request{stage("v"), publish("v", 1)}, opUnmount, unpublish("v", 1), publish("v", 1)},
		"stage by unstage":     {nil, opFormat, stage("v"), unstage("v")},
		"unstage by stage":     {[]request{stage("v")}, opUnmount, unstage("v"), stage("v")},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.volume("v")
				h.ok(row.before...)
				hang := h.k.hang(row.hangs, "", true)
				first, second := h.begin(row.first), h.begin(row.second)
				hang.open()
				h.refuse(h.got(first), state.Aborted, "superseded")
				require.NoError(h.t, h.got(second))
				h.atRest("v")
				if lie := h.lie(row.second); lie != "" {
					t.Error(lie)
				}
				if row.hangs == opFormat && h.k.count(opMount, stagePath("v")) != 0 {
					t.Error("mounted for a stage that was superseded")
				}
				h.ok(row.second)
			})
		})
	}
}

// The edit of a final failure meets an intent that was superseded meanwhile:
// the caller is told that, and never a final code for what stands again.
func TestSupersededWhileBeingWithdrawn(t *testing.T) {
	for _, at := range []int{2, 3} { // the worker notes that it begins, and withdraws
		bubble(t, func(h *harness) {
			h.volume("v")
			h.ok(stage("v"))
			h.k.fail(opBind, "", 1, state.Errorf(state.FailedPrecondition, "no parent"))
			first := make(chan error, 1)
			edits := 0
			h.store.edits = func(string) {
				if edits++; edits == at {
					h.store.edits = nil
					if _, err := h.store.Edit("v", unpublish("v", 1).edit); err != nil {
						t.Error(err)
					}
					if _, err := h.store.Edit("v", publish("v", 1).edit); err != nil {
						t.Error(err)
					}
				}
			}
			go func() { first <- h.do(publish("v", 1)) }()
			synctest.Wait()
			h.refuse(h.got(first), state.Aborted)
			h.ok(publish("v", 1))
		})
	}
}

func stageNoatime(s *state.Stage)   { s.Capability.Flags = []string{"noatime"} }
func stageContext(s *state.Stage)   { s.Context = map[string]string{"a": "1"} }
func stageOpen(s *state.Stage)      { s.Capability.FSType = "" }
func stageElsewhere(s *state.Stage) { s.Path = "/k/stage2/v" }

func publishNoatime(t *state.Target) { t.Capability.Flags = []string{"noatime"} }

// What takes the place of an intent is not settled because that one was seen undone.
func TestStatusOfWhatSupersedes(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFormat, "v", true)
		h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
		h.refuse(h.within(time.Second, stage("v", stageNoatime)), state.DeadlineExceeded)
		h.k.slow(opFind, "v", -1, time.Second)
		hang.open()
		for range 300 {
			h.sleep(100 * time.Millisecond)
			p := part(t, h.one(), "stage")
			if h.k.with(func() {
				if p.Is == report.Settled && strings.HasPrefix(p.Asked, "staged") && len(h.k.mounts[stagePath("v")]) == 0 {
					t.Errorf("it is told as settled, and nothing is mounted: %+v", p)
				}
			}); t.Failed() {
				return
			}
		}
		h.atRest("v")
	})
}

func (h *harness) mustShow(at string, attribute state.Attributes, want bool) {
	h.t.Helper()
	h.k.with(func() {
		if stack := h.k.mounts[at]; len(stack) != 1 || (stack[0].Attributes&attribute != 0) != want {
			h.t.Errorf("at %s is %+v, and %s should be %t", at, stack, attribute, want)
		}
	})
}

// Whatever step of a stage hangs, another request takes its place, also if the
// plugin is killed on the way.
func TestStageIsSupersededAtEachStep(t *testing.T) {
	for _, o := range []op{opFind, opAttach, opProbe, opBeginFormat, opFormat, opEndFormat, opMount} {
		for name, other := range map[string]func(*state.Stage){
			"flags": stageNoatime, "context": stageContext, "read-only": stageReadOnly, "fs type": stageXFS, "fs type left open": stageOpen,
			"block": stageBlock, "path": stageElsewhere,
		} {
			for _, killed := range []bool{false, true} {
				t.Run(string(o)+"/"+name, func(t *testing.T) {
					bubble(t, func(h *harness) {
						v := h.volume("v")
						hang := h.k.hang(o, "", !killed)
						h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
						err := h.within(time.Second, stage("v", other))
						if err != nil && state.ClassOf(err) != state.DeadlineExceeded {
							t.Fatal(err)
						}
						if killed {
							h.kill()
							h.k.mend()
							h.start()
						}
						hang.open()
						synctest.Wait()
						h.sleep(time.Minute)
						asked := stage("v", other)
						err = h.do(asked)
						formatted := v.formatted
						switch {
						case name == "read-only" && formatted == "":
							h.refuse(err, state.FailedPrecondition, "read-only access was asked for")
						case name == "block" && v.formatting:
							h.refuse(err, state.FailedPrecondition, "interrupted")
						case name == "fs type" && formatted == "ext4":
							h.refuse(err, state.FailedPrecondition, "xfs was asked for")
						case err != nil:
							t.Fatal(err)
						default:
							s, want := h.store.Get("v").Stage, stageOf(asked)
							if want.Capability.Access == state.MountAccess && want.Capability.FSType == "" {
								want.Capability.FSType = cmp.Or(formatted, "xfs")
							}
							if s.Gone || !s.Accepted || s.Next != nil || !s.SameAs(want) {
								t.Errorf("staged is %+v", s)
							}
							h.k.with(func() {
								if stack := h.k.mounts[want.Path]; want.Capability.Access == state.MountAccess && (len(stack) != 1 || (stack[0].Attributes&state.NoAtime != 0) != (name == "flags")) {
									t.Errorf("mounted is %+v", stack)
								}
							})
						}
						if name != "path" {
							h.atRest("v")
						}
						h.k.with(func() {
							if name == "path" && len(h.k.mounts[stagePath("v")]) > 0 {
								t.Error("still mounted where it was asked for first")
							}
						})
						h.ok(request{"v", state.StagePart(), func(v *state.Volume) error {
							if v.Stage == nil {
								return state.ErrNothingThere
							}
							return v.AskUnstage(v.Stage.Path, time.Now())
						}})
						h.atRest("v")
					})
				})
			}
		}
	}
}

// stageOf is the stage that a request asks for.
func stageOf(r request) *state.Stage {
	v := &state.Volume{ID: r.id}
	if err := r.edit(v); err != nil {
		panic(err)
	}
	return v.Stage
}

// What gives way before anything was begun for it leaves nothing to undo, so no
// step is made for it.
func TestGivesWayBeforeItIsBegun(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "ext4")
		edits := 0
		h.store.edits = func(string) {
			if edits++; edits == 2 { // the worker notes that it begins
				h.store.edits = nil
				if _, err := h.store.Edit("v", stage("v", stageReadOnly).edit); err != nil {
					t.Error(err)
				}
			}
		}
		h.refuse(h.do(stage("v")), state.Aborted, "superseded")
		synctest.Wait()
		h.wantCalls(1, opAttach, "v")
		h.ok(stage("v", stageReadOnly))
		h.atRest("v")
	})
}

// While what was begun cannot be undone, nobody is told a final code.
func TestSupersededCannotBeUndone(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opMount, "", 1, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable, "boom")
		h.k.fail(opDetach, "", 3, state.Errorf(state.FailedPrecondition, "it is claimed"))
		h.refuse(h.do(stage("v", stageNoatime)), state.Unavailable, "taking back what an earlier request began", "it is claimed")
		h.refuse(h.do(publish("v", 1)), state.Aborted, "unstaged")
		h.sleep(time.Minute)
		h.atRest("v")
		h.mustShow(stagePath("v"), state.NoAtime, true)
	})
}

func TestPublishIsSuperseded(t *testing.T) {
	for _, o := range []op{opLook, opBind, opSetAttributes} {
		for name, other := range map[string]func(*state.Target){
			"flags": publishNoatime, "read-only": publishReadOnly, "context": func(t *state.Target) { t.Context = map[string]string{"a": "1"} },
		} {
			t.Run(string(o)+"/"+name, func(t *testing.T) {
				bubble(t, func(h *harness) {
					h.volume("v")
					h.ok(stage("v"))
					first := publish("v", 1, publishNoatime)
					if name == "flags" {
						first = publish("v", 1)
					}
					hang := h.k.hang(o, targetPath("v", 1), true)
					waits := h.begin(first)
					select {
					case err := <-waits: // no such step
						require.NoError(t, err)
						return
					default:
					}
					h.refuse(h.do(publish("v", 1, other)), state.Aborted, "a caller waits")
					h.sleep(2 * time.Minute)
					h.refuse(h.got(waits), state.DeadlineExceeded)
					h.refuse(h.within(time.Second, publish("v", 1, other)), state.DeadlineExceeded)
					hang.open()
					synctest.Wait()
					h.atRest("v")
					h.mustShow(targetPath("v", 1), state.NoAtime, name == "flags")
					h.mustShow(targetPath("v", 1), state.ReadOnly, name == "read-only")
					h.ok(publish("v", 1, other))
				})
			})
		}
	}
}
