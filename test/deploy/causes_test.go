package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/harness"
)

// causes make, for each alert, what it warns of, on the real kernel, and scrape the plugin before and after.
var causes = map[string]func(t *testing.T, n *node){
	"CSINodeVolumesFailing": func(t *testing.T, n *node) {
		n.start()
		v := n.volume("volume", 32, "thin", "ext4")
		must(t, v.Stage(t.Context()))
		holder, err := os.Open(v.Staging) // somebody works in it
		must(t, err)
		if err := v.Unstage(t.Context()); err == nil {
			t.Error("it is unstaged")
		}
		n.await(`csi_node_volumes{state="failing"}`, func(value string) bool { return value == "1" })
		must(t, holder.Close())
		v.EndInTime()
	},
	"CSINodeCallsRefused": func(t *testing.T, n *node) {
		n.start()
		v := n.volume("volume", 32, "thin", "ext4")
		v.Capability.GetMount().MountFlags = []string{"nonsense"}
		for range 20 { // kubelet asks every two minutes
			if err := v.Stage(t.Context()); err == nil {
				t.Fatal("it is staged")
			}
			n.scrape()
			n.scrape()
		}
	},
	"CSINodeMountsKeepBreaking": func(t *testing.T, n *node) {
		n.run()
		v := n.volume("volume", 32, "thin", "ext4")
		must(t, v.Stage(t.Context()))
		var pods []string
		for i := range 12 {
			pods = append(pods, v.Target(fmt.Sprint("pod-", i)))
			must(t, v.Publish(t.Context(), pods[i]))
		}
		n.well()
		for _, pod := range pods {
			must(t, unix.Unmount(pod, unix.MNT_DETACH))
		}
		n.await(`csi_node_repairs_total{part="target"}`, func(value string) bool { return value == "12" })
		n.AwaitRest()
		v.End(pods...)
	},
	"CSINodeOrphans": func(t *testing.T, n *node) {
		n.start()
		v := n.volume("volume", 32, "thin", "") // of one with a file system the plugin gets rid by itself
		must(t, v.Stage(t.Context()))
		n.Kill()
		must(t, os.RemoveAll(filepath.Join(n.StateDir, store.Directory)))
		n.run()
		n.await("csi_node_orphans", func(value string) bool { return value == "1" })
		v.End()
	},
	"CSINodePoolOvercommitted": func(t *testing.T, n *node) {
		n.smallPool()
		n.run()
		n.volume("volume", 200, "thin", "ext4")
		n.well()
		harness.Command(t, "fallocate", "--length", "220M", filepath.Join(n.PoolDir, "lost+found", "somebody's"))
		n.scrape()
	},
	"CSINodePoolNearlyFull": func(t *testing.T, n *node) {
		n.smallPool()
		n.start()
		n.volume("volume", 264, "thick", "ext4")
		n.scrape()
	},
	"CSINodePoolNotSeen": func(t *testing.T, n *node) {
		n.smallPool()
		n.start()
		disk, err := os.Open(n.PoolDir)
		must(t, err)
		const goingDown = 0x8004587d // EXT4_IOC_SHUTDOWN, as when the disk is dead
		must(t, unix.IoctlSetPointerInt(int(disk.Fd()), goingDown, 2))
		must(t, disk.Close())
		n.await("csi_node_pool_seen_timestamp_seconds", stands())
	},
	"CSINodeLVMDiskMissing": func(t *testing.T, n *node) {
		group, pull := n.volumeGroup()
		n.start("--lvm-groups", group)
		pull()
		n.await(`csi_node_lvm_missing_disks{group="`+group+`"}`, func(value string) bool { return value == "1" })
	},
	"CSINodeLVMNotSeen": func(t *testing.T, n *node) {
		group, _ := n.volumeGroup()
		n.start("--lvm-groups", group)
		// As an lvm does that hangs in the midst of a change.
		lock, err := os.OpenFile("/run/lock/lvm/V_"+group, os.O_RDWR|os.O_CREATE, 0o700)
		must(t, err)
		t.Cleanup(func() { must(t, lock.Close()) }) // the lvm that waits removes it
		must(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
		n.await("csi_node_lvm_seen_timestamp_seconds", stands())
	},
	"CSINodeDown": func(t *testing.T, n *node) {
		n.start()
		n.Kill()
		n.miss()
	},
	"CSINodeNotReady": func(t *testing.T, n *node) {
		n.start()
		must(t, os.Rename(n.PoolDir, n.PoolDir+".away"))
		n.await("csi_node_ready", func(value string) bool { return value == "0" })
		must(t, os.Rename(n.PoolDir+".away", n.PoolDir))
	},
	"CSINodeNotRegistered": func(t *testing.T, n *node) {
		registry := filepath.Join(n.Dir, "registry")
		n.run("--registration-dir", registry)
		conn, err := grpc.NewClient("unix://"+filepath.Join(registry, "csi-node.local-reg.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
		must(t, err)
		defer conn.Close()
		kubelet := registerapi.NewRegistrationClient(conn)
		_, err = kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true})
		must(t, err)
		n.well()
		_, err = kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{Error: "no"})
		must(t, err)
		n.scrape()
	},
}

// inGuest are the alerts whose causes need the device mapper: TestAlertsOfLVM makes them in a virtual machine of test/vm.
var inGuest = []string{"CSINodeLVMMirrorDegraded", "CSINodeLVMThinPoolNearlyFull"}

// stands reports whether a value is that of the scrape before. The time of what is seen is another in each.
func stands() func(string) bool {
	before := ""
	return func(value string) bool {
		stands := value == before
		before = value
		return stands
	}
}

// volumeGroup makes a volume group of two disks, of which pull pulls one.
func (n *node) volumeGroup() (name string, pull func()) {
	n.t.Helper()
	one, _ := n.disk("one", 64)
	two, pull := n.disk("two", 64)
	name, _ = n.groupOf(one, two)
	return name, pull
}

// groupOf makes a volume group of disks, and returns lvm, which sees no others.
func (n *node) groupOf(disks ...string) (name string, lvm func(args ...string) string) {
	n.t.Helper()
	name = filepath.Base(n.Dir)
	config := `activation{udev_sync=0 udev_rules=0 monitoring=0} backup{backup=0 archive=0}
		devices{use_devicesfile=0 obtain_device_list_from_udev=0 global_filter=["a|^(` + strings.Join(disks, "|") + `)$|", "r/.*/"]}`
	config = strings.Join(strings.Fields(config), " ")
	lvm = func(args ...string) string {
		n.t.Helper()
		return harness.Command(n.t, "env", append([]string{"DM_DISABLE_UDEV=1", "lvm", args[0], "--config", config}, args[1:]...)...)
	}
	lvm(append([]string{"vgcreate", "--yes", name}, disks...)...)
	told := strings.Fields(lvm("vgs", "--noheadings", "--options", "vg_uuid", name))
	n.lock = "/run/lock/lvm/csi-node.csi-node.local." + strings.ReplaceAll(told[len(told)-1], "-", "") // behind warnings
	return name, lvm
}
