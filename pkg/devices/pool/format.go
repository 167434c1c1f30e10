package pool

import (
	"context"
	"fmt"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// BeginFormat sets the formatting mark, durably; the volume is not fresh any more.
// FailedPrecondition: the volume was formatted before, or published raw.
func (p *Pool) BeginFormat(ctx context.Context, id string) error {
	return p.mark(ctx, id, func(v *Volume) error {
		if v.Formatted != "" {
			return state.Errorf(state.FailedPrecondition, "volume %s: it was formatted as %s before, and is never formatted again", id, v.Formatted)
		}
		if v.Raw {
			return state.Errorf(state.FailedPrecondition, "volume %s: it was published as a raw block device, and is never formatted unless it is cleared", id)
		}
		v.Formatting, v.Fresh = true, time.Time{}
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

// BeginRaw notes, durably, that the volume is shown as a raw block device which
// takes writes. It writes no facts if that was noted before.
func (p *Pool) BeginRaw(ctx context.Context, id string) error {
	switch v, err := p.Get(ctx, id); {
	case err != nil:
		return err
	case v.Raw:
		return p.settle(ctx, id)
	}
	return p.mark(ctx, id, func(v *Volume) error {
		v.Raw, v.Fresh = true, time.Time{}
		return nil
	})
}

func (p *Pool) mark(ctx context.Context, id string, change func(*Volume) error) error {
	unlock, err := p.volumes.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: facts about its use: %w", id, err)
	}
	defer unlock()
	return p.update(ctx, id, change)
}
