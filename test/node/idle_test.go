package node

import (
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// A volume at rest costs nothing: after many calls the plugin has no more
// goroutines and open files than before, and has taken no more looks.
func TestIdleVolumeCostsNothing(t *testing.T) {
	t.Parallel()
	address := harness.FreeAddress(t)
	p := harness.Start(t, harness.Options{Flags: []string{"--http-endpoint", address, "--v", "0"}})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	cycle := func() {
		must(t, v.Stage(t.Context()))
		for _, name := range []string{"one", "two"} {
			must(t, v.Publish(t.Context(), v.Target(name)))
		}
		for _, name := range []string{"one", "two"} {
			must(t, v.Unpublish(t.Context(), v.Target(name)))
		}
		must(t, v.Unstage(t.Context()))
	}
	cycle()
	count := func(name string) float64 { return harness.Metrics(t, address)[name] }
	goroutines, files := count("go_goroutines"), count("process_open_fds")
	cycles := 100
	if testing.Short() {
		cycles = 10
	}
	for range cycles {
		cycle()
	}
	const waitForWork = 7 // the reconciler's that stay to wait for more, besides the first
	harness.Eventually(t, "as many goroutines as before", func() bool { return count("go_goroutines") <= goroutines+waitForWork })
	harness.Eventually(t, "as many open files as before", func() bool { return count("process_open_fds") <= files })
	if backOffs := count("csi_node_backoffs_total"); backOffs > 0 {
		t.Errorf("%v passes ended with something to try again", backOffs)
	}
	must(t, v.Delete(t.Context()))
}
