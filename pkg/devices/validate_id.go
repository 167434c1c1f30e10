package devices

import "context"

// ValidateID returns InvalidArgument for an id that no volume can have: the default backend
// refuses it, and no Owner claims it. It is for calls that tell only the id.
func (s *Set) ValidateID(ctx context.Context, id string) error {
	refused := s.Validate(Volume{ID: id})
	if refused == nil {
		return nil
	}
	name, err := s.Resolve(ctx, Volume{ID: id})
	switch {
	case err != nil:
		return err
	case name == s.byDefault:
		return refused
	}
	return s.Validate(Volume{ID: id, Backend: name})
}
