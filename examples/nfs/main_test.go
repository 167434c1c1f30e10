package main

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// With the build tag vm the volumes are those of a server, else of a stand-in: testKind,
// flagsOf and makeShare are of the one or the other.
func TestMain(m *testing.M) { drivertest.Main(m, options(testKind())) }

func TestDriver(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, func(t *testing.T, dir string) drivertest.Harness {
		shares := filepath.Join(dir, "shares")
		return drivertest.Harness{
			Flags:   flagsOf(t, shares),
			Mounted: true,
			Create: func(t *testing.T, _ *harness.Plugin, name string) drivertest.Volume {
				makeShare(t, shares, name)
				return drivertest.Volume{ID: name}
			},
		}
	})
}

func TestSource(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.7":   "192.0.2.7:/srv/a vers=4.2 addr=192.0.2.7",
		"2001:db8::7": "[2001:db8::7]:/srv/a vers=4.2 addr=2001:db8::7",
	} {
		s := nfs(netip.MustParseAddr(address), "/srv/a")
		if got := s.Source + " " + strings.Join(s.Options, " "); got != want || s.FSType != "nfs4" || s.Deadline <= 0 {
			t.Errorf("%s: %+v, not %s", address, s, want)
		}
	}
}

func TestFlags(t *testing.T) {
	for args, want := range map[string]string{
		"":                                   "--nfs-server: name the server by its IP address",
		"--nfs-server files.example":         "--nfs-server: name the server by its IP address",
		"--nfs-server 192.0.2.7":             "192.0.2.7:/a",
		"--nfs-server=::1 --nfs-export=srv/": "[::1]:/srv/a",
	} {
		kind, flags := shareKind(), pflag.NewFlagSet("nfs", pflag.ContinueOnError)
		kind.Flags(flags)
		require.NoError(t, flags.Parse(strings.Fields(args)))
		backend, err := kind.Open(t.Context(), devices.Environment{})
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			source, _, err := backend.(devices.MountSource).Source(t.Context(), devices.Volume{ID: "a"})
			require.NoError(t, err)
			got = source.Source
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%q: %s, not %s", args, got, want)
		}
	}
}
