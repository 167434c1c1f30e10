package ephemeral

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// fakeNode makes every intent true at once, unless err says otherwise of the part.
type fakeNode struct {
	mu      sync.Mutex
	volumes map[string]fakeVolume
	records map[string]*state.Volume
	err     map[state.Part]error
	dead    map[string]bool // by target
	away    error
	hang    chan struct{} // that the backend hangs on
	deletes error
	asked   int // the backend
	sweeps  int
	did     []string

	attributes map[string]string // that were asked for last
	made       map[string]string // the secrets that came with them
	secrets    map[string]string // that are remembered
}

type fakeVolume struct {
	owner    *devices.InlineOwner // nil: it is a claim's
	fsType   string
	smallest int64
	used     bool
}

const gib = 1 << 30

func newFakeNode() *fakeNode {
	return &fakeNode{volumes: map[string]fakeVolume{}, records: map[string]*state.Volume{}, err: map[state.Part]error{}, dead: map[string]bool{}}
}

func (f *fakeNode) note(what string) { f.did = append(f.did, what) }

func (f *fakeNode) Ensure(_ context.Context, id string, part state.Part, edit func(*state.Volume) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := &state.Volume{ID: id}
	if have := f.records[id]; have != nil {
		v = have.Clone()
	}
	if err := edit(v); err != nil {
		if errors.Is(err, state.ErrNothingThere) {
			return nil
		}
		return err
	}
	intent := v.Intent(part)
	if err := f.err[part]; err != nil && !intent.Gone {
		return err // withdrawn
	} else if err != nil {
		f.records[id] = v
		return err
	}
	if intent.Gone {
		f.note("end " + string(part.Kind))
		v.Drop(part)
	} else {
		f.note(string(part.Kind))
		v.Accept(part)
	}
	f.records[id] = v
	if v.Empty() {
		delete(f.records, id)
	}
	return nil
}

func (f *fakeNode) Remember(_ string, secrets map[string]string) { f.secrets = secrets }

func (f *fakeNode) MakeInline(_ context.Context, r devices.InlineRequest) (devices.InlineVolume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.attributes, f.made = r.Attributes, r.Secrets
	if r.Attributes["size"] == "bad" {
		return devices.InlineVolume{}, state.Errorf(state.InvalidArgument, "size")
	}
	fsType, smallest := r.Filesystem(gib)
	if have := f.volumes[r.ID].owner; have != nil && *have != r.Owner {
		return devices.InlineVolume{}, state.Errorf(state.AlreadyExists, "it is another's")
	}
	f.note("make")
	f.volumes[r.ID] = fakeVolume{owner: &r.Owner, fsType: fsType, smallest: smallest, used: f.volumes[r.ID].used}
	return devices.InlineVolume{FSType: fsType, Used: f.volumes[r.ID].used}, nil
}

func (f *fakeNode) InlineOwner(_ context.Context, id string) (*devices.InlineOwner, error) {
	if f.hang != nil {
		<-f.hang
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	v, ok := f.volumes[id]
	switch {
	case f.away != nil:
		return nil, f.away
	case !ok:
		return nil, state.Errorf(state.NotFound, "no volume")
	}
	return v.owner, nil
}

func (f *fakeNode) ListInline(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweeps++
	return slices.Sorted(maps.Keys(f.volumes)), f.away
}

func (f *fakeNode) DeleteVolume(_ context.Context, v devices.Volume) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.deletes != nil {
		return f.deletes
	}
	f.note("delete")
	delete(f.volumes, v.ID)
	return nil
}

func (f *fakeNode) Default(bytes int64) string {
	if bytes < gib {
		return "xfs"
	}
	return "ext4"
}

func (f *fakeNode) Smallest(fsType string) int64 {
	return map[string]int64{"ext4": 2 << 20, "xfs": 300 << 20}[fsType]
}

func (f *fakeNode) Remove(context.Context, string) error { return nil }

func (f *fakeNode) Gone(target string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead[target]
}

func (f *fakeNode) Get(id string) *state.Volume {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v := f.records[id]; v != nil {
		return v.Clone()
	}
	return nil
}

const path = "/kubelet/pods/1/volumes/x/mount"

var key = map[string]string{"key": "s3cret"}

func newVolumes(f *fakeNode) *Volumes {
	return New(Config{StagingDir: "/kubelet/plugins/driver-ephemeral", Reconciler: f, Records: f, Inliner: f, Backend: "pool", Filesystems: f, Directories: f, Pods: f,
		Spell: func(_ context.Context, path string) (string, error) {
			return strings.Replace(path, "/link/", "/kubelet/", 1), nil
		}})
}

