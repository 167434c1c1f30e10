package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait: long, as machines are slow; what is awaited fails by an event long before.
const patience = 5 * time.Minute

// try runs kubectl and returns what it prints.
func try(stdin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, the.built["kubectl"], append([]string{"--kubeconfig", the.kubeconfig("admin")}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()+out.String()))
	}
	return out.String(), nil
}

func kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := try("", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// get decodes an object.
func get[T any](t testing.TB, args ...string) (object T) {
	t.Helper()
	if err := json.Unmarshal([]byte(kubectl(t, append([]string{"get", "--output=json"}, args...)...)), &object); err != nil {
		t.Fatal(err)
	}
	return object
}

// await waits until check returns nil.
func await(t testing.TB, what string, check func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := eventually(ctx, check); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// space is a namespace of one test. When the test ends it is deleted.
type space struct {
	*testing.T
	name string
}

// newSpace makes the space of a test that has the node for itself: when it ends, no volume
// may have left anything there.
func newSpace(t *testing.T) *space {
	t.Helper()
	t.Cleanup(func() { assertNothingLeft(t) })
	return newSpaceAmongOthers(t)
}

// newSpaceAmongOthers makes the space of a test that has others beside it, with volumes of theirs.
func newSpaceAmongOthers(t *testing.T) *space {
	t.Helper()
	s := &space{t, strings.ReplaceAll(strings.ToLower(t.Name()), "/", "-")}
	kubectl(t, "create", "namespace", s.name)
	t.Cleanup(func() {
		if t.Failed() {
			s.tell()
		}
		kubectl(t, "delete", "namespace", s.name, "--timeout="+patience.String())
	})
	await(t, "service account", func() error {
		_, err := s.try("get", "serviceaccount", "default")
		return err
	})
	return s
}

// tell prints what an operator would look at.
func (s *space) tell() {
	for _, args := range [][]string{
		{"get", "pods,persistentvolumeclaims,persistentvolumes", "--output=wide"},
		{"get", "events", "--sort-by=.lastTimestamp"},
	} {
		out, err := s.try(args...)
		s.Log(out, err)
	}
	for _, args := range [][]string{
		{"exec", "--namespace=csi-node", "daemonset/csi-node", "--container=csi-node", "--", "csi-node", "status"},
		{"logs", "--namespace=csi-node", "daemonset/csi-node", "--container=csi-node", "--tail=60"},
	} {
		out, err := try("", args...)
		s.Log(out, err)
	}
}

func (s *space) try(args ...string) (string, error) {
	return try("", append([]string{"--namespace=" + s.name}, args...)...)
}

func (s *space) kubectl(args ...string) string {
	s.Helper()
	out, err := s.try(args...)
	if err != nil {
		s.Fatal(err)
	}
	return out
}

func (s *space) apply(manifests ...string) {
	s.Helper()
	if _, err := try(strings.Join(manifests, "\n---\n"), "--namespace="+s.name, "apply", "--filename=-"); err != nil {
		s.Fatal(err)
	}
}

// ready waits until pods are Ready.
func (s *space) ready(pods ...string) {
	s.Helper()
	for _, pod := range pods {
		if _, err := s.try("wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/"+pod); err != nil {
			out, describeErr := s.try("describe", "pod", pod)
			s.Fatal(err, out, describeErr)
		}
	}
}

// sh runs a shell script in a pod.
func (s *space) sh(pod, script string) string {
	s.Helper()
	return strings.TrimSpace(s.kubectl("exec", pod, "--", "sh", "-c", script))
}

// holds checks what a shell script prints in a pod.
func (s *space) holds(pod, script, want string) {
	s.Helper()
	if got := s.sh(pod, script); got != want {
		s.Fatalf("in pod %s `%s` printed %q, want %q", pod, script, got, want)
	}
}

// remove deletes objects and waits until they are gone.
func (s *space) remove(names ...string) {
	s.Helper()
	s.kubectl(append([]string{"delete", "--timeout=" + patience.String()}, names...)...)
}

// event waits for an event about an object whose message contains all words.
func (s *space) event(object string, words ...string) string {
	s.Helper()
	type list struct {
		Items []struct{ Reason, Message string }
	}
	var found string
	await(s, "event of "+object, func() error {
		var seen []string
		for _, e := range get[list](s, "events", "--namespace="+s.name, "--field-selector=involvedObject.name="+object).Items {
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(e.Message, word) }) {
				found = e.Message
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("none has all of %q:\n%s", words, strings.Join(seen, "\n"))
	})
	s.Logf("event of %s: %s", object, found)
	return found
}

// claim is a manifest; fields are added to its spec, as "volumeMode: Block".
func claim(name, class, size string, fields ...string) string {
	if !slices.ContainsFunc(fields, func(f string) bool { return strings.HasPrefix(f, "accessModes") }) {
		fields = append(fields, "accessModes: [ReadWriteOnce]")
	}
	return fmt.Sprintf("apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: %s}\nspec: {storageClassName: %s, resources: {requests: {storage: %s}}, %s}",
		name, class, size, strings.Join(fields, ", "))
}

const idle = "exec sleep 1000000"

// pod is a manifest of a pod that runs a shell script and has a claim's volume at /data.
func pod(name, claim, script string, fields ...string) string {
	return podOf(name, script, "volumeMounts: [{name: data, mountPath: /data}]",
		append(fields, "volumes: [{name: data, persistentVolumeClaim: {claimName: "+claim+"}}]")...)
}

// podOf is a manifest of a pod; mounts is a field of its container, fields are of its spec.
func podOf(name, script, mounts string, fields ...string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: %s}}
spec: {terminationGracePeriodSeconds: 1, automountServiceAccountToken: false, containers: [{name: main, image: "%s", command: [sh, -c, %s], %s}], %s}`,
		name, name, shellImage, strconv.Quote(script), mounts, strings.Join(fields, ", "))
}

// class is a manifest of a StorageClass; it is deleted with the test.
func class(t testing.TB, name, fsType string, fields ...string) {
	t.Helper()
	manifest := fmt.Sprintf(`apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %s}
