package reconciler

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// Clearance is what was found on a volume that was, or could be, cleared. The
// JSON is the contract of `csi-node volume clear-device --output json`.
type Clearance struct {
	Volume  string `json:"volume"`
	Backing string `json:"backing"` // the file, or the device, that holds the volume
	Bytes   int64  `json:"bytes"`   // size of the volume
	Blank   bool   `json:"blank"`   // there was nothing to destroy
	Found   string `json:"found"`   // "ext4 file system", "data at byte 4096"
	// Of a file system that was found:
	UUID            string `json:"uuid,omitempty"`
	FilesystemBytes int64  `json:"filesystemBytes,omitempty"`
	// From the volume's metadata: the type of the last completed format, and whether
	// a format was interrupted.
	Formatted  string `json:"formatted,omitempty"`
	Formatting bool   `json:"formatting,omitempty"`
	Raw        bool   `json:"raw,omitempty"` // it was published as a raw block device, for writing
	Cleared    bool   `json:"cleared"`       // every byte is zero now
}

// Clear looks at what is on a volume that nothing uses, and destroys it if do is
// set. It runs in the volume's worker, so that no stage can come between, and waits
// for its turn as Exclusive does; then it takes as long as the backend does.
//
// NotFound: no such volume. FailedPrecondition: the volume is in use or truncated, or
// the backend cannot clear volumes.
func (r *Reconciler) Clear(ctx context.Context, id string, do bool) (c Clearance, err error) {
	err = r.Exclusive(ctx, id, func(ctx context.Context, want *state.Volume, have state.Actual) error {
		clearer, can := r.kernel.Devices.(devices.Clearer)
		if !can {
			return state.Errorf(state.FailedPrecondition, "volume %s: its backend cannot clear a volume", id)
		}
		if err := clearable(want, have.Device); err != nil {
			return err
		}
		if err := clearer.Unused(ctx, r.spec(want)); err != nil {
			return err
		}
		found, err := r.readUnused(ctx, have.Device)
		if err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
		c = clearanceOf(id, have.Device, found)
		if !do {
			return nil
		}
		logger := klog.FromContext(ctx)
		logger.Info("Clearing a volume because an operator says so", "found", c.Found, "uuid", c.UUID, "bytes", c.Bytes)
		if err := clearer.Clear(ctx, r.spec(want)); err != nil {
			logger.Error(err, "Clearing failed")
			return err
		}
		cleared := have.Device
		cleared.WasCleared = true
		after, err := r.readUnused(ctx, cleared)
		switch {
		case err != nil:
			return fmt.Errorf("volume %s: reading it after it was cleared: %w", id, err)
		case !maybeBlank(after): // zeros that were written, where the backend cannot make holes, are not proven
			return state.Errorf(state.Internal, "volume %s: it was cleared, and holds %s", id, after.Found)
		}
		logger.Info("Cleared a volume")
		c.Cleared = true
		return nil
	})
	return c, err
}

// clearable returns why a volume must not be cleared now, according to its record and
// metadata.
func clearable(want *state.Volume, d state.Device) error {
	switch parts := report.Asked(want); {
	case len(parts) > 0:
		var asked []string
		for _, part := range parts {
			asked = append(asked, part.Part.String()+" "+part.Asked)
		}
		return state.Errorf(state.FailedPrecondition, "volume %s: it is in use on this node (%s): unpublish and unstage it first", want.ID, strings.Join(asked, "; "))
	case d.Missing:
		return state.Errorf(state.NotFound, "volume %s: no such volume on this node", want.ID)
	case d.Size < d.Capacity:
		return state.Errorf(state.FailedPrecondition, "volume %s: its backing%s has %d bytes, %d fewer than the volume: clearing does not mend that. Restore it from a backup, or delete the volume", want.ID, backing(d), d.Size, d.Capacity-d.Size)
	}
	return nil
}

// readUnused returns the contents of a volume that is not attached: of the file that
// backs it, or of a device that always exists. Others, such as a logical volume that is
// not active, cannot be read.
func (r *Reconciler) readUnused(ctx context.Context, d state.Device) (state.Contents, error) {
	path := cmp.Or(d.Backing, d.Path)
	if !filepath.IsAbs(path) {
		return state.Contents{Kind: state.ContentsUnproven, Found: "what cannot be read while it is not attached"}, nil
	}
	return r.kernel.Filesystems.Probe(ctx, state.Device{Path: path, Size: d.Size, Capacity: d.Capacity, WasCleared: d.WasCleared}, "")
}

func clearanceOf(id string, d state.Device, found state.Contents) Clearance {
	return Clearance{
		Volume: id, Backing: cmp.Or(d.Backing, d.Path), Bytes: d.Size, Blank: found.Kind == state.ContentsBlank,
		Found: found.Found, UUID: found.UUID, FilesystemBytes: found.Size, Formatted: d.Formatted, Formatting: d.Formatting, Raw: d.Raw,
	}
}
