package devices

import "cmp"

// PublishIdentity is a backend that knows which keys of a publish context identify the
// storage. For other backends all keys do.
type PublishIdentity interface {
	// PublishIdentity reports whether a key of the volume's publish context is
	// part of what is asked for. A request that differs in other keys is the same
	// request, and their latest values are kept. It is pure.
	PublishIdentity(v Volume, key string) bool
}

// PublishIdentity asks the backend that the volume, or its context, names.
func (s *Set) PublishIdentity(v Volume, key string) bool {
	b, ok := s.backends[cmp.Or(v.Backend, s.Named(v))].(PublishIdentity)
	return !ok || b.PublishIdentity(v, key)
}
