package driver

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Orphan is a device or are mounts of the plugin's own making that no intent
// explains, as after the loss of the store. The JSON is the contract of
// `csi-node orphans --output json`.
type Orphan struct {
	Volume  string   `json:"volume"`         // empty when the backend does not know it any more
	Device  string   `json:"device"`         // as /dev/loop3
	Backing string   `json:"backing"`        // the file behind the device, if there is one
	Paths   []string `json:"paths"`          // where it is mounted or bound and no intent says so
	Kept    string   `json:"kept,omitempty"` // why it stays; else `orphans --clean` detaches it
	Cleaned bool     `json:"cleaned"`        // it was detached just now

	formatted bool // so nobody can publish it unless it is mounted somewhere
}

// attachment is a device that a backend made, and the view over it.
type attachment struct {
	devices.Attachment
	backend string
	view    state.Device
}

// attachments returns the devices that the backends have made on this node. It
// blocks for as long as one of them does.
func (p *plugin) attachments(ctx context.Context) ([]attachment, error) {
	var all []attachment
	for _, b := range p.backends {
		lister, ok := b.Backend.(devices.Lister)
		if !ok {
			continue
		}
		attached, err := lister.Attached(ctx)
		if err != nil {
			return nil, fmt.Errorf("the backend %s: %w", b.name, err)
		}
		for _, a := range attached {
			view, err := p.views.FindView(ctx, a.Device)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil {
				klog.FromContext(ctx).Error(err, "Skipped a device, so whether it is an orphan is not known", "volume", a.Volume, "device", a.Device.Path)
				continue
			}
			all = append(all, attachment{a, b.name, view})
		}
	}
	return all, nil
}

// findOrphans compares the devices and mounts of the plugin's making with the
// store. What is mounted nowhere is shown to unasked, which says whether it is
// an orphan still and why it is kept, and may detach it.
//
// It blocks for as long as a device of a backend does.
func (p *plugin) findOrphans(ctx context.Context, unasked func(attachment, *Orphan) (is bool)) ([]Orphan, error) {
	attached, err := p.attachments(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for orphans: %w", err)
	}
	shown, err := p.mounts.ShownAt(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for orphans: %w", err)
	}
	orphans := []Orphan{}
	for _, a := range attached {
		// The record is read after the look: what was asked meanwhile explains what was seen.
		o, is := orphanOf(a, shown, p.store.Get(a.Volume))
		if is && o.Kept == "" {
			is = unasked(a, &o)
		}
		if is {
			orphans = append(orphans, o)
		}
	}
	return orphans, nil
}

// orphanOf compares a device with the record of its volume, nil if there is none.
func orphanOf(a attachment, shown map[state.DeviceNumber][]string, record *state.Volume) (o Orphan, is bool) {
	o = Orphan{Volume: a.Volume, Device: a.Device.Path, Backing: a.Device.Backing, formatted: a.Device.Formatted != ""}
	o.Paths = slices.Concat(shown[a.Device.Number], shown[a.view.Number])
	slices.Sort(o.Paths)
	if record != nil {
		o.Paths = slices.DeleteFunc(o.Paths, func(path string) bool {
			return record.Stage != nil && record.Stage.Path == path || record.Targets[path] != nil || boundByKubelet(path)
		})
		o.Kept = "the volume is in use, and NodeUnpublishVolume ends these mounts"
		return o, len(o.Paths) > 0
	}
	switch {
	case a.Volume == "":
		o.Kept = "its volume is gone from the " + a.backend + "; once you know why, detach it by hand"
		if strings.HasPrefix(o.Device, "/dev/loop") {
			o.Kept = "its volume is gone from the " + a.backend + "; once you know why, `losetup -d " + o.Device + "` detaches it"
		}
	case len(o.Paths) > 0:
		o.Kept = "it is mounted: NodePublishVolume takes it over, NodeUnpublishVolume and NodeUnstageVolume end it"
	}
	return o, true
}

// boundByKubelet reports whether kubelet binds the node of a published raw volume
// at the path: …/volumeDevices/<volume>/dev/<pod uid> (mapBindMountDevice in
// pkg/volume/util/volumepathhandler, v1.36).
func boundByKubelet(path string) bool {
	return strings.Contains(path, "/plugins/kubernetes.io/csi/volumeDevices/") && filepath.Base(filepath.Dir(path)) == "dev"
}

// orphans is findOrphans beside the reconciler, and detaches what clean says.
func (p *plugin) orphans(ctx context.Context, clean func(Orphan) bool) ([]Orphan, error) {
	found, err := p.findOrphans(ctx, func(a attachment, o *Orphan) (is bool) {
		var err error
		if is, o.Kept, err = p.reconciler.Unasked(ctx, a.Volume, clean(*o)); err != nil { // of this one alone
			is, o.Kept = true, err.Error()
		}
		o.Cleaned = is && o.Kept == "" && clean(*o)
		return is
	})
	if err == nil {
		left := slices.DeleteFunc(slices.Clone(found), func(o Orphan) bool { return o.Cleaned })
		p.metrics.orphans.Set(float64(len(left)))
	}
	return found, err
}

// adoptOrphans tells, when the plugin starts, of what no intent explains, and
// detaches devices that nobody can use any more: those of formatted volumes
// which are mounted nowhere. A raw one may be staged, for all that kubelet knows.
func (p *plugin) adoptOrphans(ctx context.Context) {
	logger := klog.FromContext(ctx)
	found, err := p.orphans(ctx, func(o Orphan) bool { return o.formatted })
	if err != nil {
		if ctx.Err() == nil {
			logger.Error(err, "What no intent explains is not known")
		}
		return
	}
	for _, o := range found {
		logger := logger.WithValues("volume", o.Volume, "device", o.Device, "backing", o.Backing, "paths", o.Paths)
		if o.Cleaned {
			logger.Info("Detached a device that no intent explains and nobody uses")
			continue
		}
		logger.Info("Found what no intent explains", "kept", o.Kept)
	}
}

// orphansNow is orphans for somebody who waits until ctx ends: DeadlineExceeded
// or Canceled. Only one look is under way at a time, so that those of a device
// that hangs do not pile up.
func (p *plugin) orphansNow(ctx context.Context, clean bool) ([]Orphan, error) {
	found, err := p.looking.Do(ctx, "", hang.NoLimit, func() ([]Orphan, error) { return p.orphans(ctx, func(Orphan) bool { return clean }) })
	if _, late := err.(*hang.Unanswered); late {
		return nil, state.Errorf(state.ClassOf(ctx.Err()), "looking for orphans: a device, or the storage, does not answer")
	}
	return found, err
}
