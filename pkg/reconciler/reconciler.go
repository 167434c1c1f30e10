package reconciler

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Store is the durable desired state; *store.Store is one.
type Store interface {
	// Get returns the record that everybody gets, which nobody changes; so do Edit and List.
	Get(id string) *state.Volume
	Edit(id string, edit func(*state.Volume) error) (*state.Volume, error)
	// Propose is an Edit that a crash may forget, until the next Edit of the volume or Flush.
	Propose(id string, edit func(*state.Volume) error) (*state.Volume, error)
	Flush(id string) error
	List() []*state.Volume
	VolumesAt(path string) []string
	// VolumeOfDevice returns the volume that is published as a device number; "" if there is none.
	VolumeOfDevice(number state.DeviceNumber) string
}

// Devices attaches volumes, each by its backend; a *devices.Set is one.
type Devices interface {
	devices.Backend
	devices.Grower
	devices.Formatter
	devices.Eraser
	// TryFormat comes before BeginFormat where a device is Noted, and returns the UUID for
	// Try and Format.
	TryFormat(ctx context.Context, v devices.Volume) (uuid string, err error)
	// AbandonFormat clears the formatting mark of a device that turned out to hold
	// somebody's data. It does nothing for a backend whose devices nobody else writes to.
	AbandonFormat(ctx context.Context, v devices.Volume) error
}

// Views keeps read-only devices over others, and tells who holds one.
type Views interface {
	devices.Viewer
	devices.Holder
}

// Filesystems works on what is on a device. Calls may block as long as a helper
// program runs; ctx ends the program.
type Filesystems interface {
	Probe(ctx context.Context, device state.Device, mountpoint string) (state.Contents, error)
	// Prove returns nil only if the device is blank; it may read for minutes, and
	// tells ctx how far it is (state.Progress).
	Prove(ctx context.Context, device state.Device) error
	// Smallest is how many bytes a device must have for a file system of the type;
	// 0: unknown.
	Smallest(fsType string) int64
	// Format calls last, if it is not nil, right before mkfs, which is given the UUID.
	Format(ctx context.Context, device state.Device, fsType string, last func(context.Context) (uuid string, err error)) error
	// Try returns state.Unwritten for a blank device that does not keep what is written.
	Try(ctx context.Context, device state.Device, uuid string) error
	Check(ctx context.Context, device state.Device, fsType string) error
	Grow(ctx context.Context, device state.Device, fsType, mountpoint string) error
	// Default returns the type to make on a device of that size if nobody names one.
	Default(bytes int64) string
	// Options returns all options of a mount's superblock that the kernel shows.
	Options(m state.Mount) string
}

// Mounts looks at the mount table and changes it, one mount at a time.
type Mounts interface {
	Look(ctx context.Context, path string, limit time.Duration) (state.Mountpoint, error)
	Mounter
	SetAttributes(ctx context.Context, path string, flags state.Flags) error
	Unmount(ctx context.Context, path string) error
	// UnmountDevice is Unmount of a stage: what is there may be frozen, and is thawed first.
	UnmountDevice(ctx context.Context, path string) error
	// Elsewhere returns a mount of the file system on a device, wherever it is; nil: none.
	Elsewhere(ctx context.Context, device state.DeviceNumber) (*state.Sighting, error)
	// MountedAt returns where below kubelet's directory the file system on a device is mounted.
	MountedAt(ctx context.Context, device state.DeviceNumber) ([]string, error)
	// BoundAt returns where the node of a device is bound, whoever bound it.
	BoundAt(ctx context.Context, device state.DeviceNumber) ([]string, error)
	// Keepers names what would keep the file system on a device alive if its
	// mounts at the paths went.
	Keepers(ctx context.Context, device state.DeviceNumber, paths []string) []string
	// CheckOptions returns InvalidArgument for an option that the kernel refuses
	// for the type of file system, whatever the device.
	CheckOptions(fsType string, flags state.Flags) error
	// Above returns the mount that holds the directory of a path, and where it is
	// mounted; an empty point if it also holds the kubelet directory.
	Above(path string) (m state.Mount, point string, err error)
}

// Mounter mounts at a path.
type Mounter interface {
	MountDevice(ctx context.Context, device state.Device, path, fsType string, flags state.Flags, readOnly bool) error
	BindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags) error
	BindDevice(ctx context.Context, device state.Device, target string) error
	// MountSource mounts what is no device. It ends with ctx or the source's deadline,
	// whatever the server does.
	MountSource(ctx context.Context, source state.Source, path string, flags state.Flags) error
}

// Directories cleans up the directories that mounts leave behind.
type Directories interface {
	// Remove deletes an empty directory or file.
	Remove(ctx context.Context, path string) error
	// Renew puts a new directory in the place of an empty one, so that the kernel drops
	// the copies of a former mount there in other mount namespaces.
	Renew(ctx context.Context, path string) error
}

