package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// documented is commandsAfter, which must be there.
func documented(t *testing.T, page, words string, replaced ...string) []string {
	t.Helper()
	commands, err := commandsAfter(page, words, replaced...)
	if err != nil {
		t.Fatal(err)
	}
	return commands
}

// follow runs documented commands where they are to be run, by a shell in the root of a checkout, and returns what they
// print.
func follow(t *testing.T, checkout string, commands ...string) string {
	t.Helper()
	out, err := tryFollow(t, checkout, commands...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryFollow(t *testing.T, checkout string, commands ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", strings.Join(commands, "\n"))
	cmd.Dir, cmd.Env = checkout, append(os.Environ(), "KUBECONFIG="+the.kubeconfig("admin"), "HOME="+the.file("helm"),
		"PATH="+strings.Join([]string{the.Work, filepath.Dir(the.built["kubectl"]), filepath.Dir(the.built["helm"]), os.Getenv("PATH")}, ":")) // the plugin of kubectl first
	out, err := cmd.CombinedOutput()
	t.Logf("%s\n%s", strings.Join(commands, "\n"), out)
	return string(out), err
}

// growthTakenBack: a growth without room is told, and taken back by a request for more than the volume has: as
// docs/volumes.md says, the old size itself is refused.
func growthTakenBack(s *space) {
	s.apply(claim("data", "csi-node-xfs", "320Mi"), pod("pod", "data", idle))
	s.ready("pod")
	s.grow("data", "1Ti")
	s.event("pod", "has no room for")
	patch := func(size string) (string, error) {
		return s.try("patch", "persistentvolumeclaim", "data", "--patch", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
	}
	if _, err := patch("320Mi"); err == nil || !strings.Contains(err.Error(), "field can not be less than status.capacity") {
		s.Errorf("the old size: %v", err)
	}
	if _, err := patch("321Mi"); err != nil {
		s.Error(err)
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
	follow(t, "../..", documented(t, "docs/troubleshoot.md", "### A claim got another class than expected", "NAME", "e2e-newer")...)
	gets("one", "e2e-older")
	s.remove("persistentvolumeclaim/one", "persistentvolumeclaim/two")
}

// looks: the commands by which docs/operate.md and docs/troubleshoot.md look at a node tell of it.
func looks(s *space) {
	s.apply(claim("data", "csi-node-local", "32Mi"), pod("pod", "data", idle))
	s.ready("pod")
	if out := follow(s.T, "../..", documented(s.T, "docs/operate.md", "## Run commands on a node", "NODE", nodeName)...); !strings.Contains(out, s.name+"/pod") {
		s.Errorf("the status of the node has not the pod:\n%s", out)
	}
	id := follow(s.T, "../..", documented(s.T, "docs/operate.md", "VOLUME is the id of a volume", "NAME", "--namespace="+s.name+" data")...)
	if want := s.volumeOf("data"); id != want {
		s.Errorf("the volume's id is %q, and not %q", id, want)
	}
	if out := follow(s.T, "../..", documented(s.T, "docs/troubleshoot.md", "3. What has it left")...); !regexp.MustCompile(`csi-node-local +[0-9]+[KMG]i? +map\[topology.csi-node.local/node:` + nodeName + `]`).MatchString(out) {
		s.Errorf("of the node's room is told\n%s", out)
	}
	s.remove("pod/pod", "persistentvolumeclaim/data")
}

// operates: by the commands of docs/operate.md the files of a volume get into a new one, and a node is kept by the
// autoscaler.
func operates(s *space) {
	s.apply(claim("old", "csi-node-local", "32Mi"), pod("old", "old", "echo kept > /data/file; "+idle), claim("new", "csi-node-local", "32Mi"), pod("new", "new", idle))
	s.ready("old")
	s.ready("new")
	follow(s.T, "../..", documented(s.T, "docs/operate.md", "- **File by file**",
		"NEW-POD", "--namespace="+s.name+" new", "POD", "--namespace="+s.name+" old", "data.tar", filepath.Join(s.TempDir(), "data.tar"))...)
	if out := s.kubectl("exec", "new", "--", "cat", "/data/file"); strings.TrimSpace(out) != "kept" {
		s.Errorf("the new volume holds %q", out)
	}
	const annotation = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	follow(s.T, "../..", documented(s.T, "docs/operate.md", "protect each node that has volumes", "NODE", nodeName)...)
	if out := kubectl(s, "get", "node", nodeName, "--output=jsonpath={.metadata.annotations}"); !strings.Contains(out, `"`+annotation+`":"true"`) {
		s.Errorf("the node has the annotations %s", out)
	}
	kubectl(s, "annotate", "node", nodeName, annotation+"-")
	s.remove("pod/old", "pod/new", "persistentvolumeclaim/old", "persistentvolumeclaim/new")
}

// classOfSomeNodes: the class on docs/volumes.md makes volumes on the nodes that it names, and on no others.
func classOfSomeNodes(s *space) {
	page, err := os.ReadFile("../../docs/volumes.md")
	if err != nil {
		s.Fatal(err)
	}
	_, class, _ := strings.Cut(string(page), "**A class for some nodes only**")
	_, class, _ = strings.Cut(class, "```yaml\n")
	class, _, _ = strings.Cut(class, "```")
	for name, node := range map[string]string{"e2e-here": nodeName, "e2e-elsewhere": "elsewhere"} {
		if _, err := try(strings.NewReplacer("two-nodes", name, "worker-1", node).Replace(class), "apply", "--filename=-"); err != nil {
			s.Fatal(err)
		}
		s.Cleanup(func() { kubectl(s, "delete", "storageclass", name) })
		s.apply(claim(name, name, "32Mi"), pod(name, name, idle))
	}
	s.ready("e2e-here")
	s.event("e2e-elsewhere", "didn't find available persistent volumes to bind")
	s.remove("pod/e2e-here", "pod/e2e-elsewhere", "persistentvolumeclaim/e2e-here", "persistentvolumeclaim/e2e-elsewhere")
}

// examples: the examples run that need no disk, volume group or encryption of the node, and so does the pod on
// docs/volumes.md. The first of them is run by TestTakenOff, and those of a disk and of a volume that is there by tests of
// their own.
func examples(s *space) {
	page, err := os.ReadFile("../../docs/volumes.md")
	if err != nil {
		s.Fatal(err)
	}
	_, scratch, _ := strings.Cut(string(page), "## Scratch disks")
	_, scratch, _ = strings.Cut(scratch, "```yaml\n")
	scratch, _, _ = strings.Cut(scratch, "```")
	manifests := []string{scratch}
	for _, name := range []string{"raw-block", "ephemeral", "inline-ephemeral", "statefulset"} {
		text, err := os.ReadFile("../../deploy/examples/" + name + ".yaml")
		if err != nil {
			s.Fatal(err)
		}
		manifests = append(manifests, string(text))
	}
	for _, manifest := range manifests {
		s.apply(manifest)
		if strings.Contains(manifest, "kind: StatefulSet") {
			s.kubectl("rollout", "status", "statefulset/replicated", "--timeout="+patience.String())
		}
		if _, err := s.try("wait", "--for=condition=Ready", "pod", "--all", "--timeout="+patience.String()); err != nil {
			s.Fatalf("%v\n%s", err, manifest)
		}
		if _, err := try(manifest, "delete", "--namespace="+s.name, "--filename=-", "--grace-period=1", "--timeout="+patience.String()); err != nil {
			s.Error(err)
		}
		s.remove("persistentvolumeclaim", "--all") // those of the set
	}
}
