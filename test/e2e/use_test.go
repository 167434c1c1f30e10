package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestWorkloads: what pods ask of volumes, several of them at once.
func TestWorkloads(t *testing.T) {
	t.Cleanup(func() { assertNothingLeft(t) })
	for name, workload := range map[string]func(*space){
		"StatefulSet":      statefulSet,
		"SharedByTwoPods":  sharedByTwoPods,
		"ReadWriteOncePod": readWriteOncePod,
		"SubPath":          subPath,
		"RawBlock":         rawBlock,
		"FSGroup":          fsGroup,
		"Filesystems":      filesystems,
		"StaticVolume":     staticVolume,
		"Expansion":        expansion,
		"GrowthTakenBack":  growthTakenBack,
		"Looks":            looks,
		"Operates":         operates,
		"ClassOfSomeNodes": classOfSomeNodes,
		"Examples":         examples,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			workload(newSpaceAmongOthers(t))
		})
	}
}

// statefulSet: each replica has a volume of its own and finds it again.
func statefulSet(s *space) {
	s.apply(`apiVersion: apps/v1
kind: StatefulSet
metadata: {name: set}
spec:
  replicas: 3
  podManagementPolicy: Parallel
  serviceName: set
  selector: {matchLabels: {app: set}}
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete}
  template:
    metadata: {labels: {app: set}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: main
          image: ` + shellImage + `
          command: [sh, -c, "hostname >> /data/names; ` + idle + `"]
          volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {accessModes: [ReadWriteOnce], storageClassName: csi-node-local, resources: {requests: {storage: 32Mi}}}
`)
	all := []string{"set-0", "set-1", "set-2"}
	s.kubectl("rollout", "status", "statefulset/set", "--timeout="+patience.String())
	s.kubectl("delete", "pod", "--all", "--timeout="+patience.String())
	s.kubectl("rollout", "status", "statefulset/set", "--timeout="+patience.String())
	s.ready(all...)
	for _, pod := range all {
		s.holds(pod, "cat /data/names", pod+"\n"+pod)
	}
	s.remove("statefulset/set")
}

// sharedByTwoPods: two pods of the node write to one ReadWriteOnce volume, and one that has it read-only cannot.
func sharedByTwoPods(s *space) {
	s.apply(claim("data", "csi-node-local", "32Mi"), pod("one", "data", idle), pod("two", "data", idle),
		podOf("reader", idle, "volumeMounts: [{name: data, mountPath: /data}]", "volumes: [{name: data, persistentVolumeClaim: {claimName: data, readOnly: true}}]"))
	s.ready("one", "two", "reader")
	s.sh("one", "echo one > /data/one")
	s.sh("two", "echo two > /data/two")
	for _, pod := range []string{"one", "two", "reader"} {
		s.holds(pod, "cat /data/one /data/two", "one\ntwo")
	}
	s.holds("reader", "(echo x > /data/three) 2>/dev/null || echo refused; grep ' /data ' /proc/mounts | cut -d' ' -f4 | cut -d, -f1", "refused\nro")
	s.remove("pod/one")
	s.holds("two", "echo still > /data/two && cat /data/two", "still")
}

// readWriteOncePod: a second pod waits until the first is gone.
func readWriteOncePod(s *space) {
	s.apply(claim("data", "csi-node-local", "32Mi", "accessModes: [ReadWriteOncePod]"), pod("first", "data", "echo first > /data/file; "+idle))
	s.ready("first")
	s.apply(pod("second", "data", idle))
	s.event("second", "ReadWriteOncePod")
	s.remove("pod/first")
	s.ready("second")
	s.holds("second", "cat /data/file", "first")
}

// subPath: two containers' worth of paths in one volume, one of them read-only.
func subPath(s *space) {
	s.apply(claim("data", "csi-node-local", "32Mi"),
		podOf("pod", idle, "volumeMounts: [{name: data, mountPath: /a, subPath: a/deep}, {name: data, mountPath: /all}, {name: data, mountPath: /ro, subPath: a, readOnly: true}]",
			"volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]"))
	s.ready("pod")
	s.sh("pod", "echo below > /a/file")
	s.holds("pod", "cat /all/a/deep/file /ro/deep/file; touch /ro/x 2>/dev/null; echo $?", "below\nbelow\n1")
}

