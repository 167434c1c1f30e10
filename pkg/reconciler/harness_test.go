package reconciler

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// process is one life of the plugin over a kernel and a store.
type process struct {
	k    *fakeKernel
	r    *Reconciler
	end  context.CancelFunc
	done chan struct{} // closed when Run has returned
	dead bool          // guarded by k.mu: nothing that it does has an effect any more
}

// die ends the process as kill -9 does. The caller holds k.mu.
func (p *process) die() {
	p.dead = true
	p.end()
}

func (p *process) kernel() Kernel {
	return Kernel{
		Devices: fakeDevices{p}, Layers: []devices.Layer{fakeLayers{p}}, Views: fakeDevices{p},
		Filesystems: fakeFilesystems{p}, Mounts: fakeMounts{p, false}, Existing: fakeMounts{p, true}, Directories: fakeMounts{p, false},
		VolumeAt: func(device state.DeviceNumber) (volume string) {
			p.k.with(func() {
				for id, v := range p.k.volumes {
					if v.has(device) {
						volume = id
					}
				}
			})
			return volume
		},
		Bound: func(device state.DeviceNumber) (bound bool, _ error) {
			p.k.with(func() { bound = len(p.k.nodes(device)) > 0 })
			return bound, nil
		},
		Holders: func(_ context.Context, device state.DeviceNumber) (names []string) {
			p.k.with(func() {
				for _, v := range p.k.volumes {
					if v.has(device) && p.k.claimed(v) {
						names = []string{"pid 7 (holder)"}
					}
				}
			})
			return names
		},
	}
}

// harness is a node, a store and the process that works on them, in a bubble
// of virtual time.
type harness struct {
	t     testing.TB
	k     *fakeKernel
	store *fakeStore
	p     *process

	hook    func(ctx context.Context, volume string, step Step, moment Moment) error // of processes started after it was set
	metrics Metrics
	tracer  trace.Tracer

	detectOnly bool
	resync     time.Duration
	pods       Pods
	random     func() float64                // for jitter; nil for another one each time
	plant      func(*process, Kernel) Kernel // puts a fault of the plugin's into its kernel; nil for none
}

// bubble runs a test in virtual time with a process started. At its end the
// process is stopped and the node must have seen no breach of the safety rules.
func bubble(t *testing.T, test func(h *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &harness{t: t, k: newFakeKernel(), store: newFakeStore()}
		t.Cleanup(func() {
			h.k.mend()
			h.stop()
			for _, v := range h.k.violations {
				t.Error(v)
			}
			if t.Failed() {
				t.Logf("the story:\n%s", h.k.story())
			}
		})
		h.start()
		test(h)
	})
}

const gib = int64(1) << 30

// volume adds a blank volume of 1 GiB.
func (h *harness) volume(id string) *fakeVolume {
	v := &fakeVolume{capacity: gib, size: gib, fakeData: fakeData{contents: state.Contents{Kind: state.ContentsBlank}, beneath: state.Contents{Kind: state.ContentsBlank}}}
	h.k.with(func() { h.k.volumes[id] = v })
	return v
}

// formatted adds a volume that holds a file system.
func (h *harness) formatted(id, fsType string) *fakeVolume {
	v := h.volume(id)
	h.k.with(func() {
		v.formatted = fsType
		v.contents = state.Contents{Kind: state.ContentsFilesystem, FSType: fsType, Size: gib}
	})
	return v
}

func (h *harness) start() {
	h.store.begin()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	p := &process{k: h.k, end: cancel, done: make(chan struct{})}
	kernel := p.kernel()
	kernel.Pods = h.pods
	if h.plant != nil {
		kernel = h.plant(p, kernel)
	}
	p.r = New(Config{Store: processStore{h.store, p}, Kernel: kernel, Hook: h.hook, Metrics: h.metrics, Tracer: h.tracer, DetectOnly: h.detectOnly, Resync: h.resync})
	if h.random != nil {
		p.r.random = h.random
	}
	h.p = p
	go func() {
		defer close(p.done)
		p.r.Run(ctx)
	}()
}

// stop ends the process as SIGTERM does, and waits for its end.
func (h *harness) stop() {
	h.p.end()
	<-h.p.done
}

func (h *harness) restart() {
	h.stop()
	h.start()
}

// kill ends the process as kill -9 does; a step that hangs has no effect.
func (h *harness) kill() {
	h.k.with(h.p.die)
	<-h.p.done
}

// wake queues the volume and lets the worker finish: drift was noticed.
func (h *harness) wake(id string) {
	h.p.r.queue.Add(id)
	synctest.Wait()
}

// sleep lets virtual time pass, and all that is due in it be done.
func (h *harness) sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// request is one call of Ensure.
type request struct {
	id   string
	part state.Part
	edit func(*state.Volume) error
}

func (r request) String() string { return r.id + " " + r.part.String() }

func mountCapability() state.Capability {
	return state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"}
}

