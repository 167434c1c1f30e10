package controllerserver

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

const (
	topologyKey = "topology.csi-node.test/node"
	gib         = 1 << 30
	mib         = 1 << 20
)

// fakePool keeps volumes in memory. A backend that holds them for it is provisioned.
type fakePool struct {
	volumes  map[string]pool.Volume
	capacity pool.Capacity
	err      error // of every call
	deleted  []string
}

func (f *fakePool) Create(_ context.Context, v pool.Volume) (pool.Volume, error) {
	if have, ok := f.volumes[v.ID]; ok {
		return have, state.Errorf(state.AlreadyExists, "volume %s: exists", v.ID)
	}
	if v.Bytes > f.capacity.Available {
		return pool.Volume{}, state.Errorf(state.ResourceExhausted, "volume %s: no room", v.ID)
	}
	f.volumes[v.ID] = v
	return v, f.err
}

func (f *fakePool) Get(_ context.Context, id string) (pool.Volume, error) {
	if err := pool.ValidateID(id); err != nil {
		return pool.Volume{}, err
	}
	v, ok := f.volumes[id]
	if !ok && f.err == nil {
		return pool.Volume{}, state.Errorf(state.NotFound, "volume %s: none", id)
	}
	return v, f.err
}

func (f *fakePool) IDs(context.Context) ([]string, error) {
	return slices.Sorted(maps.Keys(f.volumes)), f.err
}

func (f *fakePool) Capacity(context.Context) (pool.Capacity, error) { return f.capacity, f.err }

func (f *fakePool) Delete(_ context.Context, id string) error {
	if err := pool.ValidateID(id); err != nil {
		return err
	}
	f.deleted = append(f.deleted, id)
	delete(f.volumes, id)
	return f.err
}

// provisioned is the pool's own backend over volumes of a test, which attaches none.
type provisioned struct {
	devices.Backend
	pool.Provisioner
}

func backends(volumes pool.Volumes, delete func(context.Context, string) error) *devices.Set {
	return devices.NewSet("pool", map[string]devices.Backend{"pool": provisioned{Provisioner: pool.Provisioner{Volumes: volumes, Delete: delete}}})
}

type fakeFilesystems struct{}

func (fakeFilesystems) Types() []string      { return []string{"ext4", "xfs"} }
func (fakeFilesystems) Default(int64) string { return "ext4" }
func (fakeFilesystems) Smallest(fsType string) int64 {
	return map[string]int64{"ext4": 2 * mib, "xfs": 300 * mib}[fsType]
}

type fakeIntents map[string]*state.Volume

func (f fakeIntents) Get(id string) *state.Volume { return f[id] }

func newServer() (*Server, *fakePool) {
	p := &fakePool{volumes: map[string]pool.Volume{}, capacity: pool.Capacity{Total: 100 * gib, Available: 10*gib + 1, Promised: gib, Largest: 64 * gib}}
	return New(Config{
		NodeID: "node-1", Topology: map[string]string{topologyKey: "node-1"}, Filesystems: fakeFilesystems{},
		Backends: backends(p, p.Delete), Intents: fakeIntents{},
	}), p
}

type mode = csi.VolumeCapability_AccessMode_Mode

const writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER

func mount(m mode, fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

func block(m mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

func topology(pairs ...string) *csi.Topology {
	t := &csi.Topology{Segments: map[string]string{}}
	for i := 0; i < len(pairs); i += 2 {
		t.Segments[pairs[i]] = pairs[i+1]
	}
	return t
}

// request returns a valid request with changes.
func request(changes ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
	r := &csi.CreateVolumeRequest{
		Name:               "pvc-1",
		CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "")},
	}
	for _, change := range changes {
		change(r)
	}
	return r
}

type change = func(*csi.CreateVolumeRequest)

func name(n string) change { return func(r *csi.CreateVolumeRequest) { r.Name = n } }

func size(required, limit int64) change {
	return func(r *csi.CreateVolumeRequest) {
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
	}
}

func capable(c ...*csi.VolumeCapability) change {
	return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = c }
}

func parameters(pairs ...string) change {
	return func(r *csi.CreateVolumeRequest) { r.Parameters = topology(pairs...).Segments }
}

func requisite(t ...*csi.Topology) change {
	return func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: t} }
}

// check fails unless err is of the class and its text holds the words.
var check = require.Class

