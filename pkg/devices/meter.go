package devices

import "context"

// Meter is a backend whose place can be measured, for the metrics.
type Meter interface {
	// Measure may block for as long as the storage does. Names and labels are the same
	// each time. With an error it also returns what could be measured.
	Measure(ctx context.Context) ([]Measurement, error)
}

// Measurement is one value of a backend's place, shown as the gauge
// csi_node_<kind>_<name>. No label holds a volume, a path or any other value without bound.
type Measurement struct {
	Name   string            // in lower case, with its unit, such as free_bytes
	Help   string            // one sentence, the same each time
	Labels map[string]string // in lower case
	Value  float64
}
