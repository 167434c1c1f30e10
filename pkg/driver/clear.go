package driver

import (
	"context"

	"github.com/csi-node/csi-node/pkg/reconciler"
)

// Clearance is what was found on a volume that is, or could be, cleared.
type Clearance = reconciler.Clearance

// clearDevice looks at what is on a volume that nothing uses, and destroys it
// if do is set.
func (p *plugin) clearDevice(ctx context.Context, id string, do bool) (Clearance, error) {
	return p.reconciler.Clear(ctx, id, do)
}
