package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var must = require.NoError

// orderVolume does what Acme's daemon does when somebody orders a volume.
func orderVolume(array, id, name string, bytes int64) error {
	dir := filepath.Join(array, id)
	err := os.MkdirAll(dir, 0o750)
	for file, text := range map[string]string{"serial": "ACME-" + rand.Text() + "\n", "name": name, "lun": ""} {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
	}
	return errors.Join(err, os.Truncate(filepath.Join(dir, "lun"), bytes))
}

func sum(name string) string {
	hash := sha256.Sum256([]byte(name))
	return hex.EncodeToString(hash[:12])
}

// nameOf is that of the array of a test, which has one of its own.
func nameOf(dir string) string { return "acme" + sum(dir)[:8] }

func TestDriver(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, func(_ *testing.T, dir string) drivertest.Harness {
		array := filepath.Join(dir, "array")
		return drivertest.Harness{
			Flags: []string{"--array-dir", array, "--array-name", nameOf(dir)},
			Create: func(t *testing.T, _ *harness.Plugin, name string) drivertest.Volume {
				must(t, orderVolume(array, name, name, drivertest.Size))
				return drivertest.Volume{ID: name, Grows: true, Delete: func() {
					must(t, os.RemoveAll(filepath.Join(array, name)))
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
				return ordering{b}
			},
			Views: func() devicestest.Views { return blockdev.New(b.loops, nil) },
			Create: func(t *testing.T, name string) string {
				must(t, orderVolume(b.dir, name, name, devicestest.Size))
				return name
			},
		}
	})
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
