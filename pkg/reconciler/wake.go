package reconciler

import (
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Changed tells that somebody else mounted or unmounted something at a path.
// Volumes with a stage or a target at or below that path are observed.
func (r *Reconciler) Changed(path string) {
	for _, id := range r.store.VolumesAt(path) {
		r.queue.Add(id)
	}
}

// DeviceChanged tells that a block device is gone or has another size. Volumes that
// have it, or are published with its number, are observed, and those that are observed for the
// first time are once more. Its cost does not depend on the number of volumes.
func (r *Reconciler) DeviceChanged(number state.DeviceNumber) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.volumesByDevice[number] {
		r.volumes[id].deviceChanged = true
		r.queue.Add(id)
	}
	for id := range r.adopting { // whose device it may be
		r.volumes[id].deviceChanged = true
		r.queue.Add(id)
	}
}

// VolumeChanged tells that, as a backend reports, the storage of a volume may have
// changed or appeared.
func (r *Reconciler) VolumeChanged(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v := r.volumes[id]; v != nil {
		v.deviceChanged = true
		r.queue.Add(id)
		r.wakeAwaiting(id)
	}
}

// AllChanged tells that any device or mount may have changed.
func (r *Reconciler) AllChanged() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, v := range r.volumes {
		v.deviceChanged = true
		r.queue.Add(id)
		r.wakeAwaiting(id)
	}
}

// VolumeOf returns the volume that has a device, as it was last observed; empty: none has, or
// which one is not sure.
func (r *Reconciler) VolumeOf(number state.DeviceNumber) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ids := r.volumesByDevice[number]; len(ids) == 1 {
		return ids[0]
	}
	return ""
}

// index notes the device numbers by which a volume is found: those of its devices
// and view when it was last observed, and those it is published with. The caller
// holds mu.
func (r *Reconciler) index(id string, v *volume) {
	for _, n := range v.numbers {
		if r.volumesByDevice[n] = slices.DeleteFunc(r.volumesByDevice[n], func(other string) bool { return other == id }); len(r.volumesByDevice[n]) == 0 {
			delete(r.volumesByDevice, n)
		}
	}
	v.numbers = v.numbers[:0]
	add := func(n state.DeviceNumber) {
		if (n == state.DeviceNumber{}) || slices.Contains(v.numbers, n) {
			return
		}
		v.numbers = append(v.numbers, n)
		r.volumesByDevice[n] = append(r.volumesByDevice[n], id)
	}
	add(v.have.Device.Number)
	add(v.have.View.Number)
	for _, e := range v.have.Lower {
		add(e.Device.Number)
	}
	for _, t := range v.want.Targets {
		add(t.Device)
	}
}

// untilResync returns the time until a volume at rest is observed again. The first resync
// of the volumes that were in the store at the start is spread at random. The caller
// holds mu.
func (r *Reconciler) untilResync(v *volume) time.Duration {
	period := max(r.resync, time.Duration(len(r.volumes))*resyncInterval)
	if v.spread {
		v.spread = false
		return time.Duration(float64(period) * r.random())
	}
	return r.jitter(period)
}

// resyncInterval is the least mean time between two resyncs, whatever the number of
// volumes. It bounds the cost of many volumes at rest.
const resyncInterval = 500 * time.Millisecond
