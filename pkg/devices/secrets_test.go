package devices

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/csi-node/csi-node/test/require"
)

func TestSecrets(t *testing.T) {
	named := map[string]string{"key": "hunter2", "another": ""}
	s := NewSecrets(named)
	named["key"] = "changed"
	if s.Get("key") != "hunter2" || s.Get("none") != "" || !slices.Equal(s.Keys(), []string{"another", "key"}) {
		t.Errorf("the secrets are %s, %q", s, s.Get("key"))
	}
	for _, none := range []Secrets{{}, NewSecrets(nil), NewSecrets(map[string]string{})} {
		if none.Get("key") != "" || none.Keys() != nil || !none.Equal(Secrets{}) || none.Equal(s) {
			t.Errorf("there are secrets: %s", none)
		}
	}
}

// No way in which they come into a log, an error or a file shows secrets.
func TestSecretsAreNotShown(t *testing.T) {
	const value = "hunter2"
	s := NewSecrets(map[string]string{"key": value})
	v := Volume{ID: "v", Backend: "b", Context: map[string]string{"c": "1"}, Publish: map[string]string{"p": "2"}, Secrets: s}
	var logged bytes.Buffer
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&logged), textlogger.Verbosity(9)))
	hides := func(how, shown string) {
		t.Helper()
		for _, form := range []string{"%s", "%q", "%x", "% x", "%X", "%# x", "%d", "%v"} { // of the text, and of its bytes
			for _, secret := range []any{value, []byte(value)} {
				if form := fmt.Sprintf(form, secret); strings.Contains(shown, strings.Trim(form, "[]\"")) {
					t.Errorf("%s: %s", how, shown)
				}
			}
		}
	}
	for _, holder := range []any{
		s, &s, v, &v, []Volume{v}, map[string]Secrets{"s": s}, []any{s, &s}, fmt.Errorf("volume %v: %+v", v, s),
		struct{ Shown Volume }{v}, struct{ shown Volume }{v}, struct{ shown *Secrets }{&s}, &struct{ shown any }{s},
		CreateRequest{Name: "v", Secrets: s}, &InlineRequest{ID: "v", Secrets: s},
	} {
		for verb := rune('A'); verb <= 'z'; verb++ { // those that there are, and those that there are not
			for _, flags := range []string{"", "+", "#", "# ", "+#", " ", "0", "-9"} {
				form := "%" + flags + string(verb)
				hides(form, fmt.Sprintf(form, holder))
			}
		}
		hides("Sprint", fmt.Sprint(holder))
		if raw, err := json.Marshal(holder); err == nil { // a function, as of InlineRequest, is an error
			hides("JSON", string(raw))
		}
		if raw, err := xml.Marshal(holder); err == nil {
			hides("XML", string(raw))
		}
		logger.Info("A text", "holder", holder)
		klog.LoggerWithValues(logger, "with", holder).Error(nil, "A text", "object", klog.Format(holder))
	}
	hides("klog", logged.String())
	if !strings.Contains(logged.String(), "A text") {
		t.Error("nothing was logged")
	}
	raw, err := json.Marshal(v)
	require.NoError(t, err)
	if !strings.Contains(string(raw), `"ID":"v"`) {
		t.Errorf("JSON: %s", raw)
	}
	if got, want := v.String(), "v of b, context with c, publish context with p, secrets with key"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
