package state

// PublishedAs returns the device numbers with which a raw volume is published: that of its
// device, or that of its read-only view, which read-only targets of a writable stage show. Of
// a read-only stage they may show either.
func (v *Volume) PublishedAs(view bool) (numbers []DeviceNumber) {
	if v == nil || v.Stage == nil {
		return nil
	}
	for _, path := range v.TargetPaths() {
		t := v.Targets[path]
		if (t.Device != DeviceNumber{}) && (t.ReadOnly == view || v.Stage.ReadOnly) {
			numbers = append(numbers, t.Device)
		}
	}
	return numbers
}
