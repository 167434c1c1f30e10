// Package chaos does to the built csi-node binary, on the real kernel, what may
// befall it on a node: calls come at random and many at a time, it is killed at any
// moment and at each step, its store is damaged, and its mounts and devices are torn
// off and tampered with while pods use them.
//
//	go test ./test/chaos -chaos.seed 7 -chaos.calls 20000 -chaos.kills 300 -chaos.acts 300
//
// Begin with TestChaos, which draws all of that from one seed. The others show one thing each.
package chaos

import (
	"errors"
	"flag"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

var (
	seedFlag  = flag.Uint64("chaos.seed", 0, "seed of what happens when in TestChaos; 0: another one each time")
	callsFlag = flag.Int("chaos.calls", 1000, "random calls to a plugin that stays up")
	killsFlag = flag.Int("chaos.kills", 30, "how often the plugin is ended")
	actsFlag  = flag.Int("chaos.acts", 30, "acts of the saboteur")
)

func TestMain(m *testing.M) { harness.Main(m) }

const mib = 1 << 20

func must(t testing.TB, errs ...error) {
	t.Helper()
	require.NoError(t, errors.Join(errs...))
}

// pause waits for a moment that is drawn, or until something has ended.
func pause(d time.Duration, ended <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ended:
	}
}
