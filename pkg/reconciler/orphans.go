package reconciler

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Orphan is a device that the plugin made, with its mounts, that no record explains,
// such as after the loss of the store. The JSON is the contract of
// `csi-node orphans --output json`.
type Orphan struct {
	Volume  string   `json:"volume"`         // empty when the backend does not know it any more
	Device  string   `json:"device"`         // such as /dev/loop3
	Backing string   `json:"backing"`        // the file behind the device, if there is one
	Paths   []string `json:"paths"`          // where it is mounted or bound and no intent says so
	Kept    string   `json:"kept,omitempty"` // why it stays; else `orphans --clean` detaches it
	Cleaned bool     `json:"cleaned"`        // it was detached just now

	made attachment
}

// holds returns the file system or layer that is known to be on the device; empty: it may be raw.
func (o Orphan) holds() string {
	if o.made.Device.Raw {
		return ""
	}
	return o.made.Device.Formatted
}

// Lister is a backend that lists the devices it made, and the backend's name.
type Lister struct {
	Backend string
	devices.Lister
}

// Orphans lists the orphans of this node, and detaches those that nobody uses if clean is
// set. It waits until ctx ends (DeadlineExceeded, Canceled). Only one search runs at a
// time, so that searches do not pile up behind a device that hangs.
func (r *Reconciler) Orphans(ctx context.Context, clean bool) ([]Orphan, error) {
	found, err := r.listing.Do(ctx, "", hang.NoLimit, func() ([]Orphan, error) { return r.orphans(ctx, func(Orphan) bool { return clean }) })
	if _, late := err.(*hang.Unanswered); late {
		return nil, state.Errorf(state.ClassOf(ctx.Err()), "looking for orphans: a device, or the storage, does not answer")
	}
	return found, err
}

// CleanOrphansAtStart logs the orphans and detaches the devices that nobody can use any
// more: those of volumes with a file system that are mounted nowhere. The device of a raw
// volume is kept, because kubelet may believe that the volume is staged; and so is one with a
// layer, in which a raw volume may be.
func (r *Reconciler) CleanOrphansAtStart(ctx context.Context) {
	logger := klog.FromContext(ctx)
	found, err := r.orphans(ctx, func(o Orphan) bool { // a file system can be published only from where it is mounted
		return o.holds() != "" && !slices.ContainsFunc(r.kernel.Layers, func(l devices.Layer) bool { return l.Name() == o.holds() })
	})
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

// InspectOrphans lists the orphans of a node on which no plugin runs. Like Inspect
// it changes nothing, and must not be called beside Run.
func (r *Reconciler) InspectOrphans(ctx context.Context) ([]Orphan, error) {
	return r.findOrphans(ctx, func(a attachment, o *Orphan) (is bool) {
		for _, d := range []state.Device{a.Device, a.view} {
			if d.State == state.DeviceAbsent {
				continue
			}
			if held, err := r.kernel.Views.Held(ctx, d); err != nil {
				o.Kept = err.Error()
			} else if held {
				o.Kept = "it is in use, perhaps in another mount namespace"
			}
		}
		return true
	})
}

// orphans lists the orphans while the workers run, and detaches those that clean selects
// and that nobody uses.
func (r *Reconciler) orphans(ctx context.Context, clean func(Orphan) bool) ([]Orphan, error) {
	r.left.search()
	defer r.left.searched()
	found, err := r.findOrphans(ctx, func(a attachment, o *Orphan) (is bool) {
		var err error
		if is, o.Kept, err = r.inspectOrphan(ctx, a.Volume, clean(*o)); err != nil { // the others are still listed
			is, o.Kept = true, err.Error()
		}
		o.Cleaned = is && o.Kept == "" && clean(*o)
		return is
	})
	if err == nil && ctx.Err() == nil { // all were looked at
		r.left.set(slices.DeleteFunc(slices.Clone(found), func(o Orphan) bool { return o.Cleaned }))
	}
	return found, err
}

// OrphansLeft returns how many there are of the orphans that the last search left. Calls have
// taken over or torn down the others since. It searches for no others, and asks no device.
func (r *Reconciler) OrphansLeft(ctx context.Context) int {
	found := r.left.list()
	if len(found) == 0 {
		return 0
	}
	shown, err := r.kernel.ShownAt(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Which orphans were taken over is not known")
		return len(found)
	}
	left := 0
	for _, o := range found {
		if _, is := orphanOf(o.made, shown, r.store.Get(o.Volume), r.kernel.MayName); is {
			left++
		} else {
			r.left.end(o.Volume) // a record explains it: that other paths show its number later says nothing
		}
	}
	return left
}

// leftOrphans are the orphans that the last search left, without those of volumes that were taken
// over or torn down since. Its methods may be called concurrently.
type leftOrphans struct {
	mu       sync.Mutex
	found    []Orphan
	searches int
	ended    map[string]bool // volumes of which end told while a search runs, which may have seen them before
}

func (l *leftOrphans) list() []Orphan {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.found
}

// search notes that a search begins, and searched that it is over.
func (l *leftOrphans) search() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.searches++; l.searches == 1 {
		l.ended = map[string]bool{}
	}
}