func publish(v *Volumes, attributes map[string]string) error {
	return v.Publish(context.Background(), "csi-1", "1", attributes, key, &state.Target{Path: path, Capability: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_WRITER"}})
}

func (f *fakeNode) wantDone(t *testing.T, want string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if got := strings.Join(f.did, ", "); got != want {
		t.Errorf("did %q, want %q", got, want)
	}
	f.did = nil
}

// What attaches the volume may need them, and so may what makes it.
func TestSecretsAreRememberedWithTheStage(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	if err := publish(v, map[string]string{"size": "bad"}); err == nil || f.secrets != nil {
		t.Errorf("remembered of a volume that was refused: %v (%v)", f.secrets, err)
	}
	if err := publish(v, nil); err != nil || f.made["key"] != "s3cret" || f.secrets["key"] != "s3cret" {
		t.Errorf("made with %v, remembered are %v (%v)", f.made, f.secrets, err)
	}
	f.secrets = nil
	f.err[state.TargetPart(path)] = state.Errorf(state.Internal, "later")
	if err := publish(v, nil); err == nil || f.secrets["key"] != "s3cret" {
		t.Errorf("remembered are %v (%v)", f.secrets, err)
	}
}

func TestLife(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	if err := publish(v, nil); err != nil {
		t.Fatal(err)
	}
	f.wantDone(t, "make, stage, target")
	record := f.Get("csi-1")
	if record.Backend != "pool" || record.Stage.Path != "/kubelet/plugins/driver-ephemeral/csi-1" || record.Stage.Capability.FSType != "ext4" || record.Targets[path] == nil {
		t.Errorf("the record is %+v", record)
	}
	if owner := f.volumes["csi-1"].owner; owner == nil || *owner != (devices.InlineOwner{PodUID: "1", Target: path}) {
		t.Errorf("the owner is %+v", owner)
	}
	if err := v.Unpublish(t.Context(), "csi-1", "/another/target"); err != nil {
		t.Fatal(err)
	}
	f.wantDone(t, "")
	if err := f.Ensure(t.Context(), "csi-1", state.TargetPart(path), func(v *state.Volume) error { return v.AskUnpublish(path, time.Now()) }); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := v.Unpublish(t.Context(), "csi-1", path); err != nil {
			t.Fatal(err)
		}
	}
	f.wantDone(t, "end target, end stage, delete")
	if len(f.records) > 0 || len(f.volumes) > 0 {
		t.Errorf("left: %v, %v", f.records, f.volumes)
	}
}

// What an earlier version wrote of the owner may be spelled otherwise: it is the
// same target.
func TestOwnerOfAnotherSpelling(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	written := devices.InlineOwner{PodUID: "1", Target: strings.Replace(path, "/kubelet/", "/link/", 1)}
	f.volumes["csi-1"] = fakeVolume{owner: &written, fsType: "ext4"}
	if err := publish(v, nil); err != nil {
		t.Fatal(err)
	}
	f.wantDone(t, "make, stage, target")
	if owner := f.volumes["csi-1"].owner; *owner != written {
		t.Errorf("the owner is %+v", owner)
	}
	if err := f.Ensure(t.Context(), "csi-1", state.TargetPart(path), func(v *state.Volume) error { return v.AskUnpublish(path, time.Now()) }); err != nil {
		t.Fatal(err)
	}
	if err := v.Unpublish(t.Context(), "csi-1", path); err != nil {
		t.Fatal(err)
	}
	f.wantDone(t, "end target, end stage, delete")
}

// What cannot be had leaves nothing; what was had before stays.
func TestRefusal(t *testing.T) {
	final, other := state.Errorf(state.FailedPrecondition, "in the way"), errors.New("a hiccup")
	for _, part := range []state.Part{state.StagePart(), state.TargetPart(path)} {
		f := newFakeNode()
		v := newVolumes(f)
		f.err[part] = other
		if err := publish(v, nil); !errors.Is(err, other) || len(f.volumes) != 1 {
			t.Errorf("%s: %v, volumes %v", part, err, f.volumes)
		}
		f.err[part] = final
		if part != state.StagePart() { // whose undo is its own failure
			continue
		}
		err := publish(v, nil)
		if state.ClassOf(err) != state.Unavailable || !strings.Contains(err.Error(), "taking back") {
			t.Errorf("%s: %v, while the undo fails", part, err)
		}
	}
	f := newFakeNode()
	v := newVolumes(f)
	if err := publish(v, map[string]string{"size": "bad"}); state.ClassOf(err) != state.InvalidArgument {
		t.Errorf("bad attributes: %v", err)
	}
	f.wantDone(t, "")
	if err := publish(v, nil); err != nil {
		t.Fatal(err)
	}
	f.err[state.StagePart()] = final
	if err := publish(v, nil); !errors.Is(err, final) || len(f.volumes) != 1 || !v.published("csi-1") {
		t.Errorf("a refused repeat: %v, volumes %v", err, f.volumes)
	}
}

// failingOnce refuses a target for good, and lets it go.
type failingOnce struct{ *fakeNode }

func (f failingOnce) Ensure(ctx context.Context, id string, part state.Part, edit func(*state.Volume) error) error {
	v := &state.Volume{ID: id}
	if have := f.Get(id); have != nil {
		v = have
	}
	if err := edit(v); err == nil && part.Kind == state.TargetKind && !v.Intent(part).Gone {
		return state.Errorf(state.FailedPrecondition, "a file is in the way")
	}
	return f.fakeNode.Ensure(ctx, id, part, edit)
}

func TestRefusedTargetLeavesNothing(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	v.Reconciler = failingOnce{f}
	if err := publish(v, nil); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("%v", err)
	}
	f.wantDone(t, "make, stage, end stage, delete")
	if len(f.records) > 0 || len(f.volumes) > 0 {
		t.Errorf("left: %v, %v", f.records, f.volumes)
	}
}