func TestCreateVolume(t *testing.T) {
	long := strings.Repeat("x", 128)
	for title, test := range map[string]struct {
		change []change
		want   pool.Volume
	}{
		"plain":             {nil, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"rounded up":        {[]change{size(gib+1, 0)}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib + 4096, Provisioning: pool.Thick, FSType: "ext4"}},
		"exact":             {[]change{size(gib, gib)}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"no range":          {[]change{func(r *csi.CreateVolumeRequest) { r.CapacityRange = nil }}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"limit alone":       {[]change{size(0, 5000_000)}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: 4_997_120, Provisioning: pool.Thick, FSType: "ext4"}},
		"large limit alone": {[]change{size(0, 5*gib)}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"smallest xfs":      {[]change{size(1, 0), capable(mount(writer, "xfs"))}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: 300 * mib, Provisioning: pool.Thick, FSType: "xfs"}},
		"smallest ext4":     {[]change{size(1, 0)}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: 2 * mib, Provisioning: pool.Thick, FSType: "ext4"}},
		"smallest block":    {[]change{size(1, 4096), capable(block(writer))}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: 4096, Provisioning: pool.Thick}},
		"thin":              {[]change{parameters("provisioning", "thin", "csi.storage.k8s.io/pvc/name", "x")}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thin, FSType: "ext4"}},
		"overcommit":        {[]change{parameters("provisioning", "thin", "overcommit", "2.5")}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thin, OvercommitPercent: 250, FSType: "ext4"}},
		"no overcommit":     {[]change{parameters("overcommit", "1.00")}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"sectors":           {[]change{parameters("sectorSize", "4096")}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, SectorBytes: 4096, FSType: "ext4"}},
		"default sectors":   {[]change{parameters("sectorSize", "512")}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"longest name":      {[]change{name(long)}, pool.Volume{ID: long, Name: long, Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"odd name":          {[]change{name("../π\t")}, pool.Volume{ID: pool.ID("../π\t"), Name: "../π\t", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"default and ext4":  {[]change{capable(mount(writer, ""), mount(writer, "ext4", "noatime,ro"))}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"here":              {[]change{requisite(topology(topologyKey, "node-2"), topology(strings.ToUpper(topologyKey), "node-1"))}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
		"preferred elsewhere": {[]change{func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Preferred: []*csi.Topology{topology(topologyKey, "node-2")}}
		}}, pool.Volume{ID: "pvc-1", Name: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}},
	} {
		t.Run(title, func(t *testing.T) {
			s, p := newServer()
			for range 2 { // the second call joins the first
				resp, err := s.CreateVolume(t.Context(), request(test.change...))
				require.NoError(t, err)
				v := resp.GetVolume()
				if v.GetVolumeId() != test.want.ID || v.GetCapacityBytes() != test.want.Bytes || len(v.GetVolumeContext()) != 0 {
					t.Errorf("answers %v", v)
				}
				if at := v.GetAccessibleTopology(); len(at) != 1 || !maps.Equal(at[0].GetSegments(), map[string]string{topologyKey: "node-1"}) {
					t.Errorf("is accessible from %v", at)
				}
			}
			test.want.OvercommitPercent = max(test.want.OvercommitPercent, devices.NoOvercommit)
			if got := p.volumes[test.want.ID]; !reflect.DeepEqual(got, test.want) {
				t.Errorf("made %+v, not %+v", got, test.want)
			}
		})
	}
}

func TestCreateVolumeModes(t *testing.T) {
	for value, modeName := range csi.VolumeCapability_AccessMode_Mode_name {
		for _, c := range []*csi.VolumeCapability{mount(mode(value), ""), block(mode(value))} {
			s, _ := newServer()
			_, err := s.CreateVolume(t.Context(), request(capable(c)))
			if !strings.HasPrefix(modeName, "SINGLE_NODE") {
				check(t, err, state.InvalidArgument, "access")
			} else if err != nil {
				t.Errorf("mode %s: %v", modeName, err)
			}
		}
	}
}

func TestCreateVolumeRefuses(t *testing.T) {
	group := mount(writer, "")
	group.GetMount().VolumeMountGroup = "1000"
	for title, test := range map[string]struct {
		change change
		class  state.Class
		words  string
	}{
		"no name":           {name(""), state.InvalidArgument, "name is missing"},
		"long name":         {name(strings.Repeat("x", 129)), state.InvalidArgument, "128 bytes"},
		"name with NUL":     {name("a\x00"), state.InvalidArgument, "control"},
		"name with DEL":     {name("a\u007f"), state.InvalidArgument, "control"},
		"no capabilities":   {capable(), state.InvalidArgument, "volume_capabilities is missing"},
		"nil capability":    {capable(nil), state.InvalidArgument, "access_mode"},
		"no access mode":    {capable(&csi.VolumeCapability{AccessType: block(writer).AccessType}), state.InvalidArgument, "access_mode"},
		"no access type":    {capable(&csi.VolumeCapability{AccessMode: block(writer).AccessMode}), state.InvalidArgument, "access_type"},
		"unknown mode":      {capable(block(99)), state.InvalidArgument, "access mode 99"},
		"one of two":        {capable(mount(writer, ""), block(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)), state.InvalidArgument, "one node"},
		"fs type":           {capable(mount(writer, "btrfs")), state.InvalidArgument, "ext4, xfs"},
		"two fs types":      {capable(mount(writer, "xfs"), mount(writer, "")), state.InvalidArgument, "one file system"},
		"block and mount":   {capable(block(writer), mount(writer, "xfs")), state.InvalidArgument, "block and mount"},
		"mount and block":   {capable(mount(writer, ""), block(writer)), state.InvalidArgument, "block and mount"},
		"mount flag":        {capable(mount(writer, "", "bind")), state.InvalidArgument, `mount flag "bind": it asks for something else than a new mount: leave it out`},
		"mounted to read":   {capable(mount(writer, "", "noatime,ro")), state.InvalidArgument, `mount flag "ro": a new volume is blank`},
		"mount group":       {capable(group), state.InvalidArgument, "fsGroupPolicy"},
		"negative required": {size(-1, 0), state.InvalidArgument, "negative"},
		"negative limit":    {size(0, -1), state.InvalidArgument, "negative"},
		"limit < required":  {size(2*gib, gib), state.InvalidArgument, "capacity_range"},
		"limit < rounded":   {size(gib+1, gib+2), state.OutOfRange, "multiples of 4096"},
		"limit < smallest":  {func(r *csi.CreateVolumeRequest) { size(1, 299*mib)(r); capable(mount(writer, "xfs"))(r) }, state.OutOfRange, "at least 314572800 bytes"},
		"beyond sums":       {size(1<<63-1, 0), state.OutOfRange, "9223372036854775807"},
		"beyond the pool":   {size(11*gib, 0), state.ResourceExhausted, "no room"},
		"name not UTF-8":    {name("a\xff"), state.InvalidArgument, "UTF-8"},
		"file system":       {parameters("fsType", "xfs"), state.InvalidArgument, `parameter "fsType" is not known: the file system is named by csi.storage.k8s.io/fstype`},
		"parameter":         {parameters("Provisioning", "thin"), state.InvalidArgument, "there are overcommit: 1 (default) to 100"},
		"elsewhere":         {requisite(topology(topologyKey, "node-2"), topology("zone", "z")), state.ResourceExhausted, "node-1 alone"},
		"more than here":    {requisite(topology(topologyKey, "node-1", "zone", "z")), state.ResourceExhausted, "node-1 alone"},
		"source":            {func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }, state.InvalidArgument, "volume_content_source"},
		"mutable": {func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} }, state.InvalidArgument,
			"mutable_parameters"},
	} {
		t.Run(title, func(t *testing.T) {
			s, p := newServer()
			_, err := s.CreateVolume(t.Context(), request(test.change))
			check(t, err, test.class, test.words)
			if len(p.volumes) != 0 {
				t.Errorf("a refused creation left %v", p.volumes)
			}
		})
	}
}

