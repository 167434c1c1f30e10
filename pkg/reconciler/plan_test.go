package reconciler_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// TestPlan shows by example what is planned and said: the steps in order, then
// how each part stands, with words from its problem.
func TestPlan(t *testing.T) {
	for _, tt := range []struct {
		name string
		want *state.Volume
		have state.Actual
		plan []string
	}{
		// The life of a mounted volume.
		{"nothing asked", volume(), actual(), nil},
		{"staged: the device comes first", volume(staged(), published(podA)), actual(),
			[]string{"attach for stage", "stage: under way", "A: waits for stage"}},
		{"a blank device gets the formatting mark", volume(staged()), actual(attached(), blank()),
			[]string{"begin-format for stage", "stage: under way"}},
		{"a marked blank device is formatted", volume(staged()), actual(attached(marked), blank()),
			[]string{"format for stage", "stage: under way"}},
		{"an interrupted format is erased, whatever it looks like", volume(staged()), actual(attached(marked), ext4()),
			[]string{"erase for stage", "stage: under way"}},
		{"a file system is mounted", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(emptyDir())),
			[]string{"mount for stage", "stage: under way", "A: waits for stage"}},
		{"one that asks for it is checked first", volume(staged()), actual(attached(), ext4(needsCheck)),
			[]string{"check for stage", "stage: under way"}},
		{"the stage stands", volume(staged()), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled"}},
		{"targets are bound, each on its own", volume(staged(), published(podA), published(podB)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, emptyDir())),
			[]string{"bind for A", "bind for B", "stage: settled", "A: under way", "B: under way"}},
		{"all stands", volume(staged(), published(podA), published(podB, readOnly)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw)), targetIs(podB, mounted(ro))),
			[]string{"stage: settled", "A: settled", "B: settled"}},
		{"an end unbinds", volume(staged(), unpublished(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"then removes the directory", volume(staged(), unpublished(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, emptyDir())),
			[]string{"remove-target for A", "stage: settled", "A: under way"}},
		{"then is over", volume(staged(), unpublished(podA)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "A: settled"}},
		{"a stage waits for its targets to end", volume(unstaged(), unpublished(podA)), actual(attached(), stageIs(mounted(rw)), targetIs(podA, mounted(rw))),
			[]string{"unbind for A", "stage: waits for A", "A: under way"}},
		{"then is unmounted", volume(unstaged()), actual(attached(held), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way"}},
		{"then detached", volume(unstaged()), actual(attached(), stageIs(emptyDir())),
			[]string{"detach for stage", "stage: under way"}},
		{"but copies in other namespaces are taken away first", volume(unstaged()), actual(attached(held), stageIs(emptyDir())),
			[]string{"release for stage", "stage: under way"}},
		{"unless it is held", volume(unstaged()), actual(attached(held), stageIs(fullDir())),
			[]string{"stage: stuck, Unavailable: still held"}},
		{"or on its way out", volume(unstaged()), actual(device(state.DeviceDetaching), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: still held"}},
		{"then is over", volume(unstaged()), actual(stageIs(emptyDir())),
			[]string{"stage: settled"}},
		{"a device on its way out is reclaimed", volume(staged()), actual(device(state.DeviceDetaching)),
			[]string{"attach for stage", "stage: under way"}},

		{"what is in the way of a stage is told before a device is attached", volume(staged()), actual(stageIs(fullDir())),
			[]string{"stage: stuck, FailedPrecondition: holds files"}},

		// Devices that are not attached.
		{"an unknown volume", volume(staged()), actual(device(state.DeviceAbsent, missing)),
			[]string{"stage: stuck, NotFound: no such volume"}},
		{"facts that cannot be read", volume(staged()), actual(attached(unread), blank()),
			[]string{"stage: stuck, Unavailable: the pool is away"}},
		{"facts that cannot be read, and a type left open", volume(staged(as(""))), actual(device(state.DeviceAbsent, unread)),
			[]string{"stage: stuck, Unavailable: the pool is away"}},
		{"facts that cannot be read, of a volume that ends", volume(unstaged()), actual(attached(unread), stageIs(emptyDir())),
			[]string{"detach for stage", "stage: under way"}},
		{"a backing that something else uses", volume(staged()), actual(device(state.DeviceForeign, heldBy("/dev/loop9"))),
			[]string{"stage: stuck, FailedPrecondition: used by /dev/loop9"}},
		{"a truncated backing", volume(staged()), actual(device(state.DeviceAbsent, sized(50, 100))),
			[]string{"stage: stuck, FailedPrecondition: truncated"}},
		{"a device on its way out that lacks a growth", volume(staged()), actual(device(state.DeviceDetaching, sized(50, 100))),
			[]string{"attach for stage", "stage: under way"}},

		// Contents that are refused.
		{"another file system", volume(staged()), actual(attached(), xfs()),
			[]string{"stage: stuck, FailedPrecondition: type xfs, and ext4 was asked for"}},
		{"something else", volume(staged()), actual(attached(), contents(state.Contents{Kind: state.ContentsOther, Found: "LUKS header at byte 0"})),
			[]string{"stage: stuck, FailedPrecondition: found LUKS header at byte 0"}},
		{"blank after a format", volume(staged()), actual(attached(formattedBefore), blank()),
			[]string{"stage: stuck, FailedPrecondition: its data is lost"}},
		{"blank, and published raw before", volume(staged()), actual(attached(shownRaw), blank()),
			[]string{"stage: stuck, FailedPrecondition: csi-node volume clear-device"}},
		{"marked, and published raw", volume(staged()), actual(attached(shownRaw, marked), ext4()),
			[]string{"stage: stuck, FailedPrecondition: not formatted, whatever it holds"}},
		{"a file system that was made raw", volume(staged()), actual(attached(shownRaw), ext4(), stageIs(emptyDir())),
			[]string{"mount for stage", "stage: under way"}},
		{"more than a look reads is proven blank with the mark", volume(staged()), actual(attached(), unproven()),
			[]string{"begin-format for stage", "stage: under way"}},
		{"and is formatted then", volume(staged()), actual(attached(marked), unproven()),
			[]string{"format for stage", "stage: under way"}},
		{"too small for the file system", volume(staged()), actual(attached(sized(100, 100)), blank(), smallest(101)),
			[]string{"stage: stuck, FailedPrecondition: has 100 bytes, and a file system of type ext4 needs at least 101"}},
		{"marked, and too small for the file system", volume(staged()), actual(attached(marked, sized(100, 100)), blank(), smallest(101)),
			[]string{"stage: stuck, FailedPrecondition: needs at least 101"}},
		{"small, and with a file system", volume(staged()), actual(attached(sized(100, 100)), ext4(), smallest(101), stageIs(emptyDir())),
			[]string{"mount for stage", "stage: under way"}},
		{"other data than it was staged with", volume(staged(its("a"))), actual(attached(), ext4(uuid("b"))),
			[]string{"stage: stuck, FailedPrecondition: holds the file system b, and the volume was staged with a"}},
		{"other data beneath what is mounted", volume(staged(its("a")), published(podA), unpublished(podB)), actual(attached(), ext4(uuid("b"), growable, growsMounted), stageIs(mounted(ro)), targetIs(podA, mounted(rw)), targetIs(podB, mounted(rw))),
			[]string{"unbind for B", "stage: stuck, FailedPrecondition: swapped", "A: waits for stage", "B: under way"}},
		{"the data that it was staged with", volume(staged(its("a"))), actual(attached(), ext4(uuid("a"), needsCheck)),
			[]string{"check for stage", "stage: under way"}},
		{"blank after it was staged", volume(staged(its("a"))), actual(attached(), blank()),
			[]string{"stage: stuck, FailedPrecondition: staged with the file system a, and is blank"}},
		{"marked after it was staged", volume(staged(its("a"))), actual(attached(marked), ext4(uuid("a"))),
			[]string{"stage: stuck, FailedPrecondition: not formatted again"}},
		{"an end takes any data", volume(stageOf(asFilesystem, []how{gone, its("a")})), actual(attached(), ext4(uuid("b")), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way"}},
		{"unreadable now", volume(staged()), actual(attached(), contents(state.Contents{Err: errors.New("read failed")})),
			[]string{"stage: stuck, Unavailable: read failed"}},
		{"blank but held", volume(staged()), actual(attached(held), blank()),
			[]string{"stage: stuck, Unavailable: before formatting"}},
		{"blank and shown raw somewhere", volume(staged(), unpublished(podA)), actual(attached(), blank(), targetIs(podA, node(disk))),
			[]string{"unbind for A", "stage: stuck, Unavailable: before formatting", "A: under way"}},

		// A read-only stage.
		{"read-only: attached so", volume(staged(readOnly)), actual(attached(readOnlyDevice), ext4(needsCheck)),
			[]string{"mount for stage", "stage: under way"}},
		{"read-only: stands", volume(staged(readOnly), published(podA)), actual(attached(readOnlyDevice), ext4(), stageIs(mounted(ro, turned)), targetIs(podA, mounted(ro, turned))),
			[]string{"stage: settled", "A: settled"}},
		{"read-only: a blank device stays blank", volume(staged(readOnly)), actual(attached(readOnlyDevice), blank()),
			[]string{"stage: stuck, FailedPrecondition: blank and read-only"}},
		{"read-only: an interrupted format is not finished", volume(staged(readOnly)), actual(attached(readOnlyDevice, marked), blank()),
			[]string{"stage: stuck, FailedPrecondition: interrupted"}},
		{"read-only: an idle writable device is attached anew", volume(staged(readOnly)), actual(attached(), ext4()),
			[]string{"detach for stage", "stage: under way"}},
		{"read-only: one in use is not", volume(staged(readOnly)), actual(attached(held), ext4()),
			[]string{"stage: stuck, FailedPrecondition: in use"}},

		// Growth.
		{"growth: the device first", volume(staged(), size(200)), actual(attached(), ext4(growsMounted), stageIs(mounted(rw))),
			[]string{"grow-device for size", "stage: settled", "size: under way"}},
		{"growth: then the file system, mounted", volume(staged(as("xfs")), size(200)), actual(attached(sized(200, 200)), xfs(growable, growsMounted), stageIs(mounted(rw, of("xfs")))),
			[]string{"grow-filesystem for size", "stage: settled", "size: under way"}},
		{"growth: all is grown", volume(staged(), size(200)), actual(attached(sized(200, 200)), ext4(growsMounted), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: settled"}},
		{"growth: smaller than it is", volume(staged(), size(80)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: settled"}},
		{"growth: not mounted for want of a capability", volume(staged(), size(200)), actual(attached(sized(200, 200)), ext4(growable, growsUnmounted), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: stuck, FailedPrecondition: CAP_SYS_RESOURCE"}},
		{"growth: then at the next stage", volume(staged()), actual(attached(sized(200, 200)), ext4(growable, growsUnmounted), stageIs(emptyDir())),
			[]string{"grow-filesystem for stage", "stage: under way"}},
		{"growth: unasked, before targets are bound", volume(staged(), published(podA)), actual(attached(), ext4(growable, growsMounted), stageIs(mounted(rw))),
			[]string{"grow-filesystem for size", "bind for A", "stage: settled", "A: under way"}},
		{"growth: interrupted before it reached the device", volume(staged()), actual(attached(sized(50, 100)), ext4(), stageIs(mounted(rw))),
			[]string{"grow-device for stage", "stage: under way"}},
		{"growth: raw block is the device alone", volume(stagedBlock(), size(200)), actual(attached(sized(200, 200))),
			[]string{"stage: settled", "size: settled"}},
		{"growth: a view follows its device", volume(stagedBlock(), size(200), publishedBlock(podA, readOnly)), actual(attached(sized(200, 200)), view(sized(100, 0)), targetIs(podA, node(overlay))),
			[]string{"attach-view for size", "stage: settled", "size: under way", "A: settled"}},
		{"growth: a view, unasked", volume(stagedBlock(), publishedBlock(podA, readOnly)), actual(attached(sized(200, 200)), view(sized(100, 0)), targetIs(podA, node(overlay))),
			[]string{"attach-view for size", "stage: settled", "A: settled"}},
		{"growth: a view has followed", volume(stagedBlock(), size(200), publishedBlock(podA, readOnly)), actual(attached(sized(200, 200)), view(sized(200, 0)), targetIs(podA, node(overlay))),
			[]string{"stage: settled", "size: settled", "A: settled"}},
		{"growth: waits for the stage", volume(staged(), size(200)), actual(),
			[]string{"attach for stage", "stage: under way", "size: waits for stage"}},
		{"growth: of a read-only stage", volume(staged(readOnly), size(100)), actual(attached(readOnlyDevice), ext4(growable, growsMounted), stageIs(mounted(ro, turned))),
			[]string{"stage: settled", "size: stuck, FailedPrecondition: mounted read-only"}},

		// What stands at the staging path.
		{"foreign at the staging path", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(foreign())),
			[]string{"stage: stuck, FailedPrecondition: tmpfs", "A: waits for stage"}},
		{"files at the staging path", volume(staged()), actual(attached(), ext4(), stageIs(fullDir())),
			[]string{"stage: stuck, FailedPrecondition: holds files"}},
		{"mounted, and unreadable now", volume(staged(its("a"))), actual(attached(), contents(state.Contents{Err: errors.New("read failed"), UUID: "b"}), stageIs(mounted(rw))),
			[]string{"stage: settled"}},
		{"mounted twice", volume(staged()), actual(attached(), ext4(), stageIs(over(mounted(rw), mounted(rw)))),
			[]string{"unmount for stage", "stage: under way"}},
		{"attributes of the stage went astray", volume(staged()), actual(attached(), ext4(), stageIs(mounted(ro))),
			[]string{"set-attributes for stage", "stage: under way"}},
		{"the file system turned read-only", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw, turned)), targetIs(podA, mounted(rw, turned))),
			[]string{"stage: stuck, FailedPrecondition: turned read-only", "A: waits for stage"}},
		{"a broken stage is mounted anew", volume(staged()), actual(attached(), ext4(), stageIs(mounted(rw, corrupt))),
			[]string{"unmount for stage", "stage: under way"}},
		{"broken: targets go before it", volume(staged(), published(podA, accepted), published(podB)), actual(attached(), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt)), targetIs(podB, emptyDir())),
			[]string{"unbind for A", "stage: waits for A", "A: under way", "B: waits for stage"}},
		{"broken: also of a stage that was lost", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(emptyDir()), targetIs(podA, mounted(rw, corrupt))),
			[]string{"unbind for A", "stage: waits for A", "A: under way"}},
		{"broken: an end goes on", volume(staged(), unpublished(podA)), actual(attached(), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt))),
			[]string{"unbind for A", "stage: waits for A", "A: under way"}},
		{"broken: all or none", volume(staged(), published(podA), published(podB)), actual(attached(), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt)), targetIs(podB, over(foreign(), mounted(rw, corrupt)))),
			[]string{"stage: stuck, Unavailable: broken, and targets are covered", "A: waits for stage", "B: waits for stage"}},
		{"broken: not while it looks whole at a target", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw))),
			[]string{"stage: stuck, Unavailable: broken", "A: waits for stage"}},
		{"broken: not while somebody keeps it", volume(staged(), published(podA)), actual(attached(), ext4(), keptBy("pid 7 (app)"), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt))),
			[]string{"stage: stuck, Unavailable: kept by pid 7 (app)", "A: waits for stage"}},
		{"broken: not while its device fails", volume(staged(), published(podA)), actual(attached(), contents(state.Contents{Err: errors.New("read failed")}), stageIs(mounted(rw, corrupt)), targetIs(podA, mounted(rw, corrupt))),
			[]string{"stage: stuck, Unavailable: read failed", "A: waits for stage"}},
		{"broken: not while there is nothing to mount", volume(staged()), actual(attached(), blank(), stageIs(mounted(rw, corrupt))),
			[]string{"stage: stuck, FailedPrecondition: holds none now"}},
		{"broken: not while there is other data", volume(staged(its("a"))), actual(attached(), ext4(uuid("b")), stageIs(mounted(rw, corrupt))),
			[]string{"stage: stuck, FailedPrecondition: swapped"}},
		{"broken: over something else", volume(staged()), actual(attached(), ext4(), stageIs(over(mounted(rw, corrupt), foreign()))),
			[]string{"stage: stuck, FailedPrecondition: lies over tmpfs"}},
		{"foreign over a stage that is to go", volume(unstaged()), actual(attached(), stageIs(over(foreign(), mounted(rw)))),
			[]string{"stage: stuck, FailedPrecondition: mounted over the volume"}},
		{"a stage does not end while a target is out of sight", volume(unstaged(), unpublished(podA)), actual(attached(), stageIs(mounted(rw)), targetIs(podA, unseenNow())),
			[]string{"stage: waits for A", "A: stuck, Unavailable: timed out"}},

		// What stands at a target.
		{"foreign at one target is no matter to another", volume(staged(), published(podA), published(podB)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, foreign())),
			[]string{"bind for B", "stage: settled", "A: stuck, FailedPrecondition: tmpfs", "B: under way"}},
		{"files at a target", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, fullDir())),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: holds data"}},
		{"bound twice", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, over(mounted(rw), mounted(rw)))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"attributes of a target went astray", volume(staged(), published(podA, readOnly)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw))),
			[]string{"set-attributes for A", "stage: settled", "A: under way"}},
		{"a broken target is bound anew", volume(staged(), published(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw, corrupt))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"a removed target stays removed", volume(staged(), published(podA, accepted)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: is not there any more"}},
		{"unless it is asked for", volume(staged(), published(podA, accepted, asked)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"an unmounted one is bound again", volume(staged(), published(podA, accepted)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, emptyDir())),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"published without a stage", volume(published(podA)), actual(),
			[]string{"A: stuck, FailedPrecondition: not staged"}},

		// Ends that leave something.
		{"a withdrawn publish leaves the directory", volume(staged(), unpublished(podA, withdrawn)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, emptyDir())),
			[]string{"stage: settled", "A: settled"}},
		{"but not the mount", volume(staged(), unpublished(podA, withdrawn)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"a withdrawn publish at a path that is none", volume(unpublished(podA, withdrawn)), actual(targetIs(podA, noPath())),
			[]string{"A: settled"}},
		{"an end with files left", volume(unpublished(podA)), actual(targetIs(podA, fullDir())),
			[]string{"A: settled, FailedPrecondition: holds files"}},
		{"an end with a foreign mount left", volume(unpublished(podA)), actual(targetIs(podA, foreign())),
			[]string{"A: settled, FailedPrecondition: tmpfs"}},
		{"an end beneath a foreign mount", volume(staged(), unpublished(podA)), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, over(foreign(), mounted(rw)))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: mounted over the volume"}},

		// Raw block.
		{"block: attached is staged, the node is bound", volume(stagedBlock(), publishedBlock(podA)), actual(attached(shownRaw)),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"block: that it may be written is noted first", volume(stagedBlock(), publishedBlock(podA)), actual(attached()),
			[]string{"mark-raw for A", "stage: settled", "A: under way"}},
		{"block: stands", volume(stagedBlock(), publishedBlock(podA, accepted, seenAs(disk))), actual(attached(shownRaw), targetIs(podA, node(disk))),
			[]string{"stage: settled", "A: settled"}},
		{"block: was bound by a version that did not mark it", volume(stagedBlock(), publishedBlock(podA, accepted, seenAs(disk))), actual(attached(), targetIs(podA, node(disk))),
			[]string{"mark-raw for A", "stage: settled", "A: under way"}},
		{"block: read-only needs a view", volume(stagedBlock(), publishedBlock(podA, readOnly)), actual(attached()),
			[]string{"attach-view for A", "stage: settled", "A: under way"}},
		{"block: which is bound then", volume(stagedBlock(), publishedBlock(podA, readOnly)), actual(attached(), view(), targetIs(podA, emptyFile())),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"block: but not of a read-only device", volume(stagedBlock(readOnly), publishedBlock(podA, readOnly)), actual(attached(readOnlyDevice)),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"block: the writable node is no read-only target", volume(stagedBlock(), publishedBlock(podA, readOnly)), actual(attached(), view(), targetIs(podA, node(disk))),
			[]string{"unbind for A", "stage: settled", "A: under way"}},
		{"block: a view is shown", volume(stagedBlock(), publishedBlock(podA, readOnly)), actual(attached(), view(), targetIs(podA, node(overlay))),
			[]string{"stage: settled", "A: settled"}},
		{"block: an idle view goes before others come", volume(stagedBlock(), publishedBlock(podA)), actual(attached(shownRaw), view()),
			[]string{"detach-view for stage", "bind for A", "stage: settled", "A: under way"}},
		{"block: an end takes the view before the device", volume(unstagedBlock()), actual(attached(), view()),
			[]string{"detach-view for stage", "stage: under way"}},
		{"block: no view that is held", volume(unstagedBlock()), actual(attached(), view(held)),
			[]string{"stage: stuck, Unavailable: still held"}},
		{"block: a pod keeps the number", volume(stagedBlock(), publishedBlock(podA, accepted, seenAs(formerDisk))), actual(attached(), targetIs(podA, node(formerDisk))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: restart the pod"}},
		{"block: the end of a publish of a device that has gone", volume(unpublished(podA, seenAs(formerDisk))), actual(targetIs(podA, node(formerDisk))),
			[]string{"unbind for A", "A: under way"}},
		{"block: a directory at the target", volume(stagedBlock(), publishedBlock(podA)), actual(attached(), targetIs(podA, emptyDir())),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: a directory, not a file"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			told := tellPlan(tt.want, reconciler.MakePlan(tt.want, tt.have))
			if !slices.EqualFunc(told, tt.plan, matches) {
				t.Errorf("plan\n\t%s\nwant\n\t%s", strings.Join(told, "\n\t"), strings.Join(tt.plan, "\n\t"))
			}
		})
	}
}

// tellPlan puts a plan into lines.
func tellPlan(want *state.Volume, plan reconciler.Plan) []string {
	name := strings.NewReplacer("target "+podA, "A", "target "+podB, "B")
	var lines []string
	for _, step := range plan.Steps {
		lines = append(lines, name.Replace(step.String()))
	}
	parts := slices.DeleteFunc(want.Parts(), func(p state.Part) bool { return p.Kind == state.TargetKind })
	for _, path := range want.TargetPaths() {
		parts = append(parts, state.TargetPart(path))
	}
	for _, part := range parts {
		lines = append(lines, fmt.Sprintf("%s: %s", name.Replace(part.String()), name.Replace(tellVerdict(plan.Verdicts[part]))))
	}
	return lines
}

func tellVerdict(v reconciler.Verdict) string {
	told := "under way"
	switch {
	case v.Settled:
		told = "settled"
	case len(v.Needs) > 0:
		return fmt.Sprint("waits for ", strings.Trim(fmt.Sprint(v.Needs), "[]"))
	case v.Problem != reconciler.Problem{}:
		told = "stuck"
	}
	if v.Problem != (reconciler.Problem{}) {
		told += fmt.Sprintf(", %s: %s", v.Problem.Class, v.Problem.Text)
	}
	return told
}

// matches compares a line with the one wanted, whose text after a second colon
// need only be found in it.
func matches(line, want string) bool {
	if words := strings.SplitN(want, ": ", 3); len(words) == 3 {
		head := words[0] + ": " + words[1] + ": "
		return strings.HasPrefix(line, head) && strings.Contains(line[len(head):], words[2])
	}
	return line == want
}

// ---- Builders of desired states. ----

const (
	podA = "/pods/a/mount"
	podB = "/pods/b/mount"
)

type asker func(*state.Volume)

func volume(asked ...asker) *state.Volume {
	v := &state.Volume{ID: "vol", Targets: map[string]*state.Target{}}
	for _, ask := range asked {
		ask(v)
	}
	return v
}

// how is an option of a stage or a target; the other is nil.
type how func(s *state.Stage, t *state.Target)

func stageOf(c state.Capability, options []how) asker {
	return func(v *state.Volume) {
		v.Stage = &state.Stage{Path: "/staging", Capability: c}
		for _, option := range options {
			option(v.Stage, nil)
		}
	}
}

func targetOf(path string, c state.Capability, options []how) asker {
	return func(v *state.Volume) {
		t := &state.Target{Path: path, Capability: c}
		v.Targets[path] = t
		for _, option := range options {
			option(nil, t)
		}
	}
}

var (
	asFilesystem = state.Capability{Access: state.MountAccess, FSType: "ext4"}
	asBlock      = state.Capability{Access: state.BlockAccess}
)

func staged(options ...how) asker                      { return stageOf(asFilesystem, options) }
func stagedBlock(options ...how) asker                 { return stageOf(asBlock, options) }
func unstaged() asker                                  { return stageOf(asFilesystem, []how{gone}) }
func unstagedBlock() asker                             { return stageOf(asBlock, []how{gone}) }
func published(path string, options ...how) asker      { return targetOf(path, asFilesystem, options) }
func publishedBlock(path string, options ...how) asker { return targetOf(path, asBlock, options) }
func unpublished(path string, options ...how) asker {
	return targetOf(path, asFilesystem, append(options, gone))
}
func size(bytes int64) asker { return func(v *state.Volume) { v.Size = &state.Size{Bytes: bytes} } }

// limit is the most that the size before it may come to.
func limit(bytes int64) asker { return func(v *state.Volume) { v.Size.Limit = bytes } }

func readOnly(s *state.Stage, t *state.Target) {
	if s != nil {
		s.ReadOnly = true
	} else {
		t.ReadOnly = true
	}
}

func gone(s *state.Stage, t *state.Target) {
	if s != nil {
		s.Gone = true
	} else {
		t.Gone = true
	}
}

func withdrawn(_ *state.Stage, t *state.Target) { t.Withdrawn = true }
func accepted(_ *state.Stage, t *state.Target)  { t.Accepted = true }
func asked(_ *state.Stage, t *state.Target)     { t.Asked = true }
func as(fsType string) how {
	return func(s *state.Stage, _ *state.Target) { s.Capability.FSType = fsType }
}

// its is the UUID of the file system that a stage was first seen with.
func its(uuid string) how { return func(s *state.Stage, _ *state.Target) { s.UUID = uuid } }

func seenAs(n state.DeviceNumber) how {
	return func(_ *state.Stage, t *state.Target) { t.Device = n }
}

// ---- Builders of actual states. ----

var (
	disk       = state.DeviceNumber{Major: 7, Minor: 1}
	overlay    = state.DeviceNumber{Major: 7, Minor: 2}
	formerDisk = state.DeviceNumber{Major: 7, Minor: 9}
)

type fact func(*state.Actual)

// actual is what was looked at with nothing there, and then the facts.
func actual(facts ...fact) state.Actual {
	have := state.Actual{
		Device: state.Device{State: state.DeviceAbsent, Size: 100, Capacity: 100}, View: state.Device{State: state.DeviceAbsent},
		Stage: nothingThere(), Targets: map[string]state.Mountpoint{podA: nothingThere(), podB: nothingThere()},
	}
	for _, fact := range facts {
		fact(&have)
	}
	return have
}

func keptBy(names ...string) fact { return func(have *state.Actual) { have.Keepers = names } }

type deviceFact func(*state.Device)

func device(s state.DeviceState, facts ...deviceFact) fact {
	return func(have *state.Actual) {
		d := &have.Device
		*d = state.Device{State: s, Size: 100, Capacity: 100}
		if s == state.DeviceAttached || s == state.DeviceDetaching {
			d.Path, d.Number = "/dev/loop1", disk
		}
		for _, fact := range facts {
			fact(d)
		}
	}
}

func attached(facts ...deviceFact) fact { return device(state.DeviceAttached, facts...) }
func view(facts ...deviceFact) fact {
	return func(have *state.Actual) {
		have.View = state.Device{State: state.DeviceAttached, Path: "/dev/loop2", Number: overlay, ReadOnly: true}
		for _, fact := range facts {
			fact(&have.View)
		}
	}
}

func marked(d *state.Device)          { d.Formatting = true }
func shownRaw(d *state.Device)        { d.Raw = true }
func formattedBefore(d *state.Device) { d.Formatted = "ext4" }
func held(d *state.Device)            { d.Held = true }
func missing(d *state.Device)         { d.Missing = true }
func unread(d *state.Device)          { d.Err = errors.New("the pool is away") }
func readOnlyDevice(d *state.Device)  { d.ReadOnly = true }
func heldBy(holder string) deviceFact { return func(d *state.Device) { d.Holder = holder } }
func sized(bytes, capacity int64) deviceFact {
	return func(d *state.Device) { d.Size, d.Capacity = bytes, capacity }
}

type contentsFact func(*state.Contents)

func contents(c state.Contents, facts ...contentsFact) fact {
	for _, fact := range facts {
		fact(&c)
	}
	return func(have *state.Actual) { have.Contents = c }
}

func blank() fact { return contents(state.Contents{Kind: state.ContentsBlank}) }
func unproven() fact {
	return contents(state.Contents{Kind: state.ContentsUnproven})
}
func smallest(bytes int64) fact { return func(have *state.Actual) { have.Smallest = bytes } }
func ext4(facts ...contentsFact) fact {
	return contents(state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4"}, facts...)
}
func xfs(facts ...contentsFact) fact {
	return contents(state.Contents{Kind: state.ContentsFilesystem, FSType: "xfs"}, facts...)
}
func uuid(u string) contentsFact       { return func(c *state.Contents) { c.UUID = u } }
func needsCheck(c *state.Contents)     { c.NeedsCheck = true }
func growable(c *state.Contents)       { c.Growable = true }
func growsMounted(c *state.Contents)   { c.GrowsMounted = true }
func growsUnmounted(c *state.Contents) { c.GrowsUnmounted = true }

func stageIs(m state.Mountpoint) fact { return func(have *state.Actual) { have.Stage = m } }
func targetIs(path string, m state.Mountpoint) fact {
	return func(have *state.Actual) { have.Targets[path] = m }
}

func nothingThere() state.Mountpoint { return state.Mountpoint{File: state.NoFile} }
func emptyDir() state.Mountpoint     { return state.Mountpoint{File: state.Directory, Empty: true} }
func fullDir() state.Mountpoint      { return state.Mountpoint{File: state.Directory} }
func emptyFile() state.Mountpoint    { return state.Mountpoint{File: state.RegularFile, Empty: true} }
func unseenNow() state.Mountpoint    { return state.Mountpoint{Err: errors.New("timed out")} }
func noPath() state.Mountpoint {
	return state.Mountpoint{Err: state.Errorf(state.InvalidArgument, "a symbolic link")}
}

type mountFact func(*state.Mount)

// mounted is the file system of the device.
func mounted(facts ...mountFact) state.Mountpoint {
	m := state.Mount{Device: disk, FSType: "ext4", Source: "/dev/loop1", Root: "/"}
	for _, fact := range facts {
		fact(&m)
	}
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}
}

func rw(m *state.Mount)          { m.Attributes &^= state.ReadOnly }
func ro(m *state.Mount)          { m.Attributes |= state.ReadOnly }
func turned(m *state.Mount)      { m.SuperReadOnly = true }
func corrupt(m *state.Mount)     { m.Corrupt = true }
func of(fsType string) mountFact { return func(m *state.Mount) { m.FSType = fsType } }

func foreign() state.Mountpoint {
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}}
}

func node(n state.DeviceNumber) state.Mountpoint {
	return state.Mountpoint{File: state.BlockDevice, Mounts: []state.Mount{{Device: n, Node: true, FSType: "devtmpfs", Source: "devtmpfs", Root: "/loop"}}}
}

// over stacks the mounts of one place on those of another.
func over(upper, lower state.Mountpoint) state.Mountpoint {
	upper.Mounts = append(upper.Mounts, lower.Mounts...)
	return upper
}
