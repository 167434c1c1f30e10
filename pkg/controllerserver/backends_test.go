package controllerserver

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// array is an invented backend that differs from the pool: it chooses its own ids, its
// volumes have a context, and it does not keep their use.
type array struct {
	devices.Backend
	mu      sync.Mutex
	volumes map[string]devices.Provisioned // by id
	secrets []devices.Secrets
	forgets bool // what the parameters of its volumes were
}

const extent = 16 * mib

func (a *array) Owns(_ context.Context, id string) (bool, error) {
	return strings.HasPrefix(id, "array-"), nil
}

func (a *array) CheckParameters(parameters map[string]string) (map[string]string, error) {
	completed := map[string]string{"tier": "slow"}
	for key, value := range parameters {
		if key != "tier" {
			return nil, state.Errorf(state.InvalidArgument, "parameter %s is not known; there is tier", key)
		}
		completed[key] = value
	}
	return completed, nil
}

func (a *array) CreateVolume(_ context.Context, r devices.CreateRequest) (devices.Provisioned, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.secrets = append(a.secrets, r.Secrets)
	for _, v := range a.volumes {
		if v.Name == r.Name {
			if a.forgets {
				v.Parameters = nil
			}
			return v, nil
		}
	}
	bytes, err := r.Size.Choose(extent)
	if err != nil {
		return devices.Provisioned{}, err
	}
	v := devices.Provisioned{ID: "array-" + strings.ToUpper(r.Name), Name: r.Name, Bytes: bytes, Parameters: r.Parameters, Context: map[string]string{"lun": "7"}}
	maps.Copy(v.Context, r.Layers)
	a.volumes[v.ID] = v
	return v, nil
}

func (a *array) DeleteVolume(_ context.Context, v devices.Volume) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.secrets = append(a.secrets, v.Secrets)
	delete(a.volumes, v.ID)
	return nil
}

func (a *array) GetVolume(_ context.Context, v devices.Volume) (devices.Provisioned, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	have, there := a.volumes[v.ID]
	if !there {
		return have, state.Errorf(state.NotFound, "volume %s: the array has none", v.ID)
	}
	return have, nil
}

func (a *array) ListVolumes(context.Context) ([]string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Keys(a.volumes)), nil
}

func (a *array) GetCapacity(_ context.Context, parameters map[string]string) (devices.Capacity, error) {
	switch parameters["tier"] {
	case "fast":
		return devices.Capacity{Available: extent, Smallest: extent}, nil
	case "full":
		return devices.Capacity{Available: mib, Largest: mib, Smallest: extent}, nil
	}
	return devices.Capacity{Available: 1000 * gib, Largest: 10 * gib, Smallest: extent}, nil
}

// disk is a backend that does not create volumes.
type disk struct{ devices.Backend }

// withArray is a server of the pool, which is the default, of an array and of disks.
func withArray() (*Server, *array) {
	s, _ := newServer()
	a := &array{volumes: map[string]devices.Provisioned{}}
	s.Backends = devices.NewSet("pool", map[string]devices.Backend{"pool": s.Backends.Get("pool"), "array": a, "disk": disk{}})
	return s, a
}

func secretly(r *csi.CreateVolumeRequest) { r.Secrets = map[string]string{"key": "secret"} }

