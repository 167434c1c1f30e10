// Package ephemeral gives a pod a volume of its own that lives as long as its
// publish: an inline ephemeral volume is created, staged and published by one
// call, and unpublished, unstaged and deleted by another.
//
// The backend keeps with the data whose it is (devices.InlineOwner). So an unpublish
// deletes the right volume and no other, also after a reboot or the loss of the store,
// and volumes of pods that are gone are found and deleted though nobody asks.
package ephemeral

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Reconciler makes intents true; *reconciler.Reconciler is one.
type Reconciler interface {
	Ensure(ctx context.Context, id string, part state.Part, edit func(*state.Volume) error) error
	Remember(id string, secrets map[string]string)
}

// Filesystems knows what this node can make; *filesystem.Host is one.
type Filesystems interface {
	Default(bytes int64) string
	Smallest(fsType string) int64
}

// Directories removes an empty directory; *mounts.Host does.
type Directories interface {
	Remove(ctx context.Context, path string) error
}

// Pods tells whether the pod of a target path is known to be gone; *pods.Directory does.
type Pods interface {
	Gone(target string) bool
}

// Records reads the desired state; *store.Store is one.
type Records interface {
	Get(id string) *state.Volume
}

// Config is what Volumes is made of.
type Config struct {
	StagingDir string // below kubelet's directory; holds a directory for each volume
	Reconciler Reconciler
	Records    Records
	// Inliner is the backend of all these volumes, and Backend its name; nil: none
	// opts in, and there are none.
	Inliner     devices.Inliner
	Backend     string
	Filesystems Filesystems
	Directories Directories
	Pods        Pods
	// Spell returns the one spelling that a path has in requests. Owners of
	// volumes that an earlier version made may have another.
	Spell func(ctx context.Context, path string) (string, error)
}

// Volumes serves inline ephemeral volumes. Its methods may be called
// concurrently, but for Run.
type Volumes struct {
	Config
	look    chan struct{}        // holds a token when Run shall look
	looking atomic.Bool          // Run will look again by itself
	gone    map[string]time.Time // by volume: since when its pod is seen to be gone; Run's alone
}

// New returns Volumes.
func New(cfg Config) *Volumes {
	return &Volumes{Config: cfg, look: make(chan struct{}, 1), gone: map[string]time.Time{}}
}

func (v *Volumes) staging(id string) string { return filepath.Join(v.StagingDir, id) }

// Publish makes the volume, stages it and publishes it at target.Path. The secrets are
// remembered with the stage, whose steps may need them.
//
// The errors are those of the Inliner and of the Reconciler. After a final one
// nothing is left, unless the volume was published or formatted before, and may hold
// a pod's data: that is ended by Unpublish, or by Run. While what was begun could not
// be undone yet, the error is Unavailable.
func (v *Volumes) Publish(ctx context.Context, id, podUID string, attributes, secrets map[string]string, target *state.Target) error {
	ask, err := v.request(id, podUID, attributes, target)
	if err != nil {
		return err
	}
	ask.Secrets = secrets
	made, err := v.Inliner.MakeInline(ctx, ask)
	if state.ClassOf(err) == state.AlreadyExists {
		if owner, at, unread := v.owner(ctx, id); unread == nil && at == target.Path && owner.Target != at {
			ask.Owner.Target = owner.Target
			made, err = v.Inliner.MakeInline(ctx, ask)
		}
	}
	if err != nil {
		return err
	}
	if !v.looking.Load() {
		v.Look()
	}
	target.Capability.FSType = made.FSType
	err = v.Reconciler.Ensure(ctx, id, state.StagePart(), func(record *state.Volume) error {
		record.Backend = cmp.Or(record.Backend, v.Backend)
		err := record.AskStage(&state.Stage{Path: v.staging(id), Capability: target.Capability}, time.Now())
		if err == nil {
			v.Reconciler.Remember(id, secrets)
		}
		return err
	})
	if err == nil {
		err = v.Reconciler.Ensure(ctx, id, state.TargetPart(target.Path), func(record *state.Volume) error {
			own := *target
			return record.AskPublish(&own, v.staging(id), time.Now())
		})
	}
	// What was formatted before this call may hold a pod's data, whatever the
	// store knows: a reboot empties the store, and the pod goes on.
	// AlreadyExists tells of what somebody else asks for.
	if class := state.ClassOf(err); err == nil || !class.Final() || class == state.AlreadyExists || made.Used || v.published(id) {
		return err
	}
	if undo := v.end(ctx, id); undo != nil {
		return state.Errorf(state.Unavailable, "%v; and taking back what was begun fails: %v", err, undo)
	}
	return err
}

