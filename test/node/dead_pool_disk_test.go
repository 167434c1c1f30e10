package node

import (
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// When the pool's file system was shut down, as by an error
// of its disk, volumes are unpublished and unstaged: by the plugin that runs, and
// by one that is started then where the kernel still tells the devices' tags.
func TestDeadDiskOfThePool(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		mkfs    []string
		restart bool
	}{
		"ext4":            {[]string{"mkfs.ext4", "-q"}, false},
		"ext4, restarted": {[]string{"mkfs.ext4", "-q"}, true},
		"xfs":             {[]string{"mkfs.xfs", "-q"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := harness.New(t)
			mountPool(t, p, 320*mib, tt.mkfs...)
			p.Start(harness.Options{})
			// Devices that do not answer may stand for whatever volumes have their ids, in other tests too.
			own := filepath.Base(p.Dir)
			formatted := create(t, p, own+"-formatted", 32*mib, mountAs("ext4", singleWriter))
			raw := create(t, p, own+"-raw", 32*mib, blockAs(singleWriter))
			for _, v := range []*volume{formatted, raw} {
				must(t, v.Up(t.Context(), v.Target("1")))
			}
			machine.ShutDown(t, p.PoolDir)
			if tt.restart {
				p.Kill()
				p.Process = p.Launch(harness.Options{}) // it is not ready without the pool
				p.AwaitServing(p.Process)
			}
			for _, v := range []*volume{formatted, raw} {
				must(t, v.Down(t.Context(), v.Target("1")))
			}
			for _, l := range p.Loops() {
				t.Errorf("attached: %v", l)
			}
			mustHaveNoRecord(t, p)
		})
	}
}
