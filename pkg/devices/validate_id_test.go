package devices

import (
	"context"
	"errors"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// picky has volumes of one id.
type picky struct {
	Backend
	id string
}

func (p picky) Validate(v Volume) error {
	if v.ID != p.id {
		return state.Errorf(state.InvalidArgument, "not %s", p.id)
	}
	return nil
}

// Owns fails: whose a volume is does not matter.
func (p picky) Owns(context.Context, string) (bool, error) {
	return false, errors.New("the notes cannot be read")
}

// An id that any backend can have is no error, also when nobody has the volume any more: an
// unstage that is asked for again finds no record and no note.
func TestValidateID(t *testing.T) {
	s := NewSet("usual", map[string]Backend{"usual": picky{id: "good"}, "other": picky{id: "others"}})
	for _, id := range []string{"good", "others"} {
		if err := s.ValidateID(id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	require.Class(t, s.ValidateID("bad"), state.InvalidArgument, "not good")
}
