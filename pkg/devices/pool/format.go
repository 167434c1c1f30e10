package pool

import (
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/state"
)

// BeginFormat sets the formatting mark, durably.
// FailedPrecondition: the volume was formatted before.
func (p *Pool) BeginFormat(ctx context.Context, id string) error {
	return p.mark(ctx, id, func(v *Volume) error {
		if v.Formatted != "" {
			return state.Errorf(state.FailedPrecondition, "volume %s: it was formatted as %s before, and is never formatted again", id, v.Formatted)
		}
		v.Formatting = true
		return nil
	})
}

// EndFormat clears the mark and remembers the file system type, durably.
// FailedPrecondition: no format was begun.
func (p *Pool) EndFormat(ctx context.Context, id, fsType string) error {
	return p.mark(ctx, id, func(v *Volume) error {
		if !v.Formatting && v.Formatted != fsType {
			return state.Errorf(state.FailedPrecondition, "volume %s: the end of a format as %s, and none was begun", id, fsType)
		}
		v.Formatting, v.Formatted = false, fsType
		return nil
	})
}

func (p *Pool) mark(ctx context.Context, id string, change func(*Volume) error) error {
	unlock, err := p.volumes.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: formatting mark: %w", id, err)
	}
	defer unlock()
	return p.update(ctx, id, change)
}