func TestCreateVolumeThatExists(t *testing.T) {
	for title, test := range map[string]struct {
		change change
		words  string // of AlreadyExists; empty: the volume will do
	}{
		"same":             {func(*csi.CreateVolumeRequest) {}, ""},
		"explicit default": {capable(mount(writer, "ext4")), ""},
		"default sectors":  {parameters("sectorSize", "512"), ""},
		"other sectors":    {parameters("sectorSize", "4096"), "sectorSize 512, not 4096"},
		"other mode":       {capable(mount(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, "")), ""},
		"smaller":          {size(gib/2, 2*gib), ""},
		"no range":         {func(r *csi.CreateVolumeRequest) { r.CapacityRange = nil }, ""},
		"larger":           {size(2*gib, 0), "outside"},
		"lower limit":      {size(0, gib/2), "outside"},
		"thin":             {parameters("provisioning", "thin"), "provisioning thick, not thin"},
		"xfs":              {capable(mount(writer, "xfs")), "type xfs"},
		"block":            {capable(block(writer)), "not as a block device"},
		"elsewhere":        {requisite(topology(topologyKey, "node-2")), "node-1"},
	} {
		t.Run(title, func(t *testing.T) {
			s, p := newServer()
			first, err := s.CreateVolume(t.Context(), request())
			require.NoError(t, err)
			resp, err := s.CreateVolume(t.Context(), request(test.change))
			if test.words != "" {
				check(t, err, state.AlreadyExists, test.words)
			} else if err != nil || resp.String() != first.String() {
				t.Errorf("answers %v (%v), not %v", resp, err, first)
			}
			if len(p.volumes) != 1 || p.volumes["pvc-1"].Bytes != gib {
				t.Errorf("the pool has %v", p.volumes)
			}
		})
	}
}

