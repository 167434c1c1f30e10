package node

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// A second plugin on the same state directory waits for the first and then
// takes over: upgrades may overlap.
func TestSecondPluginWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	pod := v.Target("pod")
	must(t, v.Stage(ctx))

	second := p.Launch(harness.Options{})
	waiting, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	must(t, second.Log.Await(waiting, "aiting for another csi-node process"))
	must(t, v.Publish(ctx, pod)) // the first still serves
	write(t, filepath.Join(pod, "file"), "kept")
	p.Terminate()
	p.AwaitReady(second)
	p.Process = second

	must(t, v.Publish(ctx, pod))
	mustRead(t, filepath.Join(pod, "file"), "kept")
	v.End(pod)
}

// A plugin with another state directory is kept from a
// pool in use, and has it once the first has ended, however that came.
func TestPoolInUseIsKeptFromAnotherPlugin(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	other := harness.New(t)
	other.PoolDir = p.PoolDir
	second := other.Launch(harness.Options{})
	if state := second.Wait(t); state.ExitCode() != 1 {
		t.Errorf("the second plugin: %s", state)
	}
	for _, word := range []string{p.PoolDir, fmt.Sprintf("process %d ", p.PID()), "--state-dir", "--pool-dir"} {
		if !strings.Contains(second.Log.String(), word) {
			t.Errorf("it does not say %q:\n%s", word, second.Log)
		}
	}
	create(t, p, "v", 16*mib, mountAs("ext4", singleWriter)).End()
	p.Kill()
	other.Start(harness.Options{})
	other.Kill()
	p.Start(harness.Options{})
}