// Pods tells whether the pod of a target path is known to be gone.
type Pods interface {
	Gone(target string) bool
}

// Kernel is everything that steps act on.
type Kernel struct {
	Devices Devices
	// Layers are the layers that volumes can have, from the lowest to the highest.
	Layers      []devices.Layer
	Views       Views
	Filesystems Filesystems
	Mounts      Mounts
	// Existing mounts as Mounts does, but does not make missing mount points. It is
	// for repairs, because kubelet removes the directories of pods that are gone.
	Existing    Mounter
	Directories Directories
	// Inline makes the inline ephemeral volumes; nil: there are none.
	Inline *Inline
	// Pods, when set, makes publishes of pods that are gone retire.
	Pods Pods
	// Holders names who holds a device, for error texts; it may be nil.
	Holders func(ctx context.Context, device state.DeviceNumber) []string
	// Bound reports, without reading the mount table, whether the node of a device is
	// bound anywhere in this mount namespace, even where it is covered; it may be nil.
	Bound func(device state.DeviceNumber) (bool, error)
	// VolumeAt returns the volume that a device belongs to; empty: none. It may be nil.
	VolumeAt func(device state.DeviceNumber) string
	// Listers and ShownAt serve to find orphans: the backends that list the devices
	// they made, and the paths at which each device is mounted or bound.
	Listers []Lister
	ShownAt func(ctx context.Context) (map[state.DeviceNumber][]string, error)
	// MayName reports whether calls may name a path; it may be nil.
	MayName func(path string) bool
}

// Moment says on which side of a step a hook is called.
type Moment string

const (
	Before Moment = "before"
	After  Moment = "after"
)

// Config is what a Reconciler is made of.
type Config struct {
	Store  Store
	Kernel Kernel
	// Hook, when set, is called around each step, and its error fails the
	// step. Tests use it to make steps fail, hang and die.
	Hook func(ctx context.Context, volume string, step Step, moment Moment) error
	// Metrics, when set, counts steps, back-offs and repairs.
	Metrics Metrics
	// Tracer, when set, makes spans of what is done for a volume. Their parent is the span
	// in the context of the Ensure that waits, or else a span of its own.
	Tracer trace.Tracer
	// DetectOnly leaves what was lost unrepaired until somebody asks for it.
	DetectOnly bool
	// Resync is how often a volume at rest is observed; 0: never. With so many volumes that
	// this would be more than two a second, it is two a second. After a start, the first
	// of these observations are spread over that time.
	Resync time.Duration
}

// Metrics counts what the reconciler does. Its methods are called concurrently.
type Metrics interface {
	Step(action Action, took time.Duration, err error)
	BackOff()
	Repair(kind state.PartKind)
	Retire()
}

// Reconciler owns the workers of all volumes. Its methods may be called
// concurrently.
type Reconciler struct {
	store   Store
	kernel  Kernel
	hook    func(context.Context, string, Step, Moment) error
	metrics Metrics
	tracer  trace.Tracer
	repairs bool
	resync  time.Duration
	queue   *queue
	stopped chan struct{}  // closed when Run is told to end
	random  func() float64 // in [0, 1), for jitter
	waits   waitCounts
	secrets secrets
	sweep   sweep
	listing hang.Calls[[]Orphan] // of Orphans
	left    leftOrphans

	looks  hang.Calls[state.Actual] // for callers of Observe, by volume
	owners hang.Calls[state.Owner]  // questions to the backend, by volume

	mu              sync.Mutex
	volumes         map[string]*volume
	volumesByDevice map[state.DeviceNumber][]string
	adopting        map[string]bool      // volumes that are looked at for the first time, so that their devices are not known yet
	awaited         map[string]*awaiting // of volumes whose device is missing, see await
	noEvents        bool                 // there are no device events
}

// New returns a Reconciler that does nothing until Run. Every record of the
// store is queued when it returns.
func New(cfg Config) *Reconciler {
	r := &Reconciler{
		store:           cfg.Store,
		kernel:          cfg.Kernel,
		hook:            cfg.Hook,
		metrics:         cfg.Metrics,
		tracer:          cfg.Tracer,
		repairs:         !cfg.DetectOnly,
		resync:          cfg.Resync,
		queue:           newQueue(),
		stopped:         make(chan struct{}),
		random:          rand.Float64,
		volumes:         map[string]*volume{},
		volumesByDevice: map[state.DeviceNumber][]string{},
		adopting:        map[string]bool{},
		awaited:         map[string]*awaiting{},
		sweep:           sweep{look: make(chan struct{}, 1), gone: map[string]time.Time{}},
	}
	for _, v := range r.store.List() {
		known := r.volume(v.ID)
		known.unseen, known.spread = true, true
		r.queue.Add(v.ID)
	}
	return r
}

