// Package drivertest is the suite for a whole driver, as package devicestest is
// for a backend: it runs the driver as a process on directories of its own, plays
// kubelet for its volumes, kills it at each step, takes mounts and the store away
// from it, and sees that nothing is lost and nothing is left.
//
// The driver that runs is the test program itself, so nothing has to be built:
//
//	func TestMain(m *testing.M) { drivertest.Main(m, options()) }
//
//	func TestDriver(t *testing.T) {
//		drivertest.Run(t, func(t *testing.T, dir string) drivertest.Harness { … })
//	}
//
// It needs root and a kernel of its own: package test/machine says what, and
// leaves the tests out where that is missing. The process is that of package
// test/harness, which a Harness may use.
package drivertest

import (
	"os"
	"testing"

	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/driver/faults"
	"github.com/csi-node/csi-node/test/harness"
)

// Size is that of the volumes that the suite asks for, in bytes: room for the
// smallest file system that every kind of it can be made on.
const Size = 64 << 20

// larger is the size in bytes to which volumes grow that do, of which a layer may take
// layerTakes.
const (
	larger     = Size + Size/2
	layerTakes = Size / 32
)

// What the environment of a test program says that is to be the driver.
const (
	serveVariable = "CSI_NODE_DRIVERTEST"
	faultVariable = "CSI_NODE_FAULT"
)

// Main runs the tests of a package, or is the driver when the suite starts the
// test program as such. It does not return.
func Main(m *testing.M, o driver.Options) {
	if os.Getenv(serveVariable) != "" {
		o.Hook = faults.Hook(os.Getenv(faultVariable))
		driver.Main(o)
	}
	harness.Main(m)
}

// Harness is the storage that the driver runs on.
type Harness struct {
	// Flags are those of the backends.
	Flags []string
	// Create makes a volume of Size bytes that nobody has used. The plugin serves,
	// for those drivers that make their volumes themselves. It fails the test if
	// it cannot.
	Create func(t *testing.T, p *harness.Plugin, name string) Volume
	// Filesystem is asked for; empty: the driver chooses.
	Filesystem string
	// Mounted: no volume has a device, as all are mounted from a source
	// (devices.MountSource). Raw access must be refused.
	Mounted bool
}

// Volume is what a CO knows of a volume.
type Volume struct {
	ID string
	// Context, Publish and Secrets are handed to the driver with each request that
	// has a place for them.
	Context, Publish, Secrets map[string]string
	// Grows: NodeExpandVolume makes it larger, to one and a half times its size.
	Grows bool
	// Delete ends the volume, which nothing uses. It fails the test if anything
	// is left; nil: the end of the test undoes all.
	Delete func()
}

// Driver is a test program whose TestMain calls Main, as the driver with flags of
// its backends: what a harness.Plugin runs in tests beside the suite.
func Driver(program string, flags ...string) *harness.Driver {
	return &harness.Driver{Path: program, Env: []string{serveVariable + "=1"}, Flags: flags}
}

// Run runs the suite. fresh returns storage in a directory of its own, which is
// removed afterwards, and is called for each test; what it makes elsewhere it undoes
// by t.Cleanup.
func Run(t *testing.T, fresh func(t *testing.T, dir string) Harness) {
	for name, test := range map[string]func(*testing.T, func(*testing.T, bool) *life){
		"Life":      testLife,
		"ReadOnly":  testReadOnly,
		"Kill":      testKill,
		"Grow":      testGrow,
		"Heal":      testHeal,
		"LostStore": testLostStore,
		"Unknown":   testUnknown,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, func(t *testing.T, raw bool) *life {
				t.Helper()
				p := harness.New(t)
				h := fresh(t, p.Dir)
				self, err := os.Executable()
				if err != nil {
					t.Fatal(err)
				}
				p.Driver = Driver(self, h.Flags...)
				return &life{Plugin: p, t: t, harness: h, raw: raw}
			})
		})
	}
}