// A reboot leaves the data and no record: a refusal says nothing of the data.
func TestRefusedRepeatAfterAReboot(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	f.volumes["csi-1"] = fakeVolume{used: true}
	f.err[state.StagePart()] = state.Errorf(state.FailedPrecondition, "in the way")
	if err := publish(v, nil); state.ClassOf(err) != state.FailedPrecondition || len(f.volumes) != 1 {
		t.Errorf("%v, volumes %v", err, f.volumes)
	}
}

// Two calls at once: the one that asks for something else leaves the first alone.
func TestRefusedBesideAnother(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	f.err[state.StagePart()] = state.Errorf(state.AlreadyExists, "it is being staged otherwise")
	if err := publish(v, nil); state.ClassOf(err) != state.AlreadyExists || len(f.volumes) != 1 {
		t.Errorf("%v, volumes %v", err, f.volumes)
	}
	f.wantDone(t, "make")
}

// Other volumes are none of its business.
func TestUnpublishOfOthers(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	f.volumes["pvc-1"] = fakeVolume{}
	for _, id := range []string{"pvc-1", "stranger"} {
		if err := v.Unpublish(t.Context(), id, path); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	f.away = errors.New("the backend is away")
	if err := v.Unpublish(t.Context(), "pvc-1", path); err != nil {
		t.Errorf("%v, while the backend is away", err)
	}
	f.records["pvc-1"] = &state.Volume{ID: "pvc-1", Stage: &state.Stage{Path: "/kubelet/plugins/staging"}}
	f.asked = 0
	if err := v.Unpublish(t.Context(), "pvc-1", path); err != nil || f.asked > 0 {
		t.Errorf("%v; the backend was asked %d times about a volume that is known to be another's", err, f.asked)
	}
	f.wantDone(t, "")
}

// A backend that cannot say what a volume is keeps it from being deleted, not from being unstaged.
func TestUnpublishWithoutTheBackend(t *testing.T) {
	for title, test := range map[string]struct {
		err     error
		store   bool // knows the volume
		deletes error
		want    string
		left    int
	}{
		"damaged facts":              {state.Errorf(state.Internal, "damaged"), true, nil, "end stage, delete", 0},
		"facts that are gone":        {state.Errorf(state.NotFound, "no volume"), true, nil, "end stage, delete", 0},
		"away":                       {errors.New("away"), true, errors.New("away"), "end stage", 1},
		"in use":                     {errors.New("away"), true, state.Errorf(state.FailedPrecondition, "in use"), "end stage", 1},
		"silent":                     {context.DeadlineExceeded, true, nil, "end stage", 1},
		"damaged facts, store lost":  {state.Errorf(state.Internal, "damaged"), false, nil, "end stage", 1},
		"away, and the store lost":   {errors.New("away"), false, nil, "end stage", 1},
		"silent, and the store lost": {context.DeadlineExceeded, false, nil, "end stage", 1},
	} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeNode()
				v := newVolumes(f)
				id := "csi-" + strings.Repeat("0a", 32)
				if err := v.Publish(t.Context(), id, "1", nil, nil, &state.Target{Path: path, Capability: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_WRITER"}}); err != nil {
					t.Fatal(err)
				}
				f.wantDone(t, "make, stage, target")
				if f.away = test.err; state.ClassOf(test.err) == state.DeadlineExceeded {
					f.hang, f.away = make(chan struct{}), nil
					defer close(f.hang)
				}
				f.deletes = test.deletes
				if err := v.Unpublish(t.Context(), id, "/another/target"); err != nil || len(f.did) > 0 {
					t.Errorf("of another target: %v, %q", err, f.did)
				}
				delete(f.records[id].Targets, path)
				if !test.store {
					f.records[id] = &state.Volume{ID: id, Targets: map[string]*state.Target{}}
				}
				err := v.Unpublish(t.Context(), id, path)
				if final := state.ClassOf(test.deletes).Final(); (err != nil) != (test.deletes != nil && final) {
					t.Error(err)
				}
				f.wantDone(t, test.want)
				if len(f.volumes) != test.left {
					t.Errorf("%d volumes are left", len(f.volumes))
				}
			})
		})
	}
}

