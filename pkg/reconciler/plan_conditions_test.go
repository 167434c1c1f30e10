package reconciler_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// TestPlanConditions shows each condition of a rule where it alone decides.
func TestPlanConditions(t *testing.T) {
	for _, tt := range []struct {
		name string
		want *state.Volume
		have state.Actual
		plan []string
	}{
		// What keeps a device from being attached in the other mode.
		{"mode: a view", volume(stagedBlock(readOnly)), actual(attached(), view(held)),
			[]string{"stage: stuck, FailedPrecondition: in use"}},
		{"mode: a target out of sight", volume(staged(readOnly), unpublished(podA)), actual(attached(), ext4(), targetIs(podA, unseenNow())),
			[]string{"stage: stuck, FailedPrecondition: in use", "A: stuck, Unavailable: timed out"}},
		{"mode: a stage that claims nothing", volume(staged(readOnly)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: stuck, FailedPrecondition: in use"}},
		{"mode: a stage out of sight", volume(staged(readOnly)), actual(attached(), ext4(), stageIs(unseenNow())),
			[]string{"stage: stuck, FailedPrecondition: in use"}},

		// What is done to a device that nobody uses.
		{"no check of what is held", volume(staged()), actual(attached(held), ext4(needsCheck)),
			[]string{"stage: stuck, Unavailable: before checking"}},
		{"no erasing of what is held", volume(staged()), actual(attached(held, marked), ext4()),
			[]string{"stage: stuck, Unavailable: before formatting again"}},

		// A type that is left open.
		{"type left open: chosen first", volume(staged(as(""))), actual(stageIs(fullDir())),
			[]string{"choose for stage", "stage: under way"}},
		{"type left open: of no volume", volume(staged(as(""))), actual(device(state.DeviceAbsent, missing)),
			[]string{"stage: stuck, NotFound: no such volume"}},
		{"type left open: raw access has none", volume(stagedBlock()), actual(attached()),
			[]string{"stage: settled"}},
		{"type left open: of no account in the end", volume(stageOf(asBlock, []how{as(""), gone})), actual(attached()),
			[]string{"detach for stage", "stage: under way"}},

		// What must not be at the staging path.
		{"stage: out of sight", volume(staged()), actual(attached(), ext4(), stageIs(unseenNow())),
			[]string{"stage: stuck, Unavailable: timed out"}},
		{"stage: a file", volume(staged()), actual(attached(), ext4(), stageIs(emptyFile())),
			[]string{"stage: stuck, FailedPrecondition: a file, not a directory"}},
		{"stage: another volume of the same type", volume(staged()), actual(attached(), ext4(), stageIs(mounted(rw, on(formerDisk)))),
			[]string{"stage: stuck, FailedPrecondition: it is not this volume's"}},
		{"stage: a part of the volume", volume(staged()), actual(attached(), ext4(), stageIs(mounted(rw, part("/sub")))),
			[]string{"stage: stuck, FailedPrecondition: it is not this volume's"}},
		{"stage: the volume as another type", volume(staged()), actual(attached(), ext4(), stageIs(mounted(rw, of("xfs")))),
			[]string{"stage: stuck, FailedPrecondition: as xfs, and ext4 was asked for"}},
		{"stage: writable where read-only was asked for", volume(staged(readOnly)), actual(attached(readOnlyDevice), ext4(), stageIs(mounted(rw, turned))),
			[]string{"set-attributes for stage", "stage: under way"}},
		{"stage: broken, and a target is out of sight", volume(staged(), unpublished(podA)), actual(attached(), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, unseenNow())),
			[]string{"stage: stuck, Unavailable: broken", "A: stuck, Unavailable: timed out"}},

		// A staging directory that was removed.
		{"removed: stays removed", volume(staged(stageAccepted)), actual(attached(), ext4()),
			[]string{"stage: stuck, FailedPrecondition: is not there any more"}},
		{"removed: made when asked for", volume(staged(stageAccepted, stageAsked)), actual(attached(), ext4()),
			[]string{"mount for stage", "stage: under way"}},
		{"removed: made for a publish", volume(staged(stageAccepted), published(podA, asked)), actual(attached(), ext4()),
			[]string{"mount for stage", "stage: under way", "A: waits for stage"}},
		{"removed: not made for an unpublish", volume(staged(stageAccepted), unpublished(podA, asked)), actual(attached(), ext4(), targetIs(podA, emptyDir())),
			[]string{"remove-target for A", "stage: stuck, FailedPrecondition: is not there any more", "A: under way"}},

		{"out of sight: nothing is done to the device", volume(staged()), actual(attached(), contents(state.Contents{Kind: state.ContentsBlank}), stageIs(unseenNow())),
			[]string{"stage: stuck, Unavailable: timed out"}},

		// What was not looked at.
		{"unknown: a device is not attached a second time", volume(staged()), actual(unknownDevice),
			[]string{"stage: stuck, Unavailable: not known now"}},
		{"unknown: nor is its end seen", volume(unstaged()), actual(unknownDevice),
			[]string{"stage: stuck, Unavailable: not known now"}},
		{"unknown: the words are those of the cause", volume(unstaged()), actual(device(state.DeviceUnknown, unread)),
			[]string{"stage: stuck, Unavailable: the pool is away"}},
		{"unknown: a mount may be the volume's", volume(unpublished(podA)), actual(unknownDevice, targetIs(podA, mounted(rw))),
			[]string{"A: stuck, Unavailable: not known now"}},
		{"unknown: also for a publish that was refused", volume(unpublished(podA, withdrawn)), actual(unknownDevice, targetIs(podA, mounted(rw))),
			[]string{"A: stuck, Unavailable: not known now"}},
		{"unknown: a publish ends where nothing is mounted", volume(unpublished(podA)), actual(unknownDevice),
			[]string{"A: settled"}},
		{"unknown: the node that a target was seen with is the volume's", volume(unpublished(podA, seenAs(disk))), actual(unknownDevice, targetIs(podA, node(disk))),
			[]string{"unbind for A", "A: under way"}},
		{"unknown: the view", volume(unstaged()), actual(attached(), unknownView, stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: not known now"}},
		{"unknown: a view is not attached a second time", volume(stagedBlock(), publishedBlock(podA, readOnly)), actual(attached(), unknownView),
			[]string{"stage: stuck, Unavailable: not known now", "A: waits for stage"}},
		{"unknown: the staging path", volume(staged()), actual(attached(), ext4(), stageIs(state.Mountpoint{})),
			[]string{"stage: stuck, Unavailable: not looked at"}},
		{"unknown: the end of the staging path", volume(unstaged()), actual(attached(), stageIs(state.Mountpoint{})),
			[]string{"stage: stuck, Unavailable: not looked at"}},
		{"unknown: a target", volume(unstaged(), unpublished(podA)), actual(attached(), stageIs(emptyDir()), targetIs(podA, state.Mountpoint{})),
			[]string{"stage: waits for A", "A: stuck, Unavailable: not looked at"}},
		{"unknown: the contents are not formatted", volume(staged()), actual(attached()),
			[]string{"stage: stuck, Unavailable: not looked at"}},
		{"unknown: nor erased", volume(staged()), actual(attached(marked)),
			[]string{"stage: stuck, Unavailable: not looked at"}},
		{"unknown: the room for a file system to grow", volume(staged(), size(100)), actual(attached(), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: stuck, Unavailable: not looked at"}},

		// What is mounted without a device.
		{"source: the stage is a record", volume(staged(as("")), published(podA)), actual(mountSource),
			[]string{"mount-source for A", "stage: settled", "A: under way"}},
		{"source: it stands", volume(staged(as("")), published(podA)), actual(mountSource, targetIs(podA, fromSource())),
			[]string{"stage: settled", "A: settled"}},
		{"source: with other flags", volume(staged(as("")), published(podA, readOnly)), actual(mountSource, targetIs(podA, fromSource())),
			[]string{"set-attributes for A", "stage: settled", "A: under way"}},
		{"source: twice", volume(staged(as("")), published(podA)), actual(mountSource, targetIs(podA, over(fromSource(), fromSource()))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"source: another one", volume(staged(as("")), published(podA)), actual(mountSource, targetIs(podA, fromSource(func(m *state.Mount) { m.Source = "server:/other" }))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: it is not this volume's"}},
		{"source: a part of it", volume(staged(as("")), published(podA)), actual(mountSource, targetIs(podA, fromSource(part("/sub")))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: it is not this volume's"}},
		{"source: another type", volume(staged()), actual(mountSource),
			[]string{"stage: stuck, InvalidArgument: mounted as nfs4"}},
		{"source: raw", volume(stagedBlock()), actual(mountSource),
			[]string{"stage: stuck, InvalidArgument: no block device"}},
		{"source: no such volume", volume(staged(as(""))), actual(device(state.DeviceAbsent, missing), mountSource),
			[]string{"stage: stuck, NotFound: no such volume"}},
		{"source: it does not grow here", volume(staged(as("")), size(200)), actual(mountSource),
			[]string{"stage: settled", "size: stuck, FailedPrecondition: no device"}},
		{"source: a target ends", volume(staged(as("")), unpublished(podA)), actual(mountSource, targetIs(podA, fromSource())),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"source: a stage waits for its targets", volume(unstaged(), unpublished(podA)), actual(mountSource, targetIs(podA, fromSource())),
			[]string{"unbind for A", "stage: waits for A", "A: under way"}},
		{"source: and ends as a record", volume(unstaged()), actual(mountSource),
			[]string{"stage: settled"}},

		// Storage that other nodes can reach.
		{"shared: not attached unasked", volume(staged(stageAccepted)), actual(device(state.DeviceAbsent, shared), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: attached for a stage", volume(staged(stageAsked)), actual(device(state.DeviceAbsent, shared)),
			[]string{"attach for stage", "stage: under way"}},
		{"shared: attached for a publish", volume(staged(stageAccepted), published(podA, asked)), actual(device(state.DeviceAbsent, shared), stageIs(emptyDir())),
			[]string{"attach for stage", "stage: under way", "A: waits for stage"}},
		{"shared: not mounted unasked", volume(staged(stageAccepted)), actual(attached(shared), ext4(), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: nor checked", volume(staged(stageAccepted)), actual(attached(shared), ext4(needsCheck), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: nor opened", volume(staged(stageAccepted)), actual(attached(shared, madeLayer), layer(absent), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: a superblock that lives is bound", volume(staged(stageAccepted), published(podA, accepted)), actual(attached(shared), ext4(), stageIs(mounted(rw)), targetIs(podA, emptyDir())),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"shared: a broken one is not renewed unasked", volume(staged(stageAccepted), published(podA, accepted)), actual(attached(shared), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt))),
			[]string{"stage: stuck, Unavailable: only when somebody asks", "A: waits for stage"}},
		{"shared: nor taken away", volume(staged(stageAccepted)), actual(attached(shared), ext4(), stageIs(mounted(rw, corrupt))),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: but for who asks", volume(staged(stageAccepted), published(podA, accepted, asked)), actual(attached(shared), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt))),
			[]string{"unbind for A", "stage: waits for A", "A: under way"}},
		{"shared: the mode is not changed unasked", volume(staged(readOnly)), actual(attached(shared), ext4(), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: one mount too many goes", volume(staged(stageAccepted)), actual(attached(shared), ext4(), stageIs(over(mounted(rw), mounted(rw)))),
			[]string{"unmount for stage", "stage: under way"}},
		{"shared: it ends unasked", volume(unstaged()), actual(attached(shared), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way"}},
		{"shared: and is detached", volume(unstaged()), actual(attached(shared), stageIs(emptyDir())),
			[]string{"detach for stage", "stage: under way"}},
		{"shared: not formatted without proof that nobody else has it", volume(staged(stageAsked)), actual(attached(shared), blank()),
			[]string{"stage: stuck, FailedPrecondition: it is not formatted"}},
		{"shared: nor erased", volume(staged(stageAsked)), actual(attached(shared, marked), ext4()),
			[]string{"stage: stuck, FailedPrecondition: it is not formatted"}},
		{"shared: with that proof it is", volume(staged(stageAsked)), actual(attached(shared, exclusive), blank()),
			[]string{"begin-format for stage", "stage: under way"}},
		{"shared: but not unasked", volume(staged()), actual(attached(shared, exclusive), blank()),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},

		// Another device.
		{"identity: another is not attached", volume(staged(known("a"))), actual(device(state.DeviceAbsent, identity("b"))),
			[]string{"stage: stuck, FailedPrecondition: staged from the device a"}},
		{"identity: nor mounted", volume(staged(known("a"))), actual(attached(identity("b")), ext4()),
			[]string{"stage: stuck, FailedPrecondition: staged from the device a"}},
		{"identity: one that is not told now is not used", volume(staged(known("a"))), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: stuck, Unavailable: does not tell"}},
		{"identity: it may come to light when it is attached", volume(staged(known("a"))), actual(),
			[]string{"attach for stage", "stage: under way"}},
		{"identity: the same", volume(staged(known("a"))), actual(attached(identity("a")), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled"}},
		{"identity: what stands is taken down", volume(stageOf(asFilesystem, []how{known("a"), gone})), actual(attached(identity("b")), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way"}},
		{"identity: a disk that has gone is known by the number that it had", volume(stageOf(asFilesystem, []how{known("a"), gone})), actual(device(state.DeviceAbsent, numbered), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way"}},

		// Raw access.
		{"raw: not to a mounted file system", volume(stagedBlock()), actual(attached(), stageIs(mounted(rw))),
			[]string{"stage: stuck, FailedPrecondition: file system is mounted"}},
		{"raw: not to a marked device", volume(stagedBlock()), actual(attached(marked)),
			[]string{"stage: stuck, FailedPrecondition: interrupted"}},
		{"raw: reading a marked device is no harm", volume(stagedBlock(readOnly)), actual(attached(marked, readOnlyDevice)),
			[]string{"stage: settled"}},
		{"raw: what was accepted stays", volume(stagedBlock(stageAccepted)), actual(attached(marked)),
			[]string{"stage: settled"}},

		// The end of a stage.
		{"end: out of sight", volume(unstaged()), actual(attached(), stageIs(unseenNow())),
			[]string{"stage: stuck, Unavailable: timed out"}},
		{"end: a target that is no path holds nothing up", volume(unstaged(), unpublished(podA)), actual(attached(), stageIs(emptyDir()), targetIs(podA, noPath())),
			[]string{"detach for stage", "stage: under way", "A: stuck, InvalidArgument: a symbolic link"}},

		// Growth.
		{"growth: the contents cannot be read", volume(staged(), size(100)), actual(attached(), contents(state.Contents{Err: errors.New("read failed")}), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: stuck, Unavailable: read failed"}},
		{"growth: of what is being unstaged", volume(unstaged(), size(200)), actual(attached(), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way", "size: stuck, FailedPrecondition: not staged"}},
		{"growth: what was accepted stays", volume(staged(), size(100), sizeAccepted), actual(attached(), ext4(growable), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: settled"}},
		{"growth: the volume is larger than the limit", volume(staged(), size(50), limit(99)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: stuck, OutOfRange: never shrinks"}},
		{"growth: the volume will be larger than the limit", volume(staged(), size(50), limit(150)), actual(attached(sized(100, 200)), ext4(), stageIs(mounted(rw))),
			[]string{"grow-device for stage", "stage: under way", "size: stuck, OutOfRange: never shrinks"}},
		{"growth: rounded beyond the limit", volume(staged(), size(150), limit(200)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: stuck, OutOfRange: rounded up"}},
		{"growth: within the limit", volume(staged(), size(150), limit(4096)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"grow-device for size", "stage: settled", "size: under way"}},
		{"growth: there is enough, and no more is allowed", volume(staged(), size(50), limit(100)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: settled"}},
		{"growth: not before the volume is mounted", volume(staged()), actual(attached(), ext4(growable, growsMounted), stageIs(emptyDir())),
			[]string{"mount for stage", "stage: under way"}},

		// Targets.
		{"target: not while the stage goes", volume(unstaged(), published(podA)), actual(attached(), stageIs(emptyDir())),
			[]string{"detach for stage", "stage: under way", "A: stuck, FailedPrecondition: not staged"}},
		{"target: out of sight", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, unseenNow())),
			[]string{"stage: settled", "A: stuck, Unavailable: timed out"}},
		{"target: another volume of the same type", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw, on(formerDisk)))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: it is not this volume's"}},
		{"target: flags of its own", volume(staged(), published(podA, flagged("noexec"))), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw))),
			[]string{"set-attributes for A", "stage: settled", "A: under way"}},
		{"target: the node of another device", volume(stagedBlock(), publishedBlock(podA)), actual(attached(), targetIs(podA, node(formerDisk))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: it is not this volume's"}},
		{"target: the view that a target shows until its end stays", volume(stagedBlock(), unpublished(podA)), actual(attached(), view(), targetIs(podA, node(overlay))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"target: a view that is held stays", volume(stagedBlock()), actual(attached(), view(held)),
			[]string{"stage: settled"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			told := tellPlan(tt.want, reconciler.MakePlan(tt.want, tt.have))
			if !slices.EqualFunc(told, tt.plan, matches) {
				t.Errorf("plan\n\t%s\nwant\n\t%s", strings.Join(told, "\n\t"), strings.Join(tt.plan, "\n\t"))
			}
		})
	}
}

func mountSource(have *state.Actual) {
	have.Source = &state.Source{FSType: "nfs4", Source: "server:/export"}
}

// fromSource is a mount of it.
func fromSource(facts ...mountFact) state.Mountpoint {
	m := state.Mount{FSType: "nfs4", Source: "server:/export", Root: "/"}
	for _, fact := range facts {
		fact(&m)
	}
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}
}

func shared(d *state.Device)    { d.Shared = true }
func exclusive(d *state.Device) { d.Exclusive = true }

func known(identity string) how {
	return func(s *state.Stage, _ *state.Target) { s.Identity = identity }
}
func identity(i string) deviceFact { return func(d *state.Device) { d.Identity = i } }
func numbered(d *state.Device)     { d.Number = disk }

func unknownDevice(have *state.Actual) { have.Device, have.View = state.Device{}, state.Device{} }
func unknownView(have *state.Actual)   { have.View = state.Device{} }

// A record of which nothing was looked at is planned nothing for.
func TestPlanWithoutALook(t *testing.T) {
	want := volume(staged(), size(100), published(podA), unpublished(podB))
	plan := reconciler.MakePlan(want, state.Actual{})
	if len(plan.Steps) > 0 {
		t.Errorf("steps %v", plan.Steps)
	}
	for part, v := range plan.Verdicts {
		if v.Settled {
			t.Errorf("%s is settled", part)
		}
	}
}

func TestProblems(t *testing.T) {
	plan := reconciler.MakePlan(volume(staged(), published(podB), published(podA), size(200)),
		actual(attached(sized(200, 200)), ext4(growable), stageIs(mounted(rw)), targetIs(podA, foreign()), targetIs(podB, unseenNow())))
	var parts []string
	for part, v := range plan.Verdicts {
		if v.Problem == (reconciler.Problem{}) {
			continue
		}
		if v.Problem.Text == "" {
			t.Errorf("%s has a problem without words", part)
		}
		parts = append(parts, part.String())
	}
	slices.Sort(parts)
	if want := []string{"size", "target " + podA, "target " + podB}; !slices.Equal(parts, want) {
		t.Errorf("problems of %q, want %q", parts, want)
	}
}

func stageAccepted(s *state.Stage, _ *state.Target) { s.Accepted = true }
func stageAsked(s *state.Stage, _ *state.Target)    { s.Asked = true }
func sizeAccepted(v *state.Volume)                  { v.Size.Accepted = true }

func flagged(flags ...string) how {
	return func(_ *state.Stage, t *state.Target) { t.Capability.Flags = flags }
}

func on(n state.DeviceNumber) mountFact { return func(m *state.Mount) { m.Device = n } }
func part(root string) mountFact        { return func(m *state.Mount) { m.Root = root } }
