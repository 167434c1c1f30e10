package reconciler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// eager detaches a device as soon as it is bound.
type eager struct{ fakeMounts }

func (m eager) BindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags) error {
	if err := m.fakeMounts.BindMount(ctx, source, device, target, flags); err != nil {
		return err
	}
	return fakeDevices{m.process}.Detach(ctx, devices.Volume{ID: volumeOf(target)})
}

// blind sees no mounts at targets.
type blind struct{ fakeMounts }

func (m blind) Look(ctx context.Context, at string) (state.Mountpoint, error) {
	have, err := m.fakeMounts.Look(ctx, at)
	if at != stagePath(volumeOf(at)) {
		have = state.Mountpoint{File: state.NoFile}
	}
	return have, err
}

// greedy takes away what somebody else has mounted over a path that it looks at.
type greedy struct{ fakeMounts }

func (m greedy) Look(ctx context.Context, at string) (state.Mountpoint, error) {
	m.k.with(func() {
		if stack := m.k.mounts[at]; len(stack) > 0 && stack[0].volume == "" {
			m.k.unmount(at)
		}
	})
	return m.fakeMounts.Look(ctx, at)
}

// hasty erases a volume before it is mounted.
type hasty struct{ fakeMounts }

func (m hasty) MountDevice(ctx context.Context, device state.Device, at, fsType string, flags state.Flags, readOnly bool) error {
	m.k.with(func() { m.k.volumes[volumeOf(at)].formatting = true })
	if err := (fakeDevices{m.process}).Erase(ctx, devices.Volume{ID: volumeOf(at)}); err != nil {
		return err
	}
	return m.fakeMounts.MountDevice(ctx, device, at, fsType, flags, readOnly)
}

// lying tells something else of devices than what is.
type lying struct {
	fakeDevices
	lie func(*state.Device)
}

func (d lying) Find(ctx context.Context, volume devices.Volume) (state.Device, error) {
	have, err := d.fakeDevices.Find(ctx, volume)
	d.lie(&have)
	return have, err
}

// sourceless takes what is mounted from a source for what has a device.
type sourceless struct{ fakeDevices }

func (sourceless) Source(context.Context, devices.Volume) (source state.Source, ok bool, err error) {
	return source, false, nil
}

// prying detaches a device as soon as a layer is open on it.
type prying struct{ fakeLayers }

func (l prying) Open(ctx context.Context, lower state.Device, volume devices.Volume, readOnly bool) error {
	if err := l.fakeLayers.Open(ctx, lower, volume, readOnly); err != nil {
		return err
	}
	return fakeDevices{l.process}.Detach(ctx, volume)
}

// Random histories find each fault that is put into the plugin, and the shortest
// history that is printed is as short as one can be.
func TestHistoriesFindPlantedFaults(t *testing.T) {
	for name, c := range map[string]struct {
		plant   func(p *process, k *Kernel)
		says    string
		longest int      // operations of the shortest history
		verbs   []string // that are among them
	}{
		"a device is detached while mounted":      {mounting(func(m fakeMounts) Mounts { return eager{m} }), "detach while mounted", 4, []string{"volume", "stage", "publish"}},
		"targets are not seen":                    {mounting(func(m fakeMounts) Mounts { return blind{m} }), "", 3, []string{"volume"}},
		"foreign mounts are removed":              {mounting(func(m fakeMounts) Mounts { return greedy{m} }), "somebody else's are gone", 4, []string{"cover"}},
		"data is erased":                          {mounting(func(m fakeMounts) Mounts { return hasty{m} }), "with data", 2, []string{"volume", "stage"}},
		"another device is taken for the stage's": {finding(func(d *state.Device) { d.Identity = "disk" }), "the stage was seen with", 5, []string{"volume", "swap"}},
		"other nodes are not reckoned with":       {finding(func(d *state.Device) { d.Shared = false }), "another node may have it", 2, []string{"volume", "stage"}},
		"a device is detached beneath a layer":    {func(p *process, k *Kernel) { k.Layers = []devices.Layer{prying{fakeLayers{p}}} }, "a layer stands on it", 2, []string{"volume", "stage"}},
		"a source is taken for a device":          {func(p *process, k *Kernel) { k.Devices = sourceless{fakeDevices{p}} }, "has no device", 2, []string{"volume", "stage"}},
	} {
		t.Run(name, func(t *testing.T) {
			plant := func(p *process, k Kernel) Kernel {
				c.plant(p, &k)
				return k
			}
			fails := func(h []operation) bool {
				return strings.Contains(try(t, h, plant).failed(), c.says) && len(try(t, h, plant).failures) > 0
			}
			for seed := range uint64(300) {
				history := generate(seed)
				if !fails(history) {
					continue
				}
				short := shrink(history, fails)
				if len(short) > c.longest {
					t.Errorf("seed %d: %d operations, %d would do: %s", seed, len(short), c.longest, script(short))
				}
				for _, verb := range c.verbs {
					if !strings.Contains(script(short), verb+" ") {
						t.Errorf("seed %d: no %s in %s", seed, verb, script(short))
					}
				}
				return
			}
			t.Error("not found in 300 histories")
		})
	}
}

// mounting and finding plant a fault into what mounts, and into what finds devices.
func mounting(plant func(m fakeMounts) Mounts) func(p *process, k *Kernel) {
	return func(p *process, k *Kernel) {
		m := plant(fakeMounts{p, false})
		k.Mounts, k.Existing = m, m
	}
}

func finding(lie func(*state.Device)) func(p *process, k *Kernel) {
	return func(p *process, k *Kernel) { k.Devices = lying{fakeDevices{p}, lie} }
}

// A history goes the same way each time, as a rule, or it could not be shrunk,
// nor played again.
func TestHistoriesRepeat(t *testing.T) {
	// What happens at one moment is told in any order.
	same := func(a, b string) bool {
		x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
		slices.Sort(x)
		slices.Sort(y)
		return slices.Equal(x, y)
	}
	const histories = 60
	var differ []string
	for seed := range uint64(histories) {
		history := generate(seed)
		first := try(t, history, nil)
		if again := try(t, history, nil); !same(first.story, again.story) {
			differ = append(differ, fmt.Sprintf("seed %d: first\n%s\nthen\n%s", seed, first.story, again.story))
		}
	}
	if len(differ) > histories/10 { // the scheduler has a word in what happens at one moment
		t.Errorf("%d of %d histories went another way: %s", len(differ), histories, differ[0])
	}
}

// What is printed can be read again.
func TestHistoriesAreText(t *testing.T) {
	for seed := range uint64(1000) {
		history := generate(seed)
		if len(history) > 50 {
			t.Errorf("seed %d: %d operations", seed, len(history))
		}
		again, err := parse(script(history))
		if err != nil || script(again) != script(history) {
			t.Fatalf("seed %d: %v\n%s\n%s", seed, err, script(history), script(again))
		}
	}
	for _, text := range []string{"fly a", "stage", "stage c", "stage a soon", "publish a 0", "sleep long", "mend now", "fault bind a 1 fails many 0s"} {
		if _, err := parse(text); err == nil {
			t.Errorf("%q was understood", text)
		}
	}
}
