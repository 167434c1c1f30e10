package controllerserver

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
)

// class is the parameters of a StorageClass, understood.
type class struct {
	devices.Provisioner                   // of which the volumes are
	backend             string            // its name
	parameters          map[string]string // completed
}

// class chooses the backend that the parameters name, else the usual one, which
// completes the others. InvalidArgument: there is no such backend, it makes no
// volumes, or it does not know the parameters.
func (s *Server) class(parameters map[string]string) (class, error) {
	name, named := parameters[devices.BackendKey]
	if !named {
		name = s.Backends.Usual()
	}
	p, err := s.Backends.Provisioner(name)
	if err != nil {
		return class{}, fmt.Errorf("parameter %w", err)
	}
	completed, err := p.CheckParameters(ownParameters(parameters))
	return class{p, name, completed}, err
}

// ownParameters returns those that are the backend's to know.
func ownParameters(parameters map[string]string) map[string]string {
	own := maps.Clone(parameters)
	maps.DeleteFunc(own, func(key, _ string) bool {
		return key == devices.BackendKey || strings.HasPrefix(key, devices.KubernetesPrefix)
	})
	return own
}

// anyClass returns the class of no parameters, of the usual backend if that has one.
func (s *Server) anyClass() (c class, err error) {
	for _, name := range append([]string{s.Backends.Usual()}, s.Backends.Provisioners()...) {
		if c, err = s.class(map[string]string{devices.BackendKey: name}); err == nil {
			break
		}
	}
	return c, err
}

// differs says which parameter that counts a volume has otherwise; empty: none, as
// far as its backend keeps them.
func differs(have, want map[string]string, counts func(key string) bool) string {
	if have == nil {
		return ""
	}
	all := slices.Concat(slices.Collect(maps.Keys(have)), slices.Collect(maps.Keys(want)))
	slices.Sort(all)
	for _, key := range all {
		if h, w := value(have, key), value(want, key); h != w && counts(key) {
			return fmt.Sprintf("%s %s, not %s", key, h, w)
		}
	}
	return ""
}

func value(parameters map[string]string, key string) string {
	if v, given := parameters[key]; given {
		return v
	}
	return "by default"
}
