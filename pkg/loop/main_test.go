package loop

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var wantError = require.Class

const size = 4 << 20 // bytes of a test's file

func newDevices(t testing.TB) *Devices {
	t.Helper()
	machine.Kernel(t)
	s, err := New(t.Context())
	require.NoError(t, err)
	// What another package's test waits for to get again is not taken.
	s.Reserve(Numbers{Bound: machine.Bound})
	return s
}

// newFile makes a file and returns what a device over it is to show. Its devices
// are detached when the test ends.
func newFile(t testing.TB, name string) Target {
	t.Helper()
	path := filepath.Join(t.TempDir(), name, "data")
	put(t, path, strings.Repeat("\x00", size))
	t.Cleanup(func() {
		for range 2 { // those of the views first
			for _, over := range over(t, path) {
				for _, view := range overDevice(t, over) {
					detachLeft(t, view, over)
				}
				detachLeft(t, over, backingOf(filepath.Base(over)))
			}
		}
	})
	return target(t, name, path)
}

func target(t testing.TB, name, path string) Target {
	t.Helper()
	file, err := StatFile(path)
	require.NoError(t, err)
	place := filepath.Base(filepath.Dir(filepath.Dir(filepath.Dir(path)))) // that of this test, which ends in a number of its own
	place = place[max(0, len(place)-12):]
	return Target{Tag: Tag(place, name), File: file, Path: path, Place: "/" + name + "/"}
}

// over lists the nodes of the devices over a file.
func over(t testing.TB, path string) (nodes []string) {
	t.Helper()
	names, err := bound()
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasPrefix(backingOf(name), path) {
			nodes = append(nodes, "/dev/"+name)
		}
	}
	return nodes
}

func overDevice(t testing.TB, node string) (nodes []string) {
	t.Helper()
	for _, over := range over(t, node) {
		if backingOf(filepath.Base(over)) == node {
			nodes = append(nodes, over)
		}
	}
	return nodes
}

// detachLeft detaches what a test has left, unless it goes by itself just now.
func detachLeft(t testing.TB, node, backing string) {
	t.Helper()
	_, err := machine.Detach(node, backing)
	require.NoError(t, err)
	machine.AwaitDetached(node, backing)
}

// request asks for a writable device over a target, for a volume.
func request(to Target, volume string) Request {
	return Request{Target: to, Shape: Shape{Sector: 512}, Volume: volume, Open: func() (*os.File, error) { return OpenFile(to.Path, to.File.ID, os.O_RDWR) }}
}

func attach(t testing.TB, s *Devices, r Request) *Device {
	t.Helper()
	require.NoError(t, s.Attach(t.Context(), r))
	d, err := s.Recall(t.Context(), r.Target)
	if err != nil || d == nil || !r.Owns(d) {
		t.Fatalf("%v, %v", d, err)
	}
	return d
}

// detached detaches what stands for a target.
func detached(t testing.TB, s *Devices, to Target) {
	t.Helper()
	require.NoError(t, s.Detach(t.Context(), to))
	if d, err := s.Recall(t.Context(), to); d != nil || err != nil {
		t.Fatalf("%v, %v", d, err)
	}
}

// replace sets a variable until the test ends.
func replace(t *testing.T, variable *string, value string) {
	t.Helper()
	before := *variable
	*variable = value
	t.Cleanup(func() { *variable = before })
}

// put writes a file, and makes the directory for it.
func put(t testing.TB, path, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}
