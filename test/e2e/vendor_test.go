package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestVendor: by the command of docs/backends.md the chart installs a driver that a vendor made of the engine, whose volume
// a pod has, and kubectl csi-node tells of it. It registers itself, and the array is where a node of the test has room.
func TestVendor(t *testing.T) {
	const array = "/var/lib/acme"
	lun := filepath.Join(array, "ordered", "lun")
	if err := errors.Join(os.MkdirAll(filepath.Dir(lun), 0o750), os.WriteFile(filepath.Join(filepath.Dir(lun), "serial"), []byte("ACME-1\n"), 0o600),
		os.WriteFile(lun, nil, 0o600), os.Truncate(lun, 64<<20)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(array); err != nil {
			t.Error(err)
		}
	})
	s := newSpace(t)
	install := documented(t, "docs/backends.md", "The chart installs your driver", "-n acme", "-n "+s.name)
	install[0] += " --set selfRegistration=true,extraVolumes[0].hostPath.path=" + array
	t.Cleanup(func() {
		if t.Failed() {
			out, err := s.try("logs", "daemonset/acme-csi-node", "--all-containers", "--tail=60")
			t.Log(out, err)
		}
		if _, err := tryHelm("", "uninstall", "acme", "--namespace="+s.name); err != nil {
			t.Error(err)
		}
	})
	follow(t, "../..", install...)
	follow(t, "../..", "kubectl rollout status --timeout=2m --namespace="+s.name+" daemonset/acme-csi-node")
	await(t, "registration", func() error { return drivers(t, 2) })

	example, err := os.ReadFile("../../deploy/examples/static.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s.apply(strings.NewReplacer("csi-node.local", "csi.acme.example", "id-of-the-volume", "ordered", "name-of-the-node", nodeName, "1Gi", "64Mi").Replace(string(example)),
		pod("pod", "static", idle))
	t.Cleanup(func() {
		kubectl(t, "delete", "--ignore-not-found", "persistentvolume/static", "storageclass/csi-node-static")
	})
	s.ready("pod")
	s.holds("pod", "echo kept > /data/file && cat /data/file", "kept")
	if out := follow(t, "../..", "kubectl csi-node status --selector app.kubernetes.io/name=acme-csi-node --command acme"); !strings.Contains(out, s.name+"/pod") {
		t.Errorf("kubectl csi-node tells\n%s", out)
	}
	s.remove("pod/pod", "persistentvolumeclaim/static")
	assertNothingLeft(t) // kubelet may unstage the volume after the pod is gone, and needs the driver for it
}
