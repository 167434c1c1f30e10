package devices

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// Set holds the backends of one plugin by name. It is a Backend itself, which asks
// the one that a Volume names. Volumes of a backend that the Set lacks are unknown, and
// nothing is done to them.
type Set struct {
	backends  map[string]Backend
	byDefault string
	facts     Facts // nil: none are kept for backends that are no Formatter
	layers    []ClassLayer
}

// NewSet returns a Set. A volume that names no backend, and that no Owner claims, belongs
// to the default one.
func NewSet(byDefault string, backends map[string]Backend) *Set {
	return &Set{backends: maps.Clone(backends), byDefault: byDefault}
}

// Names returns the names of the backends, in order.
func (s *Set) Names() []string { return slices.Sorted(maps.Keys(s.backends)) }

// Get returns a backend by its name; nil: there is none.
func (s *Set) Get(name string) Backend { return s.backends[name] }

// Resolve names the backend of a volume whose record does not: the one that its
// context names, else the one that claims the id as an Owner, else the default one. An error
// comes from an Owner.
func (s *Set) Resolve(ctx context.Context, v Volume) (string, error) {
	if name := v.Context[BackendKey]; name != "" {
		return name, nil
	}
	for _, name := range s.Names() {
		if o, ok := s.backends[name].(Owner); ok && name != s.byDefault {
			if owns, err := o.Owns(ctx, v.ID); owns || err != nil {
				return name, err
			}
		}
	}
	return s.byDefault, nil
}

// Named returns the name of the backend that the context of a volume asks for: the
// default one unless it says otherwise. The Set may lack it.
func (s *Set) Named(v Volume) string {
	return cmp.Or(v.Context[BackendKey], s.byDefault)
}

// of returns the backend of a volume. Unavailable: this plugin lacks it.
func (s *Set) of(ctx context.Context, v Volume) (Backend, error) {
	_, b, err := s.named(ctx, v)
	return b, err
}

// named is of, with the name of the backend.
func (s *Set) named(ctx context.Context, v Volume) (name string, b Backend, err error) {
	name = v.Backend
	if name == "" {
		if name, err = s.Resolve(ctx, v); err != nil {
			return "", nil, err
		}
	}
	if b := s.backends[name]; b != nil {
		return name, b, nil
	}
	return name, nil, state.Errorf(state.Unavailable, "volume %s: its storage is of the backend %q, and this plugin has %s: nothing is known of it. Run the version that has the backend", v.ID, name, strings.Join(s.Names(), ", "))
}

// Validate returns InvalidArgument also for a backend, and for a layer, that the Set
// lacks.
func (s *Set) Validate(v Volume) error {
	name := cmp.Or(v.Backend, s.Named(v))
	b := s.backends[name]
	if b == nil {
		return state.Errorf(state.InvalidArgument, "volume %s: %s: %.200q is no backend of this plugin, which has %s", v.ID, BackendKey, name, strings.Join(s.Names(), ", "))
	}
	if err := s.validateLayers(v); err != nil {
		return fmt.Errorf("volume %s: volume_context: %w", v.ID, err)
	}
	v.Context = state.WithoutKubernetes(v.Context)
	return b.Validate(v)
}

// ValidateID returns the default backend's InvalidArgument for an id that no volume of any
// backend can have. It is for calls that tell only the id: an unknown volume is no error in
// many of them, whoever's it was.
func (s *Set) ValidateID(id string) error {
	for _, name := range s.Names() {
		if s.Validate(Volume{ID: id, Backend: name}) == nil {
			return nil
		}
	}
	return s.Validate(Volume{ID: id})
}

// Find asks the volume's backend, and the Facts.
func (s *Set) Find(ctx context.Context, v Volume) (state.Device, error) {
	facts, _, d, err := s.noted(ctx, v)
	if facts != nil || err != nil {
		return d, err
	}
	b, err := s.of(ctx, v)
	if err != nil {
		return d, err
	}
	return b.Find(ctx, v)
}

// Attach lets the volume's backend attach it.
func (s *Set) Attach(ctx context.Context, v Volume, readOnly bool) error {
	b, err := s.of(ctx, v)
	if err != nil {
		return err
	}
	return b.Attach(ctx, v, readOnly)
}

// Detach lets the volume's backend detach it.
func (s *Set) Detach(ctx context.Context, v Volume) error {
	b, err := s.of(ctx, v)
	if err != nil {
		return err
	}
	return b.Detach(ctx, v)
}

