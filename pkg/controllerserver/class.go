package controllerserver

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// class is the parsed parameters of a StorageClass.
type class struct {
	devices.Provisioner                   // that creates its volumes
	backend             string            // the name of the Provisioner
	parameters          map[string]string // with the defaults of the Provisioner
	layers              map[string]string // that the parameters ask for; nil: none
}

// class chooses the backend that the parameters name, else the default one. The
// backend completes the other parameters. InvalidArgument: there is no such backend,
// it does not create volumes, or it does not know the parameters.
func (s *Server) class(parameters map[string]string) (class, error) {
	name, named := parameters[devices.BackendKey]
	if !named {
		name = s.Backends.Default()
	}
	p, err := s.Backends.Provisioner(name)
	if err != nil {
		return class{}, fmt.Errorf("parameter %w", err)
	}
	layers, err := s.Backends.LayerContext(parameters)
	if err != nil {
		return class{}, fmt.Errorf("parameter %w", err)
	}
	own := ownParameters(parameters, layers)
	completed, err := p.CheckParameters(own)
	if err != nil {
		err = cmp.Or(misnamed(own), err)
	}
	return class{p, name, completed, layers}, err
}

// misnamed explains a parameter that is how other drivers, or their older versions, call what
// Kubernetes has a key of its own for; nil: there is none.
func misnamed(parameters map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		if strings.EqualFold(key, "fsType") {
			return state.Errorf(state.InvalidArgument, "parameter %q is not known: the file system is named by %sfstype", key, state.KubernetesPrefix)
		}
	}
	return nil
}

// ownParameters returns the parameters that are meant for the backend.
func ownParameters(parameters, layers map[string]string) map[string]string {
	own := maps.Clone(parameters)
	maps.DeleteFunc(own, func(key, _ string) bool {
		_, layer := layers[key]
		return layer || key == devices.BackendKey || strings.HasPrefix(key, state.KubernetesPrefix)
	})
	return own
}

// anyClass returns a class without parameters: of the default backend if that creates
// volumes, else of another.
func (s *Server) anyClass() (c class, err error) {
	for _, name := range append([]string{s.Backends.Default()}, s.Backends.Provisioners()...) {
		if c, err = s.class(map[string]string{devices.BackendKey: name}); err == nil {
			break
		}
	}
	return c, err
}

// differs describes the first parameter that counts and that a volume has with another
// value. It is empty if there is none, or if the backend does not keep parameters.
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
