//go:build !vm

package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// testKind has overlays over a directory for shares of a server: another file system without
// a device, and what is written by one mount of it is there for the next.
func testKind() devices.Kind {
	var dir string
	return devices.Kind{
		Name:  "share",
		Flags: func(f *pflag.FlagSet) { f.StringVar(&dir, "overlay-dir", "", "where the shares are") },
		Open: func(context.Context, devices.Environment) (devices.Backend, error) {
			if os.Getenv(orderVariable) != "" {
				return ordering{overlays(dir), dir}, nil
			}
			return overlays(dir), nil
		},
	}
}

// overlays are shares that are overlays over the directories in dir.
func overlays(dir string) shares {
	return shares{source: func(id string) state.Source {
		share := filepath.Join(dir, id)
		return state.Source{
			FSType: "overlay", Source: share, Deadline: 10 * time.Second,
			Options: []string{"lowerdir=" + share + "/lower", "upperdir=" + share + "/upper", "workdir=" + share + "/work"},
		}
	}}
}

func flagsOf(_ *testing.T, shares string) []string { return []string{"--overlay-dir", shares} }

func makeShare(t *testing.T, shares, id string) {
	t.Helper()
	for _, dir := range []string{"lower", "upper", "work"} {
		require.NoError(t, os.MkdirAll(filepath.Join(shares, id, dir), 0o755))
	}
}
