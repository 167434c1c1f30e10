package devices

import (
	"context"
	"errors"
	"maps"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// share knows one key of a volume context, and says what else it has got.
type share struct{ Backend }

func (share) Validate(v Volume) error {
	if !maps.Equal(v.Context, map[string]string{"path": "a"}) {
		return state.Errorf(state.InvalidArgument, "unknown: %v", v.Context)
	}
	return nil
}

func (p share) Source(_ context.Context, v Volume) (state.Source, bool, error) {
	return state.Source{}, true, p.Validate(v)
}

// A backend gets none of the keys that Kubernetes adds to a volume context, of which some are
// secret, and the caller keeps them.
func TestKeysOfKubernetes(t *testing.T) {
	all := map[string]string{"path": "a", state.KubernetesPrefix + "serviceAccount.tokens": "s3cret", state.KubernetesPrefix + "pod.name": "web"}
	asked := maps.Clone(all)
	s := NewSet("nas", map[string]Backend{"nas": share{}})
	v := Volume{ID: "v", Context: asked}
	require.NoError(t, s.Validate(v))
	_, _, err := s.Source(t.Context(), v)
	require.NoError(t, err)
	require.NoError(t, share{}.Validate(Recorded(&state.Volume{ID: "v", Stage: &state.Stage{Context: asked}})))
	if !maps.Equal(asked, all) {
		t.Errorf("the caller's context is %v", asked)
	}
}

// choosy is a layer that one value of its key asks for.
type choosy struct{ ClassLayer }

func (choosy) ContextKey() string   { return "compress" }
func (choosy) Wanted(v Volume) bool { return v.Context["compress"] == "zip" }

// madeWith makes volumes, keeps their facts, and has one, with a context; nil: it has none.
type madeWith struct {
	Backend
	Provisioner
	Formatter
	context map[string]string
}

func (m madeWith) GetVolume(context.Context, Volume) (Provisioned, error) {
	if m.context == nil {
		return Provisioned{}, state.Errorf(state.NotFound, "no such volume")
	}
	return Provisioned{Context: m.context}, nil
}

func (madeWith) BeginFormat(context.Context, Volume) error       { return nil }
func (madeWith) EndFormat(context.Context, Volume, string) error { return nil }
func (madeWith) BeginRaw(context.Context, Volume) error          { return nil }

// A volume is not written without a layer with which it was made because its context lacks that.
func TestVolumeKeepsItsLayers(t *testing.T) {
	zip, off := map[string]string{"compress": "zip"}, map[string]string{"compress": "off"}
	for name, c := range map[string]struct {
		made, asked map[string]string
		refused     bool
	}{
		"made with it, and not asked for":      {zip, nil, true},
		"made with it, and asked for without":  {zip, off, true},
		"made with it, and asked for":          {zip, zip, false},
		"made without, by a value of its own":  {off, nil, false},
		"made without, and asked for":          {map[string]string{}, zip, false},
		"not made by the backend":              {nil, nil, false},
		"not made by the backend, but so used": {nil, zip, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewSet("maker", map[string]Backend{"maker": madeWith{context: c.made}})
			s.KeepLayers([]Layer{choosy{}})
			v := Volume{ID: "v", Context: c.asked}
			for step, do := range map[string]func() error{
				"begin a format": func() error { return s.BeginFormat(t.Context(), v) },
				"end a format":   func() error { return s.EndFormat(t.Context(), v, "ext4") },
				"begin raw":      func() error { return s.BeginRaw(t.Context(), v) },
				"try a format":   func() error { _, err := s.TryFormat(t.Context(), v); return err },
			} {
				if err := do(); (err != nil) != c.refused {
					t.Errorf("%s: %v", step, err)
				} else if c.refused {
					require.Class(t, err, state.FailedPrecondition, "created with compress=zip", "csi-node volume manifest v")
				}
			}
		})
	}
}

// noted counts what is forgotten.
type noted struct {
	Facts
	forgotten *int
}

func (noted) Tell(Volume, *state.Device) {}

func (n noted) Forget(context.Context, Volume, state.Device) error { *n.forgotten++; return nil }

// deleter makes volumes, and keeps no facts.
type deleter struct {
	Backend
	Provisioner
	missing  bool
	returned error
}

func (d deleter) Find(context.Context, Volume) (state.Device, error) {
	return state.Device{Missing: d.missing}, nil
}
func (d deleter) DeleteVolume(context.Context, Volume) error { return d.returned }

// What is noted of a volume goes with it, and not with one that the backend does not call its own.
func TestDeletedVolumeIsForgotten(t *testing.T) {
	none := state.Errorf(state.NotFound, "none")
	for name, c := range map[string]struct {
		backend   deleter
		class     state.Class // of the error; none: OK
		forgotten int
	}{
		"deleted":                   {deleter{}, 0, 1},
		"deleted before":            {deleter{missing: true, returned: none}, 0, 1},
		"there, and not its own":    {deleter{returned: none}, 0, 0},
		"in use":                    {deleter{returned: state.Errorf(state.FailedPrecondition, "in use")}, state.FailedPrecondition, 0},
		"of an id that none can be": {deleter{returned: state.Errorf(state.InvalidArgument, "no id"), missing: true}, 0, 1},
	} {
		forgotten := 0
		s := NewSet("deleter", map[string]Backend{"deleter": c.backend})
		s.KeepFacts(noted{forgotten: &forgotten})
		err := s.DeleteVolume(t.Context(), Volume{ID: "v", Backend: "deleter"})
		if (err != nil) != (c.class != 0) || err != nil && state.ClassOf(err) != c.class || forgotten != c.forgotten {
			t.Errorf("%s: %v, and forgotten %d times", name, err, forgotten)
		}
	}
}

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
