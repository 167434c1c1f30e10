package devices

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// String leaves out the secrets, and the values of the contexts, which may be large.
func (v Volume) String() string {
	text := v.ID
	if v.Backend != "" {
		text += " of " + v.Backend
	}
	for _, part := range []struct {
		name string
		keys map[string]string
	}{{"context", v.Context}, {"publish context", v.Publish}, {"secrets", v.Secrets}} {
		if len(part.keys) > 0 {
			text += fmt.Sprintf(", %s with %s", part.name, strings.Join(slices.Sorted(maps.Keys(part.keys)), " "))
		}
	}
	return text
}

// GoString is String, so that no verb of package fmt shows the secrets.
func (v Volume) GoString() string { return v.String() }

// MarshalLog is what a log shows.
func (v Volume) MarshalLog() any { return v.String() }