// request returns what the backend is asked for. InvalidArgument: no backend opts
// in, or a pod's author chooses one.
func (v *Volumes) request(id, podUID string, attributes map[string]string, target *state.Target) (devices.InlineRequest, error) {
	if v.Inliner == nil {
		return devices.InlineRequest{}, state.Errorf(state.InvalidArgument, "volume %s: no backend of this plugin takes inline ephemeral volumes: use a PersistentVolumeClaim", id)
	}
	if _, chosen := attributes[devices.BackendKey]; chosen {
		return devices.InlineRequest{}, state.Errorf(state.InvalidArgument, "volume %s: attribute %s: whoever writes a pod cannot choose the backend; inline ephemeral volumes are of %s", id, devices.BackendKey, v.Backend)
	}
	own := maps.Clone(attributes)
	maps.DeleteFunc(own, func(key, _ string) bool { return strings.HasPrefix(key, devices.KubernetesPrefix) })
	return devices.InlineRequest{ID: id, Owner: devices.InlineOwner{PodUID: podUID, Target: target.Path}, Attributes: own,
		Filesystem: func(bytes int64) (string, int64) {
			fsType := cmp.Or(target.Capability.FSType, v.Filesystems.Default(bytes))
			return fsType, v.Filesystems.Smallest(fsType)
		}}, nil
}

// published reports whether a target of the volume is asked for.
func (v *Volumes) published(id string) bool {
	record := v.Records.Get(id)
	if record == nil {
		return false
	}
	for _, t := range record.Targets {
		if !t.Gone {
			return true
		}
	}
	return false
}

// Unpublish ends the volume whose publish at target has ended, with its data. It
// does nothing to volumes of other kinds, and to a volume of another target.
//
// The record tells which volumes are of another kind, and the backend is not asked
// about them. A volume of which nobody can say more is unstaged; its data is
// deleted by Run when the backend answers again.
func (v *Volumes) Unpublish(ctx context.Context, id, target string) error {
	if v.Inliner == nil {
		return nil
	}
	staged := false // here
	if record := v.Records.Get(id); record != nil && record.Stage != nil {
		if staged = record.Stage.Path == v.staging(id); !staged {
			return nil
		}
	}
	owner, at, err := v.ask(ctx, id)
	switch class := state.ClassOf(err); {
	case err == nil && (owner == nil || at != target):
		return nil
	case err == nil:
		return v.end(ctx, id)
	case !staged && class == state.NotFound, class == state.InvalidArgument:
		return nil
	}
	logger := klog.FromContext(ctx).WithValues("volume", id)
	if !staged && !kubeletID.MatchString(id) {
		logger.Error(err, "Whether this is an ephemeral volume is not known; if it is, it is deleted once its backend answers and the pod is gone")
		v.Look()
		return nil
	}
	if v.published(id) {
		return nil // at another target
	}
	if err := v.unstage(ctx, id); err != nil {
		return err
	}
	if staged && state.ClassOf(err) != state.DeadlineExceeded {
		if err = v.delete(ctx, id); err == nil || state.ClassOf(err).Final() {
			return err
		}
	}
	logger.Error(err, "An ephemeral volume has ended, and its data is not deleted yet: that is tried again when the pod is gone")
	v.Look()
	return nil
}

// kubeletID matches the ids that kubelet gives to inline ephemeral volumes
// (makeVolumeHandle in its CSI volume plugin).
var kubeletID = regexp.MustCompile(`^csi-[0-9a-f]{64}$`)

// askTime bounds the wait for the backend, whose disk may hang.
const askTime = 2 * time.Second

