// Command nfs is a whole CSI driver for the directories of an NFS server: volumes that are
// mounted from a source and have no device. See docs/backends.md.
package main

import (
	"context"
	"net/netip"
	"path"
	"regexp"
	"time"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/state"
)

func main() { driver.Main(options(shareKind())) }

func options(kind devices.Kind) driver.Options {
	return driver.Options{Name: "csi.nfs.example", Version: "v1.0.0", Backends: []devices.Kind{kind}}
}

// shareKind is the one sort of storage that the driver has.
func shareKind() devices.Kind {
	var server, export string
	return devices.Kind{
		Name: "share",
		Flags: func(f *pflag.FlagSet) {
			f.StringVar(&server, "nfs-server", "", "the address of the server, which speaks NFS 4.2")
			f.StringVar(&export, "nfs-export", "/", "the server's directory in which each volume is a directory")
		},
		Open: func(context.Context, devices.Environment) (devices.Backend, error) {
			address, err := netip.ParseAddr(server)
			if err != nil {
				return nil, state.Errorf(state.InvalidArgument, "--nfs-server: name the server by its IP address, as in 192.0.2.7: %w", err)
			}
			return shares{source: func(id string) state.Source { return nfs(address, path.Join("/", export, id)) }}, nil
		},
	}
}

// nfs is a directory of a server. The engine asks the kernel, which has no resolver and
// wants the address as an option; whoever waits for a server does so for half a minute.
func nfs(server netip.Addr, dir string) state.Source {
	host := server.String()
	if server.Is6() {
		host = "[" + host + "]"
	}
	return state.Source{FSType: "nfs4", Source: host + ":" + dir, Options: []string{"vers=4.2", "addr=" + server.String()}, Deadline: 30 * time.Second}
}

// shares is the backend. Only the server knows which volumes there are, and it is not asked
// before a volume is mounted.
type shares struct {
	source func(id string) state.Source
}

var validID = regexp.MustCompile(`^[a-z0-9][-a-z0-9]{0,62}$`)

// Validate is pure: it knows which ids and contexts a volume can never have.
func (shares) Validate(v devices.Volume) error {
	if !validID.MatchString(v.ID) {
		return state.Errorf(state.InvalidArgument, "volume %.200q: no volume of the server has such an id", v.ID)
	}
	return nil
}

// Source makes the backend a devices.MountSource: all of its volumes are mounted.
func (s shares) Source(_ context.Context, v devices.Volume) (source state.Source, mounted bool, err error) {
	return s.source(v.ID), true, nil
}

// Find tells that there is no device, and never will be.
func (s shares) Find(_ context.Context, v devices.Volume) (state.Device, error) {
	return state.Device{State: state.DeviceAbsent}, s.Validate(v)
}

// Attach is not called of volumes that are mounted.
func (shares) Attach(_ context.Context, v devices.Volume, _ bool) error {
	return state.Errorf(state.FailedPrecondition, "volume %s: attach: it has no device", v.ID)
}

// Detach has nothing to do.
func (s shares) Detach(_ context.Context, v devices.Volume) error { return s.Validate(v) }
