package devices

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Secrets are secrets by their keys. The zero value holds none. No verb of package fmt, no
// log and no JSON shows a value, whatever the Secrets are part of.
type Secrets struct {
	values func() map[string]string // a function, because package fmt looks into all else
}

// NewSecrets returns Secrets with a copy of the values.
func NewSecrets(values map[string]string) Secrets {
	if len(values) == 0 {
		return Secrets{}
	}
	values = maps.Clone(values)
	return Secrets{func() map[string]string { return values }}
}

func (s Secrets) all() map[string]string {
	if s.values == nil {
		return nil
	}
	return s.values()
}

// Get returns the secret of a key; empty: there is none.
func (s Secrets) Get(key string) string { return s.all()[key] }

// Keys returns the keys, in order.
func (s Secrets) Keys() []string { return slices.Sorted(maps.Keys(s.all())) }

// Equal reports whether both have the same keys and values.
func (s Secrets) Equal(other Secrets) bool { return maps.Equal(s.all(), other.all()) }

// String names the keys.
func (s Secrets) String() string { return strings.Join(s.Keys(), " ") }

// String leaves out the secrets, and the values of the contexts, which may be large.
func (v Volume) String() string {
	text := v.ID
	if v.Backend != "" {
		text += " of " + v.Backend
	}
	for _, part := range []struct {
		name string
		keys []string
	}{{"context", slices.Sorted(maps.Keys(v.Context))}, {"publish context", slices.Sorted(maps.Keys(v.Publish))}, {"secrets", v.Secrets.Keys()}} {
		if len(part.keys) > 0 {
			text += fmt.Sprintf(", %s with %s", part.name, strings.Join(part.keys, " "))
		}
	}
	return text
}