// ask is owner, on a goroutine that may be lost to the backend's disk.
// DeadlineExceeded: it does not answer.
func (v *Volumes) ask(ctx context.Context, id string) (owner *devices.InlineOwner, target string, err error) {
	type answer struct {
		owner  *devices.InlineOwner
		target string
		err    error
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	answers := make(chan answer, 1)
	go func() {
		owner, target, err := v.owner(ctx, id)
		answers <- answer{owner, target, err}
	}()
	select {
	case a := <-answers:
		return a.owner, a.target, a.err
	case <-ctx.Done():
		return nil, "", fmt.Errorf("volume %s: the backend %s does not answer: %w", id, v.Backend, ctx.Err())
	}
}

// owner returns whose a volume is, and its target path as requests spell it; nil:
// it is no inline volume.
func (v *Volumes) owner(ctx context.Context, id string) (owner *devices.InlineOwner, target string, err error) {
	if owner, err = v.Inliner.InlineOwner(ctx, id); err == nil && owner != nil {
		target, err = v.Spell(ctx, owner.Target)
	}
	return owner, target, err
}

// end unstages and deletes an ephemeral volume.
func (v *Volumes) end(ctx context.Context, id string) error {
	err := v.unstage(ctx, id)
	if err == nil {
		err = v.delete(ctx, id)
	}
	return err
}

func (v *Volumes) delete(ctx context.Context, id string) error {
	return v.Inliner.DeleteVolume(ctx, devices.Volume{ID: id, Backend: v.Backend})
}

// unstage ends the stage and removes its directory: before the volume, by which
// a next attempt knows what to do.
func (v *Volumes) unstage(ctx context.Context, id string) error {
	err := v.Reconciler.Ensure(ctx, id, state.StagePart(), func(record *state.Volume) error {
		return record.AskUnstage(v.staging(id), time.Now())
	})
	if err == nil {
		err = v.Directories.Remove(ctx, v.staging(id))
	}
	return err
}

const (
	// grace lies between the two looks that must both find a pod gone.
	grace = time.Minute
	// again is when pods are looked for though nothing was noticed.
	again = 10 * time.Minute
	// endTime bounds the attempt to end one volume; the work goes on behind it.
	endTime = time.Minute
)

// Look lets Run look for pods that are gone now. It does not block.
func (v *Volumes) Look() {
	select {
	case v.look <- struct{}{}:
	default:
	}
}

// Run ends the volumes whose pods are gone, until ctx ends. While there is no
// ephemeral volume it does nothing but wait for Look.
func (v *Volumes) Run(ctx context.Context) {
	if v.Inliner == nil {
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-v.look:
		case <-timer.C:
		}
		v.looking.Store(false) // who comes during the sweep may be missed by it
		wait, err := v.sweep(ctx)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Ephemeral volumes of pods that are gone are not known")
			wait = again
		}
		timer.Stop()
		if wait > 0 {
			timer.Reset(wait)
			v.looking.Store(true)
		}
	}
}

// sweep looks at the pod of each ephemeral volume, and returns when to look
// again; 0: not before Look is called, as there is no such volume.
func (v *Volumes) sweep(ctx context.Context) (wait time.Duration, err error) {
	ids, err := v.Inliner.ListInline(ctx)
	if err != nil {
		return 0, err
	}
	still := map[string]time.Time{}
	for _, id := range ids {
		owner, target, err := v.owner(ctx, id)
		if state.ClassOf(err) == state.NotFound || err == nil && owner == nil {
			continue
		}
		if wait == 0 {
			wait = again
		}
		if err != nil {
			continue // it may be an inline volume; what reads its facts reports the error
		}
		if !v.Pods.Gone(target) {
			continue
		}
		since, before := v.gone[id]
		if !before {
			since = time.Now()
		}
		still[id] = since
		left := grace - time.Since(since)
		if left <= 0 {
			if err := v.endGone(ctx, id, target); err == nil {
				delete(still, id)
				continue
			}
			left = grace
		}
		wait = min(wait, left)
	}
	v.gone = still
	return wait, ctx.Err()
}

// endGone ends the volume of a pod that is gone.
func (v *Volumes) endGone(ctx context.Context, id, target string) error {
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	err := v.Reconciler.Ensure(ctx, id, state.TargetPart(target), func(record *state.Volume) error {
		return record.AskUnpublish(target, time.Now())
	})
	if err == nil {
		err = v.end(ctx, id)
	}
	logger := klog.FromContext(ctx).WithValues("volume", id, "target", target)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			logger.Error(err, "Cannot delete the ephemeral volume of a pod that is gone; it is tried again")
		}
		return fmt.Errorf("volume %s: %w", id, err)
	}
	logger.Info("Deleted the ephemeral volume of a pod that is gone")
	return nil
}
