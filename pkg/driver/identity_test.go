package driver

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// A check that hangs does not make the plugin unready, and probes do not pile
// up behind it.
func TestProbeWithAHungCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang, looks := make(chan struct{}), 0
		i := &identity{needs: &needs{checks: []func(context.Context) error{func(context.Context) error { looks++; <-hang; return nil }}}}
		for range 5 {
			if resp, err := i.Probe(context.Background(), &csi.ProbeRequest{}); err != nil || !resp.GetReady().GetValue() {
				t.Errorf("%v, %v", resp, err)
			}
		}
		close(hang)
		synctest.Wait()
		if looks != 1 {
			t.Errorf("%d checks hung", looks)
		}
	})
}
