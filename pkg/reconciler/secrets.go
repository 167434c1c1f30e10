package reconciler

import (
	"maps"
	"sync"

	"github.com/csi-node/csi-node/pkg/devices"
)

// secrets are the secrets of volumes with a record, by volume, in memory only. They
// have a lock of their own, because edits call Remember while the store runs them.
// The zero value is ready.
type secrets struct {
	mu sync.Mutex
	of map[string]map[string]string
}

// Remember keeps the secrets of a volume for as long as anything is asked of it. All
// steps get those of the stage, the publishes and the expansion alike; a later value
// of a key replaces an earlier one. It does not block, and may be called by an edit.
func (r *Reconciler) Remember(id string, named map[string]string) {
	if len(named) == 0 {
		return
	}
	r.secrets.mu.Lock()
	defer r.secrets.mu.Unlock()
	if r.secrets.of == nil {
		r.secrets.of = map[string]map[string]string{}
	}
	if r.secrets.of[id] == nil {
		r.secrets.of[id] = map[string]string{}
	}
	maps.Copy(r.secrets.of[id], named)
}

// get returns the secrets of a volume that were named so far.
func (s *secrets) get(id string) devices.Secrets {
	s.mu.Lock()
	defer s.mu.Unlock()
	return devices.NewSecrets(s.of[id])
}

// forget drops the secrets of a volume.
func (s *secrets) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, id)
}
