package devices

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
