package devices

import (
	"context"
	"slices"

	"github.com/csi-node/csi-node/pkg/state"
)

// Layer makes a device on top of another one, such as an encrypted one. A volume's
// device is a stack: the backend's, which is the source, then a device for each
// layer that the volume wants. The top is formatted, mounted and published.
//
// The engine opens and grows from the source up, and closes from the top down. Its
// calls for one volume never overlap. What blocks, and what a context ends, is as
// for a Backend. v may be without contexts, such as after the loss of the store: Find
// and Close must work with the id alone then.
type Layer interface {
	// Name is the layer's name in steps, errors and the facts about formatting. It
	// never changes.
	Name() string
	// Wanted reports whether the volume has the layer. It is pure.
	Wanted(v Volume) bool
	// Find returns the device of the layer. Its cost does not depend on the number of
	// volumes.
	//
	// If the lower element is attached, Find tells whether that bears the layer (else
	// Device.Unmade), and whether the layer is Fresh: stamped new, as Create does. The
	// state is that of the layer's own device; Capacity is the most bytes that it can have
	// on the lower element as it is now. A device that bears the volume's name and lies on
	// another element than lower is foreign and Stray, also when lower is not attached. If
	// the volume does not want the layer, Find only looks for the layer's own device and
	// what that lies on.
	Find(ctx context.Context, lower state.Device, v Volume) (state.Device, error)
	// Create makes the layer on a lower element that was proved blank and bears the
	// formatting mark, and stamps it new, durably. Its header has the lower element's
	// FormatUUID from the first moment, if that is not empty. It does nothing if there is a
	// layer that is stamped new. If it is interrupted, either such a layer is there or none
	// (Unmade).
	Create(ctx context.Context, lower state.Device, v Volume) error
	// Open makes the layer's device, or reclaims one that is going away; it does
	// nothing if it is open so already. Unauthenticated: v.Secrets lack the key, or
	// it is the wrong one.
	Open(ctx context.Context, lower state.Device, v Volume, readOnly bool) error
	// Close removes the layer's device, also one that is Stray. nil means that it was
	// seen to be gone. A device that is mounted or claimed stays as it is.
	Close(ctx context.Context, lower state.Device, v Volume) error
	// Grow lets the layer's open device fill the lower element.
	Grow(ctx context.Context, lower state.Device, v Volume) error
	// Erase makes every byte of the layer's open device zero, durably.
	// FailedPrecondition: the layer is not stamped new.
	Erase(ctx context.Context, lower state.Device, v Volume) error
	// Used removes the stamp, durably: from now on there is data on the layer.
	Used(ctx context.Context, lower state.Device, v Volume) error
}

// PlacedLayer is a layer that must know where it runs.
type PlacedLayer interface {
	Layer
	// In returns the layer in an environment. It is called before anything else is.
	In(Environment) Layer
}

// ClassLayer is a layer for which a StorageClass asks, by a parameter that becomes a
// key of the volume context. Its methods are pure.
type ClassLayer interface {
	Layer
	// ContextKey is the parameter, and the key.
	ContextKey() string
	// Validate returns InvalidArgument for a value of the key that the layer does not
	// have: a volume must not lack a layer because of a typing error.
	Validate(Volume) error
	// Overhead is how many bytes of the element beneath the layer takes for itself. The
	// backend's volume is made larger by them; the sizes that the CO sees do not include
	// them.
	Overhead() int64
}

// PlaceLayers returns the layers of a driver in their environment.
func PlaceLayers(layers []Layer, env Environment) []Layer {
	placed := slices.Clone(layers)
	for i, l := range placed {
		if p, ok := l.(PlacedLayer); ok {
			placed[i] = p.In(env)
		}
	}
	return placed
}

// KeepLayers tells a Set which layers its volumes can have. It is called before
// anything else is.
func (s *Set) KeepLayers(layers []Layer) {
	for _, l := range layers {
		if c, ok := l.(ClassLayer); ok {
			s.layers = append(s.layers, c)
		}
	}
}

// LayerContext returns the parameters of a StorageClass that ask for layers, which belong
// in the volume context; nil: no layer is asked for. InvalidArgument: there is no such
// layer.
func (s *Set) LayerContext(parameters map[string]string) (layers map[string]string, err error) {
	for _, l := range s.layers {
		if value, named := parameters[l.ContextKey()]; named {
			if layers == nil {
				layers = map[string]string{}
			}
			layers[l.ContextKey()] = value
		}
	}
	return layers, s.validateLayers(Volume{Context: layers})
}

// validateLayers returns InvalidArgument for an unknown layer.
func (s *Set) validateLayers(v Volume) error {
	for _, l := range s.layers {
		if err := l.Validate(v); err != nil {
			return err
		}
	}
	return nil
}

// keepsLayers returns FailedPrecondition for a volume that its backend has made with a layer for
// which its context does not ask: what is written to it would lack that, such as encryption.
func (s *Set) keepsLayers(ctx context.Context, v Volume) error {
	if len(s.layers) == 0 {
		return nil
	}
	name, b, err := s.named(ctx, v)
	if err != nil {
		return err
	}
	p, makes := b.(Provisioner)
	if !makes {
		return nil
	}
	have, err := p.GetVolume(ctx, Volume{ID: v.ID, Backend: name})
	switch {
	case err != nil && state.ClassOf(err) == state.NotFound: // it is none that the backend has made
		return nil
	case err != nil:
		return err
	}
	for _, l := range s.layers {
		if key := l.ContextKey(); l.Wanted(Volume{Context: have.Context}) && !l.Wanted(v) {
			return state.Errorf(state.FailedPrecondition, "volume %s: it was created with %s=%s, and is not asked for so: replace the PersistentVolume, with the reclaim policy Retain, by one that has this among its volumeAttributes, as csi-node volume manifest %s prints it", v.ID, key, have.Context[key], v.ID)
		}
	}
	return nil
}

// Overhead returns how many bytes of a volume with that context its layers take.
func (s *Set) Overhead(context map[string]string) (bytes int64) {
	for _, l := range s.layers {
		if l.Wanted(Volume{Context: context}) {
			bytes += l.Overhead()
		}
	}
	return bytes
}