provisioner: csi-node.local
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
parameters: {csi.storage.k8s.io/fstype: %s}
%s`, name, fsType, strings.Join(fields, "\n"))
	if _, err := try(manifest, "apply", "--filename=-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kubectl(t, "delete", "storageclass", name) })
}

// volumeOf returns the handle of the volume that is bound to a claim.
func (s *space) volumeOf(claim string) string {
	s.Helper()
	name := s.kubectl("get", "persistentvolumeclaim", claim, "--output=jsonpath={.spec.volumeName}")
	return kubectl(s, "get", "persistentvolume", name, "--output=jsonpath={.spec.csi.volumeHandle}")
}

// inPlugin runs a command of csi-node in the plugin's container.
func inPlugin(t testing.TB, args ...string) string {
	t.Helper()
	return kubectl(t, append([]string{"exec", "--namespace=csi-node", "daemonset/csi-node", "--container=csi-node", "--", "csi-node"}, args...)...)
}

// created makes a volume by hand and returns its handle.
func (s *space) created(name string, flags ...string) string {
	s.Helper()
	var made struct {
		Volume struct {
			ID string `json:"volumeId"`
		}
	}
	if err := json.Unmarshal([]byte(inPlugin(s, append([]string{"volume", "create", name, "--output=json"}, flags...)...)), &made); err != nil {
		s.Fatal(err)
	}
	return made.Volume.ID
}

// destroyed deletes a volume that was made by hand. It is refused while kubelet has not unstaged the volume, which may be
// after the last pod is gone.
func (s *space) destroyed(handle string) {
	s.Helper()
	await(s, "deletion of volume "+handle, func() error {
		_, err := try("", "exec", "--namespace=csi-node", "daemonset/csi-node", "--container=csi-node", "--", "csi-node", "volume", "delete", handle)
		return err
	})
}

// static is a manifest of a PersistentVolume for a volume that is there. It outlives its claim.
func static(name, handle, fsType string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: %s}
spec:
  capacity: {storage: 32Mi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  csi: {driver: csi-node.local, volumeHandle: %s, fsType: %s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: topology.csi-node.local/node, operator: In, values: [%s]}]}]}}`,
		name, handle, fsType, nodeName)
}

