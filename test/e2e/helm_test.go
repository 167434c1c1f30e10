package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A second driver, of which the chart makes a release beside the first. Its pool is on the same disk.
const (
	secondDriver = "second.csi-node.local"
	secondPool   = "/var/lib/csi-node/second"
	secondSet    = "daemonset/second-csi-node"
	secondValues = `
driver: {name: ` + secondDriver + `}
pool: {dir: ` + secondPool + `/pool}
selfRegistration: true
networkPolicy: {enabled: true}
metrics: {dashboard: {enabled: true}}
`
)

// TestHelm: the chart installs a second driver beside the first, and its own test passes; by the commands of docs/upgrade.md it becomes the older
// version, is upgraded to this one, and rolled back to each, under pods that write; values that cannot be change nothing;
// with traces, though no collector is there, the log names them; and the uninstall leaves nothing in the cluster.
func TestHelm(t *testing.T) {
	if err := os.MkdirAll(secondPool, 0o755); err != nil {
		t.Fatal(err)
	}
	s := newSpace(t)
	values := the.file("second.yaml")
	if err := os.WriteFile(values, []byte(secondValues), 0o600); err != nil {
		t.Fatal(err)
	}
	second := func(page, words string, more ...string) []string { // the commands are those for the release csi-node
		return documented(t, page, words, append(more, "namespace csi-node", "namespace second", "csi-node deploy/chart", "second deploy/chart", "-n csi-node", "-n second",
			"daemonset/csi-node", secondSet, "rollback csi-node", "rollback second", "history csi-node", "history second", "uninstall csi-node", "uninstall second",
			"REGISTRY", registry)...)
	}
	follow(t, "../..", second("docs/install.md", "## With Helm")...)
	gone := false
	t.Cleanup(func() {
		if gone {
			return
		}
		for _, args := range [][]string{{"get", "all", "--output=wide"}, {"get", "events"}, {"logs", secondSet, "--all-containers", "--tail=40"}} {
			out, err := try("", append(args, "--namespace=second")...)
			t.Log(out, err)
		}
		if _, err := tryHelm("", "uninstall", "second", "--namespace=second"); err != nil {
			t.Error(err)
		}
	})
	install := second("docs/install.md", "Then install it:")
	install[0] += " --values=" + values
	follow(t, "../..", install...)
	await(t, "registration", func() error { return drivers(t, 2) })
	if version := inSecond(t, "csi-node", "version"); strings.TrimSpace(version) != "v1" {
		t.Errorf("the image that was built with VERSION=v1 has the version %s", version)
	}
	follow(t, "../..", second("docs/install.md", "Then let Helm try it.", "helm test csi-node", "helm test second")...)

	u := startWriters(s, "second", secondDriver, "second-csi-node")
	if out := inSecond(t, "csi-node", "status"); !strings.Contains(out, s.name+"/local") {
		t.Errorf("the second driver's status has not the pod:\n%s", out)
	}
	scraped(t)

	upgrade := func(tag string) []string { return second("docs/upgrade.md", "3. With Helm", "tag=v2", "tag="+tag) }
	u.to(olderImage, func() { follow(t, the.older(), upgrade("older")...) })
	u.to(pluginImage, func() {
		commands := upgrade("v1")
		commands[0] += " --set=driver.loggingFormat=json,driver.logLevel=4"
		follow(t, "../..", commands...)
	})
	allInJSON(t)
	if out, err := tryHelm("replicas: 3", "upgrade", "second", "../../deploy/chart", "--namespace=second", "--reset-then-reuse-values", "--values=-"); err == nil || !strings.Contains(err.Error(), "replicas") {
		t.Errorf("a value that is none is not refused: %s, %v", out, err)
	}
	u.to(olderImage, func() { follow(t, "../..", second("docs/upgrade.md", "With Helm to the release before")...) })
	u.to(pluginImage, func() { follow(t, "../..", second("docs/upgrade.md", "To an older one,")...) })
	if args := kubectl(t, "get", "--namespace=second", secondSet, "--output=jsonpath={.spec.template.spec.containers[0].args}"); strings.Contains(args, "json") {
		t.Errorf("after the rollback to the first release its arguments are %s", args)
	}
	follow(t, "../..", second("docs/operate.md", "it was, and the class of its error.")...)
	follow(t, "../..", "kubectl rollout status --namespace=second "+secondSet)
	s.remove("pod", "--all")
	s.remove("persistentvolumeclaim", "--all")
	follow(t, "../..", second("docs/operate.md", "in the line of each call and of its steps", "logs POD", "logs "+secondSet)...)

	assertNothingLeft(t) // kubelet may unstage a volume after its pod is gone, and needs the driver for it
	follow(t, "../..", second("docs/install.md", "   That deletes the namespace")...)
	gone = true
	await(t, "end of the second driver", func() error { return drivers(t, 1) })
	if out, err := try("", "get", "all,csidrivers,storageclasses,clusterroles,clusterrolebindings,roles,rolebindings,networkpolicies,configmaps,csistoragecapacities",
		"--all-namespaces", "--selector=app.kubernetes.io/instance=second", "--output=name"); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("the uninstall left %s, %v", out, err)
	}
	kubectl(t, "delete", "namespace", "second", "--timeout="+patience.String())
	await(t, "end of its capacity", func() error {
		out, err := try("", "get", "csistoragecapacities", "--all-namespaces", "--output=jsonpath={.items[*].storageClassName}")
		if err == nil && strings.Contains(out, "second") {
			err = fmt.Errorf("of the classes %s", out)
		}
		return err
	})
	if err := os.RemoveAll(secondPool); err != nil {
		t.Error(err)
	}
}

// tryHelm runs helm with values on its standard input.
func tryHelm(values string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, the.built["helm"], append(args, "--kubeconfig="+the.kubeconfig("admin"), "--timeout="+patience.String())...)
	cmd.Env = append(os.Environ(), "HOME="+the.file("helm"))
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(values), &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("helm %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return out.String(), nil
}

// drivers tells whether the node has so many.
func drivers(t testing.TB, want int) error {
	t.Helper()
	out, err := try("", "get", "csinode", nodeName, "--output=jsonpath={.spec.drivers[*].name}")
	if names := strings.Fields(out); err == nil && len(names) != want {
		err = fmt.Errorf("CSINode has %q", names)
	}
	return err
}

func inSecond(t testing.TB, command ...string) string {
	t.Helper()
	return kubectl(t, append([]string{"exec", "--namespace=second", secondSet, "--container=csi-node", "--"}, command...)...)
}

// scraped checks that metrics are where the pod's annotations say.
func scraped(t testing.TB) {
	t.Helper()
	const port = `{.items[0].metadata.annotations.prometheus\.io/port}`
	address := kubectl(t, "get", "pods", "--namespace=second", "--selector=app.kubernetes.io/name=second-csi-node", "--output=jsonpath={.items[0].status.podIP}:"+port)
	resp, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), "csi_node_build_info{") {
		t.Errorf("%s tells %s, %v", address, text, err)
	}
}

// allInJSON checks that each line of each container's log is an object.
func allInJSON(t testing.TB) {
	t.Helper()
	for _, container := range []string{"csi-node", "external-provisioner", "external-resizer"} {
		await(t, "log of "+container, func() error {
			out, err := try("", "logs", "--namespace=second", secondSet, "--container="+container)
			if err == nil && strings.TrimSpace(out) == "" {
				err = errors.New("it is empty")
			}
			for line := range strings.Lines(out) {
				if !json.Valid([]byte(line)) {
					t.Errorf("%s logs %s", container, line)
				}
			}
			return err
		})
	}
}
