package node

import (
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/harness"
)

// mkfs dies with the plugin, and what it left half done is done again; a
// format that was completed never is.
func TestMkfsDiesWithThePluginAndIsDoneAgain(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]string{"exec": byExec, "grandchild": byGrandchild} {
		t.Run(name, func(t *testing.T) {
			p, w, v := startWithMkfs(t, then)
			staged := w.stageInto(v)
			killWithHelpers(t, p, syscall.SIGKILL)
			mustRefuse(t, <-staged, codes.Unavailable)

			w.open()
			p.Start(harness.Options{Env: w.env()})
			must(t, v.Stage(t.Context()))
			write(t, filepath.Join(v.Staging, "file"), "kept")
			w.mustHaveRun(2)
			p.Kill()
			p.Start(harness.Options{Env: w.env()})
			must(t, v.Stage(t.Context()))
			must(t, v.Unstage(t.Context()))
			must(t, v.Stage(t.Context()))
			mustRead(t, filepath.Join(v.Staging, "file"), "kept")
			w.mustHaveRun(2)
			v.End()
		})
	}
}

// What a plugin that was killed has left in kubelet's directory, of a directory that was to
// take another's place, goes at the start.
func TestSpareDirectoryIsSweptAtTheStart(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	spare := filepath.Join(p.KubeletDir, ".csi-node-spare-0123456789abcdef")
	makeDir(t, spare)
	p.Start(harness.Options{})
	mustBeGone(t, spare)
}

// killWithHelpers ends the plugin by a signal while it has helper processes,
// which must end with it.
func killWithHelpers(t *testing.T, p *harness.Plugin, signal syscall.Signal) {
	t.Helper()
	helpers := p.Helpers(t)
	if len(helpers) == 0 {
		t.Error("no helper process is running")
	}
	p.Signal(t, signal)
	p.Wait(t)
	for _, h := range helpers {
		if ended, err := h.AwaitEnd(); err != nil || !ended {
			t.Errorf("helper process %s lives on (%v)", h, err)
		}
	}
}

// At SIGTERM calls under way are answered, the process ends with 0, and mounts stay.
func TestSIGTERMAnswersCallsAndKeepsMounts(t *testing.T) {
	t.Parallel()
	p, w, v := startWithMkfs(t, byGrandchild)
	running := create(t, p, "running", smallest("xfs"), mountAs("xfs", multiWriter))
	ctx, pod := t.Context(), running.Target("pod")
	must(t, running.Up(ctx, pod))
	write(t, filepath.Join(pod, "file"), "kept")

	staged := w.stageInto(v)
	killWithHelpers(t, p, syscall.SIGTERM)
	if state := p.Wait(t); state.ExitCode() != 0 {
		t.Errorf("after SIGTERM: %s", state)
	}
	mustRefuse(t, <-staged, codes.Unavailable, v.ID, "stopping")
	mustRead(t, filepath.Join(pod, "file"), "kept")

	w.open()
	p.Start(harness.Options{Env: w.env()})
	must(t, v.Stage(ctx))
	must(t, v.Unstage(ctx))
	must(t, v.Delete(ctx))
	running.End(pod)
}

// After a crash the plugin takes over what runs and does nothing to it.
func TestRestartTakesOverAndChangesNothing(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	var volumes []*volume
	var pods []string
	for _, v := range []*volume{
		create(t, p, "ext4", smallest("ext4"), mountAs("ext4", multiWriter)),
		create(t, p, "xfs", smallest("xfs"), mountAs("xfs", multiWriter)),
		create(t, p, "block", 32*mib, blockAs(multiWriter)),
	} {
		pod1, pod2 := v.Target("pod-1"), v.Target("pod-2")
		must(t, v.Up(ctx, pod1))
		must(t, v.PublishReadOnly(ctx, pod2))
		volumes, pods = append(volumes, v), append(pods, pod1, pod2)
	}
	write(t, filepath.Join(pods[0], "file"), "kept")
	before := snapshot(t, p)
	p.Kill()
	mustRead(t, filepath.Join(pods[1], "file"), "kept")

	address := harness.FreeAddress(t)
	p.Start(harness.Options{Flags: []string{"--http-endpoint", address}})
	p.AwaitRest()
	for _, v := range p.Status().Volumes {
		if v.Worst() != report.Settled {
			t.Errorf("not settled: %+v", v)
		}
	}
	for i, v := range volumes {
		must(t, v.Up(ctx, pods[2*i]))
		must(t, v.PublishReadOnly(ctx, pods[2*i+1]))
	}
	if n := harness.Metrics(t, address)["csi_node_step_duration_seconds_count"]; n != 0 {
		t.Errorf("%v steps were run for volumes that are as asked", n)
	}
	mustEqual(t, before, snapshot(t, p))
	for i, v := range volumes {
		for _, pod := range pods[2*i : 2*i+2] {
			must(t, v.Unpublish(ctx, pod))
			mustBeGone(t, pod)
		}
		must(t, v.Unstage(ctx))
		must(t, v.Delete(ctx))
	}
	mustHaveNoRecord(t, p)
}

// Wherever the plugin is killed, the next one brings things to their end: every
// call that was cut off succeeds when it is made again, and nothing is lost or left.
// The steps of every volume's life have the suite of pkg/driver/drivertest, these do not.
func TestKillAtEachStep(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		story func(*testing.T, *harness.Plugin) story
		steps []reconciler.Action
	}{
		{driftStory, []reconciler.Action{reconciler.SetAttributes}},
		{viewStory, []reconciler.Action{reconciler.AttachView, reconciler.DetachView}},
		{repairStory, []reconciler.Action{reconciler.Check}},
		{eraseStory, []reconciler.Action{reconciler.Erase, reconciler.Format}},
	} {
		for _, step := range row.steps {
			for _, moment := range []reconciler.Moment{reconciler.Before, reconciler.After} {
				fault := string(moment) + ":" + string(step)
				t.Run(fault, func(t *testing.T) {
					t.Parallel()
					p := harness.Start(t, harness.Options{})
					s := row.story(t, p)
					faulty := harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=" + fault + "=die"}}
					if s.down { // the next one may die before it is ready
						p.Process = p.Launch(faulty)
					} else {
						p.Restart(faulty)
					}
					if !tell(t, p, s) {
						t.Errorf("the plugin never came to %s", fault)
					}
					s.v.End()
				})
			}
		}
	}
}

// tell goes through a story. When the plugin dies it is started again, without
// faults, and the part that was cut off is repeated. It reports whether that happened.
func tell(t *testing.T, p *harness.Plugin, s story) (died bool) {
	t.Helper()
	for i, part := range s.parts {
		ctx, cancel := p.WhileAlive(t.Context())
		err := part(ctx)
		if err != nil && !died && (status.Code(err) == codes.Unavailable || ctx.Err() != nil) {
			died = true
			if state := p.Wait(t); state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the plugin ended by itself: %s", state)
			}
			p.Start(harness.Options{})
			err = part(t.Context())
		}
		cancel()
		if err != nil {
			t.Fatalf("part %d of the story: %v", i, err)
		}
	}
	return died
}
