package driver

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// Clearance is what was found on a volume that is, or could be, cleared. The
// JSON is the contract of `csi-node volume clear-device --output json`.
type Clearance struct {
	Volume  string `json:"volume"`
	Backing string `json:"backing"` // the file that holds the volume
	Bytes   int64  `json:"bytes"`   // of the volume
	Blank   bool   `json:"blank"`   // there was nothing to destroy
	Found   string `json:"found"`   // "ext4 file system", "data at byte 4096"
	// Of a file system that was found:
	UUID            string `json:"uuid,omitempty"`
	FilesystemBytes int64  `json:"filesystemBytes,omitempty"`
	// What the volume's facts say of the past: the type of the last format that
	// completed, and that a format was interrupted.
	Formatted  string `json:"formatted,omitempty"`
	Formatting bool   `json:"formatting,omitempty"`
	Raw        bool   `json:"raw,omitempty"` // it was published as a raw block device, for writing
	Cleared    bool   `json:"cleared"`       // every byte is zero now
}

// clearDevice looks at what is on a volume that nothing uses, and destroys it
// if do is set. It runs in the volume's worker, so that no stage comes between.
//
// NotFound: no such volume. FailedPrecondition: what stands in the way.
func (p *plugin) clearDevice(ctx context.Context, id string, do bool) (c Clearance, err error) {
	err = p.reconciler.Exclusive(ctx, id, func(ctx context.Context, want *state.Volume, have state.Actual) error {
		if err := p.clearable(ctx, want, have.Device); err != nil {
			return err
		}
		found, err := p.readBacking(ctx, have.Device)
		if err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
		c = clearanceOf(id, have.Device, found)
		if !do {
			return nil
		}
		logger := klog.FromContext(ctx)
		logger.Info("Clearing a volume because an operator says so", "found", c.Found, "uuid", c.UUID, "bytes", c.Bytes)
		if err := p.devices.Clear(ctx, volumeOf(want)); err != nil {
			logger.Error(err, "Clearing failed")
			return err
		}
		after, err := p.readBacking(ctx, have.Device)
		switch {
		case err != nil:
			return fmt.Errorf("volume %s: reading it after it was cleared: %w", id, err)
		case after.Kind != state.ContentsBlank && after.Kind != state.ContentsUnproven: // zeros that were written, where the pool cannot make holes
			return state.Errorf(state.Internal, "volume %s: it was cleared, and holds %s", id, after.Found)
		}
		logger.Info("Cleared a volume")
		c.Cleared = true
		return nil
	})
	return c, err
}

// clearable returns why a volume must not be cleared now.
func (p *plugin) clearable(ctx context.Context, want *state.Volume, d state.Device) error {
	switch parts := reconciler.StatusOf(want).Parts; {
	case len(parts) > 0:
		var asked []string
		for _, part := range parts {
			asked = append(asked, part.Part+" "+part.Asked)
		}
		return state.Errorf(state.FailedPrecondition, "volume %s: it is in use on this node (%s): unpublish and unstage it first", want.ID, strings.Join(asked, "; "))
	case d.Missing:
		return state.Errorf(state.NotFound, "volume %s: no such volume on this node", want.ID)
	case d.Size < d.Capacity:
		return state.Errorf(state.FailedPrecondition, "volume %s: its backing %s has %d bytes, %d fewer than the volume: clearing does not mend that. Restore it from a backup, or delete the volume", want.ID, d.Backing, d.Size, d.Capacity-d.Size)
	}
	return p.devices.Unused(ctx, volumeOf(want))
}

// readBacking says what is in the file behind a volume that is not attached.
func (p *plugin) readBacking(ctx context.Context, d state.Device) (state.Contents, error) {
	return p.filesystem.Probe(ctx, state.Device{Path: d.Backing, Size: d.Size, Capacity: d.Capacity}, "")
}

// volumeOf returns what a backend is told of a volume with a record.
func volumeOf(record *state.Volume) devices.Volume {
	v := devices.Volume{ID: record.ID, Backend: record.Backend}
	if record.Stage != nil {
		v.Context, v.Publish = state.SplitContext(record.Stage.Context)
	}
	return v
}

func clearanceOf(id string, d state.Device, found state.Contents) Clearance {
	return Clearance{
		Volume: id, Backing: d.Backing, Bytes: d.Size, Blank: found.Kind == state.ContentsBlank,
		Found: found.Found, UUID: found.UUID, FilesystemBytes: found.Size, Formatted: d.Formatted, Formatting: d.Formatting, Raw: d.Raw,
	}
}