func TestCreateVolumeOfATakenID(t *testing.T) {
	s, p := newServer()
	p.volumes["pvc-1"] = pool.Volume{ID: "pvc-1", Name: "another", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}
	_, err := s.CreateVolume(t.Context(), request())
	check(t, err, state.AlreadyExists, "its id pvc-1 is taken by the volume named another")
	p.volumes["pvc-1"] = pool.Volume{ID: "pvc-1", Bytes: gib, Provisioning: pool.Thin, FSType: "ext4", Ephemeral: &pool.Owner{PodUID: "uid", Target: "/pods/uid/mount"}}
	_, err = s.CreateVolume(t.Context(), request())
	check(t, err, state.AlreadyExists, "its id pvc-1 is taken by an inline volume, of the pod at /pods/uid/mount")
	p.volumes["pvc-1"] = pool.Volume{ID: "pvc-1", Bytes: gib, Provisioning: pool.Thick, FSType: "ext4"}
	_, err = s.CreateVolume(t.Context(), request())
	check(t, err, state.AlreadyExists, "its id pvc-1 is taken by a volume that no CreateVolume has made")
}

// calls calls each RPC of a server, by name, in a request that only its backends can refuse.
func calls(t *testing.T, s *Server) map[string]func() error {
	return map[string]func() error{
		"CreateVolume": func() error { _, err := s.CreateVolume(t.Context(), request()); return err },
		"DeleteVolume": func() error {
			_, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "v"})
			return err
		},
		"ListVolumes": func() error { _, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); return err },
		"ControllerGetVolume": func() error {
			_, err := s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "v"})
			return err
		},
		"GetCapacity": func() error { _, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); return err },
		"ValidateVolumeCapabilities": func() error {
			_, err := s.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "v", VolumeCapabilities: []*csi.VolumeCapability{block(writer)}})
			return err
		},
	}
}

// What the pool says of its own trouble reaches the caller of any RPC.
func TestPoolErrorsPass(t *testing.T) {
	s, p := newServer()
	p.err = errors.New("the pool is gone")
	for rpc, call := range calls(t, s) {
		if err := call(); !errors.Is(err, p.err) {
			t.Errorf("%s: %v", rpc, err)
		}
	}
}

func TestDeleteVolume(t *testing.T) {
	s, p := newServer()
	p.volumes["v"] = pool.Volume{ID: "v"}
	s.Intents = fakeIntents{
		"used": {ID: "used", Stage: &state.Stage{Path: "/stage"}, Targets: map[string]*state.Target{"/pod": {Path: "/pod"}}},
		"torn": {ID: "torn", Stage: &state.Stage{Intent: state.Intent{Gone: true}, Path: "/stage"}},
	}
	for id, want := range map[string]struct {
		class state.Class
		words string
	}{
		"":     {state.InvalidArgument, "volume_id is missing"},
		"used": {state.FailedPrecondition, "/pod, /stage"},
		"torn": {state.FailedPrecondition, "/stage"},
	} {
		_, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		check(t, err, want.class, want.words)
	}
	for _, id := range []string{"v", "v", "../../etc", strings.Repeat("x", 1000), "."} {
		if _, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
			t.Errorf("id %.20q: %v", id, err)
		}
	}
	if !slices.Equal(p.deleted, []string{"v", "v"}) {
		t.Errorf("deleted %q", p.deleted)
	}
	p.err = state.Errorf(state.NotFound, "none")
	if _, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "v"}); err != nil {
		t.Errorf("a volume that is gone: %v", err)
	}
	p.err = state.Errorf(state.FailedPrecondition, "attached as /dev/loop7")
	_, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "v"})
	check(t, err, state.FailedPrecondition, "/dev/loop7")
}