// What a pod's author says is the backend's to know, but not which backend that is.
func TestAttributes(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	if err := publish(v, map[string]string{"size": "1Gi", "csi.storage.k8s.io/pod.name": "web", "csi.storage.k8s.io/serviceAccount.tokens": "secret"}); err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(f.attributes, map[string]string{"size": "1Gi"}) {
		t.Errorf("the backend is told %v", f.attributes)
	}
	if made := f.volumes["csi-1"]; made.fsType != "ext4" || made.smallest != 2<<20 {
		t.Errorf("made %+v", made)
	}
	f.wantDone(t, "make, stage, target")
	for _, name := range []string{"pool", "disk", ""} {
		if err := publish(v, map[string]string{"backend": name}); state.ClassOf(err) != state.InvalidArgument || !strings.Contains(err.Error(), "attribute backend") {
			t.Errorf("backend %q: %v", name, err)
		}
	}
	target := &state.Target{Path: path, Capability: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_WRITER", FSType: "xfs"}}
	if err := v.Publish(t.Context(), "csi-2", "1", nil, nil, target); err != nil {
		t.Fatal(err)
	}
	if made := f.volumes["csi-2"]; made.fsType != "xfs" || made.smallest != 300<<20 {
		t.Errorf("made %+v", made)
	}
}

func TestNoBackendOptsIn(t *testing.T) {
	f := newFakeNode()
	v := newVolumes(f)
	v.Inliner = nil
	if err := publish(v, nil); state.ClassOf(err) != state.InvalidArgument || !strings.Contains(err.Error(), "csi-1") {
		t.Errorf("%v", err)
	}
	if err := v.Unpublish(t.Context(), "csi-1", path); err != nil {
		t.Error(err)
	}
	v.Look()
	v.Run(t.Context())
	f.wantDone(t, "")
}

func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeNode()
		v := newVolumes(f)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); v.Run(ctx) }()
		sleep := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
		with := func(change func()) {
			f.mu.Lock()
			defer f.mu.Unlock()
			change()
		}
		looked := func() (n int) {
			with(func() { n, f.sweeps = f.sweeps, 0 })
			return n
		}
		sleep(24 * time.Hour)
		if n := looked(); n != 1 {
			t.Errorf("looked %d times without a volume", n)
		}
		with(func() { f.volumes["pvc-1"] = fakeVolume{} })
		for range 3 {
			if err := publish(v, nil); err != nil {
				t.Fatal(err)
			}
		}
		sleep(time.Hour)
		if n := looked(); n > 2+6 {
			t.Errorf("looked %d times in an hour", n)
		}
		f.wantDone(t, "make, stage, target, make, stage, target, make, stage, target")
		with(func() { f.dead[path] = true })
		sleep(again + time.Second)
		f.wantDone(t, "") // seen once
		with(func() { f.dead[path] = false })
		sleep(grace)
		with(func() { f.dead[path] = true })
		sleep(again - time.Second)
		f.wantDone(t, "") // it was back meanwhile
		with(func() { f.err[state.StagePart()] = errors.New("held") })
		sleep(grace + 2*time.Second)
		f.wantDone(t, "end target")
		with(func() { clear(f.err) })
		sleep(grace)
		f.wantDone(t, "end target, end stage, delete")
		with(func() {
			if len(f.volumes) != 1 {
				t.Errorf("volumes %v", f.volumes)
			}
		})
		looked()
		sleep(24 * time.Hour)
		if n := looked(); n > 1 {
			t.Errorf("looked %d times after the last one", n)
		}
		with(func() { f.away = errors.New("the backend is away") })
		v.Look()
		sleep(time.Hour)
		if n := looked(); n < 6 {
			t.Errorf("looked %d times while the backend was away", n)
		}
		cancel()
		<-done
	})
}
