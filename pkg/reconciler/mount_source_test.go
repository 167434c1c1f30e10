package reconciler

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// memory is a backend whose volumes are a tmpfs each; all else it does not have.
type memory struct {
	Devices
	forgetful *atomic.Bool // nothing is known by the id alone
	moved     *atomic.Bool // they are mounted from somewhere else, after a start with other flags
}

func (memory) Find(context.Context, devices.Volume) (state.Device, error) {
	return state.Device{State: state.DeviceAbsent}, nil
}

func (m memory) Source(_ context.Context, v devices.Volume) (state.Source, bool, error) {
	if m.forgetful.Load() && len(v.Context) == 0 {
		return state.Source{}, false, errors.New("no context")
	}
	server := "memory:"
	if m.moved.Load() {
		server = "moved:"
	}
	return state.Source{FSType: "tmpfs", Source: server + v.ID, Options: []string{"size=1m"}, Deadline: 10 * time.Second}, true, nil
}

// newMemory returns a reconciler on this node whose volume is of such a backend.
func newMemory(t *testing.T) (*layered, memory) {
	l := &layered{t: t, n: newRealNode(t), store: newFakeStore()}
	m := memory{l.n.parts.Devices, new(atomic.Bool), new(atomic.Bool)}
	l.n.parts.Devices = m
	l.start()
	return l, m
}

// A server that does not answer holds up nothing but its volume, and that no longer
// than a mount of it may take.
func TestMountSourceThatHangs(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.source = true })
		h.volume("w")
		anyStage := func(s *state.Stage) { s.Capability.FSType = "" }
		anyTarget := func(t *state.Target) { t.Capability.FSType = "" }
		path := targetPath("v", 1)
		h.ok(stage("v", anyStage), publish("v", 2, anyTarget))
		hang := h.k.fault(&fault{op: opMountSource, key: path, times: -1, hang: make(chan struct{})})

		h.refuse(h.within(10*time.Second, publish("v", 1, anyTarget)), state.DeadlineExceeded, "volume v", path, "step mount-source for target "+path+" has been running since ")
		again := h.begin(publish("v", 1, anyTarget))
		h.ok(stage("w"), publish("w", 1))
		h.pending(again)
		h.sleep(20 * time.Second)
		h.pending(again)
		h.wantCalls(1, opMountSource, path)
		h.sleep(33 * time.Second) // the deadline of the source has passed twice: the second caller had an attempt of its own
		h.refuse(h.got(again), state.DeadlineExceeded, "volume v", "step mount-source for target "+path)
		h.wantCalls(3, opMountSource, path)
		ended := h.begin(unpublish("v", 1))
		h.pending(ended)
		h.sleep(30 * time.Second)
		if err := h.got(ended); err != nil {
			t.Errorf("unpublished: %v", err)
		}
		hang.open()
		h.ok(unpublish("v", 2), publish("v", 1, anyTarget))
		h.atRest("v")
		h.atRest("w")
	})
}

// The mount of a server that is away is left: it works again with it, and nothing could be mounted
// in its place. One that is lost (ESTALE, ENOTCONN) is mounted anew.
func TestMountSourceOfAServerThatIsAway(t *testing.T) {
	bubble(t, func(h *harness) {
		v, path := h.volume("v"), targetPath("v", 1)
		h.k.with(func() { v.source = true })
		anyStage := func(s *state.Stage) { s.Capability.FSType = "" }
		anyTarget := func(t *state.Target) { t.Capability.FSType = "" }
		h.ok(stage("v", anyStage), publish("v", 1, anyTarget))
		h.k.with(func() { v.serverAway = true })
		h.wake("v")
		h.sleep(time.Hour)
		h.wantCalls(1, opMountSource, path)
		h.refuse(h.do(publish("v", 1, anyTarget)), state.Unavailable, path, "its server is away")
		if !h.k.isMounted(path) {
			t.Error("it was taken away")
		}
		h.k.with(func() { v.serverAway = false })
		h.ok(publish("v", 1, anyTarget))
		h.atRest("v")
		h.k.with(func() { v.dead = true })
		h.wake("v")
		h.atRest("v")
		h.k.with(func() { v.serverAway = true })
		h.ok(unpublish("v", 1), unstage("v"))
	})
}

// What was mounted from a source that is another one at the next look is the volume's nevertheless. No pod
// has it yet, so that the new one is mounted in its place.
func TestMountSourceThatMovesMeanwhile(t *testing.T) {
	bubble(t, func(h *harness) {
		v, path := h.volume("v"), targetPath("v", 1)
		h.k.with(func() { v.source = true })
		h.ok(stage("v", func(s *state.Stage) { s.Capability.FSType = "" }))
		h.k.slow(opMountSource, path, 1, time.Second)
		published := h.begin(publish("v", 1, func(t *state.Target) { t.Capability.FSType = "" }))
		h.k.with(func() { v.moved = true; h.k.drift("v") })
		h.sleep(2 * time.Second)
		if err := h.got(published); err != nil {
			t.Errorf("published: %v", err)
		}
		h.wantCalls(1, opUnmount, path)
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"))
	})
}

