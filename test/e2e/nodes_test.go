package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestNodes: a second node joins the cluster, for the tests of two, and leaves it.
func TestNodes(t *testing.T) {
	two, err := the.addNode(context.Background())
	if two != nil {
		t.Cleanup(func() {
			if err := the.removeNode(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	deployed(t)
	await(t, "room of the second node", func() error {
		if room(t, two) == "" {
			return errors.New("none is told")
		}
		return nil
	})
	for _, test := range []struct {
		name string
		run  func(s *space, two *node)
	}{{"Room", testRoom}, {"Drained", testDrained}, {"Lost", testLost}, {"Away", testAway}, {"Excluded", testExcluded}} {
		t.Run(test.name, func(t *testing.T) { test.run(newSpace(t), two) })
	}
}

// room returns what tells of a node's room.
func room(t testing.TB, n *node) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, "get", "--namespace=csi-node", "csistoragecapacities", "--output=name",
		"--selector=csi.storage.k8s.io/managed-by=external-provisioner-"+n.name))
}

// isOn checks on which node a pod runs.
func (s *space) isOn(pod string, n *node) {
	s.Helper()
	if got := s.kubectl("get", "pod", pod, "--output=jsonpath={.spec.nodeName}"); got != n.name {
		s.Fatalf("pod %s is on node %s, not on %s", pod, got, n.name)
	}
}

// startOn starts pods while new ones can only go to one node.
func (s *space) startOn(n *node, manifests []string, pods ...string) {
	s.Helper()
	for _, other := range the.nodes {
		if other != n {
			kubectl(s, "cordon", other.name)
			defer kubectl(s, "uncordon", other.name)
		}
	}
	s.apply(manifests...)
	for _, pod := range pods {
		await(s, "pod "+pod, func() error { _, err := s.try("get", "pod", pod); return err }) // a set makes it
	}
	s.ready(pods...)
	for _, pod := range pods {
		s.isOn(pod, n)
	}
}

// testRoom: a claim goes to the node that has room for it, the pod follows its volume, and kubectl csi-node tells of both
// nodes.
func testRoom(s *space, two *node) {
	large, next := pod("large", "large", idle), pod("next", "next", idle)
	s.apply(claim("large", "csi-node-local", "5Gi"), large) // more than the second node's pool
	s.ready("large")
	s.isOn("large", the.node)
	s.apply(claim("next", "csi-node-local", "2Gi"), next) // more than is left of the first node's
	s.ready("next")
	s.isOn("next", two)

	status, top := follow(s.T, "../..", "kubectl csi-node status"), follow(s.T, "../..", "kubectl csi-node top")
	kept := follow(s.T, "../..", "kubectl csi-node volumes")
	for pod, n := range map[string]*node{"large": the.node, "next": two} {
		s.sh(pod, "echo "+pod+" | dd of=/data/file conv=fsync 2>/dev/null")
		if !regexp.MustCompile(`(?m)^` + n.name + ` +` + s.name + `/` + pod + ` .*settled`).MatchString(status) {
			s.Errorf("status does not tell of pod %s on node %s", pod, n.name)
		}
		if !regexp.MustCompile(`(?m)^` + n.name + ` +` + s.volumeOf(pod) + ` .* ` + s.name + `/` + pod + ` +Bound$`).MatchString(kept) {
			s.Errorf("volumes does not tell of pod %s on node %s", pod, n.name)
		}
		if told := follow(s.T, "../..", "kubectl csi-node explain "+s.name+"/"+pod); !strings.HasPrefix(told, "On node "+n.name+": ") {
			s.Errorf("explain tells of %s:\n%s", pod, told)
		}
		if !strings.Contains(top, "\n"+n.name+" ") {
			s.Errorf("top does not tell of node %s", n.name)
		}
	}

	s.remove("pod/large", "pod/next")
	s.apply(pod("astray", "next", idle, "nodeSelector: {kubernetes.io/hostname: "+nodeName+"}"))
	s.event("astray", "node affinity")
	s.remove("pod/astray")
	s.apply(large, next)
	s.ready("large", "next")
	s.isOn("large", the.node)
	s.isOn("next", two)
	s.holds("large", "cat /data/file", "large")
	s.holds("next", "cat /data/file", "next")
}

// set is a StatefulSet of one pod, which writes to a volume of its own.
func set(fields ...string) string {
	return `apiVersion: apps/v1
kind: StatefulSet
metadata: {name: set}
spec:
  serviceName: set
  selector: {matchLabels: {app: set}}
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete}
  template:
    metadata: {labels: {app: set}}
    spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: ` + shellImage + `, command: [sh, -c, "echo start | dd of=/data/starts oflag=append conv=notrunc,fsync 2>/dev/null; ` + idle + `"],
      volumeMounts: [{name: data, mountPath: /data}]}], ` + strings.Join(fields, ", ") + `}
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {accessModes: [ReadWriteOnce], storageClassName: csi-node-local, resources: {requests: {storage: 320Mi}}}
`
}

// testDrained: the pod of a drained node waits for it, as its data is there, and keeps nothing mounted.
func testDrained(s *space, two *node) {
	s.startOn(two, []string{set()}, "set-0")
	kubectl(s, "drain", two.name, "--ignore-daemonsets")
	s.event("set-0", "node affinity", "unschedulable")
	assertUnused(s)
	kubectl(s, "uncordon", two.name)
	s.ready("set-0")
	s.isOn("set-0", two)
	s.holds("set-0", "cat /data/starts", "start\nstart")
	s.remove("statefulset/set")
}

// testLost: a node is lost, kubelet and plugin, and its pods are told. The one that was deleted waits for the node, as its
// data is there; the one that was not writes on; the other node takes new ones. When the node is back it takes over what it
// finds.
func testLost(s *space, two *node) {
	s.startOn(two, []string{set("tolerations: [{key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 1}]"),
		claim("stays", "csi-node-local", "320Mi"), pod("stays", "stays", writer, "restartPolicy: Never")}, "set-0", "stays")
	if err := errors.Join(two.kill(two.built["kubelet"], two.kubelet), two.kill(pluginProgram, nil)); err != nil {
		s.Fatal(err)
	}
	s.event("stays", "Node is not ready")
	await(s, "eviction", func() error {
		if s.kubectl("get", "pod", "set-0", "--output=jsonpath={.metadata.deletionTimestamp}") == "" {
			return errors.New("nobody has deleted the pod")
		}
		return nil
	})
	s.kubectl("delete", "pod", "set-0", "--force", "--grace-period=0")
	s.event("set-0", "node affinity", "untolerated taint")
	s.apply(claim("other", "csi-node-local", "320Mi"), pod("other", "other", idle))
	s.ready("other")
	s.isOn("other", the.node)

	if err := two.startKubelet(); err != nil {
		s.Fatal(err)
	}
	s.ready("set-0", "stays")
	s.isOn("set-0", two)
	s.holds("set-0", "cat /data/starts", "start\nstart")
	s.wrote("stays")
	deployed(s)
	if told := follow(s.T, "../..", "kubectl csi-node status --failing"); strings.Contains(told, s.name) {
		s.Errorf("something fails:\n%s", told)
	}
	s.remove("statefulset/set")
}

// testAway: a plugin that starts without its pool tells no room, so that no pod is sent there. When the pool is back, all
// goes on.
func testAway(s *space, two *node) {
	pool := filepath.Join(two.root(), "var/lib/csi-node/pool")
	if err := os.Rename(pool, pool+".away"); err != nil {
		s.Fatal(err)
	}
	back := func() error { return os.Rename(pool+".away", pool) }
	s.Cleanup(func() {
		if s.Failed() {
			_ = back()
		}
	})
	kubectl(s, "delete", "--namespace=csi-node", "pods", "--selector=app.kubernetes.io/name=csi-node", "--field-selector=spec.nodeName="+two.name)
	await(s, "no room", func() error {
		told := kubectl(s, "get", "--namespace=csi-node", "csistoragecapacities", "--output=jsonpath={.items[*].capacity}",
			"--selector=csi.storage.k8s.io/managed-by=external-provisioner-"+two.name)
		if told == "" || strings.Trim(told, "0 ") != "" {
			return fmt.Errorf("the room of the classes is %q", told)
		}
		return nil
	})
	s.apply(claim("data", "csi-node-local", "320Mi"), pod("pod", "data", idle, "nodeSelector: {kubernetes.io/hostname: "+two.name+"}"))
	s.event("pod", "did not have enough free storage")
	if err := back(); err != nil {
		s.Fatal(err)
	}
	s.ready("pod")
	deployed(s)
	s.remove("pod/pod", "persistentvolumeclaim/data")
}

// testExcluded: a node that is excluded looks as if it had room, until what docs/install.md says is done; then pods are
// told. It all comes back with the plugin, and goes with it for good.
func testExcluded(s *space, two *node) {
	label := func() string {
		return kubectl(s, "get", "node", two.name, `--output=jsonpath={.metadata.labels.topology\.csi-node\.local/node}`)
	}
	exclude := func() {
		kubectl(s, "label", "node", two.name, "csi-node.local/exclude=")
		await(s, "the plugin's end", func() error {
			if pods := kubectl(s, "get", "--namespace=csi-node", "pods", "--output=name", "--field-selector=spec.nodeName="+two.name); pods != "" {
				return errors.New("there is " + pods)
			}
			return nil
		})
		if room(s, two) == "" || label() == "" {
			s.Errorf("docs/install.md says that this stays: room told by %q, label %q", room(s, two), label())
		}
		told := strings.Join(strings.Fields(follow(s.T, "../..", "kubectl csi-node status")), " ")
		if !strings.Contains(told, "On node "+two.name+" the plugin of csi-node.local does not run") || strings.Contains(told, "On node "+nodeName+" ") {
			s.Errorf("of that room status tells %q", told)
		}
		follow(s.T, "../..", documented(s.T, "docs/install.md", "3. `kubectl label node NODE", "NODE", two.name)...)
		if room(s, two) != "" || label() != "" || room(s, the.node) == "" {
			s.Errorf("after the commands of docs/install.md: room told by %q, label %q, room of the other by %q", room(s, two), label(), room(s, the.node))
		}
	}
	exclude()
	kubectl(s, "cordon", nodeName)
	s.Cleanup(func() { kubectl(s, "uncordon", nodeName) })
	s.apply(claim("data", "csi-node-local", "320Mi"), pod("pod", "data", idle))
	s.event("pod", "did not have enough free storage")
	kubectl(s, "label", "node", two.name, "csi-node.local/exclude-")
	await(s, "the plugin, registered again", func() error {
		if label() != two.name || room(s, two) == "" {
			return fmt.Errorf("the node's label is %q, and room is told by %q", label(), room(s, two))
		}
		return nil
	})
	deployed(s)
	s.ready("pod")
	s.isOn("pod", two)
	s.remove("pod/pod", "persistentvolumeclaim/data")
	assertNothingLeft(s)
	exclude()
}
