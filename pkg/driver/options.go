package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/note"
	"github.com/csi-node/csi-node/pkg/loop"
)

// Options is what a driver is made of: what its builder decides, where Config is
// what an operator does. Name and Backends are needed.
type Options struct {
	// Name is the usual name of the driver, as csi.acme.example (--driver-name
	// gives it another): a domain name of at most 63 characters.
	Name string
	// Program is how help texts call the program, and the name of its directories
	// in /run and /var/lib; empty: Name.
	Program string
	// Version is what GetPluginInfo and the version command tell; empty: that of
	// the Go module.
	Version string
	// Short, Long and Example are the help texts of the program; empty: general ones.
	Short, Long, Example string

	// Backends are the sorts of storage that the driver has. Volumes that name no
	// backend, and that no devices.Owner claims, are of the first. A Kind is of one
	// program: it is opened once at a time.
	Backends []devices.Kind

	// Layers stand on the devices of the volumes that want them, the first one
	// lowest, whatever backend the volumes are of; nil: none.
	Layers []devices.Layer

	// Services adds gRPC services to the CSI socket, behind the same interceptors;
	// nil: none.
	Services func(grpc.ServiceRegistrar)
	// Capabilities are told by GetPluginCapabilities beside the engine's.
	Capabilities []*csi.PluginCapability
	// Identity, Node and Controller wrap the services of the engine: what they
	// return serves, and of Identity and Node it is not nil. Controller is given nil
	// when no backend provisions; it may return nil when the driver has no Controller
	// here. One that adds an RPC adds its capability, too.
	Identity   func(csi.IdentityServer) csi.IdentityServer
	Node       func(csi.NodeServer) csi.NodeServer
	Controller func(csi.ControllerServer) csi.ControllerServer
	// Topology tells segments of the node's place beside the engine's own, as its
	// zone, when NodeGetInfo is answered; nil: none. It may block until ctx ends.
	Topology func(ctx context.Context) (map[string]string, error)

	// Commands may add commands to the program's, or change their texts.
	Commands func(root *cobra.Command)

	// Hook is called before and after each step, and its error fails the step;
	// only builds for tests set it.
	Hook func(ctx context.Context, volume, moment, step string) error
}

func (o Options) program() string { return cmp.Or(o.Program, o.Name, filepath.Base(os.Args[0])) }

