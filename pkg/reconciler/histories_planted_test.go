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

// A history that fails is shrunk to a shortest one. That random histories find faults is
// for the mutants to show.
func TestShortestHistory(t *testing.T) {
	plant := func(p *process, k Kernel) Kernel {
		k.Mounts = eager{fakeMounts{p, false}}
		return k
	}
	fails := func(h []operation) bool { return strings.Contains(try(t, h, plant).failed(), "detach while mounted") }
	for seed := range uint64(300) {
		history := generate(seed)
		if !fails(history) {
			continue
		}
		short := shrink(history, fails)
		var verbs []string
		for _, o := range short {
			verbs = append(verbs, o[0])
		}
		if slices.Sort(verbs); !slices.Equal(verbs, []string{"publish", "stage", "volume"}) {
			t.Errorf("seed %d: %s", seed, script(short))
		}
		return
	}
	t.Error("not found in 300 histories")
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
