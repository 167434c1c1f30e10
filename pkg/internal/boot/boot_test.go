package boot

import "testing"

func TestID(t *testing.T) {
	if a, err := ID(); err != nil || len(a) != 36 {
		t.Errorf("boot id %q: %v", a, err)
	}
}