func blockCapability() state.Capability {
	return state.Capability{Access: state.BlockAccess, Mode: "SINGLE_NODE_MULTI_WRITER"}
}

func stage(id string, change ...func(*state.Stage)) request {
	return request{id, state.StagePart(), func(v *state.Volume) error {
		s := &state.Stage{Path: stagePath(id), Capability: mountCapability()}
		for _, c := range change {
			c(s)
		}
		return v.AskStage(s, time.Now())
	}}
}

func publish(id string, n int, change ...func(*state.Target)) request {
	return request{id, state.TargetPart(targetPath(id, n)), func(v *state.Volume) error {
		t := &state.Target{Path: targetPath(id, n), Capability: mountCapability()}
		for _, c := range change {
			c(t)
		}
		return v.AskPublish(t, stagePath(id), time.Now())
	}}
}

func unpublish(id string, n int) request {
	return request{id, state.TargetPart(targetPath(id, n)), func(v *state.Volume) error {
		return v.AskUnpublish(targetPath(id, n), time.Now())
	}}
}

func unstage(id string) request {
	return request{id, state.StagePart(), func(v *state.Volume) error {
		return v.AskUnstage(stagePath(id), time.Now())
	}}
}

// unmount is an unstage at a path other than the one at which the volume is staged.
func unmount(id, path string) request {
	return request{id, state.TargetPart(path), func(v *state.Volume) error {
		return v.AskUnmount(path, time.Now())
	}}
}

func resize(id string, bytes int64) request {
	return request{id, state.SizePart(), func(v *state.Volume) error { return v.AskSize(bytes, 0, time.Now()) }}
}

func stageBlock(s *state.Stage)    { s.Capability = blockCapability() }
func stageXFS(s *state.Stage)      { s.Capability.FSType = "xfs" }
func stageReadOnly(s *state.Stage) { s.ReadOnly = true }

func publishBlock(t *state.Target)    { t.Capability = blockCapability() }
func publishXFS(t *state.Target)      { t.Capability.FSType = "xfs" }
func publishReadOnly(t *state.Target) { t.ReadOnly = true }

// do makes a request as kubelet does, with two minutes for an answer.
func (h *harness) do(r request) error { return h.within(2*time.Minute, r) }

func (h *harness) within(d time.Duration, r request) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return h.p.r.Ensure(ctx, r.id, r.part, r.edit)
}

// begin makes a request in the background and returns when all is blocked.
func (h *harness) begin(r request) <-chan error {
	answer := make(chan error, 1)
	go func() { answer <- h.do(r) }()
	synctest.Wait()
	return answer
}

// ok makes requests that must succeed, one after the other.
func (h *harness) ok(requests ...request) {
	h.t.Helper()
	for _, r := range requests {
		if err := h.do(r); err != nil {
			h.t.Fatalf("%s: %v", r, err)
		}
		if lie := h.lie(r); lie != "" {
			h.t.Fatalf("%s: answered OK, and %s", r, lie)
		}
	}
}

// wantCalls checks how often the kernel was called so.
func (h *harness) wantCalls(times int, o op, key string) {
	h.t.Helper()
	if n := h.k.count(o, key); n != times {
		h.t.Errorf("%d calls of %s for %q, want %d", n, o, key, times)
	}
}

// noStepSince checks that the node was not changed since it had seen so many changes.
func (h *harness) noStepSince(changes int) {
	h.t.Helper()
	if n := h.k.changes() - changes; n != 0 {
		h.t.Errorf("%d steps were taken", n)
	}
}

// noRecord checks that the store knows nothing of a volume.
func (h *harness) noRecord(id string) {
	h.t.Helper()
	if v := h.store.Get(id); v != nil {
		h.t.Errorf("the record is %s", marshal(v))
	}
}

// atOnce checks that something takes no time.
func (h *harness) atOnce(do func()) {
	h.t.Helper()
	start := time.Now()
	do()
	if took := time.Since(start); took != 0 {
		h.t.Errorf("it took %s", took)
	}
}

// refuse checks that err has the class and names all the words.
func (h *harness) refuse(err error, class state.Class, words ...string) {
	h.t.Helper()
	require.Class(h.t, err, class, words...)
}

// got returns an answer that must be there already.
func (h *harness) got(answer <-chan error) error {
	h.t.Helper()
	synctest.Wait()
	select {
	case err := <-answer:
		return err
	default:
		h.t.Fatal("no answer yet")
		return nil
	}
}

// pending checks that there is no answer yet.
func (h *harness) pending(answer <-chan error) {
	h.t.Helper()
	synctest.Wait()
	select {
	case err := <-answer:
		h.t.Fatalf("answered already: %v", err)
	default:
	}
}

// lie says what is wrong with the node if the request was answered OK just now.
func (h *harness) lie(r request) (lie string) {
	record := h.store.Get(r.id)
	h.k.with(func() { lie = h.k.lie(record, r) })
	return lie
}

