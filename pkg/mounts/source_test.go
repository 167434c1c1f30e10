package mounts

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// A server that does not answer lets the volume's worker go, also if the backend names no deadline.
func TestMountSourceWithoutADeadline(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "target")
	synctest.Test(t, func(t *testing.T) {
		silent := make(chan struct{})
		defer close(silent)
		go h.mounting.Do(context.Background(), path, hang.NoLimit, func() (struct{}, error) { <-silent; return struct{}{}, nil })
		synctest.Wait()
		began := time.Now()
		err := h.MountSource(context.Background(), state.Source{FSType: "tmpfs", Source: "server:/export"}, path, state.Flags{})
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != sourceDeadline {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
	})
}

// A source that is no device is mounted as asked, once, and where it may be.
func TestMountSource(t *testing.T) {
	machine.Kernel(t)
	h, root := newHost(t)
	path := filepath.Join(root, "target")
	source := state.Source{FSType: "tmpfs", Source: "server:/export", Options: []string{"size=1m"}, Deadline: time.Minute}
	must(t, h.MountSource(t.Context(), source, path, state.Flags{Set: state.NoExec, Super: []string{"mode=0700"}}))
	m, err := h.Look(t.Context(), path, hang.NoLimit)
	must(t, err)
	if len(m.Mounts) != 1 || !source.Is(m.Mounts[0]) || m.Mounts[0].Attributes&state.NoExec == 0 {
		t.Errorf("mounted is %+v", m.Mounts)
	}
	if other := (&state.Source{FSType: "tmpfs", Source: "server:/other"}); other.Is(m.Mounts[0]) {
		t.Error("it is another source, too")
	}
	_, usage, err := h.Usage(t.Context(), path)
	must(t, err)
	mustBe(t, "bytes", usage.Bytes.Total, 1<<20)
	if err := h.MountSource(t.Context(), source, path, state.Flags{}); err == nil {
		t.Error("mounted over itself")
	}
	must(t, h.Unmount(t.Context(), path))

	wantClass(t, h.MountSource(t.Context(), state.Source{FSType: "none-such", Source: "s"}, path, state.Flags{}), state.FailedPrecondition, "load its module")
	if err := h.MountSource(t.Context(), source, path, state.Flags{Super: []string{"no-such-option"}}); err == nil {
		t.Error("an option that nobody knows was taken")
	}
	wantClass(t, h.MountSource(t.Context(), source, root+"/../x", state.Flags{}), state.InvalidArgument)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.MountSource(ended, source, path, state.Flags{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after its end: %v", err)
	}
	m, err = h.Look(t.Context(), path, hang.NoLimit)
	must(t, err)
	mustBe(t, "mounts left", len(m.Mounts), 0)
}