// deployed waits until the DaemonSet is as it should be.
func deployed(t testing.TB) {
	t.Helper()
	kubectl(t, "rollout", "status", "--namespace=csi-node", "daemonset/csi-node", "--timeout="+patience.String())
}

// restartKubelet ends kubelet by a signal, runs between, starts it, and waits until it knows its pods.
func restartKubelet(t testing.TB, signal syscall.Signal, between func()) {
	t.Helper()
	if err := the.kubelet.stop(signal); err != nil {
		t.Fatal(err)
	}
	between()
	if err := the.startKubelet(); err != nil {
		t.Fatal(err)
	}
	await(t, "kubelet", func() error {
		select {
		case <-the.kubelet.done: // it ends where containerd is not ready yet, and is started again, as systemd would
			return errors.Join(errors.New("it has ended, and was started again"), the.startKubelet())
		default:
		}
		_, err := try("", "exec", "--namespace=csi-node", "daemonset/csi-node", "--container=csi-node", "--", "csi-node", "status")
		return err
	})
}

const pluginProgram = "/usr/local/bin/csi-node"

// killPlugin ends the plugin's process as a power cut would end it.
func killPlugin(t testing.TB) {
	t.Helper()
	await(t, "plugin to kill", func() error { return the.kill(pluginProgram, nil) })
}

// pluginRestarts returns how often kubelet has started the plugin again on the first node, as far as it has told.
func pluginRestarts(t testing.TB) int {
	t.Helper()
	out := kubectl(t, "get", "pods", "--namespace=csi-node", "--selector=app.kubernetes.io/name=csi-node", "--field-selector=spec.nodeName="+nodeName,
		`--output=jsonpath={.items[0].status.containerStatuses[?(@.name=="csi-node")].restartCount}`)
	n, err := strconv.Atoi(out)
	if err != nil {
		t.Fatalf("restarts of the plugin: %v", err)
	}
	return n
}

// assertNothingLeft waits until no volume has left anything on the node.
func assertNothingLeft(t testing.TB) {
	t.Helper()
	await(t, "left behind", func() error { return errors.Join(leftovers()...) })
}

func leftovers() (left []error) {
	devices, err := the.volumeLoops()
	if err != nil {
		return []error{err}
	}
	for _, l := range devices {
		left = append(left, fmt.Errorf("device %s on %s", l.Name, l.File))
	}
	for _, n := range the.nodes {
		left = append(left, n.leftovers()...)
	}
	return left
}

func (n *node) leftovers() (left []error) {
	mounts, err := n.mountPoints()
	if err != nil {
		return []error{err}
	}
	for _, path := range mounts {
		if strings.Contains(path, "kubernetes.io~csi") || strings.Contains(path, "kubernetes.io/csi") || strings.Contains(path, "volume-subpaths") {
			left = append(left, fmt.Errorf("on %s mount %s", n.name, path))
		}
	}
	for _, pattern := range []string{
		"/var/lib/csi-node/pool/*/*",
		"/var/lib/kubelet/plugins/kubernetes.io/csi/csi-node.local/*",
		"/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/pvc-*",
		"/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/staging/*",
		"/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/*",
		"/var/lib/kubelet/plugins/csi-node.local-ephemeral/*",
		"/var/lib/kubelet/pods/*/volumes/kubernetes.io~csi/*",
		"/var/lib/kubelet/pods/*/volumeDevices/kubernetes.io~csi/*",
	} {
		paths, err := filepath.Glob(n.root() + pattern)
		if err != nil {
			return []error{err}
		}
		for _, path := range paths {
			left = append(left, fmt.Errorf("on %s path %s", n.name, strings.TrimPrefix(path, n.root())))
		}
	}
	return left
}

// mountPoints returns the mount points below kubelet's directory.
func (n *node) mountPoints() ([]string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", n.pid()))
	if err != nil {
		return nil, err
	}
	var paths []string
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], "/var/lib/kubelet/") {
			paths = append(paths, f[4])
		}
	}
	return paths, nil
}
