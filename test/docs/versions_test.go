package docs

import (
	"regexp"
	"testing"
)

// TestKubernetesVersions: the pages name the versions of Kubernetes that the chart takes, and the one that test/e2e runs.
func TestKubernetesVersions(t *testing.T) {
	least := regexp.MustCompile(`kubeVersion: ">=(1\.\d+)\.0-0"`).FindStringSubmatch(read(t, "deploy/chart/Chart.yaml"))
	tested := regexp.MustCompile(`k8s\.io/kubernetes v(1\.\d+)\.`).FindStringSubmatch(read(t, "test/e2e/build/go.mod"))
	if least == nil || tested == nil {
		t.Fatalf("the chart takes %q, and tested is %q", least, tested)
	}
	for page, words := range map[string]string{
		"README.md":       `Kubernetes \| ` + least[1] + ` or later; tested on ` + tested[1] + ` `,
		"docs/install.md": `Kubernetes ` + least[1] + ` or later[^.]*\. Tested on ` + tested[1] + `\.`,
		"docs/kubelet.md": `Kubernetes v` + tested[1] + `\.`,
	} {
		if !regexp.MustCompile(words).MatchString(read(t, page)) {
			t.Errorf("%s does not say %q", page, words)
		}
	}
}