func (l *leftOrphans) searched() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.searches--; l.searches == 0 {
		l.ended = nil
	}
}

// set notes what a search has found.
func (l *leftOrphans) set(found []Orphan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found = slices.DeleteFunc(found, func(o Orphan) bool { return l.ended[o.Volume] })
}

// end notes that a volume has no orphan any more.
func (l *leftOrphans) end(volume string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		l.ended[volume] = true
	}
	if slices.ContainsFunc(l.found, func(o Orphan) bool { return o.Volume == volume }) {
		l.found = slices.DeleteFunc(slices.Clone(l.found), func(o Orphan) bool { return o.Volume == volume })
	}
}

// attachment is a device that a backend made, and the view over it.
type attachment struct {
	devices.Attachment
	backend string
	view    state.Device
}

// findOrphans compares the devices and mounts that the plugin made with the store. It
// passes a device that is mounted nowhere to unused. unused reports whether the device
// is still an orphan, sets Kept, and may detach it.
//
// It blocks for as long as a device of a backend does.
func (r *Reconciler) findOrphans(ctx context.Context, unused func(attachment, *Orphan) (is bool)) ([]Orphan, error) {
	attached, err := r.attachments(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for orphans: %w", err)
	}
	shown, err := r.kernel.ShownAt(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for orphans: %w", err)
	}
	orphans := []Orphan{}
	for _, a := range attached {
		// The record is read after the devices: it may explain what was made meanwhile.
		o, is := orphanOf(a, shown, r.store.Get(a.Volume), r.kernel.MayName)
		if is && o.Kept == "" {
			is = unused(a, &o)
		}
		if is {
			orphans = append(orphans, o)
		}
	}
	return orphans, nil
}

// attachments returns the devices that the backends have made on this node. It
// blocks for as long as one of them does.
func (r *Reconciler) attachments(ctx context.Context) ([]attachment, error) {
	var all []attachment
	for _, lister := range r.kernel.Listers {
		attached, err := lister.Attached(ctx)
		if err != nil {
			return nil, fmt.Errorf("the backend %s: %w", lister.Backend, err)
		}
		for _, a := range attached {
			view, err := r.kernel.Views.FindView(ctx, a.Device)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil {
				klog.FromContext(ctx).Error(err, "Skipped a device, so whether it is an orphan is not known", "volume", a.Volume, "device", a.Device.Path)
				continue
			}
			all = append(all, attachment{a, lister.Backend, view})
		}
	}
	return all, nil
}

