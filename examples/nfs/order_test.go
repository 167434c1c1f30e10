//go:build !vm

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// orderVariable in the environment says that the driver also makes its shares.
const orderVariable = "NFS_ORDERS"

// ordering is a backend of shares that is a devices.Provisioner, too: the file "made" of a
// share tells what was asked for. Nothing keeps a share from taking more.
type ordering struct {
	shares
	dir string
}

// orders is locked while one is taken: two for one name make one share.
var orders sync.Mutex

// all is the room for shares, in bytes.
const all = 1 << 40

func (o ordering) made(id string) string { return filepath.Join(o.dir, id, "made") }

// Find knows, unlike that of shares, whether there is such a volume.
func (o ordering) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	d, err := o.shares.Find(ctx, v)
	if err == nil {
		_, d.Err = os.Stat(o.made(v.ID))
	}
	if errors.Is(d.Err, fs.ErrNotExist) {
		d.Missing, d.Err = true, nil
	}
	return d, err
}

func (ordering) CheckParameters(parameters map[string]string) (map[string]string, error) {
	for key := range parameters {
		return nil, state.Errorf(state.InvalidArgument, "parameter %.200q: a share has none", key)
	}
	return nil, nil
}

func (o ordering) CreateVolume(ctx context.Context, r devices.CreateRequest) (devices.Provisioned, error) {
	sum := sha256.Sum256([]byte(r.Name))
	v := devices.Provisioned{ID: "v-" + hex.EncodeToString(sum[:12]), Name: r.Name, Context: r.Layers}
	orders.Lock()
	defer orders.Unlock()
	if err := ctx.Err(); err != nil {
		return v, err
	}
	if have, err := o.GetVolume(ctx, devices.Volume{ID: v.ID}); state.ClassOf(err) != state.NotFound {
		return have, err
	}
	var err error
	if v.Bytes, err = r.Size.Choose(1); err != nil {
		return v, err
	}
	if free, err := o.GetCapacity(ctx, nil); err != nil || v.Bytes > free.Available {
		return v, state.Errorf(state.ResourceExhausted, "volume %s: there is no room (%v)", v.ID, err)
	}
	raw, err := json.Marshal(v)
	for _, dir := range []string{"lower", "upper", "work"} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(o.dir, v.ID, dir), 0o755))
	}
	return v, errors.Join(err, os.WriteFile(o.made(v.ID), raw, 0o600))
}

func (o ordering) DeleteVolume(ctx context.Context, v devices.Volume) error {
	if err := errors.Join(o.Validate(v), ctx.Err()); err != nil {
		return err
	}
	return os.RemoveAll(filepath.Join(o.dir, v.ID))
}

func (o ordering) GetVolume(_ context.Context, v devices.Volume) (have devices.Provisioned, err error) {
	if err := o.Validate(v); err != nil {
		return have, err
	}
	raw, err := os.ReadFile(o.made(v.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return have, state.Errorf(state.NotFound, "volume %s: there is no such share", v.ID)
	}
	if err == nil {
		err = json.Unmarshal(raw, &have)
	}
	return have, err
}

func (o ordering) ListVolumes(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(o.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, entry := range entries {
		ids = append(ids, entry.Name())
	}
	return ids, err
}

func (o ordering) GetCapacity(ctx context.Context, _ map[string]string) (devices.Capacity, error) {
	room := int64(all)
	ids, err := o.ListVolumes(ctx)
	for _, id := range ids {
		have, err := o.GetVolume(ctx, devices.Volume{ID: id})
		if err != nil && state.ClassOf(err) != state.NotFound { // it was deleted meanwhile
			return devices.Capacity{}, err
		}
		room -= have.Bytes
	}
	return devices.Capacity{Available: room}, err
}

// The suite of backends tests what can be tested of volumes without devices.
func TestBackend(t *testing.T) {
	devicestest.Backend(t, func(t *testing.T) devicestest.Harness {
		dir := t.TempDir()
		return devicestest.Harness{
			Mounted: true,
			Open:    func(*testing.T) devices.Backend { return ordering{overlays(dir), dir} },
			Create: func(t *testing.T, name string) string {
				v, err := ordering{overlays(dir), dir}.CreateVolume(t.Context(), devices.CreateRequest{Name: name})
				require.NoError(t, err)
				return v.ID
			},
		}
	})
}

func TestSanity(t *testing.T) {
	t.Parallel()
	machine.Kernel(t)
	p := harness.New(t)
	self, err := os.Executable()
	require.NoError(t, err)
	p.Driver = drivertest.Driver(self, flagsOf(t, filepath.Join(p.Dir, "shares"))...)
	p.Driver.Env = append(p.Driver.Env, orderVariable+"=1")
	p.Start(harness.Options{})
	out, err := exec.Command(harness.SanityBinary(t), "-csi.endpoint", "unix://"+p.Socket,
		"-csi.stagingdir", filepath.Join(p.KubeletDir, "staging"), "-csi.mountdir", filepath.Join(p.KubeletDir, "mount")).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "0 Failed") {
		t.Fatalf("csi-sanity: %v\n%s", err, out)
	}
}

// A test of the suite that is named runs without the others, and no name passes for which
// there is none.
func TestSuiteByName(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for name, there := range map[string]bool{"Capacity": true, "Attach": false} {
		out, err := exec.Command(self, "-test.v", "-test.run", "^TestBackend$/^"+name+"$").CombinedOutput()
		if ran := strings.Contains(string(out), "--- PASS: TestBackend/"+name+" "); ran != there || (err == nil) != there {
			t.Errorf("%s ran: %t (%v)\n%s", name, ran, err, out)
		}
	}
}
