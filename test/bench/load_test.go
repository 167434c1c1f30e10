package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// node is a driver at work on a kubelet directory of its own.
type node struct {
	*harness.Plugin
	name string
	t    *testing.T
}

// start starts the plugin or a peer. Its state directory is a tmpfs, as /run is.
func start(t *testing.T, name string, env ...string) *node {
	t.Helper()
	n := &node{Plugin: harness.New(t), name: name, t: t}
	n.Interrupted = wasInterrupted
	require.NoError(t, os.MkdirAll(n.StateDir, 0o750))
	require.NoError(t, unix.Mount("state", n.StateDir, "tmpfs", 0, "mode=0700"))
	t.Cleanup(func() {
		n.Terminate()
		if err := unix.Unmount(n.StateDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	n.start(env...)
	return n
}

func (n *node) start(env ...string) {
	n.t.Helper()
	options := harness.Options{Env: env}
	if n.name == oursName {
		options.Flags = []string{"--v", "2"} // the default
	} else {
		own, err := os.Executable()
		require.NoError(n.t, err)
		n.Driver = &harness.Driver{Path: own, Env: []string{peerVariable + "=" + n.name}}
	}
	n.Start(options)
}

// volume names a volume of an ext4 or xfs.
func (n *node) volume(name, fsType string) *harness.Volume {
	return harness.NewVolume(n.t, n.Plugin, name, harness.Shared(fsType))
}

// sizes are those of the smallest volumes that each file system has.
var sizes = map[string]int64{"ext4": 10 << 20, "xfs": 300 << 20}

// create makes a volume that is promised a tenth of its size: thousands fit on a small disk.
func create(ctx context.Context, v *harness.Volume) error {
	_, err := v.Controller.CreateVolume(ctx, v.CreateRequest(sizes[v.Capability.GetMount().GetFsType()], map[string]string{"provisioning": "thin", "overcommit": "10"}))
	return err
}

// samples are the times that calls took, by the name of the call.
type samples struct {
	mu    sync.Mutex
	times map[string][]time.Duration
}

func newSamples() *samples { return &samples{times: map[string][]time.Duration{}} }

// time makes a call and notes how long it took, unless name is "".
func (s *samples) time(name string, call func() error) error {
	start := time.Now()
	if err := call(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if took := time.Since(start); name != "" {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.times[name] = append(s.times[name], took)
	}
	return nil
}

// step is a call of a life, by the name that it is told by; "" if it is not timed.
type step struct {
	name string
	call func(context.Context) error
}

func (s *samples) run(ctx context.Context, steps []step) error {
	for _, step := range steps {
		if wasInterrupted() {
			return errors.New("interrupted")
		}
		if err := s.time(step.name, func() error { return step.call(ctx) }); err != nil {
			return err
		}
	}
	return nil
}

// pod returns the calls of kubelet for a pod, from the stage of a formatted volume to its end.
func pod(v *harness.Volume, target string) []step {
	return []step{
		{"stage", v.Stage},
		{"publish", func(ctx context.Context) error { return v.Publish(ctx, target) }},
		{"unpublish", func(ctx context.Context) error { return v.Unpublish(ctx, target) }},
		{"unstage", v.Unstage},
	}
}

// life returns the calls of a volume's whole life.
func life(v *harness.Volume, target string) []step {
	steps := pod(v, target)
	steps[0].name = "stage, blank " + v.Capability.GetMount().GetFsType()
	steps = append([]step{{"create", func(ctx context.Context) error { return create(ctx, v) }}}, steps...)
	return append(steps, step{"delete", v.Delete})
}

// questions returns the calls for a volume that is staged and published.
func questions(v *harness.Volume, target, readOnly string) []step {
	return []step{
		{"publish again", func(ctx context.Context) error { return v.Publish(ctx, target) }},
		{"stats", func(ctx context.Context) error { return v.Stats(ctx, target) }},
		{"publish, read-only", func(ctx context.Context) error { return v.PublishReadOnly(ctx, readOnly) }},
		{"", func(ctx context.Context) error { return v.Unpublish(ctx, readOnly) }},
	}
}

// podWithQuestions is pod, with questions in its middle.
func podWithQuestions(v *harness.Volume, target string) []step {
	steps := pod(v, target)
	steps[0].name = "stage, formatted ext4"
	all := append([]step{}, steps[:2]...)
	all = append(all, questions(v, target, v.Target("reader"))...)
	return append(all, steps[2:]...)
}

// formatted returns a volume that was formatted, and is staged nowhere.
func (n *node) formatted(name, fsType string) *harness.Volume {
	n.t.Helper()
	v := n.volume(name, fsType)
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { return create(ctx, v) }, v.Stage, v.Unstage,
	} {
		if err := call(n.t.Context()); err != nil {
			n.t.Fatalf("%s: %v", n.name, err)
		}
	}
	return v
}

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
}

// measureCalls times each call by one caller.
func measureCalls(t *testing.T, r *report) {
	names := []string{floorName, oursName, usualName}
	type bench struct {
		*node
		ext4, xfs *harness.Volume
	}
	var benches []bench
	for _, name := range names {
		n := start(t, name)
		benches = append(benches, bench{n, n.formatted("ext4", "ext4"), n.formatted("xfs", "xfs")})
	}
	for round := range r.rounds {
		for _, b := range benches {
			progress("round %d of %d: %s", round+1, r.rounds, b.name)
			s := newSamples()
			for i := range r.cycles {
				blank := b.volume(fmt.Sprintf("life-%d-%d", round, i), "ext4")
				b.must(s.run(t.Context(), podWithQuestions(b.ext4, b.ext4.Target("pod"))))
				b.must(s.run(t.Context(), life(blank, blank.Target("pod"))))
				if i%3 == 0 { // mkfs.xfs takes long
					xfs := pod(b.xfs, b.xfs.Target("pod"))
					xfs[0].name, xfs[1].name, xfs[2].name, xfs[3].name = "stage, formatted xfs", "", "", "unstage xfs"
					b.must(s.run(t.Context(), xfs))
				}
			}
			r.calls.add(b.name, s)
		}
	}
	for _, b := range benches {
		b.must(b.ext4.Delete(t.Context()))
		b.must(b.xfs.Delete(t.Context()))
	}
}

// cost is what a number of cycles took of time and of the processor.
type cost struct {
	cycles       int
	time         time.Duration
	own, helpers time.Duration
}

// measureCycles counts the cycles of many callers, of formatted volumes and of whole lives.
func measureCycles(t *testing.T, r *report) {
	var nodes []*node
	for _, name := range []string{floorName, bareName, oursName, usualName} {
		nodes = append(nodes, start(t, name))
	}
	for _, callers := range r.callers {
		for round := range r.rounds {
			for _, n := range nodes {
				progress("%d callers, round %d of %d: %s", callers, round+1, r.rounds, n.name)
				each := max(1, r.busyCycles/callers)
				r.busy.add(n.name, "formatted", callers, n.busy(callers, each, func(caller int) func(int) []step {
					v := n.formatted(fmt.Sprint("caller-", caller), "ext4")
					target := v.Target("pod")
					return func(int) []step { return pod(v, target) }
				}, func(ctx context.Context, caller int) error {
					return n.volume(fmt.Sprint("caller-", caller), "ext4").Delete(ctx)
				}))
				r.busy.add(n.name, "whole", callers, n.busy(callers, each, func(caller int) func(int) []step {
					return func(i int) []step {
						v := n.volume(fmt.Sprintf("life-%d-%d", caller, i), "ext4")
						return life(v, v.Target("pod"))
					}
				}, nil))
			}
		}
	}
}

// busy lets so many callers make so many cycles each, and returns what that cost.
func (n *node) busy(callers, each int, prepare func(caller int) func(i int) []step, after func(context.Context, int) error) cost {
	n.t.Helper()
	var cycles []func(int) []step
	for caller := range callers {
		cycles = append(cycles, prepare(caller))
	}
	ownBefore, helpersBefore := n.cpu()
	s, group, start := newSamples(), errgroup.Group{}, time.Now()
	for _, cycle := range cycles {
		group.Go(func() error {
			for i := range each {
				if err := s.run(n.t.Context(), cycle(i)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	n.must(group.Wait())
	took := time.Since(start)
	own, helpers := n.cpu()
	if after != nil {
		for caller := range callers {
			n.must(after(n.t.Context(), caller))
		}
	}
	return cost{callers * each, took, own - ownBefore, helpers - helpersBefore}
}

// cpu is the processor time so far of the driver, and of the programs that it has
// started and waited for.
func (n *node) cpu() (own, helpers time.Duration) {
	n.t.Helper()
	ticks := n.ticks()
	return ticks[0] + ticks[1], ticks[2] + ticks[3]
}

// ticks are utime, stime, cutime and cstime of the driver (proc(5)).
func (n *node) ticks() (ticks [4]time.Duration) {
	n.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.PID()))
	require.NoError(n.t, err)
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	for i := range ticks {
		count, err := strconv.Atoi(fields[11+i])
		require.NoError(n.t, err)
		ticks[i] = time.Duration(count) * time.Second / 100
	}
	return ticks
}

// rss is the resident memory of the driver in bytes.
func (n *node) rss() int64 {
	n.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", n.PID()))
	require.NoError(n.t, err)
	pages, err := strconv.ParseInt(strings.Fields(string(raw))[1], 10, 64)
	require.NoError(n.t, err)
	return pages * int64(os.Getpagesize())
}

// helpers are all programs that one of the drivers may start.
var helpers = []string{"mkfs.ext4", "mke2fs", "mkfs.xfs", "e2fsck", "fsck", "blkid", "mount", "umount", "losetup", "resize2fs", "dumpe2fs"}

// countPrograms counts the programs that a cycle starts. It puts a script in the place
// of each, which notes that it runs, and so times nothing.
func countPrograms(t *testing.T, r *report) {
	for _, name := range []string{oursName, usualName} {
		dir := t.TempDir()
		log := filepath.Join(dir, "log")
		for _, helper := range helpers {
			script := fmt.Sprintf("#!/bin/sh\necho %s >>%s\nPATH=%s:/usr/sbin:/sbin\nexec %s \"$@\"\n", helper, log, os.Getenv("PATH"), helper)
			machine.WriteProgram(t, filepath.Join(dir, helper), script)
		}
		n := start(t, name, "PATH="+dir+":"+os.Getenv("PATH")+":/usr/sbin:/sbin")
		count := func(steps []step) string {
			require.NoError(t, os.WriteFile(log, nil, 0o600))
			n.must(newSamples().run(t.Context(), steps))
			raw, err := os.ReadFile(log)
			require.NoError(t, err)
			return strings.Join(strings.Fields(string(raw)), ", ")
		}
		v := n.formatted("formatted", "ext4")
		r.programs = append(r.programs, programs{name, "of a formatted volume", count(pod(v, v.Target("pod")))})
		n.must(v.Delete(t.Context()))
		v = n.volume("blank", "ext4")
		r.programs = append(r.programs, programs{name, "of a new volume", count(life(v, v.Target("pod")))})
	}
}
