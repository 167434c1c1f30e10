//go:build vm

package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

// TestAlertsOfLVM: those of which TestAlerts cannot make the causes fire, too, where there is a device mapper.
func TestAlertsOfLVM(t *testing.T) {
	t.Parallel()
	if names := slices.Sorted(maps.Keys(mapped)); !slices.Equal(names, inGuest) {
		t.Fatalf("made are the causes of %q", names)
	}
	for _, r := range rules(t) {
		if cause := mapped[r.Alert]; cause != nil {
			t.Run(r.Alert, func(t *testing.T) {
				t.Parallel()
				checkCause(t, r, cause)
			})
		}
	}
}

var mapped = map[string]func(t *testing.T, n *node){
	"CSINodeLVMMirrorDegraded": func(t *testing.T, n *node) {
		const size = 64
		one, _ := n.disk("one", size)
		two, _ := n.disk("two", size)
		leg, become := n.mappedDisk(two)
		group, lvm := n.groupOf(one, leg)
		t.Cleanup(func() { lvm("vgremove", "--force", "--force", "--yes", group) })
		n.run("--lvm-groups", group)
		v := n.logical(group, 16, map[string]string{"raid": "raid1"})
		must(t, v.Stage(t.Context()))
		degraded := `csi_node_lvm_degraded_volumes{group="` + group + `"}`
		n.await(degraded, func(value string) bool { return value == "0" })
		n.well()

		const sectors, last = size * mib / 512, 8 // the last are there, so that what is below remains its own
		become(fmt.Sprintf("0 %d error\n%d %d linear %s %d\n", sectors-last, sectors-last, last, two, sectors-last))
		fill(t, v, 4)
		n.await(degraded, func(value string) bool { return value == "1" })

		become(fmt.Sprintf("0 %d linear %s 0\n", sectors, two))
		v.EndInTime()
	},
	"CSINodeLVMThinPoolNearlyFull": func(t *testing.T, n *node) {
		group := n.thinPool()
		n.run("--lvm-groups", group)
		v := n.logical(group, 96, map[string]string{"thinPool": "tank", "overcommit": "2"})
		must(t, v.Stage(t.Context()))
		used := `csi_node_lvm_thin_pool_data_used_ratio{group="` + group + `",thin_pool="tank"}`
		n.await(used, func(value string) bool { return ratio(t, value) < 0.5 })
		n.well()

		fill(t, v, 56)
		n.await(used, func(value string) bool { return ratio(t, value) > 0.85 })
		v.EndInTime()
	},
}

// TestDashboardOfThinPools: those queries of the dashboard that ask for thin pools find some.
func TestDashboardOfThinPools(t *testing.T) {
	t.Parallel()
	d, n := readDashboard(t), newNode(t)
	n.start("--lvm-groups", n.thinPool())
	if d.ask(t, n.told(10*time.Minute), ofThinPools) == 0 {
		t.Error("there are none")
	}
}

// thinPool makes a thin pool of 64 MiB in a volume group.
func (n *node) thinPool() (group string) {
	n.t.Helper()
	disk, _ := n.disk("disk", 160)
	group, lvm := n.groupOf(disk)
	n.t.Cleanup(func() { lvm("vgremove", "--force", "--force", "--yes", group) })
	lvm("lvcreate", "--yes", "--type", "thin-pool", "--size", "64M", "--poolmetadatasize", "4M", "--chunksize", "64k", "--name", "tank", group)
	return group
}

func ratio(t *testing.T, value string) float64 {
	t.Helper()
	share, err := strconv.ParseFloat(value, 64)
	must(t, err)
	return share
}

// mappedDisk makes a device of the device mapper over a whole disk, and returns what gives it another table.
func (n *node) mappedDisk(below string) (device string, become func(table string)) {
	n.t.Helper()
	name := filepath.Base(n.Dir) + "-leg"
	dmsetup := func(args ...string) string {
		n.t.Helper()
		return strings.TrimSpace(harness.Command(n.t, "env", append([]string{"DM_DISABLE_UDEV=1", "dmsetup"}, args...)...))
	}
	dmsetup("create", "--noudevsync", name, "--table", "0 "+strings.TrimSpace(harness.Command(n.t, "blockdev", "--getsz", below))+" linear "+below+" 0")
	n.t.Cleanup(func() { dmsetup("remove", "--noudevsync", "--retry", name) })
	become = func(table string) {
		n.t.Helper()
		file := filepath.Join(n.t.TempDir(), "table")
		must(n.t, os.WriteFile(file, []byte(table), 0o600))
		dmsetup("load", name, file)
		dmsetup("suspend", "--noflush", name)
		dmsetup("resume", name)
	}
	return "/dev/dm-" + dmsetup("info", "--columns", "--noheadings", "--options", "minor", name), become
}

// logical makes a logical volume of so many MiB, with the parameters of a class.
func (n *node) logical(group string, size int64, parameters map[string]string) *harness.Volume {
	n.t.Helper()
	v := harness.NewVolume(n.t, n.Plugin, "volume", harness.Shared("ext4"))
	parameters["backend"], parameters["volumeGroup"] = "lvm", group
	made, err := n.Controller.CreateVolume(n.t.Context(), v.CreateRequest(size*mib, parameters))
	must(n.t, err)
	v.ID, v.Context = made.GetVolume().GetVolumeId(), made.GetVolume().GetVolumeContext()
	return v
}

// fill writes so many MiB to a volume that is staged.
func fill(t *testing.T, v *harness.Volume, size int) {
	t.Helper()
	file := filepath.Join(v.Staging, "file")
	must(t, os.WriteFile(file, bytes.Repeat([]byte("x"), size*mib), 0o600))
	harness.Command(t, "sync", file)
}