func (o Options) version() string {
	if o.Version != "" {
		return o.Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "v0.0.0-dev"
}

// check returns what is wrong with how the driver was built.
func (o Options) check() (devices.Properties, error) {
	if err := checkName(o.Name); err != nil {
		return devices.Properties{}, fmt.Errorf("this driver was built with the name %w", err)
	}
	if program := o.program(); program != filepath.Base(program) || program == "." || program == ".." {
		return devices.Properties{}, fmt.Errorf("this driver was built with the program %q: it must be the name of a file", program)
	}
	properties, err := checkKinds(o.Backends)
	if err == nil && properties.AttachRequired && o.Controller == nil {
		err = errors.New("this driver was built with a backend that needs ControllerPublishVolume, and without a Controller that has it: one that returns nil says that it is served elsewhere")
	}
	return properties, err
}

// checkName returns what is wrong with the name of a driver.
func checkName(name string) error {
	if len(name) > 63 || !driverName.MatchString(name) {
		return fmt.Errorf("%q: must be a domain name of at most 63 lower-case letters, digits, dots and dashes, as csi-node.local", name)
	}
	return nil
}

func checkKinds(kinds []devices.Kind) (devices.Properties, error) {
	if len(kinds) == 0 {
		return devices.Properties{}, errors.New("this driver was built without a backend")
	}
	seen := map[string]bool{}
	flags := map[string]string{} // whose the flag of a name is
	engineFlags(Options{}, &Config{}, new(bool), new(int)).VisitAll(func(flag *pflag.Flag) { flags[flag.Name] = "the engine" })
	for _, k := range kinds {
		switch {
		case !driverName.MatchString(k.Name) || k.Open == nil:
			return devices.Properties{}, fmt.Errorf("this driver was built with a backend %q: its name must be of lower-case letters, digits and dashes, and it must be one that opens", k.Name)
		case seen[k.Name]:
			return devices.Properties{}, fmt.Errorf("this driver was built with two backends of the name %s", k.Name)
		}
		seen[k.Name] = true
		var err error
		backendFlags([]devices.Kind{k}).VisitAll(func(flag *pflag.Flag) {
			if _, list := flag.Value.(pflag.SliceValue); list {
				err = fmt.Errorf("this driver was built with a flag --%s that holds a list: a backend's flags have one value each", flag.Name)
			}
			if flag.Shorthand != "" {
				err = fmt.Errorf("this driver was built with a flag --%s that is -%s, too: a backend's flags have no short names", flag.Name, flag.Shorthand)
			}
			if whose := flags[flag.Name]; whose != "" {
				err = fmt.Errorf("this driver was built with a flag --%s of the backend %s, and %s has one of that name", flag.Name, k.Name, whose)
			}
			flags[flag.Name] = "the backend " + k.Name
		})
		if err != nil {
			return devices.Properties{}, err
		}
	}
	return devices.Agree(kinds)
}

// backendFlags returns the flags of all kinds, with their defaults. Of a name that
// two have, which checkKinds tells, it has the first.
func backendFlags(kinds []devices.Kind) *pflag.FlagSet {
	all := pflag.NewFlagSet("backends", pflag.ContinueOnError)
	for _, k := range kinds {
		if k.Flags != nil {
			own := pflag.NewFlagSet(k.Name, pflag.ContinueOnError)
			k.Flags(own)
			all.AddFlagSet(own)
		}
	}
	return all
}

// setFlags gives the flags of the kinds their values. One that no kind has is
// an error, or left out if old: another version wrote it down.
func setFlags(kinds []devices.Kind, values map[string]string, old bool) error {
	flags := backendFlags(kinds)
	for _, name := range slices.Sorted(maps.Keys(values)) {
		switch {
		case flags.Lookup(name) != nil:
			if err := flags.Set(name, values[name]); err != nil {
				return fmt.Errorf("--%s %q: %w", name, values[name], err)
			}
		case !old:
			return fmt.Errorf("--%s: no backend of this driver has such a flag", name)
		}
	}
	return nil
}

// backend is an open one.
type backend struct {
	name string
	devices.Backend
}

// openBackends opens the kinds, the usual one first.
func (p *plugin) openBackends(ctx context.Context, lookOnly bool) error {
	if err := setFlags(p.options.Backends, p.BackendFlags, lookOnly); err != nil {
		return err
	}
	var err error
	if p.loops, err = loop.New(ctx); err != nil {
		return err
	}
	if !lookOnly {
		p.loops.Reserve(p.numbers())
	}
	byName := map[string]devices.Backend{}
	for _, kind := range p.options.Backends {
		opened, err := kind.Open(ctx, devices.Environment{
			DriverName: p.DriverName, NodeID: p.NodeID, StateDir: p.StateDir, LibDir: p.LibDir, LookOnly: lookOnly,
			Wanted: func() []devices.Volume { return p.wanted(kind.Name) }, Loops: p.loops,
		})
		if err == nil && opened == nil {
			err = fmt.Errorf("this driver was built with a backend %s that opens as nothing", kind.Name)
		}
		if err != nil {
			return err
		}
		p.backends = append(p.backends, backend{kind.Name, opened})
		byName[kind.Name] = opened
	}
	p.devices = devices.NewSet(p.options.Backends[0].Name, byName)
	facts, err := note.Open(p.LibDir)
	if err != nil {
		return fmt.Errorf("--lib-dir %s: %w", p.LibDir, err)
	}
	p.devices.KeepFacts(facts)
	p.views = blockdev.New(p.loops, p.volumeAt)
	return nil
}

// wanted returns the volumes of a backend that are asked for on this node.
func (p *plugin) wanted(name string) []devices.Volume {
	var all []devices.Volume
	for _, record := range p.store.List() {
		if v := devices.Recorded(record); cmp.Or(v.Backend, v.Context[devices.BackendKey], p.options.Backends[0].Name) == name {
			all = append(all, v)
		}
	}
	return all
}

// abilities returns the backends that can do something more, the usual one first.
func abilities[T any](p *plugin) []T {
	var all []T
	for _, b := range p.backends {
		if can, ok := b.Backend.(T); ok {
			all = append(all, can)
		}
	}
	return all
}

// ability returns the first backend that can do something more.
func ability[T any](p *plugin) (can T, ok bool) {
	for _, can := range abilities[T](p) {
		return can, true
	}
	return can, false
}

// stateDir and libDir are where the plugin keeps things if nobody says otherwise.
func (o Options) stateDir() string {
	return cmp.Or(os.Getenv("CSI_NODE_STATE_DIR"), filepath.Join("/run", o.program()))
}

func (o Options) libDir() string { return filepath.Join("/var/lib", o.program()) }
