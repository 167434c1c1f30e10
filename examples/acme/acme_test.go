package main

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

func TestMain(m *testing.M) { drivertest.Main(m, options()) }

// makeVolume does what Acme's daemon does when somebody orders a volume.
func makeVolume(t *testing.T, array, id string, bytes int64) {
	t.Helper()
	dir := filepath.Join(array, id)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"serial": "ACME-" + filepath.Base(filepath.Dir(array)) + "-" + id + "\n", "lun": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Truncate(filepath.Join(dir, "lun"), bytes); err != nil {
		t.Fatal(err)
	}
}

func TestDriver(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, func(_ *testing.T, dir string) drivertest.Harness {
		array := filepath.Join(dir, "array")
		name := "acme" + dir[strings.LastIndexByte(dir, '-')+1:] // the tests have an array each
		return drivertest.Harness{
			Flags: []string{"--array-dir", array, "--array-name", name},
			Create: func(t *testing.T, _ *harness.Plugin, name string) drivertest.Volume {
				makeVolume(t, array, name, drivertest.Size)
				return drivertest.Volume{ID: name, Delete: func() {
					if err := os.RemoveAll(filepath.Join(array, name)); err != nil {
						t.Error(err)
					}
				}}
			},
		}
	})
}

// The backend by itself runs the suite of backends.
func TestBackend(t *testing.T) {
	devicestest.Backend(t, func(t *testing.T) devicestest.Harness {
		machine.Kernel(t)
		b := &array{dir: filepath.Join(t.TempDir(), "array"), name: "acme" + rand.Text()[:8]}
		t.Cleanup(func() { detachAll(t, b) })
		return devicestest.Harness{
			Open: func(t *testing.T) devices.Backend {
				loops, err := loop.New(t.Context())
				must(t, err)
				b = &array{dir: b.dir, name: b.name, loops: loops}
				return b
			},
			Views: func() devicestest.Views { return blockdev.New(b.loops, nil) },
			Create: func(t *testing.T, name string) string {
				makeVolume(t, b.dir, name, devicestest.Size)
				return name
			},
			Hold: func(t *testing.T, d state.Device) (release func()) {
				f, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
				must(t, err)
				return func() { must(t, f.Close()) }
			},
			Write: func(t *testing.T, d state.Device, offset int64, data []byte) {
				f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
				must(t, err)
				_, err = f.WriteAt(data, offset)
				must(t, errors.Join(err, f.Sync(), f.Close()))
			},
			Read: func(t *testing.T, d state.Device, offset int64, data []byte) {
				f, err := os.Open(d.Path)
				must(t, err)
				_, err = f.ReadAt(data, offset)
				must(t, errors.Join(err, f.Close()))
			},
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// detachAll ends what the tests of an array have left attached.
func detachAll(t *testing.T, b *array) {
	ctx := context.WithoutCancel(t.Context())
	entries, err := os.ReadDir(b.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	views := blockdev.New(b.loops, nil)
	for _, entry := range entries {
		v := devices.Volume{ID: entry.Name()}
		d, err := b.Find(ctx, v)
		if err == nil && d.Path != "" {
			err = views.DetachView(ctx, d)
		}
		if err = errors.Join(err, b.Detach(ctx, v)); err != nil {
			t.Error(err)
		}
	}
}
