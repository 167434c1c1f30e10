// Package chaos does to the built csi-node binary, on the real kernel, what may
// befall it on a node: it is killed at any moment and at each step, and its
// mounts and devices are torn off and tampered with while pods use them.
//
//	go test ./test/chaos -chaos.seed 7 -chaos.kills 300 -chaos.acts 300
package chaos

import (
	"errors"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

var (
	seedFlag  = flag.Uint64("chaos.seed", 0, "seed of what happens when; 0: another one each time")
	killsFlag = flag.Int("chaos.kills", 30, "how often the plugin is ended in TestKills")
	actsFlag  = flag.Int("chaos.acts", 30, "acts of the saboteur in TestSabotage")
)

func TestMain(m *testing.M) { harness.Main(m) }

// chance returns the source of all that is random in a test.
func chance(t *testing.T) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-chaos.seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

const mib = 1 << 20

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
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
