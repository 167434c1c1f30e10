package e2e

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUpgrade: by the commands for kustomize in docs/upgrade.md the plugin becomes the older version, and is rolled back to
// this one, under pods that write.
func TestUpgrade(t *testing.T) {
	s := newSpace(t)
	u := startWriters(s, "csi-node", "csi-node.local", "csi-node")
	t.Cleanup(func() { // what the older version has besides its DaemonSet
		kubectl(t, "apply", "--kustomize", "deploy")
		deployed(t)
	})
	u.to(olderImage, func() {
		follow(t, the.older(), documented(t, "docs/upgrade.md", "   With kustomize put the tag", "deploy/base", "test/e2e/deploy")...)
	})
	u.grows("352Mi")
	u.to(pluginImage, func() {
		follow(t, "../..", documented(t, "docs/upgrade.md", "If it has to be quick,")...)
		deployed(t)
	})
	u.grows("384Mi")
}

// versions is a driver whose version changes under pods that write to each kind of its volumes.
type versions struct {
	*space
	release, class string // the namespace of the driver's pods; what its classes begin with
	writers        []string
	made           int // volumes since
}

func startWriters(s *space, release, driver, class string) *versions {
	v := &versions{space: s, release: release, class: class, writers: []string{"local", "thin", "raw", "inline"}}
	s.apply(claim("local", class+"-local", "320Mi"), pod("local", "local", writer, "restartPolicy: Never"),
		claim("thin", class+"-thin", "320Mi"), pod("thin", "thin", writer, "restartPolicy: Never"),
		claim("raw", class+"-local", "32Mi", "volumeMode: Block"),
		podOf("raw", writerTo("/dev/data"), "volumeDevices: [{name: data, devicePath: /dev/data}]", "restartPolicy: Never",
			"volumes: [{name: data, persistentVolumeClaim: {claimName: raw}}]"),
		podOf("inline", writer, "volumeMounts: [{name: data, mountPath: /data}]", "restartPolicy: Never",
			"volumes: [{name: data, csi: {driver: "+driver+", volumeAttributes: {size: 320Mi}}}]"))
	s.ready(v.writers...)
	return v
}

// to has the version of an image take over: no write fails and no mount changes, a new volume is made, and one that another
// version has made goes.
func (v *versions) to(image string, change func()) {
	v.Helper()
	before := mountIDs(v)
	change()
	await(v, "end of the pod of the other image", func() error { // which may still be there when the roll-out is told to be done
		got, err := try("", "get", "pods", "--namespace="+v.release, "--selector=app.kubernetes.io/name in (csi-node, "+v.release+"-csi-node)",
			"--output=jsonpath={.items[*].spec.containers[0].image}")
		if err == nil && got != image {
			err = fmt.Errorf("the plugin's image is %q, not %s", got, image)
		}
		return err
	})
	for _, pod := range v.writers {
		v.wrote(pod)
	}
	after := mountIDs(v)
	for path, id := range before {
		if after[path] != id {
			v.Errorf("%s: mount %d became %d", path, id, after[path])
		}
	}

	v.made++
	made := fmt.Sprintf("made-%d", v.made)
	v.apply(claim(made, v.class+"-local", "320Mi"), pod(made, made, writer, "restartPolicy: Never"))
	v.ready(made)
	if earlier := fmt.Sprintf("made-%d", v.made-1); v.made > 1 {
		v.wrote(earlier)
		volume := v.kubectl("get", "persistentvolumeclaim", earlier, "--output=jsonpath={.spec.volumeName}")
		v.remove("pod/"+earlier, "persistentvolumeclaim/"+earlier)
		// Until then it may still be staged, and its mount would be one that changes.
		kubectl(v, "wait", "--for=delete", "persistentvolume/"+volume, "--timeout="+patience.String())
	}
}

// grows checks that a volume grows that another version has made.
func (v *versions) grows(size string) {
	v.Helper()
	v.grow("local", size)
	v.grown("local", size)
	v.wrote("local")
}

// mountIDs returns what the kernel calls the mounts of volumes, by their mount points: an id that it never gives again.
func mountIDs(t testing.TB) map[string]uint64 {
	t.Helper()
	paths, err := the.mountPoints()
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]uint64{}
	for _, path := range paths {
		if !strings.Contains(path, "/kubernetes.io~csi/") && !strings.Contains(path, "/kubernetes.io/csi/") && !strings.Contains(path, "-ephemeral/") {
			continue
		}
		var st unix.Statx_t
		if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID_UNIQUE|unix.STATX_MNT_ID, &st); err != nil {
			t.Fatalf("statx %s: %v", path, err)
		}
		ids[path] = st.Mnt_id
	}
	if len(ids) == 0 {
		t.Fatal("no volume is mounted")
	}
	return ids
}