// Grow lets the volume's backend grow it. FailedPrecondition: it cannot.
func (s *Set) Grow(ctx context.Context, v Volume, bytes int64) error {
	g, err := optional[Grower](ctx, s, v, "grow a volume")
	if err != nil {
		return err
	}
	return g.Grow(ctx, v, bytes)
}

// TryFormat notes, before BeginFormat, that it will be tried whether the volume keeps what
// is written to it, and returns the UUID of the trial; "" for a Formatter, whose volumes
// need no trial.
func (s *Set) TryFormat(ctx context.Context, v Volume) (uuid string, err error) {
	if err := s.keepsLayers(ctx, v); err != nil {
		return "", err
	}
	facts, v, d, err := s.noted(ctx, v)
	if facts == nil || err != nil {
		return "", err
	}
	return facts.TryFormat(ctx, v, d)
}

// BeginFormat is Formatter's. As EndFormat and BeginRaw it refuses a volume that would lack a layer
// with which it was made.
func (s *Set) BeginFormat(ctx context.Context, v Volume) error {
	return s.note(ctx, v, "format a volume", Formatter.BeginFormat, Facts.BeginFormat)
}

// EndFormat is Formatter's. An earlier stage may have begun the format, with the layer.
func (s *Set) EndFormat(ctx context.Context, v Volume, fsType string) error {
	return s.note(ctx, v, "format a volume",
		func(f Formatter, ctx context.Context, v Volume) error { return f.EndFormat(ctx, v, fsType) },
		func(f Facts, ctx context.Context, v Volume, d state.Device) error {
			return f.EndFormat(ctx, v, d, fsType)
		})
}

// AbandonFormat clears the formatting mark of a device that turned out to hold somebody's
// data, such as one that read as zeros for a while. It does nothing for a Formatter: its
// volumes hold nobody else's data.
func (s *Set) AbandonFormat(ctx context.Context, v Volume) error {
	facts, v, d, err := s.noted(ctx, v)
	if facts == nil || err != nil {
		return err
	}
	return facts.AbandonFormat(ctx, v, d)
}

// BeginRaw is Formatter's.
func (s *Set) BeginRaw(ctx context.Context, v Volume) error {
	return s.note(ctx, v, "show a volume raw", Formatter.BeginRaw, Facts.BeginRaw)
}

// note changes the facts about a volume: its backend does, or the Facts do.
func (s *Set) note(ctx context.Context, v Volume, what string, own func(Formatter, context.Context, Volume) error, noted func(Facts, context.Context, Volume, state.Device) error) error {
	if err := s.keepsLayers(ctx, v); err != nil {
		return err
	}
	if facts, v, d, err := s.noted(ctx, v); err != nil {
		return err
	} else if facts != nil {
		return noted(facts, ctx, v, d)
	}
	f, err := optional[Formatter](ctx, s, v, what)
	if err != nil {
		return err
	}
	return own(f, ctx, v)
}

// Erase is Eraser's.
func (s *Set) Erase(ctx context.Context, v Volume) error {
	b, err := s.of(ctx, v)
	if err != nil {
		return err
	}
	if e, own := b.(Eraser); own {
		return e.Erase(ctx, v)
	}
	facts, v, d, err := s.noted(ctx, v)
	switch {
	case err != nil:
		return err
	case facts == nil:
		return state.Errorf(state.FailedPrecondition, "volume %s: its backend cannot erase a volume", v.ID)
	}
	return facts.Erase(ctx, v, d)
}

const clearing = "clear a volume: empty it by the means of the storage itself"

// Unused is Clearer's.
func (s *Set) Unused(ctx context.Context, v Volume) error {
	c, err := optional[Clearer](ctx, s, v, clearing)
	if err != nil {
		return err
	}
	return c.Unused(ctx, v)
}

// Clear is Clearer's.
func (s *Set) Clear(ctx context.Context, v Volume) error {
	c, err := optional[Clearer](ctx, s, v, clearing)
	if err != nil {
		return err
	}
	facts, noted, d, err := s.noted(ctx, v)
	switch {
	case err != nil:
		return err
	case facts == nil:
		return c.Clear(ctx, v)
	}
	if err := c.Unused(ctx, v); err != nil { // before the facts say that it is to be erased
		return err
	}
	return facts.Clear(ctx, noted, d, func() error { return c.Clear(ctx, v) })
}

// optional returns the backend of a volume as one that can do more.
func optional[T any](ctx context.Context, s *Set, v Volume, what string) (can T, err error) {
	b, err := s.of(ctx, v)
	if err != nil {
		return can, err
	}
	can, ok := b.(T)
	if !ok {
		return can, state.Errorf(state.FailedPrecondition, "volume %s: its backend cannot %s", v.ID, what)
	}
	return can, nil
}
