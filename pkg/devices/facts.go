package devices

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Facts keeps the durable facts about formatting, by the identity of the device, and
// erases devices, for backends that do not implement Formatter. Its methods take the
// device that Find returned; *note.Facts is one.
type Facts interface {
	// Tell adds the facts to a device; if they cannot be read, it sets Device.Err.
	Tell(v Volume, d *state.Device)
	// TryFormat notes, durably, that a stamp with a new UUID is about to be written to a
	// device that was proved blank. It clears an earlier mark, and does not set one.
	TryFormat(ctx context.Context, v Volume, d state.Device) (uuid string, err error)
	// BeginFormat sets the mark, durably. After TryFormat the mark has the UUID of the
	// stamp: what does not bear that UUID was not left by the format.
	BeginFormat(ctx context.Context, v Volume, d state.Device) error
	EndFormat(ctx context.Context, v Volume, d state.Device, fsType string) error
	// AbandonFormat clears the mark, durably: what is on the device is not what was
	// begun.
	AbandonFormat(ctx context.Context, v Volume, d state.Device) error
	BeginRaw(ctx context.Context, v Volume, d state.Device) error
	// Erase makes every byte of an attached device zero, as Eraser's does.
	Erase(ctx context.Context, v Volume, d state.Device) error
	// Clear sets the formatting mark, calls clear, and forgets all facts. If clear returns
	// state.Unwritten, the facts are what they were.
	Clear(ctx context.Context, v Volume, d state.Device, clear func() error) error
	// Forget forgets a volume that is deleted, and its device; a volume that is made later may
	// have the same id.
	Forget(ctx context.Context, v Volume, d state.Device) error
}

// KeepFacts gives the backends of a Set that are no Formatter their facts. It is
// called before anything else is.
func (s *Set) KeepFacts(facts Facts) { s.facts = facts }

// noted returns the Facts of a volume, the volume with the name of its backend, and
// its device; no Facts if the backend keeps its own, or if none are kept.
func (s *Set) noted(ctx context.Context, v Volume) (Facts, Volume, state.Device, error) {
	name, b, err := s.named(ctx, v)
	if err != nil {
		return nil, v, state.Device{}, err
	}
	if _, own := b.(Formatter); own || s.facts == nil {
		return nil, v, state.Device{}, nil
	}
	v.Backend = name
	d, err := b.Find(ctx, v)
	if err == nil {
		s.facts.Tell(v, &d)
	}
	return s.facts, v, d, err
}
