package devices

import (
	"context"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/state"
)

// Kind is a sort of backend that a program has: what its main function lists.
type Kind struct {
	// Name is how volume contexts, records and ids call the backend.
	Name string
	// Flags adds the backend's own flags, before Open; nil: it has none.
	Flags func(*pflag.FlagSet)
	// Open makes the backend. A backend that is an io.Closer is closed when the
	// plugin ends. The error says what is wrong with the setup and what to do.
	Open func(ctx context.Context, env Environment) (Backend, error)
}

// Environment is what the engine lends to a backend.
type Environment struct {
	DriverName string
	NodeID     string
	StateDir   string // on a tmpfs: lost with a reboot
	LibDir     string // outlives reboots: for notes about what outlives them too
	// LookOnly: no plugin runs, and a tool looks. Nothing may be made or changed,
	// no lock taken.
	LookOnly bool
	// Wanted returns the volumes of this backend that are asked for on this node,
	// without secrets; a shared object is needed by those.
	Wanted func() []Volume
	// Numbers tells which device numbers are somebody's, for backends that
	// choose the number of a device, as loop devices can.
	Numbers Numbers
}

// Numbers tells which device numbers are somebody's: what is bound at a path, or
// was made in a pod, is a number only, and would show whatever volume is given it
// next. The functions are called concurrently; a nil one knows of nothing.
type Numbers struct {
	// Owner returns the volume that is published with the number, "" for none.
	Owner func(state.DeviceNumber) (volume string)
	// Bound reports whether a device node with the number is bound anywhere on
	// this node, by whomever.
	Bound func(state.DeviceNumber) (bool, error)
	// Published returns the numbers with which a volume is published: those of its
	// device, or those of its read-only view.
	Published func(volume string, view bool) []state.DeviceNumber
}