// orphanOf compares a device with the record of its volume, nil if there is none. Of a path
// that no call may name a person is told to unmount it.
func orphanOf(a attachment, shown map[state.DeviceNumber][]string, record *state.Volume, mayName func(path string) bool) (o Orphan, is bool) {
	o = Orphan{Volume: a.Volume, Device: a.Device.Path, Backing: a.Device.Backing, made: a}
	o.Paths = slices.Concat(shown[a.Device.Number], shown[a.view.Number])
	slices.Sort(o.Paths)
	if record != nil {
		o.Paths = slices.DeleteFunc(o.Paths, func(path string) bool {
			return record.Stage != nil && record.Stage.Path == path || record.Targets[path] != nil || boundByKubelet(path)
		})
		o.Kept = mountsEnd("the volume is in use", ", and NodeUnpublishVolume ends these mounts", o.Paths, mayName)
		return o, len(o.Paths) > 0
	}
	switch {
	case a.Volume == "":
		o.Kept = "its volume is gone from the " + a.backend + "; once you know why, detach it by hand"
		if strings.HasPrefix(o.Device, "/dev/loop") {
			o.Kept = "its volume is gone from the " + a.backend + "; once you know why, `losetup -d " + o.Device + "` detaches it"
		}
	case len(o.Paths) > 0:
		o.Kept = mountsEnd("it is mounted", ": NodePublishVolume takes it over, for which a restart of kubelet asks; NodeUnpublishVolume and NodeUnstageVolume end it", o.Paths, mayName)
	}
	return o, true
}

// mountsEnd adds to why a device stays what ends its mounts: calls, or, at the paths that none
// may name, a person.
func mountsEnd(why, calls string, paths []string, mayName func(path string) bool) string {
	var outside []string
	for _, path := range paths {
		if mayName != nil && !mayName(path) {
			outside = append(outside, path)
		}
	}
	if len(outside) < len(paths) {
		why += calls
	}
	if len(outside) > 0 {
		why += "; no call ends what is mounted outside of kubelet's directory: `umount " + strings.Join(outside, " ") + "`"
	}
	return why
}

// boundByKubelet reports whether kubelet binds the node of a published raw volume
// at the path: …/volumeDevices/<volume>/dev/<pod uid> (mapBindMountDevice in
// pkg/volume/util/volumepathhandler, v1.36).
func boundByKubelet(path string) bool {
	return strings.Contains(path, "/plugins/kubernetes.io/csi/volumeDevices/") && filepath.Base(filepath.Dir(path)) == "dev"
}

// inspectOrphan reports whether a volume has a device and no record: that is an orphan. If
// detach is set, it detaches the device with its view and layers, unless somebody uses
// them. kept says why the device has to stay; empty: it may go, or is gone.
//
// It waits for its turn as Exclusive does.
func (r *Reconciler) inspectOrphan(ctx context.Context, id string, detach bool) (orphan bool, kept string, err error) {
	err = r.Exclusive(ctx, id, func(ctx context.Context, want *state.Volume, have state.Actual) error {
		if !want.Empty() || !have.Device.Present() {
			return nil
		}
		orphan = true
		switch {
		case have.Device.Held:
			kept = "it is in use: " + r.holder(ctx, have.Device)
		case have.View.Held:
			kept = "its read-only view is in use: " + r.holder(ctx, have.View)
		case have.View.Present():
			kept = r.inUse(ctx, have.View)
		default:
			kept = r.inUse(ctx, have.Device)
		}
		if kept != "" || !detach {
			return nil
		}
		if have.View.Present() {
			if err := r.kernel.Views.DetachView(ctx, have.Device); err != nil {
				return fmt.Errorf("volume %s: %w", id, err)
			}
			if kept = r.inUse(ctx, have.Device); kept != "" {
				return nil
			}
		}
		for i := len(have.Lower); i > 0; i-- { // from the top
			if e := have.Stack()[i]; presentOrStray(e.Device) {
				if err := r.onLayer(ctx, Step{Action: CloseLayer, Layer: e.Layer}, want, &have); err != nil {
					return fmt.Errorf("volume %s: %w", id, err)
				}
			}
		}
		if err := r.kernel.Devices.Detach(ctx, devices.Volume{ID: id}); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
		r.left.end(id)
		return nil
	})
	return orphan, kept, err
}

// inUse names who uses a device that nobody has claimed; empty: nobody. A process that
// has its node open, such as one in a pod with a raw volume, would find another volume
// behind that node once the device is detached.
func (r *Reconciler) inUse(ctx context.Context, d state.Device) string {
	if who := r.findHolder(ctx, d); who != "" {
		return d.Path + " is open: " + who
	}
	return ""
}
