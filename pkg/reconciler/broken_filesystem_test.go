package reconciler

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// shutDown breaks the mounted file system of volume v. No event tells of it.
func (h *harness) shutDown(v *fakeVolume, keepers ...string) {
	h.k.with(func() { v.dead, v.keepers = true, keepers })
	h.wake("v")
}

func TestBrokenFilesystemIsMountedAnew(t *testing.T) {
	bubble(t, func(h *harness) {
		m := h.published()
		v := h.k.volumes["v"]
		h.shutDown(v)
		h.atRest("v")
		if want := []state.PartKind{state.TargetKind, state.TargetKind, state.StageKind}; v.dead || !slices.Equal(m.repairs, want) {
			t.Errorf("broken: %t, repaired %v, want %v", v.dead, m.repairs, want)
		}
		h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
		h.shutDown(v)
		h.sleep(maxDelay)
		h.atRest("v")
	})
}

// What would stay broken is left as it is, and told.
func TestBrokenFilesystemThatIsKept(t *testing.T) {
	bubble(t, func(h *harness) {
		h.published()
		v := h.k.volumes["v"]
		before := h.k.changes()
		h.shutDown(v, "pid 7 (app)")
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "waits for stage", "kept by pid 7 (app)")
		h.refuse(h.do(stage("v")), state.Unavailable, "kept by pid 7 (app)")
		h.sleep(time.Hour)
		h.noStepSince(before)
		h.k.with(func() { v.keepers = nil })
		h.ok(publish("v", 1), publish("v", 2, publishReadOnly))
		h.atRest("v")
		h.shutDown(v, "pid 7 (app)")
		h.ok(unpublish("v", 1), unpublish("v", 2))
		h.k.with(func() { v.keepers = nil })
		h.ok(unstage("v"))
	})
}

// swap puts another file system onto a volume's device, behind everybody's back.
func (h *harness) swap(v *fakeVolume, uuid string) {
	h.k.with(func() { v.contents.UUID = uuid })
	h.wake("v")
}

// A file system that is not the one that the volume was staged with is neither
// mounted nor called staged, until somebody stages it anew.
func TestOtherDataIsNotShown(t *testing.T) {
	for name, lost := range map[string]bool{"mounted": false, "lost": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				h.ok(stage("v"))
				its := v.contents.UUID
				if uuid := h.store.Get("v").Stage.UUID; uuid != its {
					t.Errorf("%q is remembered, want %s", uuid, its)
				}
				h.ok(publish("v", 1))
				h.restart()
				if lost {
					h.k.with(func() { clear(h.k.mounts) })
				}
				h.swap(v, "another")
				h.refuse(h.do(stage("v")), state.Unavailable, "another", its, "/pool/v")
				h.refuse(h.do(publish("v", 2)), state.FailedPrecondition, "waits for stage", "another", its)
				if h.k.isMounted(stagePath("v")) == lost || h.k.isMounted(targetPath("v", 2)) {
					t.Error("other data is shown, or what was shown was taken away")
				}
				h.swap(v, its)
				h.ok(stage("v"), publish("v", 2))
				h.swap(v, "another")
				h.ok(unpublish("v", 1), unpublish("v", 2), unstage("v"), stage("v"), publish("v", 1))
				h.atRest("v")
				if uuid := h.store.Get("v").Stage.UUID; uuid != "another" {
					t.Errorf("staged with %s", uuid)
				}
			})
		})
	}
}

// A file system that could not be read when the stage was accepted is
// remembered when it can.
func TestFilesystemIsRememberedLater(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.formatted("v", "ext4")
		h.ok(stage("v"))
		if uuid := h.store.Get("v").Stage.UUID; uuid != "" {
			t.Fatalf("%q is remembered of a file system without a UUID", uuid)
		}
		h.swap(v, "its")
		h.k.with(func() { clear(h.k.mounts) })
		h.swap(v, "another")
		h.refuse(h.do(stage("v")), state.Unavailable, "another", "its")
		h.swap(v, "its")
		h.ok(stage("v"))
		h.atRest("v")
	})
}

// A target of a broken file system is not taken down before the stage may be mounted, however
// often it has broken: a container that starts would write into the empty directory.
func TestFilesystemThatBreaksAgain(t *testing.T) {
	bubble(t, func(h *harness) {
		h.published()
		v := h.k.volumes["v"]
		for range 9 {
			h.shutDown(v)
			for range 10 * int(maxDelay/time.Second) {
				h.sleep(100 * time.Millisecond)
				for i := range 2 {
					if !h.k.isMounted(targetPath("v", i+1)) {
						t.Fatalf("a target shows an empty directory, and the file system is broken: %t", v.dead)
					}
				}
			}
			h.atRest("v")
		}
	})
}

