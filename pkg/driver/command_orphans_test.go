package driver

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
)

func TestPrintOrphans(t *testing.T) {
	var out strings.Builder
	printOrphans(&out, []reconciler.Orphan{
		{Volume: "v", Device: "/dev/loop3", Paths: []string{"/stage", "/pod"}, Kept: "it is mounted"},
		{Device: "/dev/loop4", Cleaned: true}, {Volume: "w", Device: "/dev/loop5"},
	})
	const want = `
v on /dev/loop3
    mounted at /stage
    mounted at /pod
    stays: it is mounted
an unknown volume on /dev/loop4
    detached
w on /dev/loop5
    nobody uses it now: ` + "`csi-node orphans --clean` detaches it\n"
	if out.String() != want[1:] {
		t.Errorf("prints\n%s", out.String())
	}
}
