package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/csi-node/csi-node/pkg/devices"
)

// Options is what a driver is made of. Its builder decides these, while an operator
// decides Config. Name and Backends are required.
type Options struct {
	// Name is the default name of the driver, such as csi.acme.example
	// (--driver-name gives it another): a domain name of at most 63 characters.
	Name string
	// Program is how help texts call the program, and the name of its directories
	// in /run and /var/lib; empty: Name.
	Program string
	// Version is reported by GetPluginInfo and the version command; empty: the
	// version of the Go module.
	Version string
	// Short, Long and Example are the help texts of the program; empty: general ones.
	Short, Long, Example string

	// Backends are the kinds of storage that the driver has. Volumes whose context names
	// none belong to the first; if only the id is known, a devices.Owner may claim it. A Kind
	// belongs to one program: it is opened once at a time.
	Backends []devices.Kind

	// Layers are the layers that volumes of any backend can have, from the lowest to the
	// highest; nil: none.
	Layers []devices.Layer

	// Services adds gRPC services to the CSI socket, behind the same interceptors;
	// nil: none.
	Services func(grpc.ServiceRegistrar)
	// Capabilities are returned by GetPluginCapabilities together with the engine's. With
	// VolumeExpansion among them the node offers EXPAND_VOLUME though no backend is a Grower.
	Capabilities []*csi.PluginCapability
	// Identity, Node and Controller wrap the services of the engine: what they
	// return is served. Identity and Node must not return nil. Controller is given nil
	// when no backend provisions, and may return nil when this process is to serve no
	// Controller. A wrapper that adds an RPC must also add its capability.
	Identity   func(csi.IdentityServer) csi.IdentityServer
	Node       func(csi.NodeServer) csi.NodeServer
	Controller func(csi.ControllerServer) csi.ControllerServer
	// Topology returns further topology segments of the node, such as its zone. It is
	// called by each NodeGetInfo, and may block until ctx ends; nil: there are none.
	Topology func(ctx context.Context) (map[string]string, error)

	// Commands may add commands to the program, or change the texts of the others.
	Commands func(root *cobra.Command)

	// Hook is called before and after each step, and its error makes the step fail.
	// Only test builds set it.
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

// domainName matches names of drivers (CSI spec v1.13, GetPluginInfo: domain name notation; the
// topology key contains it, and Kubernetes requires that in lower case) and those of objects of
// Kubernetes (RFC 1123).
var domainName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// checkName returns what is wrong with the name of a driver.
func checkName(name string) error {
	if len(name) > 63 || !domainName.MatchString(name) {
		return fmt.Errorf("%q: must be a domain name of at most 63 lower-case letters, digits, dots and dashes, such as csi-node.local", name)
	}
	return nil
}

func checkKinds(kinds []devices.Kind) (devices.Properties, error) {
	if len(kinds) == 0 {
		return devices.Properties{}, errors.New("this driver was built without a backend")
	}
	seen := map[string]bool{}
	flags := map[string]string{} // whose the flag of a name is
	engineFlags(Options{}, &Config{}, new(bool), new(loggingFlags)).VisitAll(func(flag *pflag.Flag) { flags[flag.Name] = "the engine" })
	for _, k := range kinds {
		switch {
		case !domainName.MatchString(k.Name) || k.Open == nil:
			return devices.Properties{}, fmt.Errorf("this driver was built with a backend %q: its name must consist of lower-case letters, digits and dashes, and it needs an Open function", k.Name)
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

// backendFlags returns the flags of all kinds, with their defaults. If two kinds have
// a flag of one name, which checkKinds refuses, it is the first one's.
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

// setFlags sets the flags of the kinds. A flag that no kind has is an error, or is
// ignored if old: then the values may be those of another version.
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

// stateDir and libDir are the defaults of --state-dir and --lib-dir.
func (o Options) stateDir() string {
	return cmp.Or(os.Getenv("CSI_NODE_STATE_DIR"), filepath.Join("/run", o.program()))
}

func (o Options) libDir() string { return filepath.Join("/var/lib", o.program()) }
