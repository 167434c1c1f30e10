package main

import (
	"cmp"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/harness"
)

// orderVariable in the environment says that the driver is one that also orders
// volumes of the array, for csi-sanity needs a Controller that makes them.
const orderVariable = "ACME_ORDERS"

func TestMain(m *testing.M) {
	o := options()
	if os.Getenv(orderVariable) != "" {
		o = orderOptions()
	}
	drivertest.Main(m, o)
}

func orderOptions() driver.Options {
	o := options()
	kind := o.Backends[0]
	open := kind.Open
	kind.Open = func(ctx context.Context, env devices.Environment) (devices.Backend, error) {
		b, err := open(ctx, env)
		if err != nil {
			return nil, err
		}
		return ordering{b.(*array)}, nil
	}
	o.Backends = []devices.Kind{kind}
	return o
}

// ordering is an array that is a devices.Provisioner, too: Acme's daemon does what
// it asks for at once.
type ordering struct{ *array }

// orders is locked while one is taken: two for one name make one volume.
var orders sync.Mutex

func (ordering) CheckParameters(parameters map[string]string) (map[string]string, error) {
	for key := range parameters {
		return nil, state.Errorf(state.InvalidArgument, "parameter %.200q: the array has none", key)
	}
	return nil, nil
}

func (a ordering) CreateVolume(ctx context.Context, r devices.CreateRequest) (devices.Provisioned, error) {
	bytes, err := r.Size.Choose(4096)
	if err != nil {
		return devices.Provisioned{}, err
	}
	id := idOf(r.Name)
	orders.Lock()
	defer orders.Unlock()
	if err := ctx.Err(); err != nil {
		return devices.Provisioned{}, err
	}
	if have, err := a.GetVolume(ctx, devices.Volume{ID: id}); state.ClassOf(err) != state.NotFound {
		return have, err
	}
	if free, err := a.GetCapacity(ctx, nil); err != nil || bytes > free.Available {
		return devices.Provisioned{}, state.Errorf(state.ResourceExhausted, "volume %s: the array has no room (%v)", id, err)
	}
	if err := orderVolume(a.dir, id, r.Name, bytes); err != nil {
		return devices.Provisioned{}, err
	}
	layers, err := json.Marshal(r.Layers)
	if err == nil {
		err = os.WriteFile(filepath.Join(a.dir, id, "layers"), layers, 0o600)
	}
	if err != nil {
		return devices.Provisioned{}, err
	}
	return a.GetVolume(ctx, devices.Volume{ID: id})
}

// idOf makes an id of a name, another for each, that the array can have.
func idOf(name string) string { return "v-" + sum(name) }

func (a ordering) DeleteVolume(ctx context.Context, v devices.Volume) error {
	switch d, err := a.Find(ctx, v); {
	case err != nil || ctx.Err() != nil:
		return cmp.Or(err, ctx.Err())
	case d.State != state.DeviceAbsent:
		return state.Errorf(state.FailedPrecondition, "volume %s: it is attached as %s", v.ID, d.Path)
	}
	return os.RemoveAll(filepath.Join(a.dir, v.ID))
}

func (a ordering) GetVolume(ctx context.Context, v devices.Volume) (devices.Provisioned, error) {
	d, err := a.Find(ctx, v)
	switch {
	case err != nil:
		return devices.Provisioned{}, err
	case d.Err != nil:
		return devices.Provisioned{}, d.Err
	case d.Missing:
		return devices.Provisioned{}, state.Errorf(state.NotFound, "volume %s: the array has no such volume", v.ID)
	}
	have := devices.Provisioned{ID: v.ID, Bytes: d.Size}
	name, err := os.ReadFile(filepath.Join(a.dir, v.ID, "name"))
	if err != nil {
		return have, err
	}
	have.Name = string(name)
	layers, err := os.ReadFile(filepath.Join(a.dir, v.ID, "layers"))
	if err == nil {
		err = json.Unmarshal(layers, &have.Context)
	}
	return have, err
}

func (a ordering) ListVolumes(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(a.dir)
	if os.IsNotExist(err) {
		return nil, nil
	}
	for _, entry := range entries {
		ids = append(ids, entry.Name())
	}
	return ids, err
}

func (a ordering) GetCapacity(ctx context.Context, _ map[string]string) (devices.Capacity, error) {
	room := int64(1 << 40)
	ids, err := a.ListVolumes(ctx)
	for _, id := range ids {
		have, err := a.GetVolume(ctx, devices.Volume{ID: id})
		if err != nil && state.ClassOf(err) != state.NotFound { // it was deleted meanwhile
			return devices.Capacity{}, err
		}
		room -= have.Bytes
	}
	return devices.Capacity{Available: room}, err
}

func TestSanity(t *testing.T) {
	t.Parallel()
	for _, access := range []string{"mount", "block"} {
		t.Run(access, func(t *testing.T) {
			p := harness.New(t)
			self, err := os.Executable()
			must(t, err)
			p.Driver = drivertest.Driver(self, "--array-dir", filepath.Join(p.Dir, "array"), "--array-name", nameOf(p.Dir))
			p.Driver.Env = append(p.Driver.Env, orderVariable+"=1")
			p.Start(harness.Options{})
			out, err := exec.Command(harness.SanityBinary(t), "-csi.endpoint", "unix://"+p.Socket,
				"-csi.stagingdir", filepath.Join(p.KubeletDir, "staging"), "-csi.mountdir", filepath.Join(p.KubeletDir, "mount"),
				"-csi.testvolumeaccesstype", access, "-csi.testvolumesize", "67108864", "-csi.testvolumeexpandsize", "100663296").CombinedOutput()
			if err != nil || !strings.Contains(string(out), "0 Failed") {
				t.Fatalf("csi-sanity: %v\n%s", err, out)
			}
		})
	}
}
