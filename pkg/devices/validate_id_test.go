package devices

import (
	"context"
	"errors"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// picky has volumes of one id, or of any.
type picky struct {
	Backend
	id  string // "" for any
	err error  // of Owns
}

func (p picky) Validate(v Volume) error {
	if p.id != "" && v.ID != p.id {
		return state.Errorf(state.InvalidArgument, "not %s", p.id)
	}
	return nil
}

func (p picky) Owns(_ context.Context, id string) (bool, error) { return id == "owned", p.err }

// An id that the usual backend refuses is another's only if that says so.
func TestValidateID(t *testing.T) {
	broken := state.Errorf(state.Unavailable, "the notes cannot be read")
	for id, test := range map[string]struct {
		other picky
		ok    bool
		class state.Class
	}{
		"good":    {picky{}, true, 0},
		"owned":   {picky{}, true, 0},
		"nobodys": {picky{}, false, state.InvalidArgument},
		"unknown": {picky{err: broken}, false, state.Unavailable},
	} {
		err := NewSet("usual", map[string]Backend{"usual": picky{id: "good"}, "other": test.other}).ValidateID(t.Context(), id)
		if test.ok != (err == nil) || !test.ok && state.ClassOf(err) != test.class {
			t.Errorf("%s: %v", id, err)
		}
		if id == "unknown" && !errors.Is(err, broken) {
			t.Errorf("%s: %v", id, err)
		}
	}
}
