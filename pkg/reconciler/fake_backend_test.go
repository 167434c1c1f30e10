package reconciler

import (
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/state"
)

// The backend of the simulated node answers as every backend must.
func TestFakeKernelIsABackend(t *testing.T) {
	devicestest.Backend(t, func(t *testing.T) devicestest.Harness {
		k := newFakeKernel()
		k.obeys = true
		t.Cleanup(func() {
			for _, v := range k.violations {
				t.Error(v)
			}
		})
		open := func() fakeDevices { return fakeDevices{&process{k: k, end: func() {}}} }
		bytes := map[*fakeVolume][]byte{}
		// of calls f with the volume that has a device.
		of := func(t *testing.T, device state.Device, f func(v *fakeVolume)) {
			t.Helper()
			k.with(func() {
				for _, v := range k.volumes {
					if v.has(device.Number) {
						f(v)
						return
					}
				}
				t.Fatalf("no volume has %+v", device)
			})
		}
		return devicestest.Harness{
			Open:     func(*testing.T) devices.Backend { return open() },
			Views:    func() devicestest.Views { return open() },
			BadIDs:   []string{}, // any will do
			Existing: true,
			Create: func(_ *testing.T, name string) string {
				blank := state.Contents{Kind: state.ContentsBlank}
				k.with(func() {
					v := &fakeVolume{capacity: devicestest.Size, size: devicestest.Size, fakeData: fakeData{contents: blank, beneath: blank}}
					k.volumes[name], bytes[v] = v, make([]byte, 4*devicestest.Size)
				})
				return name
			},
			Hold: func(t *testing.T, device state.Device) func() {
				var claim *bool
				of(t, device, func(v *fakeVolume) {
					if claim = &v.held; v.view != nil && v.view.number == device.Number {
						claim = &v.viewHeld
					}
					*claim = true
				})
				return func() { k.with(func() { *claim = false }) }
			},
			Write: func(t *testing.T, device state.Device, offset int64, data []byte) {
				of(t, device, func(v *fakeVolume) {
					copy(bytes[v][offset:], data)
					v.contents.Kind = state.ContentsOther
				})
			},
			Read: func(t *testing.T, device state.Device, offset int64, data []byte) {
				of(t, device, func(v *fakeVolume) {
					if v.contents.Kind == state.ContentsBlank { // since it was erased
						clear(bytes[v])
					}
					copy(data, bytes[v][offset:])
				})
			},
		}
	})
}
