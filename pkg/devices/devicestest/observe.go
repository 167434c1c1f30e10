package devicestest

import (
	"maps"
	"regexp"
	"slices"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// list: what is attached is listed as Find tells of it, in the order of the ids, also
// by a backend that did not attach it; what is detached is not.
func (s *suite) list() {
	first, second := s.Create(s.T, "list-a"), s.Create(s.T, "list-b")
	for _, v := range []string{second, first} {
		s.attached(v, false)
	}
	s.b = s.Open(s.T)
	for _, want := range [][]string{{first, second}, {first}} {
		slices.Sort(want)
		all, err := s.b.(devices.Lister).Attached(s.ctx)
		s.ok(err)
		var listed []string
		for _, a := range all {
			if a.Volume != first && a.Volume != second {
				continue
			}
			listed = append(listed, a.Volume)
			if d, err := s.b.Find(s.ctx, of(a.Volume)); err != nil || a.Device != d {
				s.Errorf("volume %s is listed with %+v; Find returns %+v (%v)", a.Volume, a.Device, d, err)
			}
		}
		if !slices.Equal(listed, want) {
			s.Errorf("attached are %q in this order, and listed are %q", want, listed)
		}
		s.ok(s.b.Detach(s.ctx, of(second)))
	}
}

// locate: a number leads to the volume whose device has it, and to no other.
func (s *suite) locate() {
	at := func(number state.DeviceNumber) string { return s.b.(devices.Locator).VolumeAt(number) }
	first, second := s.Create(s.T, "locate-a"), s.Create(s.T, "locate-b")
	numbers := map[string]state.DeviceNumber{first: s.attached(first, false).Number, second: s.attached(second, false).Number}
	s.b = s.Open(s.T)
	for v, number := range numbers {
		s.attached(v, false)
		if id := at(number); id != v {
			s.Errorf("the device %s shows volume %s, and is that of %q", number, v, id)
		}
	}
	s.ok(s.b.Detach(s.ctx, of(first)))
	for _, number := range []state.DeviceNumber{{}, numbers[first]} {
		if id := at(number); id == first || id == second {
			s.Errorf("the device %s is that of %q, which is not attached there", number, id)
		}
	}
}

var metricName = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// measure: of each name there is one help, of each name and labels one value, and
// the same ones each time.
func (s *suite) measure() {
	var before []devices.Measurement
	for range 2 {
		all, err := s.b.(devices.Meter).Measure(s.ctx)
		s.ok(err)
		var seen []devices.Measurement
		for _, m := range all {
			if !metricName.MatchString(m.Name) || m.Help == "" {
				s.Errorf("%q is no name of a metric in lower case, or has no help: %q", m.Name, m.Help)
			}
			for label := range m.Labels {
				if !metricName.MatchString(label) {
					s.Errorf("%q is no name of a label in lower case, of the metric %s", label, m.Name)
				}
			}
			for _, o := range seen {
				switch {
				case o.Name == m.Name && o.Help != m.Help:
					s.Errorf("%s has two helps, %q and %q", m.Name, o.Help, m.Help)
				case isOf(m)(o):
					s.Errorf("%s %v has two values, %v and %v", m.Name, m.Labels, o.Value, m.Value)
				}
			}
			seen = append(seen, m)
			if before != nil && !slices.ContainsFunc(before, isOf(m)) {
				s.Errorf("%s %v was not measured before", m.Name, m.Labels)
			}
		}
		if len(seen) < len(before) {
			s.Errorf("%d values were measured, and %d before", len(seen), len(before))
		}
		before = seen
	}
}

// isOf returns whether a measurement is another one of the same name and labels.
func isOf(m devices.Measurement) func(devices.Measurement) bool {
	return func(o devices.Measurement) bool { return o.Name == m.Name && maps.Equal(o.Labels, m.Labels) }
}