// rawBlock: a device that two pods share, one of them read-only, grows under them and keeps its bytes for the next pod.
func rawBlock(s *space) {
	device := func(name string, readOnly bool) string {
		return podOf(name, idle, "volumeDevices: [{name: data, devicePath: /dev/data}]",
			fmt.Sprintf("volumes: [{name: data, persistentVolumeClaim: {claimName: data, readOnly: %t}}]", readOnly))
	}
	s.apply(claim("data", "csi-node-local", "32Mi", "volumeMode: Block"), device("writer", false))
	s.ready("writer")
	s.holds("writer", "echo bytes | dd of=/dev/data conv=fsync,notrunc 2>/dev/null; blockdev --getsize64 /dev/data", "33554432")

	s.apply(device("reader", true))
	s.ready("reader")
	s.holds("reader", "head -c 5 /dev/data; (echo x > /dev/data) 2>/dev/null || echo refused", "bytesrefused")

	s.grow("data", "64Mi")
	s.grown("data", "64Mi")
	s.holds("writer", "blockdev --getsize64 /dev/data; head -c 5 /dev/data", "67108864\nbytes")
	s.remove("pod/writer", "pod/reader")
	s.apply(device("next", false))
	s.ready("next")
	s.holds("next", "head -c 5 /dev/data", "bytes")
}

// fsGroup: a pod of an ordinary user owns the thousands of files that root has left.
func fsGroup(s *space) {
	s.apply(claim("data", "csi-node-local", "64Mi"),
		pod("root", "data", "mkdir -p /data/d && for i in $(seq 4000); do echo $i > /data/d/$i; done; touch /tmp/done; "+idle))
	s.ready("root")
	await(s, "files", func() error {
		_, err := s.try("exec", "root", "--", "test", "-e", "/tmp/done")
		return err
	})
	s.remove("pod/root")
	s.apply(pod("user", "data", idle, "securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}"))
	s.ready("user")
	s.holds("user", "cat /data/d/4000 && echo mine > /data/d/1 && find /data/d -group 2000 | wc -l", "4000\n4001")
}

// filesystems: each file system, with mount options of its class.
func filesystems(s *space) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		class(s, "e2e-"+fsType+"-options", fsType, "mountOptions: [noatime, nodev]")
		s.apply(claim(fsType, "e2e-"+fsType+"-options", "320Mi"), pod(fsType, fsType, idle))
	}
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.ready(fsType)
		line := s.sh(fsType, "echo data | dd of=/data/file conv=fsync 2>/dev/null && cat /data/file && grep ' /data ' /proc/mounts | cut -d' ' -f3,4")
		if !strings.HasPrefix(line, "data\n"+fsType+" rw,") || !strings.Contains(line, "nodev") || !strings.Contains(line, "noatime") {
			s.Errorf("%s: %s", fsType, line)
		}
		s.remove("pod/" + fsType)
		s.apply(pod(fsType, fsType, idle))
	}
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.ready(fsType)
		s.holds(fsType, "cat /data/file", "data")
	}
	// The classes go before the volumes: these do not need them any more.
}

// staticVolume: a volume that somebody else has made, as deploy/examples has it; it stays when the claim goes, and
// grows.
func staticVolume(s *space) {
	handle := s.created("static", "--size=320Mi", "--fs-type=xfs")
	example, err := os.ReadFile("../../deploy/examples/static.yaml")
	if err != nil {
		s.Fatal(err)
	}
	manifest := strings.NewReplacer("id-of-the-volume", handle, "name-of-the-node", nodeName, "1Gi", "320Mi").Replace(string(example))
	s.apply(manifest, pod("first", "static", idle))
	s.ready("first")
	s.sh("first", "echo kept > /data/file")
	s.remove("pod/first", "persistentvolumeclaim/static")
	kubectl(s, "delete", "persistentvolume", "static")
	s.apply(manifest, pod("second", "static", idle))
	s.ready("second")
	s.holds("second", "cat /data/file", "kept")
	s.grow("static", "384Mi")
	s.grown("static", "384Mi")
	s.remove("pod/second", "persistentvolumeclaim/static")
	kubectl(s, "delete", "persistentvolume/static", "storageclass/csi-node-static")
	s.destroyed(handle)
}

// TestDisk: a disk of the node, as deploy/examples has it, is formatted once, and its data stays when the claim goes.
func TestDisk(t *testing.T) {
	s := newSpace(t)
	example, err := os.ReadFile("../../deploy/examples/disk.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 320<<20)); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", file).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	manifest := strings.NewReplacer("wwid: naa.600140512345678", "path: "+device, "name-of-the-node", nodeName, "1Ti", "320Mi").Replace(string(example))
	for _, pods := range []struct{ name, script, want string }{
		{"first", "echo kept > /data/file && cat /data/file && grep ' /data ' /proc/mounts | cut -d' ' -f1,3", "kept\n" + device + " xfs"},
		{"second", "cat /data/file", "kept"},
	} {
		s.apply(manifest, pod(pods.name, "disk", idle))
		s.ready(pods.name)
		s.holds(pods.name, pods.script, pods.want)
		s.remove("pod/"+pods.name, "persistentvolumeclaim/disk")
		kubectl(t, "delete", "persistentvolume/disk", "storageclass/csi-node-static")
	}
}