// Run works until ctx ends and every worker has returned. Then callers that still
// wait are answered Unavailable, and each worker stops after its current step.
// A worker whose step ignores ctx (a hung mount) keeps Run from returning.
func (r *Reconciler) Run(ctx context.Context) {
	r.queue.Run(ctx, func(id string) {
		r.converge(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("volume", id)), id)
	}, func() { close(r.stopped) })
}

// Ensure makes the edit and waits until part is seen to be as the edit asks. The edit is
// durable before a step is made for it, and before Ensure returns.
//
// If the edit refuses, its error is returned, and nothing has changed.
// DeadlineExceeded and Canceled: ctx ended first (the answer comes a little before
// its deadline); the intent is kept and the work goes on. Unavailable: the plugin
// stops, or an attempt failed that will be made again. Aborted: a later request
// superseded this one, or it contradicts one for which a caller waits. A final class:
// the part cannot be brought about, and the edit was withdrawn and seen undone; a size
// that was accepted before stays, and a stage or target that was is Unavailable then.
func (r *Reconciler) Ensure(ctx context.Context, id string, part state.Part, edit func(*state.Volume) error) error {
	w := r.register(id, part)
	defer r.unregister(id, w)
	return r.ensure(ctx, id, w, edit)
}

// EnsureSize is Ensure for the size of a volume, and returns the bytes that its
// device had when that was seen to be as the edit asks.
func (r *Reconciler) EnsureSize(ctx context.Context, id string, edit func(*state.Volume) error) (bytes int64, err error) {
	w := r.register(id, state.SizePart())
	defer r.unregister(id, w)
	if err := r.ensure(ctx, id, w, edit); err != nil {
		return 0, err
	}
	return w.bytes, nil
}

func (r *Reconciler) ensure(ctx context.Context, id string, w *waiter, edit func(*state.Volume) error) error {
	part := w.part
	w.call = r.traced(ctx)
	var asked waitedFor
	var refused error
	// It is written before the first step that is made for it, and before the caller is answered.
	record, err := r.store.Propose(id, func(v *state.Volume) error {
		// The edit of a caller that has gone must not be made after that of a later call.
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("nothing was asked: %w", err)
		}
		err := r.waits.during(v, func(v *state.Volume) error {
			err := edit(v)
			if errors.Is(err, state.ErrEarlierPending) { // which nobody may ask for any more
				v.GiveUp(part, time.Now())
				refused, err = err, nil
			}
			return err
		})
		if err != nil || refused != nil {
			return err
		}
		if intent := v.Latest(part); intent != nil { // from now on, the next edit sees that a caller waits
			asked = waitedFor{id, part, intent.Revision}
			r.waits.add(asked)
		}
		return nil
	})
	stopWaiting := func() {
		if asked != (waitedFor{}) {
			r.waits.drop(asked)
			asked = waitedFor{}
		}
	}
	defer stopWaiting()
	switch {
	case errors.Is(err, state.ErrNothingThere):
		return nil
	case err != nil:
		return fmt.Errorf("volume %s: %w", id, err)
	case refused != nil:
		r.queue.Add(id)
		if lost := r.store.Flush(id); lost != nil { // or a crash would bring back what was given up
			refused = lost
		}
		return fmt.Errorf("volume %s: %w", id, refused)
	}
	intent := record.Latest(part)
	if intent == nil {
		return nil // the edit found nothing to ask for
	}
	r.arm(id, w, intent, intent != record.Intent(part), record.Stage.LivesFor(part.Path))
	r.queue.Add(id)
	err = r.awaitAnswer(ctx, id, w)
	stopWaiting() // what is accepted from now on, this caller does not hear of
	if lost := r.store.Flush(id); lost != nil && err == nil {
		err = fmt.Errorf("volume %s: %w", id, lost)
	}
	return err
}

// awaitAnswer returns the answer to a caller.
func (r *Reconciler) awaitAnswer(ctx context.Context, id string, w *waiter) error {
	early, stop := answerTimer(ctx)
	defer stop()
	var class state.Class
	select {
	case err := <-w.answer:
		return err
	case <-early:
		class = state.DeadlineExceeded
	case <-ctx.Done():
		class = state.ClassOf(ctx.Err())
	case <-r.stopped:
		class = state.Unavailable
	}
	select {
	case err := <-w.answer: // which came at the same time, and counts as heard
		return err
	default:
	}
	if class == state.Unavailable {
		return state.Errorf(class, "volume %s: %s: the plugin is stopping; the intent is kept, ask again", id, w.part)
	}
	return r.late(id, w.part, class)
}

// answerTimer returns a channel that fires when a call must be answered, see package deadline.
func answerTimer(ctx context.Context) (<-chan time.Time, func() bool) {
	at, ok := deadline.AnswerTime(ctx)
	if !ok {
		return nil, func() bool { return true }
	}
	timer := time.NewTimer(time.Until(at))
	return timer.C, timer.Stop
}