func TestBackendOfAClass(t *testing.T) {
	s, a := withArray()
	of := func(n string, more ...change) *csi.CreateVolumeRequest {
		return request(append([]change{name(n), size(gib+1, 0), parameters("backend", "array", "csi.storage.k8s.io/pvc/name", "x"), secretly}, more...)...)
	}
	for range 2 {
		resp, err := s.CreateVolume(t.Context(), of("v"))
		require.NoError(t, err)
		if v := resp.GetVolume(); v.GetVolumeId() != "array-V" || v.GetCapacityBytes() != gib+extent || !maps.Equal(v.GetVolumeContext(), map[string]string{"lun": "7", "backend": "array"}) {
			t.Errorf("answers %v", v)
		}
	}
	if _, err := s.CreateVolume(t.Context(), of("v", capable(block(writer)))); err != nil {
		t.Errorf("of a backend that does not keep what a volume is for: %v", err)
	}
	_, err := s.CreateVolume(t.Context(), of("v", parameters("backend", "array", "tier", "fast")))
	check(t, err, state.AlreadyExists, "tier slow, not fast")
	a.forgets = true
	if _, err := s.CreateVolume(t.Context(), of("v", parameters("backend", "array", "tier", "fast"))); err != nil {
		t.Errorf("of a backend that does not keep the parameters: %v", err)
	}
	a.forgets = false
	a.volumes["x"] = devices.Provisioned{Name: "nameless", Bytes: 2 * gib}
	_, err = s.CreateVolume(t.Context(), of("nameless"))
	check(t, err, state.Internal, "the backend array", "without an id")
	delete(a.volumes, "x")
	for words, change := range map[string]change{
		`"tape" is no backend of this plugin, which has array, disk, pool`: parameters("backend", "tape"),
		`"" is no backend`:                 parameters("backend", ""),
		"disk makes no volumes":            parameters("backend", "disk"),
		"there is tier":                    parameters("backend", "array", "provisioning", "thin"),
		`parameter "tier" is not known`:    parameters("backend", "pool", "tier", "fast"),
		`parameter "Backend" is not known`: parameters("Backend", "array"),
	} {
		_, err := s.CreateVolume(t.Context(), of("w", change))
		check(t, err, state.InvalidArgument, words)
	}
	_, err = s.CreateVolume(t.Context(), of("w", size(gib+1, gib+2)))
	check(t, err, state.OutOfRange, "multiples of 16777216")

	resp, err := s.CreateVolume(t.Context(), request(name("w"), parameters("backend", "pool")))
	if err != nil || len(resp.GetVolume().GetVolumeContext()) != 0 {
		t.Errorf("of the usual backend, by its name: %v (%v)", resp, err)
	}
	if all := pages(t, s, 1, func() {}); len(all) != 2 || !slices.Equal(slices.Sorted(slices.Values(slices.Concat(all...))), []string{"array-V", "w"}) {
		t.Errorf("lists %q", all)
	}
	got, err := s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "array-V"})
	if err != nil || got.GetVolume().GetVolumeContext()["backend"] != "array" {
		t.Errorf("answers %v (%v)", got, err)
	}
	_, err = s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "array-W"})
	check(t, err, state.NotFound, "the array has none")
	a.secrets = nil
	for _, id := range []string{"array-V", "array-V", "w", "unknown"} {
		if _, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id, Secrets: map[string]string{"key": "secret"}}); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if len(a.volumes) != 0 || len(pages(t, s, 0, func() {})[0]) != 0 || len(a.secrets) != 2 || a.secrets[0].Get("key") != "secret" {
		t.Errorf("left: %v; secrets %v", a.volumes, a.secrets)
	}
}

func TestValidateOfABackend(t *testing.T) {
	s, _ := withArray()
	if _, err := s.CreateVolume(t.Context(), request(name("v"), parameters("backend", "array"))); err != nil {
		t.Fatal(err)
	}
	for title, test := range map[string]struct {
		context, parameters map[string]string
		words               string // of the message; empty: confirmed
	}{
		"nothing":         {nil, nil, ""},
		"all":             {map[string]string{"lun": "7", "backend": "array", "csi.storage.k8s.io/pod.name": "x"}, map[string]string{"backend": "array", "tier": "slow"}, ""},
		"another lun":     {map[string]string{"lun": "8"}, nil, `another value of "lun"`},
		"another key":     {map[string]string{"wwn": "8"}, nil, `no key "wwn"`},
		"another tier":    {nil, map[string]string{"tier": "fast"}, "tier slow, not fast"},
		"another backend": {nil, map[string]string{"backend": "pool"}, "backend array, not pool"},
	} {
		resp, err := s.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "array-V",
			VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "")}, VolumeContext: test.context, Parameters: test.parameters})
		if err != nil || (resp.GetConfirmed() != nil) != (test.words == "") || !strings.Contains(resp.GetMessage(), test.words) {
			t.Errorf("%s: %v (%v)", title, resp, err)
		}
	}
	for _, backend := range []string{"pool", "disk", "tape"} {
		_, err := s.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "array-V",
			VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "")}, VolumeContext: map[string]string{"backend": backend}})
		check(t, err, state.NotFound, "array-V")
	}
}

