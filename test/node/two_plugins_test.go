package node

import (
	"context"
	"path/filepath"
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
	must(t, second.Log.Await(waiting, "aiting for another plugin process"))
	must(t, v.Publish(ctx, pod)) // the first still serves
	write(t, filepath.Join(pod, "file"), "kept")
	p.Terminate()
	p.AwaitReady(second)
	p.Process = second

	must(t, v.Publish(ctx, pod))
	mustRead(t, filepath.Join(pod, "file"), "kept")
	v.End(pod)
}
