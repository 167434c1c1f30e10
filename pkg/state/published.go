package state

// PublishedAs returns the numbers with which a raw volume is published: of its
// device, or of the view over that, which read-only targets of a stage that is
// written show.
func (v *Volume) PublishedAs(view bool) (numbers []DeviceNumber) {
	if v == nil || v.Stage == nil {
		return nil
	}
	for _, path := range v.TargetPaths() {
		t := v.Targets[path]
		if (t.Device != DeviceNumber{}) && (t.ReadOnly && !v.Stage.ReadOnly) == view {
			numbers = append(numbers, t.Device)
		}
	}
	return numbers
}
