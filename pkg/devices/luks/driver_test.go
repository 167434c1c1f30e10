//go:build vm

package luks

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// costlyVariable in the environment of a driver makes its luksFormat endless.
const costlyVariable = "CSI_NODE_LUKS_COSTLY"

func TestMain(m *testing.M) {
	l := New()
	l.cost = cheap
	if os.Getenv(costlyVariable) != "" {
		l.cost = costly
	}
	drivertest.Main(m, driver.Options{Name: "csi.luks.example", Backends: []devices.Kind{pool.Kind()}, Layers: []devices.Layer{l}})
}

// flags are those of a driver in a directory of its own. Its name is another for each:
// the names of the devices are the node's.
func flags(dir string) []string {
	return []string{"--pool-dir", filepath.Join(dir, "pool"), "--pool-reserve", "0", "--driver-name", nameOf(dir)}
}

func nameOf(dir string) string {
	return fmt.Sprintf("csi.luks%d.example", crc32.ChecksumIEEE([]byte(dir)))
}

// class makes encrypted volumes.
var class = map[string]string{"provisioning": "thin", EncryptionKey: LUKS2}

// The driver's whole suite, with each volume encrypted.
func TestDriver(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, func(_ *testing.T, dir string) drivertest.Harness {
		return drivertest.Harness{
			Flags:      flags(dir),
			Filesystem: "ext4",
			Create: func(t *testing.T, p *harness.Plugin, name string) drivertest.Volume {
				v := encrypted{harness.NewVolume(t, p, name, harness.Shared("ext4")), t}
				v.create(drivertest.Size)
				return drivertest.Volume{ID: v.ID, Context: v.Volume.Context, Secrets: secrets("one", ""), Grows: true, Delete: func() {
					if err := v.Delete(t.Context()); err != nil {
						t.Error(err)
					}
				}}
			},
		}
	})
}

// encrypted is a volume, and how kubelet calls the plugin for it.
type encrypted struct {
	*harness.Volume
	t *testing.T
}

func newEncrypted(t *testing.T, o harness.Options) (*harness.Plugin, encrypted) {
	t.Helper()
	p := harness.New(t)
	self, err := os.Executable()
	require.NoError(t, err)
	p.Driver = drivertest.Driver(self, flags(p.Dir)...)
	p.Start(o)
	v := encrypted{harness.NewVolume(t, p, "v", harness.Shared("ext4")), t}
	v.create(64 * mib)
	v.Secrets = secrets("one", "")
	return p, v
}

// create makes the volume, which has as many bytes as were asked for.
func (v encrypted) create(bytes int64) {
	v.t.Helper()
	resp, err := v.Controller.CreateVolume(v.t.Context(), v.CreateRequest(bytes, class))
	require.NoError(v.t, err)
	made := resp.GetVolume()
	if made.GetVolumeId() != v.ID || made.GetCapacityBytes() != bytes || made.GetVolumeContext()[EncryptionKey] != LUKS2 {
		v.t.Fatalf("made %v", made)
	}
	v.Volume.Context = made.GetVolumeContext()
}

func (v encrypted) must(err error) {
	v.t.Helper()
	require.NoError(v.t, err)
}

func (v encrypted) refused(err error, code codes.Code, words string) {
	v.t.Helper()
	if status.Code(err) != code || !strings.Contains(err.Error(), words) {
		v.t.Fatalf("refused with %v, not with %s and %q", err, code, words)
	}
}

// mapper is the name of the volume's device.
func (v encrypted) mapper(p *harness.Plugin) string {
	return (&Layer{owner: nameOf(p.Dir)}).device(devices.Volume{ID: v.ID})
}

// bytes returns how large the device is; 0: there is none.
func (v encrypted) bytes(p *harness.Plugin) int64 {
	v.t.Helper()
	m, err := host.find(v.mapper(p))
	v.must(err)
	if m == nil {
		return 0
	}
	return m.size
}

func (v encrypted) write(target string) {
	v.t.Helper()
	f, err := os.Create(filepath.Join(target, "file"))
	v.must(err)
	_, err = f.WriteString("kept")
	v.must(errors.Join(err, f.Sync(), f.Close()))
}

func (v encrypted) kept(target string) {
	v.t.Helper()
	if text, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(text) != "kept" {
		v.t.Errorf("%s holds %q (%v)", target, text, err)
	}
}

