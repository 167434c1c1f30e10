package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// documented returns the commands of the first block that follows some words on a page, with the words in them replaced that
// stand for names or are others here.
func documented(t *testing.T, page, words string, replaced ...string) (commands [][]string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "\n"+words)
	for line := range strings.Lines(after) {
		switch command := strings.TrimSpace(line); {
		case strings.HasPrefix(line, "    ") && (strings.HasPrefix(command, "kubectl ") || strings.HasPrefix(command, "helm ")):
			commands = append(commands, strings.Fields(strings.NewReplacer(replaced...).Replace(command)))
		case len(commands) > 0:
			return commands
		}
	}
	t.Fatalf("docs/%s has no command after %q", page, words)
	return nil
}

// follow runs a documented command where it is to be run: in the root of a checkout.
func follow(t *testing.T, checkout string, command []string, more ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, the.built[command[0]], append(command[1:], more...)...)
	cmd.Dir, cmd.Env = checkout, append(os.Environ(), "KUBECONFIG="+the.kubeconfig("admin"), "HOME="+the.file("helm"))
	out, err := cmd.CombinedOutput()
	if t.Logf("%s\n%s", strings.Join(cmd.Args, " "), out); err != nil {
		t.Fatal(err)
	}
}

// TestExcludedNode: a node that is excluded looks as if it had room, until what docs/install.md says is done; then pods
// are told. It all comes back with the plugin.
func TestExcludedNode(t *testing.T) {
	s := newSpace(t)
	room := func() string {
		return strings.TrimSpace(kubectl(t, "get", "--namespace=csi-node", "csistoragecapacities", "--output=name"))
	}
	label := func() string {
		return kubectl(t, "get", "node", nodeName, `--output=jsonpath={.metadata.labels.topology\.csi-node\.local/node}`)
	}
	include := func() {
		kubectl(t, "label", "node", nodeName, "csi-node.local/exclude-")
		await(t, "the plugin, registered again", func() error {
			if label() != nodeName || room() == "" {
				return fmt.Errorf("the node's label is %q, and room is told by %q", label(), room())
			}
			return nil
		})
		deployed(t)
	}
	kubectl(t, "label", "node", nodeName, "csi-node.local/exclude=")
	excluded := true
	t.Cleanup(func() {
		if excluded {
			include()
		}
	})
	await(t, "the plugin's end", func() error {
		if pods := kubectl(t, "get", "--namespace=csi-node", "pods", "--output=name"); pods != "" {
			return errors.New("there is " + pods)
		}
		return nil
	})
	if room() == "" || label() == "" {
		t.Errorf("docs/install.md says that this stays: room told by %q, label %q", room(), label())
	}
	for _, command := range documented(t, "install.md", "## Take a node out", "NODE", nodeName) {
		follow(t, "../..", command)
	}
	if room() != "" || label() != "" {
		t.Errorf("after the commands of docs/install.md: room told by %q, label %q", room(), label())
	}
	s.apply(claim("data", "csi-node-local", "32Mi"), pod("pod", "data", idle))
	s.event("pod", "did not have enough free storage")
	excluded = false
	include()
	s.ready("pod")
}

// TestGrowthTakenBack: a growth without room is told, and taken back by a request for more than the volume has: as
// docs/volumes.md says, the old size itself is refused.
func TestGrowthTakenBack(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "csi-node-xfs", "320Mi"), pod("pod", "data", idle))
	s.ready("pod")
	s.grow("data", "1Ti")
	s.event("pod", "has no room for")
	patch := func(size string) (string, error) {
		return s.try("patch", "persistentvolumeclaim", "data", "--patch", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
	}
	if _, err := patch("320Mi"); err == nil || !strings.Contains(err.Error(), "field can not be less than status.capacity") {
		t.Errorf("the old size: %v", err)
	}
	if _, err := patch("321Mi"); err != nil {
		t.Error(err)
	}
	s.grown("data", "321Mi")
}

// TestTwoDefaultClasses: a claim that names no class gets the newer one, and what docs/troubleshoot.md says leaves the other.
func TestTwoDefaultClasses(t *testing.T) {
	s := newSpace(t)
	const byDefault = `metadata: {name: %s, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}`
	for _, name := range []string{"e2e-older", "e2e-newer"} { // of one second the first by name counts
		manifest := "apiVersion: storage.k8s.io/v1\nkind: StorageClass\n" + fmt.Sprintf(byDefault, name) +
			"\nprovisioner: csi-node.local\nvolumeBindingMode: WaitForFirstConsumer\n"
		if _, err := try(manifest, "apply", "--filename=-"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { kubectl(t, "delete", "storageclass", name) })
	}
	gets := func(name, want string) {
		t.Helper()
		await(t, "class of "+name, func() error {
			s.apply(claim(name, "", "32Mi"))
			got := s.kubectl("get", "persistentvolumeclaim", name, "--output=jsonpath={.spec.storageClassName}")
			if got != want {
				s.remove("persistentvolumeclaim/" + name) // the API server may not know the classes yet
				return fmt.Errorf("the claim got %q, not %q", got, want)
			}
			return nil
		})
	}
	gets("two", "e2e-newer")
	for _, command := range documented(t, "troubleshoot.md", "### A claim got another class than expected", "NAME", "e2e-newer") {
		follow(t, "../..", command)
	}
	gets("one", "e2e-older")
	s.remove("persistentvolumeclaim/one", "persistentvolumeclaim/two")
}
