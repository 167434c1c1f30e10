package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestForcedDeletionWithoutKubelet: pods are deleted by force while kubelet is down; after its return nothing of them stays.
func TestForcedDeletionWithoutKubelet(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("one", "data", idle), pod("two", "data", idle),
		claim("raw", "e2e-ext4", "32Mi", "volumeMode: Block"),
		podOf("raw", idle, "volumeDevices: [{name: data, devicePath: /dev/data}]", "volumes: [{name: data, persistentVolumeClaim: {claimName: raw}}]"))
	s.ready("one", "two", "raw")
	restartKubelet(t, syscall.SIGKILL, func() { s.kubectl("delete", "pod", "--all", "--force", "--grace-period=0") })
	assertUnused(t)
}

// assertUnused waits until no volume is staged or published, though volumes are in the pool.
func assertUnused(t testing.TB) {
	t.Helper()
	await(t, "left behind", func() error {
		var left []error
		for _, err := range leftovers() {
			if !strings.Contains(err.Error(), "/var/lib/csi-node/pool/volumes/") || strings.HasPrefix(err.Error(), "device") {
				left = append(left, err)
			}
		}
		return errors.Join(left...)
	})
}

// TestLostStore: the plugin's store is lost under running pods; their deletion completes and leaves nothing.
func TestLostStore(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("one", "data", "echo kept > /data/file; "+idle), pod("two", "data", idle))
	s.ready("one", "two")
	// The store is where the plugin keeps it; the plugin ends at once, as with a crash.
	files, err := filepath.Glob("/run/csi-node/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("no store in /run/csi-node: %v", err)
	}
	for _, file := range files {
		if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
	}
	killPlugin(t)
	s.remove("pod/one", "pod/two")
	assertUnused(t)
	deployed(t)
	s.apply(pod("next", "data", idle))
	s.ready("next")
	s.holds("next", "cat /data/file", "kept")
}

// TestPrivateNamespaceHoldsMounts: another pod holds kubelet's directory, with all mounts as they were, in a mount namespace
// that learns nothing of their end; unstage completes all the same.
func TestPrivateNamespaceHoldsMounts(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("pod", "data", idle))
	s.ready("pod")
	s.apply(podOf("holder", idle, "volumeMounts: [{name: kubelet, mountPath: /var/lib/kubelet}]", "volumes: [{name: kubelet, hostPath: {path: /var/lib/kubelet}}]"))
	s.ready("holder")
	s.holds("holder", "grep -c globalmount /proc/mounts", "1")
	s.remove("pod/pod")
	assertUnused(t)
	s.remove("persistentvolumeclaim/data")
	assertNothingLeft(t)
}

