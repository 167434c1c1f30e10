package report

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// Nobody calls NodeStageVolume or NodeUnstageVolume for an inline volume.
func TestInlineVolumesAreNotStagedByACall(t *testing.T) {
	for bits := range 1 << 5 {
		v := staged(&state.Target{Path: pod})
		s := v.Stage
		s.Gone, s.Withdrawn, s.Adopted, s.Provisional = bits&1 != 0, bits&2 != 0, bits&4 != 0, bits&8 != 0
		s.Inline = &state.Inline{Target: pod, Made: true, Ended: bits&16 != 0}
		told := strings.Join(Make(Facts{Want: v, Looked: true}, now).Explanation().Asked, " ")
		if strings.Contains(told, "NodeStageVolume") || strings.Contains(told, "NodeUnstageVolume") || !strings.Contains(told, place) {
			t.Errorf("of %+v is told %q", s, told)
		}
	}
}
