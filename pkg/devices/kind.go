package devices

import (
	"context"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/loop"
)

// Kind is a sort of backend that a program has: what its main function lists.
type Kind struct {
	// Name is how volume contexts, records and ids call the backend.
	Name string
	// Properties are the same of all kinds of one driver.
	Properties Properties
	// Flags adds the backend's own flags, before Open; nil: it has none. Each has one
	// value, which Set takes as String gives it, no short name, and a name that
	// neither the engine nor another backend has: the backend's own begins it best. Flags may be called again: the
	// values are those of the last call.
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
	LibDir     string // outlives reboots: for notes about what outlives them too; need not be there yet
	// LookOnly: no plugin runs, and a tool looks. Nothing may be made or changed,
	// no lock taken.
	LookOnly bool
	// Wanted returns the volumes of this backend that are asked for on this node,
	// without secrets; a shared object is needed by those.
	Wanted func() []Volume
	// Loops attaches files as loop devices: one for all backends of a process.
	Loops *loop.Devices
}
