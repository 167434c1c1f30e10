package devices

import "context"

// ValidateID returns InvalidArgument for the id of a volume of which nothing else
// is known, if there can be none: the usual backend can have no such volume, and
// no Owner says that it has. It asks an Owner only if the usual one refuses.
func (s *Set) ValidateID(ctx context.Context, id string) error {
	refused := s.Validate(Volume{ID: id})
	if refused == nil {
		return nil
	}
	name, err := s.Resolve(ctx, Volume{ID: id})
	switch {
	case err != nil:
		return err
	case name == s.usual:
		return refused
	}
	return s.Validate(Volume{ID: id, Backend: name})
}
