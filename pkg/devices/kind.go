package devices

import (
	"context"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// Kind is a type of backend. A program's main function lists the ones that it has.
type Kind struct {
	// Name is the backend's name in volume contexts, records and ids.
	Name string
	// Properties are the same of all kinds of one driver.
	Properties Properties
	// Flags adds the backend's own flags, before Open; nil: it has none. Each has one
	// value, whose Set accepts what its String returns, no short name, and a name that
	// neither the engine nor another backend has, best with the backend's as a prefix.
	// Flags may be called again: the values are those of the last call.
	Flags func(*pflag.FlagSet)
	// Open makes the backend. A backend that is an io.Closer is closed when the
	// plugin ends. The error says what is wrong with the setup and what to do.
	// InvalidArgument: a flag has a value that it can never have, which is wrong use.
	Open func(ctx context.Context, env Environment) (Backend, error)
}

// Environment is what the engine provides to a backend.
type Environment struct {
	DriverName string
	StateDir   string // on a tmpfs: lost with a reboot
	LibDir     string // survives reboots: for notes about storage that does; need not exist yet
	// ObserveOnly: a tool observes a node on which no plugin runs. Nothing may be made or
	// changed, and no lock taken.
	ObserveOnly bool
	// Wanted returns the volumes of this backend that are asked for on this node,
	// without secrets. As long as there are any, objects that they share are needed.
	Wanted func() []Volume
	// Raw returns an error that says why if what is on a device belongs to pods, and means
	// nothing to the node: it is a volume of any backend, or was published as a raw block
	// volume.
	Raw func(state.DeviceNumber) error
	// VolumeAt returns the volume that is published as a device; "" if there is none.
	VolumeAt func(state.DeviceNumber) string
	// Loops attaches whole files as loop devices: one for all backends of a process.
	Loops *loop.Devices
}