func (k *fakeKernel) lie(record *state.Volume, r request) string {
	asked := &state.Volume{ID: r.id, Stage: &state.Stage{Path: stagePath(r.id)}}
	if record != nil {
		asked = record
	}
	v := k.volumes[r.id]
	intent := asked.Intent(r.part)
	switch r.part.Kind {
	case state.SizeKind:
		if intent == nil || v.device == nil || v.device.size < asked.Size.Bytes {
			return "the device is smaller"
		}
	case state.StageKind:
		if record == nil || intent == nil || asked.Stage.Provisional {
			if k.shown(r) {
				return "the volume is still attached or mounted"
			}
			return ""
		}
		if why := v.unready(); why != "" {
			return why
		}
		if owner := k.whosePods(r.id); owner != "" {
			return "pods of " + owner + " have its number"
		}
		if asked.Stage.Capability.Access == state.MountAccess && !v.source {
			return k.shows(asked.Stage.Path, v.top().number, asked.Stage.ReadOnly)
		}
	case state.TargetKind:
		if record == nil || intent == nil || intent.Gone {
			if len(k.mounts[r.part.Path]) > 0 || k.files[r.part.Path] != nil {
				return "the target is still there"
			}
			return ""
		}
		t := asked.Targets[r.part.Path]
		readOnly := t.Capability.Access == state.MountAccess && (t.ReadOnly || asked.Stage.ReadOnly)
		if v.source {
			if stack := k.mounts[t.Path]; len(stack) > 0 && stack[0].Source != k.sourceOf(r.id) {
				return "another source is mounted at " + t.Path
			}
			return k.shows(t.Path, state.DeviceNumber{}, readOnly)
		}
		if v.top() == nil {
			return "the device is not there"
		}
		if t.Capability.Access == state.BlockAccess && t.ReadOnly && !v.top().readOnly {
			if v.view == nil {
				return "there is no read-only view"
			}
			return k.shows(t.Path, v.view.number, false)
		}
		return k.shows(t.Path, v.top().number, readOnly)
	}
	return ""
}

// shows says what is wrong if not just the device is mounted at a path, once.
func (k *fakeKernel) shows(at string, number state.DeviceNumber, readOnly bool) string {
	stack := k.mounts[at]
	switch {
	case len(stack) != 1:
		return fmt.Sprintf("%d mounts are at %s", len(stack), at)
	case stack[0].Device != number:
		return fmt.Sprintf("device %s is mounted at %s, not %s", stack[0].Device, at, number)
	case readOnly && stack[0].Attributes&state.ReadOnly == 0:
		return at + " is writable"
	}
	return ""
}

// looking reports whether the worker of a volume is looking at it.
func (h *harness) looking(id string) bool {
	h.p.r.mu.Lock()
	defer h.p.r.mu.Unlock()
	v := h.p.r.volumes[id]
	return v != nil && !v.since.IsZero() && v.running.Action == Look
}

// atRest checks that the volume is as its record asks, with nothing under way
// and nothing forgotten.
func (h *harness) atRest(id string) {
	h.t.Helper()
	synctest.Wait()
	for range 100 {
		if !h.looking(id) { // as it does every ten minutes, also at rest
			break
		}
		h.sleep(time.Millisecond)
	}
	record := h.store.Get(id)
	if record != nil {
		for _, part := range record.Parts() {
			intent := record.Intent(part)
			if intent.Gone || !intent.Accepted {
				h.t.Errorf("volume %s: %s is at rest unsettled: %+v", id, part, *intent)
			}
			if lie := h.lie(request{id: id, part: part}); lie != "" {
				h.t.Errorf("volume %s: %s is at rest, and %s", id, part, lie)
			}
		}
	}
	h.k.with(func() {
		for at, stack := range h.k.mounts {
			if volumeOf(at) != id || stack[0].volume == "" {
				continue
			}
			if record == nil || record.Targets[at] == nil && (record.Stage == nil || record.Stage.Path != at) {
				h.t.Errorf("volume %s: still mounted at %s, which no record asks for", id, at)
			}
			if len(stack) > 1 {
				h.t.Errorf("volume %s: %d mounts stacked at %s", id, len(stack), at)
			}
		}
		if v := h.k.volumes[id]; v != nil && v.highest() != nil && (record == nil || record.Stage == nil) {
			h.t.Errorf("volume %s: still attached, which no record asks for", id)
		}
	})
	r := h.p.r
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volumes[id]
	switch {
	case v == nil && record != nil:
		h.t.Errorf("volume %s: nothing is known of it", id)
	case v == nil:
	case record == nil:
		h.t.Errorf("volume %s: kept in memory without a record", id)
	case !v.since.IsZero() || len(v.waiters) > 0 || len(v.attempts) > 0:
		h.t.Errorf("volume %s: not at rest: step since %v, %d waiters, %d attempts", id, v.since, len(v.waiters), len(v.attempts))
	}
}
