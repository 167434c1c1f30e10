package reconciler

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// podGoneGrace is the time between the two looks that must both find a pod gone before
// anything of it ends. Whether a look finds it gone is decided by Pods.Gone (package pods).
const podGoneGrace = time.Minute

// podsGone holds, by a name that the caller chooses, since when every look at a pod has found
// it gone.
type podsGone map[string]time.Time

// note notes the result of one look, and returns how much longer a pod must stay away until
// it counts as gone; 0: it is gone. A caller that acts on that deletes the name, so that the
// count begins anew.
func (g *podsGone) note(name string, gone bool) (left time.Duration) {
	if !gone {
		delete(*g, name)
		return podGoneGrace
	}
	since, before := (*g)[name]
	if !before {
		if *g == nil {
			*g = podsGone{}
		}
		since = time.Now()
		(*g)[name] = since
	}
	return max(podGoneGrace-time.Since(since), 0)
}

// retire asks for the end of publishes whose pods are gone, because nobody else will.
// It reports whether the record is to be read again.
func (p *pass) retire(ctx context.Context, want *state.Volume) bool {
	if p.r.kernel.Pods == nil {
		return false
	}
	var dead []string
	for path, t := range want.Targets {
		gone := !t.Gone && !t.CallerWaits && p.r.kernel.Pods.Gone(path)
		if p.r.podGone(p.id, path, gone) {
			dead = append(dead, path)
		}
	}
	if len(dead) == 0 {
		return false
	}
	var retired []string
	_, err := p.r.store.Edit(p.id, func(v *state.Volume) error {
		retired = nil
		for _, path := range dead {
			// A call that came meanwhile has precedence.
			if now := v.Targets[path]; now != nil && now.Revision == want.Targets[path].Revision {
				err := v.AskUnpublish(path, time.Now())
				if v.Stage.LivesFor(path) && !v.Stage.Inline.Made { // the sweep would not find it
					err = v.AskEnd(path, v.Stage.Path, time.Now())
				}
				if err != nil {
					return err
				}
				retired = append(retired, path)
			}
		}
		return nil
	})
	if err != nil {
		for _, path := range dead {
			p.fail(want, state.TargetPart(path), fmt.Errorf("volume %s: retiring the publish of a pod that is gone: %w", p.id, err))
		}
		return false
	}
	for _, path := range retired {
		klog.FromContext(ctx).Info("Retired the publish of a pod that is gone", "target", path)
		if p.r.metrics != nil {
			p.r.metrics.Retire()
		}
	}
	if len(retired) > 0 {
		p.r.sweep.lookNow()
	}
	return true // also if the record has changed meanwhile
}

// podGone notes whether the pod of a target is gone, and reports whether it has
// been so for long enough.
func (r *Reconciler) podGone(id, path string, gone bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	if v.podGoneSince.note(path, gone) > 0 {
		return false
	}
	delete(v.podGoneSince, path)
	return true
}