// A volume that is mounted without a device is a record while it is staged, and
// each target is a mount of its own, which is mounted again when it is lost and
// taken away in the end.
func TestMountSource(t *testing.T) {
	l, b := newMemory(t)
	defer l.stop()
	anyType := func(s *state.Stage) { s.Capability.FSType, s.Context = "", nil }
	target := func(t *state.Target) { t.Capability.FSType, t.Context = "", nil }
	if err := l.stage(); state.ClassOf(err) != state.InvalidArgument {
		t.Errorf("staged as ext4: %v", err)
	}
	if err := l.stage(stageBlock, func(s *state.Stage) { s.Context = nil }); state.ClassOf(err) != state.InvalidArgument {
		t.Errorf("staged as a block device: %v", err)
	}
	l.forget()
	l.ok(l.stage(anyType))
	if len(l.done()) > 0 {
		t.Errorf("staged by %q", actions(l.done()))
	}
	l.ok(l.publish(target, func(t *state.Target) { t.Capability.Flags = []string{"noexec"} }))
	have := l.look()
	m := have.Targets.At(l.n.path(1)).Mounts
	if len(m) != 1 || m[0].FSType != "tmpfs" || m[0].Source != "memory:v" || m[0].Attributes&state.NoExec == 0 {
		t.Fatalf("mounted is %+v", m)
	}
	var st unix.Statfs_t
	l.ok(unix.Statfs(l.n.path(1), &st))
	if bytes := int64(st.Blocks) * st.Bsize; bytes != 1<<20 {
		t.Errorf("it has %d bytes", bytes)
	}
	if err := l.ask(state.SizePart(), func(v *state.Volume) error { return v.AskSize(small, 0, time.Now()) }); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("grown: %v", err)
	}

	told, err := l.r.Explain(t.Context(), "v")
	l.ok(err)
	if is := strings.Join(told.Explanation().Is, " "); !strings.Contains(is, "It is mounted from memory:v (tmpfs)") || strings.Contains(is, "formatted") || strings.Contains(is, "attached") {
		t.Errorf("told is %q", is)
	}
	if got := report.Statuses(l.r.Reports())[0].Device; got != "none, it is mounted from memory:v (tmpfs)" {
		t.Errorf("the device is %q", got)
	}

	// What is lost comes again, what is somebody else's stays.
	l.ok(l.n.umount(1))
	l.ok(l.publish(target, func(t *state.Target) { t.Capability.Flags = []string{"noexec"} }))
	l.ok(l.n.umount(1))
	l.ok(l.n.tmpfs(1))
	if err := l.publish(target, func(t *state.Target) { t.Capability.Flags = []string{"noexec"} }); state.ClassOf(err) != state.Unavailable {
		t.Errorf("published over somebody else's: %v", err)
	}
	l.ok(l.n.umount(1))
	l.ok(l.publish(target, func(t *state.Target) { t.Capability.Flags = []string{"noexec"} }))
	l.ok(os.WriteFile(filepath.Join(l.n.path(1), "data"), []byte("x"), 0o600))

	// When the store is lost, a publish finds the stage, which is a record, as it was.
	l.store.lose()
	l.ok(l.publish(target, func(t *state.Target) { t.Capability.Flags = []string{"noexec"} }))
	if s := l.store.Get("v").Stage; s.Provisional || !s.Accepted || s.Path != l.n.path(0) {
		t.Errorf("the stage is %+v", s)
	}
	l.store.lose()
	if err := l.publish(publishBlock, func(t *state.Target) { t.Context = nil }); state.ClassOf(err) != state.InvalidArgument {
		t.Errorf("published as a block device: %v", err)
	}

	// What may be its own is not left behind as somebody else's, and where nothing is there is nothing to know.
	l.store.lose()
	b.forgetful.Store(true)
	if err := l.unpublish(); state.ClassOf(err) != state.Unavailable || !strings.Contains(err.Error(), "no context") {
		t.Errorf("unpublished what may be its own: %v", err)
	}
	l.ok(l.ask(state.TargetPart(l.n.path(2)), func(v *state.Volume) error { return v.AskUnpublish(l.n.path(2), time.Now()) }))
	b.forgetful.Store(false)

	l.ok(l.unpublish())
	l.ok(l.unstage())
	if _, err := os.Stat(l.n.path(1)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target is left: %v", err)
	}
}

// A target stays the volume's if that is mounted from somewhere else after a restart: it is left to its pod, and can be
// unpublished.
func TestMountSourceThatMoved(t *testing.T) {
	l, b := newMemory(t)
	defer func() { l.stop() }() // of the last one
	target := func(t *state.Target) { t.Capability.FSType, t.Context = "", nil }
	l.ok(l.stage(func(s *state.Stage) { s.Capability.FSType, s.Context = "", nil }))
	l.ok(l.publish(target))
	_, err := l.store.Edit("v", func(v *state.Volume) error { // as versions wrote it that remembered no source
		v.Targets[l.n.path(1)].From = nil
		return nil
	})
	l.ok(err)
	l.restart(nil)
	grown := l.ask(state.SizePart(), func(v *state.Volume) error { return v.AskSize(small, 0, time.Now()) }) // asks nothing of the target
	require.Class(t, grown, state.FailedPrecondition, "no device")
	if kept := l.store.Get("v").Targets[l.n.path(1)]; kept.From == nil || !kept.Confirmed() {
		t.Errorf("the target is %+v", kept)
	}
	for range 2 { // and back
		b.moved.Store(!b.moved.Load())
		l.restart(nil)
		if b.moved.Load() {
			require.Class(t, l.publish(target), state.Unavailable, "from memory:v at "+l.n.path(1), "from moved:v now", "restart the pod")
		} else {
			l.ok(l.publish(target))
		}
		if mounts := l.look().Targets.At(l.n.path(1)).Mounts; len(mounts) != 1 || mounts[0].Source != "memory:v" {
			t.Errorf("mounted is %+v", mounts)
		}
	}
	b.moved.Store(true)
	l.restart(nil)
	l.ok(l.unpublish())
	l.ok(l.publish(target))
	if mounts := l.look().Targets.At(l.n.path(1)).Mounts; len(mounts) != 1 || mounts[0].Source != "moved:v" {
		t.Errorf("mounted is %+v", mounts)
	}
	l.ok(l.unpublish())
	l.ok(l.unstage())
}