// scratch is a pod with an inline ephemeral volume at /data.
func scratch(name, fsType, size string, fields ...string) string {
	return podOf(name, idle, "volumeMounts: [{name: data, mountPath: /data}]",
		fmt.Sprintf("volumes: [{name: data, csi: {%s}}]", strings.Join(append(fields, "driver: csi-node.local", "fsType: "+fsType, "volumeAttributes: {size: "+size+"}"), ", ")))
}

// TestInlineEphemeral: a pod's own scratch disk has a hard limit and goes with the pod, also when kubelet and the plugin are
// down while the pod goes; what it cannot be is told in an event.
func TestInlineEphemeral(t *testing.T) {
	s := newSpace(t)
	s.apply(scratch("small", "ext4", "16Mi"), scratch("large", "xfs", "320Mi"), scratch("reader", "ext4", "16Mi", "readOnly: true"), scratch("wrong", "ext4", "plenty"))
	s.ready("small", "large", "reader")
	s.holds("reader", "grep ' /data ' /proc/mounts | cut -d' ' -f4 | cut -d, -f1", "ro")
	s.holds("small", "dd if=/dev/zero of=/data/file bs=1M count=20 2>&1 | grep -o 'No space left'; grep ' /data ' /proc/mounts | cut -d' ' -f3", "No space left\next4")
	s.holds("large", "dd if=/dev/zero of=/data/file bs=1M count=20 conv=fsync 2>/dev/null && grep ' /data ' /proc/mounts | cut -d' ' -f3", "xfs")
	s.event("wrong", "plenty", "is not a size such as 500Mi or 1Gi")
	s.remove("pod/wrong", "pod/small", "pod/reader")
	restartKubelet(t, syscall.SIGKILL, func() {
		s.kubectl("delete", "pod", "large", "--force", "--grace-period=0")
		killPlugin(t)
	})
	assertNothingLeft(t)
}

// TestRights: in all that the tests before it have asked of them, the sidecars were refused nothing.
func TestRights(t *testing.T) {
	for _, container := range []string{"external-provisioner", "external-resizer"} {
		for line := range strings.Lines(kubectl(t, "logs", "--namespace=csi-node", "daemonset/csi-node", "--container="+container)) {
			if strings.Contains(line, "forbidden") {
				t.Errorf("%s: %s", container, line)
			}
		}
	}
}

// TestTakenOff: after the tests before it, which have let their volumes go, the commands of docs/install.md take the driver
// off the cluster, and nothing of it stays there; installed again, it has a volume for the README's pod, which grows.
func TestTakenOff(t *testing.T) {
	assertNothingLeft(t)
	const driver, ours = "deploy/base", "test/e2e/deploy"
	follow(t, "../..", documented(t, "docs/install.md", "4. Remove it.", driver, ours)...)
	await(t, "end of the driver", func() error {
		out, err := try("", "get", "all,csidrivers,storageclasses,clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,configmaps,csistoragecapacities",
			"--all-namespaces", "--output=custom-columns=KIND:.kind,SPACE:.metadata.namespace,NAME:.metadata.name,CLASS:.storageClassName")
		if err == nil && strings.Contains(out, "csi-node") {
			err = fmt.Errorf("there is\n%s", out)
		}
		return errors.Join(err, drivers(t, 0))
	})
	follow(t, "../..", documented(t, "docs/install.md", "## With kustomize", driver, ours)...)
	await(t, "registration", func() error { return registered(t, time.Time{}) })

	tryIt := documented(t, "docs/install.md", "## Try it")
	follow(t, "../..", tryIt[:2]...)
	await(t, "what the pod writes", func() error {
		out, err := tryFollow(t, "../..", tryIt[2:]...)
		if err == nil && !strings.Contains(out, "UTC") {
			err = fmt.Errorf("it writes %q", out)
		}
		return err
	})
	follow(t, "../..", documented(t, "docs/volumes.md", "Raise the claim", "20Gi", "1100Mi")...)
	(&space{t, "default"}).grown("data", "1100Mi")
	follow(t, "../..", "kubectl delete -f deploy/examples/pod.yaml")
	assertNothingLeft(t)
}