// A volume's life, as far as its passphrases go.
func TestLifeWithPassphrases(t *testing.T) {
	t.Parallel()
	p, v := newEncrypted(t, harness.Options{Flags: []string{"--v", "10"}})
	ctx, pod, pod2 := t.Context(), v.Target("pod"), v.Target("pod-2")

	v.Secrets = nil
	v.refused(v.Stage(ctx), codes.Unavailable, "waits for its secret")
	v.must(v.Unstage(ctx))
	v.Secrets = secrets("s3cret-one", "")
	v.must(v.Up(ctx, pod))
	v.write(pod)
	if got := v.bytes(p); got != 64*mib {
		t.Errorf("the device has %d bytes", got)
	}
	v.must(v.Down(ctx, pod)) // an end names no secret
	if got := v.bytes(p); got != 0 || len(v.Devices()) > 0 {
		t.Errorf("left: a device of %d bytes, %v", got, v.Devices())
	}

	v.Secrets = secrets("s3cret-wrong", "")
	v.refused(v.Stage(ctx), codes.Unauthenticated, PassphraseKey)
	v.Secrets = secrets("s3cret-one", "")
	v.must(v.Up(ctx, pod))
	v.kept(pod)

	// The next plugin knows no passphrase: it keeps what is open, and grows it.
	p.Kill()
	p.Start(harness.Options{})
	v.Secrets = nil
	v.must(v.Publish(ctx, pod2))
	v.kept(pod2)
	if got, err := v.ExpandAt(ctx, pod, 96*mib); err != nil || got != 96*mib || v.bytes(p) != 96*mib {
		t.Errorf("grown to %d, the device has %d (%v)", got, v.bytes(p), err)
	}
	if total := v.Total(pod); total < 80*mib {
		t.Errorf("the file system has %d bytes", total)
	}

	// What is lost without a passphrase waits for it, and takes that of a publish.
	p.Kill()
	for _, path := range []string{pod, pod2, v.Staging} {
		v.must(machine.Unmount(path))
	}
	v.must(remove(v.mapper(p)))
	p.Start(harness.Options{})
	p.AwaitRest()
	if got := v.bytes(p); got != 0 {
		t.Errorf("opened without a passphrase: %d bytes", got)
	}
	if told := v.Unsettled(); !strings.Contains(told, "waits for its secret") {
		t.Errorf("status tells %q", told)
	}
	v.refused(v.Publish(ctx, pod), codes.Unavailable, "waits for its secret")
	v.Secrets = secrets("s3cret-one", "")
	v.must(v.Publish(ctx, pod))
	harness.Eventually(t, "both pods have it again", func() bool {
		_, err := os.Stat(filepath.Join(pod2, "file"))
		return err == nil
	})
	v.kept(pod)

	// The passphrase is changed with a stage.
	v.must(v.Down(ctx, pod, pod2))
	v.Secrets = secrets("s3cret-two", "s3cret-one")
	v.must(v.Stage(ctx))
	v.must(v.Unstage(ctx))
	v.Secrets = secrets("s3cret-one", "")
	v.refused(v.Stage(ctx), codes.Unauthenticated, PassphraseKey)
	v.Secrets = secrets("s3cret-two", "")
	v.must(v.Up(ctx, pod))
	v.kept(pod)
	v.must(v.Down(ctx, pod))

	for _, root := range []string{p.StateDir, p.PoolDir} {
		v.must(filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() || path == v.Data() {
				return err
			}
			text, err := os.ReadFile(path)
			if strings.Contains(string(text), "s3cret") {
				t.Errorf("%s holds a passphrase", path)
			}
			return err
		}))
	}
	if strings.Contains(p.Log.String(), "s3cret") {
		t.Error("the log holds a passphrase")
	}

	// The volume is one with that class, and no other.
	plain := v.CreateRequest(64*mib, map[string]string{"provisioning": "thin"})
	_, err := v.Controller.CreateVolume(ctx, plain)
	v.refused(err, codes.AlreadyExists, EncryptionKey)
	v.Volume.Context = map[string]string{EncryptionKey: "rot13"}
	v.refused(v.Stage(ctx), codes.InvalidArgument, "rot13")
	v.must(v.Delete(ctx))
}

// Whatever step of the layer the plugin dies at, the next one goes on; what a luksFormat
// left that died with it is begun anew.
func TestPluginDiesAtTheLayer(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"create-layer", "open-layer", "format", "grow-layer", "close-layer"} {
		p, v := newEncrypted(t, harness.Options{Env: []string{"CSI_NODE_FAULT=after:" + step + "=die"}})
		survive := func(call func() error) {
			t.Helper()
			if err := call(); err == nil {
				return
			}
			select {
			case <-p.Exited():
				p.Start(harness.Options{})
			case <-time.After(10 * time.Second):
			}
			v.must(call())
		}
		pod := v.Target("pod")
		survive(func() error { return v.Stage(t.Context()) })
		survive(func() error { return v.Publish(t.Context(), pod) })
		v.write(pod)
		survive(func() error { _, err := v.ExpandAt(t.Context(), pod, 80*mib); return err })
		if got := v.bytes(p); got != 80*mib {
			t.Errorf("%s: the device has %d bytes", step, got)
		}
		survive(func() error { return v.Unpublish(t.Context(), pod) })
		survive(func() error { return v.Unstage(t.Context()) })
		v.must(v.Up(t.Context(), pod))
		v.kept(pod)
		v.must(v.Down(t.Context(), pod))
		v.must(v.Delete(t.Context()))
	}
}

func TestPluginDiesInLuksFormat(t *testing.T) {
	t.Parallel()
	p, v := newEncrypted(t, harness.Options{Env: []string{costlyVariable + "=1"}})
	answer := make(chan error, 1)
	go func() { answer <- v.Stage(t.Context()) }()
	lower := state.Device{}
	half := func() bool {
		for _, l := range v.Devices() {
			if number, is := devnode.NumberAt(l.Path); is {
				lower = state.Device{Path: l.Path, Number: number}
				h, err := readHeader(lower, true)
				return err == nil && h.magic
			}
		}
		return false
	}
	harness.Eventually(t, "there is something of a header", half)
	p.Kill()
	<-answer
	if h, err := readHeader(lower, true); err != nil || h.made {
		t.Fatalf("it was not killed in time: %+v (%v)", h, err)
	}
	p.Start(harness.Options{})
	v.must(v.Stage(t.Context()))
	if log := p.Log.String(); !strings.Contains(log, `step="erase"`) || !strings.Contains(log, `step="create-layer"`) {
		t.Errorf("it was not begun anew: %s", log)
	}
	v.write(v.Staging)
	v.must(v.Unstage(t.Context()))
	v.must(v.Stage(t.Context()))
	v.kept(v.Staging)
	v.must(v.Unstage(t.Context()))
	v.must(v.Delete(t.Context()))
}