func TestValidateVolumeCapabilities(t *testing.T) {
	type validate = csi.ValidateVolumeCapabilitiesRequest
	for title, test := range map[string]struct {
		change func(*validate)
		class  state.Class
		words  string // of an error if class is not 0, else of the message; empty: confirmed
	}{
		"good": {func(*validate) {}, 0, ""},
		"contexts": {func(r *validate) {
			r.VolumeContext = map[string]string{"storage.kubernetes.io/csiProvisionerIdentity": "x"}
		}, 0, ""},
		"parameters":      {func(r *validate) { r.Parameters = map[string]string{"provisioning": "thin"} }, 0, ""},
		"others' keys":    {func(r *validate) { r.Parameters = map[string]string{"csi.storage.k8s.io/fstype": "ext4"} }, 0, ""},
		"no id":           {func(r *validate) { r.VolumeId = "" }, state.InvalidArgument, "volume_id"},
		"no capabilities": {func(r *validate) { r.VolumeCapabilities = nil }, state.InvalidArgument, "volume_capabilities"},
		"half capability": {func(r *validate) { r.VolumeCapabilities = []*csi.VolumeCapability{{}} }, state.InvalidArgument, "access_mode"},
		"unknown":         {func(r *validate) { r.VolumeId = "w" }, state.NotFound, "w"},
		"unfit":           {func(r *validate) { r.VolumeId = "../v" }, state.NotFound, "../v"},
		"mode": {func(r *validate) {
			r.VolumeCapabilities = []*csi.VolumeCapability{mount(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, "")}
		}, 0, "MULTI_NODE_MULTI_WRITER"},
		"fs type":          {func(r *validate) { r.VolumeCapabilities = []*csi.VolumeCapability{mount(writer, "xfs")} }, 0, "not as a file system of type xfs"},
		"block":            {func(r *validate) { r.VolumeCapabilities = []*csi.VolumeCapability{block(writer)} }, 0, "not as a block device"},
		"block, too":       {func(r *validate) { r.VolumeCapabilities = append(r.VolumeCapabilities, block(writer)) }, 0, "block and mount"},
		"thick":            {func(r *validate) { r.Parameters = map[string]string{"provisioning": "thick"} }, 0, "provisioning thin, not thick"},
		"bad parameter":    {func(r *validate) { r.Parameters = map[string]string{"x": "y"} }, 0, `"x"`},
		"another context":  {func(r *validate) { r.VolumeContext = map[string]string{"x": "y"} }, 0, `"x"`},
		"mutable":          {func(r *validate) { r.MutableParameters = map[string]string{"x": "y"} }, 0, "mutable_parameters"},
		"one of two modes": {func(r *validate) { r.VolumeCapabilities = append(r.VolumeCapabilities, mount(5, "")) }, 0, "MULTI_NODE"},
	} {
		t.Run(title, func(t *testing.T) {
			s, _ := newServer()
			if _, err := s.CreateVolume(t.Context(), request(name("v"), parameters("provisioning", "thin"))); err != nil {
				t.Fatal(err)
			}
			r := &validate{VolumeId: "v", VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "")}}
			test.change(r)
			resp, err := s.ValidateVolumeCapabilities(t.Context(), r)
			switch {
			case test.class != 0:
				check(t, err, test.class, test.words)
			case err != nil:
				t.Fatal(err)
			case test.words == "":
				c := resp.GetConfirmed()
				if len(c.GetVolumeCapabilities()) != len(r.VolumeCapabilities) || !maps.Equal(c.GetParameters(), r.Parameters) || resp.GetMessage() != "" {
					t.Errorf("answers %v", resp)
				}
			case resp.GetConfirmed() != nil || !strings.Contains(resp.GetMessage(), test.words):
				t.Errorf("answers %v, not with %q", resp, test.words)
			}
		})
	}
}

