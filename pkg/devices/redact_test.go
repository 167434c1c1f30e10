package devices

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

// No way in which a volume comes into a log or an error shows its secrets.
func TestSecretsAreNotShown(t *testing.T) {
	v := Volume{ID: "v", Backend: "b", Context: map[string]string{"c": "1"}, Publish: map[string]string{"p": "2"}, Secrets: map[string]string{"key": "hunter2"}}
	raw, err := json.Marshal(v)
	require.NoError(t, err)
	for name, shown := range map[string]string{
		"%v": fmt.Sprintf("%v", v), "%+v": fmt.Sprintf("%+v", v), "%#v": fmt.Sprintf("%#v", v), "String": v.String(),
		"%v of a pointer": fmt.Sprintf("%+v", &v), "within": fmt.Sprintf("%+v %#v", struct{ V Volume }{v}, []Volume{v}),
		"log": fmt.Sprint(v.MarshalLog()), "JSON": string(raw),
	} {
		if strings.Contains(shown, "hunter2") {
			t.Errorf("%s: %s", name, shown)
		}
		if !strings.Contains(shown, "v") {
			t.Errorf("%s does not name the volume: %s", name, shown)
		}
	}
	if got, want := v.String(), "v of b, context with c, publish context with p, secrets with key"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