// That holds, too, if only the stage was lost so often that its repair is put off.
func TestFilesystemBreaksWhileTheStageIsPutOff(t *testing.T) {
	bubble(t, func(h *harness) {
		h.published()
		v := h.k.volumes["v"]
		for range 11 {
			h.tear(stagePath("v"))
			h.sleep(maxDelay + time.Second)
		}
		h.tear(stagePath("v"))
		h.shutDown(v)
		for v.dead {
			if !h.k.isMounted(targetPath("v", 1)) || !h.k.isMounted(targetPath("v", 2)) {
				t.Fatal("a target shows an empty directory")
			}
			h.sleep(100 * time.Millisecond)
		}
		h.atRest("v")
	})
}

// What a caller has begun to mount anew is mounted, also if he is gone by then and nothing is
// repaired unasked.
func TestCallerLeavesWhileAFilesystemIsMountedAnew(t *testing.T) {
	bubble(t, func(h *harness) {
		h.detectOnly = true
		h.published()
		v := h.k.volumes["v"]
		h.shutDown(v)
		h.k.slow(opUnmount, targetPath("v", 1), 1, 20*time.Second)
		h.refuse(h.within(10*time.Second, publish("v", 1)), state.DeadlineExceeded)
		h.sleep(time.Minute)
		h.atRest("v")
	})
}

// A target that shows a broken file system twice keeps it no longer than others.
func TestBrokenFilesystemThatIsBoundTwice(t *testing.T) {
	bubble(t, func(h *harness) {
		h.published()
		v := h.k.volumes["v"]
		h.k.with(func() {
			at := targetPath("v", 1)
			h.k.mounts[at] = append(slices.Clone(h.k.mounts[at]), h.k.mounts[at]...)
			h.k.drift("v")
		})
		h.shutDown(v)
		h.sleep(maxDelay)
		h.atRest("v")
	})
}

// A file system that breaks as soon as it is mounted, or bound, is tried again as what fails is. Its
// targets are left as they are meanwhile.
func TestFilesystemThatBreaksAtOnce(t *testing.T) {
	for _, action := range []Action{Mount, Bind} {
		t.Run(string(action), func(t *testing.T) {
			bubble(t, func(h *harness) {
				var v *fakeVolume
				breaks := false
				h.hook = func(_ context.Context, _ string, step Step, m Moment) error {
					if m == After && step.Action == action && breaks {
						time.Sleep(3 * time.Millisecond)
						h.k.with(func() { v.dead = true; h.k.drift("v") })
					}
					return nil
				}
				h.restart()
				v = h.volume("v")
				h.ok(stage("v"), publish("v", 1))
				breaks = true
				h.shutDown(v)
				empty := 0
				for range 3600 {
					h.sleep(time.Second)
					if action == Bind && !h.k.isMounted(targetPath("v", 1)) {
						empty++
					}
				}
				mounts, binds := h.k.count(opMount, stagePath("v")), h.k.count(opBind, targetPath("v", 1))
				if mounts < 10 || mounts > 100 || binds > 100 || empty > 10 {
					t.Errorf("%d mounts and %d binds in an hour, and the target was empty for %d of 3600 looks", mounts, binds, empty)
				}
				if action == Mount {
					h.refuse(h.do(stage("v")), state.Unavailable, "what was just mounted there does not work")
				}
				breaks = false
				h.ok(stage("v"), publish("v", 1))
				h.atRest("v")
			})
		})
	}
}

// A caller has a broken file system repaired though one of its targets backs off. Nobody waits
// for that by looking again and again.
func TestBrokenFilesystemWhileATargetBacksOff(t *testing.T) {
	for _, asked := range []bool{false, true} {
		bubble(t, func(h *harness) {
			h.published()
			v := h.k.volumes["v"]
			h.k.fail(opFind, "v", 1, errBoom) // so that the stage has failed, too
			h.wake("v")
			synctest.Wait()
			f := h.k.fail(opUnmount, targetPath("v", 2), 4, errBoom)
			h.shutDown(v)
			h.sleep(10 * time.Second)
			if f.times != 0 || !v.dead {
				t.Fatalf("%d failures to come, broken: %t", f.times, v.dead)
			}
			h.shutDown(v)
			if began := time.Now(); asked {
				h.ok(publish("v", 3))
				synctest.Wait()
				if took := time.Since(began); took > 0 || !h.k.isMounted(targetPath("v", 2)) {
					t.Errorf("it took %s, and the target shows an empty directory", took)
				}
			}
			h.sleep(maxDelay)
			if v.dead {
				t.Errorf("asked %t: it is broken still", asked)
			}
			h.atRest("v")
		})
	}
}

// Somebody who has it tried again has all of a broken file system repaired.
func TestRetryOfABrokenFilesystem(t *testing.T) {
	for title, off := range map[string]bool{"switched off": true, "put off": false} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.detectOnly = off
				h.published()
				v := h.k.volumes["v"]
				for range 12 {
					h.shutDown(v)
					h.sleep(time.Millisecond)
					if v.dead {
						break
					}
				}
				if !v.dead {
					t.Fatal("it is repaired each time")
				}
				if _, err := h.retry("v"); err != nil || v.dead {
					t.Errorf("broken: %t, %v", v.dead, err)
				}
				h.atRest("v")
			})
		})
	}
}