func TestGetCapacity(t *testing.T) {
	type capacity = csi.GetCapacityRequest
	for title, test := range map[string]struct {
		request *capacity
		want    int64
		least   int64
		class   state.Class
	}{
		"overcommit":     {&capacity{Parameters: map[string]string{"provisioning": "thin", "overcommit": "1.5"}}, 15 * gib, 4096, 0},
		"beyond a file":  {&capacity{Parameters: map[string]string{"provisioning": "thin", "overcommit": "100"}}, 1000 * gib, 4096, 0},
		"thick, though":  {&capacity{Parameters: map[string]string{"overcommit": "2"}}, 10 * gib, 4096, 0},
		"all":            {&capacity{}, 10 * gib, 4096, 0},
		"here":           {&capacity{AccessibleTopology: topology(topologyKey, "node-1")}, 10 * gib, 4096, 0},
		"anywhere":       {&capacity{AccessibleTopology: topology()}, 10 * gib, 4096, 0},
		"elsewhere":      {&capacity{AccessibleTopology: topology(topologyKey, "node-2")}, 0, 0, 0},
		"other key":      {&capacity{AccessibleTopology: topology("zone", "node-1")}, 0, 0, 0},
		"xfs":            {&capacity{VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "xfs")}}, 10 * gib, 300 * mib, 0},
		"other fs type":  {&capacity{VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "btrfs")}}, 0, 0, 0},
		"several nodes":  {&capacity{VolumeCapabilities: []*csi.VolumeCapability{block(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)}}, 0, 0, 0},
		"both accesses":  {&capacity{VolumeCapabilities: []*csi.VolumeCapability{block(writer), mount(writer, "")}}, 0, 0, 0},
		"thin":           {&capacity{Parameters: map[string]string{"provisioning": "thin"}}, 10 * gib, 4096, 0},
		"bad parameter":  {&capacity{Parameters: map[string]string{"overcommit": "0", "provisioning": "fat"}}, 10 * gib, 4096, 0},
		"bad capability": {&capacity{VolumeCapabilities: []*csi.VolumeCapability{{}}}, 0, 0, state.InvalidArgument},
	} {
		t.Run(title, func(t *testing.T) {
			s, _ := newServer()
			resp, err := s.GetCapacity(t.Context(), test.request)
			if test.class != 0 {
				check(t, err, test.class, "")
				return
			}
			if err != nil || resp.GetAvailableCapacity() != test.want || resp.GetMinimumVolumeSize().GetValue() != test.least ||
				resp.GetMaximumVolumeSize().GetValue() != min(test.want, 64*gib) {
				t.Errorf("answers %v (%v)", resp, err)
			}
		})
	}
	s, p := newServer()
	for _, available := range []int64{-5, 0, 300*mib - 1} {
		p.capacity.Available = available
		resp, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{mount(writer, "xfs")}})
		if err != nil || resp.GetAvailableCapacity() != 0 || resp.GetMaximumVolumeSize().GetValue() != 0 {
			t.Errorf("with %d bytes it answers %v (%v)", available, resp, err)
		}
	}
}

func TestControllerGetCapabilities(t *testing.T) {
	s, _ := newServer()
	resp, err := s.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	require.NoError(t, err)
	var got []string
	for _, c := range resp.GetCapabilities() {
		got = append(got, c.GetRpc().GetType().String())
	}
	if !slices.Equal(got, []string{"CREATE_DELETE_VOLUME", "LIST_VOLUMES", "GET_CAPACITY", "GET_VOLUME", "SINGLE_NODE_MULTI_WRITER"}) {
		t.Errorf("capabilities %v", got)
	}
}

// preferXFS are the file systems of a node on which ext4 does not grow while mounted.
type preferXFS struct{ fakeFilesystems }

func (preferXFS) Default(bytes int64) string {
	if bytes >= 300*mib {
		return "xfs"
	}
	return "ext4"
}

// The default type is one that grows while mounted, if the limit lets it fit.
func TestDefaultTypeFitsTheLimit(t *testing.T) {
	for name, want := range map[string]struct {
		size   change
		bytes  int64
		fsType string
	}{
		"large":              {size(gib, 0), gib, "xfs"},
		"as small as can be": {size(300*mib, 0), 300 * mib, "xfs"},
		"small":              {size(32*mib, 0), 300 * mib, "xfs"},
		"small by limit":     {size(32*mib, 64*mib), 32 * mib, "ext4"},
		"no size":            {size(0, 0), gib, "xfs"},
		"only a limit":       {size(0, 64*mib), 64 * mib, "ext4"},
	} {
		t.Run(name, func(t *testing.T) {
			s, p := newServer()
			s.Filesystems = preferXFS{}
			resp, err := s.CreateVolume(t.Context(), request(want.size))
			require.NoError(t, err)
			if got := p.volumes[resp.GetVolume().GetVolumeId()]; got.Bytes != want.bytes || got.FSType != want.fsType {
				t.Errorf("made %d bytes for %s, want %d for %s", got.Bytes, got.FSType, want.bytes, want.fsType)
			}
		})
	}
}
