package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// follow runs a documented command where it is to be run, in the root of a checkout, and returns what it prints.
func follow(t *testing.T, checkout string, command []string, more ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, the.built[command[0]], append(command[1:], more...)...)
	cmd.Dir, cmd.Env = checkout, append(os.Environ(), "KUBECONFIG="+the.kubeconfig("admin"), "HOME="+the.file("helm"),
		"PATH="+the.Work+":"+filepath.Dir(the.built["kubectl"])+":"+os.Getenv("PATH")) // the plugin of kubectl, and kubectl
	out, err := cmd.CombinedOutput()
	if t.Logf("%s\n%s", strings.Join(cmd.Args, " "), out); err != nil {
		t.Fatal(err)
	}
	return string(out)
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