// TestEventsTellWhatToDo: what fails is told in the events of the claim or the pod, in words to act on.
func TestEventsTellWhatToDo(t *testing.T) {
	all := newSpace(t)
	run := func(name string, test func(s *space)) {
		t.Run(name, func(t *testing.T) { test(&space{t, all.name}) })
	}

	run("pool full", func(s *space) {
		s.apply(claim("large", "e2e-ext4", "1Ti"), pod("large", "large", idle))
		s.event("large", "did not have enough free storage")
	})

	run("unknown file system", func(s *space) {
		class(s.T, "e2e-zfs", "zfs")
		s.apply(claim("zfs", "e2e-zfs", "64Mi"), pod("zfs", "zfs", idle))
		s.event("zfs", "zfs", "ext4")
	})

	run("misspelt parameter", func(s *space) {
		class(s.T, "misspelt", "ext4, provisionning: thin")
		s.apply(claim("misspelt", "misspelt", "32Mi"), pod("misspelt", "misspelt", idle))
		s.event("misspelt", "Volume provisioning failed with infeasible error. Retries will be delayed. rpc error: code = InvalidArgument",
			`parameter "provisionning" is not known`, "provisioning: thick (default) or thin")
		// When the class is made again, the claim needs nobody.
		right := strings.ReplaceAll(kubectl(s, "get", "storageclass", "misspelt", "--output=yaml"), "provisionning", "provisioning")
		if _, err := try(right, "replace", "--force", "--filename=-"); err != nil {
			s.Fatal(err)
		}
		s.ready("misspelt")
		s.remove("pod/misspelt", "persistentvolumeclaim/misspelt")
	})

	run("foreign data", func(s *space) {
		s.apply(claim("foreign", "e2e-ext4", "32Mi", "volumeMode: Block"),
			podOf("raw", idle, "volumeDevices: [{name: data, devicePath: /dev/data}]", "volumes: [{name: data, persistentVolumeClaim: {claimName: foreign}}]"))
		s.ready("raw")
		s.sh("raw", "echo not a file system | dd of=/dev/data conv=fsync,notrunc 2>/dev/null")
		handle := s.volumeOf("foreign")
		s.remove("pod/raw")
		s.apply(static("foreign-fs", handle, "ext4"), claim("foreign-fs", `""`, "32Mi", "volumeName: foreign-fs"), pod("foreign-fs", "foreign-fs", idle))
		s.Cleanup(func() {
			s.remove("pod/foreign-fs", "persistentvolumeclaim/foreign-fs")
			kubectl(s, "delete", "persistentvolume", "foreign-fs")
		})
		s.event("foreign-fs", handle, "neither blank nor a file system")
	})

	run("unformatted and read-only", func(s *space) {
		handle := s.created("blank", "--size=32Mi")
		s.apply(strings.Replace(static("blank", handle, "ext4"), "ReadWriteOnce", "ReadOnlyMany", 1),
			claim("blank", `""`, "32Mi", "volumeName: blank", "accessModes: [ReadOnlyMany]"),
			podOf("blank", idle, "volumeMounts: [{name: data, mountPath: /data}]", "volumes: [{name: data, persistentVolumeClaim: {claimName: blank, readOnly: true}}]"))
		s.Cleanup(func() {
			s.remove("pod/blank", "persistentvolumeclaim/blank")
			kubectl(s, "delete", "persistentvolume", "blank")
			s.destroyed(handle)
		})
		s.event("blank", handle, "blank", "read-only")
	})
}

// TestManyPods: thirty pods with a volume each start and end together, twice, and leave nothing. What new volumes and
// those that exist cost is printed, against the same pods with emptyDir.
func TestManyPods(t *testing.T) {
	const n = 30
	s := newSpace(t)
	for round := range *rounds {
		empty := s.startTogether(n, func(name string) []string {
			return []string{podOf(name, idle, "volumeMounts: [{name: data, mountPath: /data}]", "volumes: [{name: data, emptyDir: {}}]")}
		})
		s.remove("pod", "--all")
		fresh := s.startTogether(n, func(name string) []string {
			return []string{claim(name, "e2e-ext4", "16Mi"), pod(name, name, idle)}
		})
		s.remove("pod", "--all")
		assertUnused(t)
		existing := s.startTogether(n, func(name string) []string { return []string{pod(name, name, idle)} })
		s.remove("pod", "--all")
		assertUnused(t)
		s.remove("persistentvolumeclaim", "--all")
		assertNothingLeft(t)
		say("round %d: %d pods Ready after %.1f s with emptyDir, %.1f s (%.2f times as long) with volumes that exist, %.1f s (%.2f) with new ones",
			round+1, n, empty.Seconds(), existing.Seconds(), existing.Seconds()/empty.Seconds(), fresh.Seconds(), fresh.Seconds()/empty.Seconds())
	}
}

// startTogether applies all manifests at once and returns how long it takes until all pods are Ready.
func (s *space) startTogether(n int, manifests func(name string) []string) time.Duration {
	s.Helper()
	var all []string
	for i := range n {
		all = append(all, manifests(fmt.Sprintf("pod-%d", i))...)
	}
	start := time.Now()
	s.apply(all...)
	if _, err := s.try("wait", "--for=condition=Ready", "pod", "--all", "--timeout="+patience.String()); err != nil {
		s.Fatal(err)
	}
	return time.Since(start)
}
