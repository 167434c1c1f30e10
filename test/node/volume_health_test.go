package node

import (
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

// The health of a volume in use tells what its device does not show, and what its storage
// does not tell.
func TestHealthOfAVolumeInUse(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "in-use", 16*mib, blockAs(multiWriter))
	target := v.Target("pod")
	must(t, v.Up(t.Context(), target))
	health := func(want string) {
		t.Helper()
		resp, err := p.Node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, VolumePublishPath: target})
		must(t, err)
		var got []string
		for _, e := range resp.GetVolumeHealth().GetHealthStatuses() {
			got = append(got, e.GetStatus().String()+" "+e.GetReason()+": "+e.GetMessage())
		}
		if told := strings.Join(got, "; "); !strings.Contains(told, want) || want == "" && told != "" {
			t.Errorf("its health is %q, not %q", told, want)
		}
	}
	health("")
	must(t, os.Truncate(v.Data(), mib))
	health("DATA_LOSS BackingTruncated: the volume has 1048576 bytes of 16777216")
	must(t, os.Truncate(v.Data(), 16*mib))
	health("")
	away := p.PoolDir + ".away"
	must(t, os.Rename(p.PoolDir, away))
	health("INACCESSIBLE StorageUnusable: volume " + v.ID + ": observe: pool")
	must(t, os.Rename(away, p.PoolDir))
	health("")
	v.End(target)
}