func TestCapacityOfABackend(t *testing.T) {
	s, _ := withArray()
	for title, test := range map[string]struct {
		parameters             map[string]string
		available, most, least int64
	}{
		"usual":           {nil, 10 * gib, 10 * gib, 2 * mib},
		"named":           {map[string]string{"backend": "array"}, 1000 * gib, 10 * gib, extent},
		"parameters":      {map[string]string{"backend": "array", "tier": "fast"}, extent, extent, extent},
		"bad parameters":  {map[string]string{"backend": "array", "x": "y"}, 10 * gib, 10 * gib, 2 * mib},
		"no such backend": {map[string]string{"backend": "tape"}, 10 * gib, 10 * gib, 2 * mib},
		"makes none":      {map[string]string{"backend": "disk"}, 10 * gib, 10 * gib, 2 * mib},
	} {
		resp, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: test.parameters, VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "ext4")}})
		if err != nil || resp.GetAvailableCapacity() != test.available || resp.GetMaximumVolumeSize().GetValue() != test.most || resp.GetMinimumVolumeSize().GetValue() != test.least {
			t.Errorf("%s: %v (%v)", title, resp, err)
		}
	}
	// The default backend creates none: a class without the parameter is refused, and its node is not called full.
	s.Backends = devices.NewSet("disk", map[string]devices.Backend{"array": s.Backends.Get("array"), "disk": disk{}})
	if resp, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil || resp.GetAvailableCapacity() != 1000*gib {
		t.Errorf("answers %v (%v)", resp, err)
	}
	_, err := s.CreateVolume(t.Context(), request())
	check(t, err, state.InvalidArgument, "those that do are: array")
	if _, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "a-disk"}); err != nil {
		t.Errorf("a volume that nobody made: %v", err)
	}
	_, err = s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "a-disk"})
	check(t, err, state.NotFound, "a-disk")
}

// TestMoreTopology: a CO names all segments of a node together, those of the driver's builder, too.
func TestMoreTopology(t *testing.T) {
	s, _ := newServer()
	s.MoreTopology = func(context.Context) (map[string]string, error) { return map[string]string{"rack": "r1"}, nil }
	for at, here := range map[*csi.Topology]bool{
		topology(topologyKey, "node-1", "Rack", "r1"): true,
		topology("rack", "r1"):                        true,
		topology(topologyKey, "node-1", "rack", "r2"): false,
		topology(topologyKey, "node-2", "rack", "r1"): false,
		topology(topologyKey, "node-1", "zone", "r1"): false,
	} {
		_, err := s.CreateVolume(t.Context(), request(requisite(at)))
		room, e := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: at})
		require.NoError(t, e)
		if (err == nil) != here || (room.GetAvailableCapacity() > 0) != here {
			t.Errorf("%v: created: %v; room: %v", at, err, room)
		}
	}
	asked := 0
	s.MoreTopology = func(context.Context) (map[string]string, error) {
		asked++
		return nil, errors.New("the rack is not known")
	}
	_, err := s.CreateVolume(t.Context(), request(requisite(topology(topologyKey, "node-1", "rack", "r1"))))
	check(t, err, state.Unavailable, "the rack is not known")
	for _, without := range [][]*csi.Topology{{topology(topologyKey, "node-1", "rack", "r1"), topology(topologyKey, "node-1")}, {topology(topologyKey, "node-1")}} {
		_, err = s.CreateVolume(t.Context(), request(requisite(without...)))
		require.NoError(t, err)
	}
	_, err = s.CreateVolume(t.Context(), request(name("far"), requisite(topology(topologyKey, "node-2", "rack", "r1"), topology(topologyKey, "node-3", "rack", "r1"))))
	check(t, err, state.ResourceExhausted, "other nodes")
	if asked != 1 {
		t.Errorf("asked %d times for more segments, want once", asked)
	}
}

// TestAccessibleFromEverywhere: without a topology there is no other node.
func TestAccessibleFromEverywhere(t *testing.T) {
	s, _ := newServer()
	s.Topology = nil
	resp, err := s.CreateVolume(t.Context(), request(requisite(topology("zone", "z"))))
	if err != nil || len(resp.GetVolume().GetAccessibleTopology()) != 0 {
		t.Errorf("answers %v (%v)", resp, err)
	}
}

// Where no backend provisions, the driver says that it serves none of it.
func TestNothingIsProvisioned(t *testing.T) {
	s, _ := newServer()
	s.Backends = devices.NewSet("disk", map[string]devices.Backend{"disk": disk{}})
	if resp, err := s.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{}); err != nil || len(resp.GetCapabilities()) != 0 {
		t.Errorf("capabilities %v (%v)", resp, err)
	}
	for rpc, call := range calls(t, s) {
		check(t, call(), state.Unimplemented, rpc)
	}
}
