package reconciler

import (
	"context"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// clearing is a backend that can clear its volumes.
type clearing struct{ Devices }

func (clearing) Unused(context.Context, devices.Volume) error { return nil }
func (clearing) Clear(context.Context, devices.Volume) error  { return nil }

// unread finds more on every device than is read of one that was not cleared.
type unread struct{ Filesystems }

func (unread) Probe(_ context.Context, device state.Device, _ string) (state.Contents, error) {
	if device.WasCleared {
		return state.Contents{Kind: state.ContentsUnproven}, nil
	}
	return state.Contents{Kind: state.ContentsOther, Found: "much that may be data"}, nil
}

// A device that is too large to be read is cleared, and not said to hold something after that.
func TestClearOfALargeDevice(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		k := &h.p.r.kernel
		k.Devices, k.Filesystems = clearing{k.Devices}, unread{k.Filesystems}
		for _, do := range []bool{false, true} {
			if c, err := h.p.r.Clear(context.Background(), "v", do); err != nil || c.Cleared != do || c.Found != "much that may be data" {
				t.Errorf("do %t: %+v, %v", do, c, err)
			}
		}
	})
}
