package devices

import (
	"context"
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
