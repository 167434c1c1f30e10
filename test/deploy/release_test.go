package deploy

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
)

// TestRelease: hack/release makes an archive of the chart that Helm loads as it loads the directory, notes of what
// changed, and the checksums of all that a release publishes; and it refuses a version that one of its files does not name.
func TestRelease(t *testing.T) {
	tree := t.TempDir()
	for _, dir := range []string{"deploy", "hack"} {
		must(t, os.CopyFS(filepath.Join(tree, dir), os.DirFS(filepath.Join(root, "..", dir))))
	}
	write := func(name, text string) { must(t, os.WriteFile(filepath.Join(tree, name), []byte(text), 0o600)) }
	krew := read(t, filepath.Join(root, "..", ".krew.yaml"))
	write(".krew.yaml", krew)
	write("CHANGELOG.md", "# Changes\n\n## v0.1.0\n\n- Ours.\n\n## v0.0.9\n\n- Older.\n")
	for _, archive := range regexp.MustCompile(`kubectl-csi_node-\w+-\w+\.tar\.gz`).FindAllString(krew, -1) {
		write(archive, archive)
	}
	release := func(version string) (string, error) {
		out, err := exec.Command(filepath.Join(tree, "hack", "release"), version, tree).CombinedOutput()
		return string(out), err
	}
	if out, err := release("v0.1.0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	made, err := loader.LoadFile(filepath.Join(tree, "csi-node-0.1.0.tgz"))
	must(t, err)
	if !maps.Equal(texts(made), texts(loadChart(t))) {
		t.Errorf("the archive has the files %v, or other texts", slices.Sorted(maps.Keys(texts(made))))
	}
	if notes := read(t, filepath.Join(tree, "notes.md")); strings.TrimSpace(notes) != "- Ours." {
		t.Errorf("the notes are %q", notes)
	}
	check := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	check.Dir = tree
	out, err := check.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "csi-node-0.1.0.tgz: OK") || strings.Count(string(out), ": OK") != 6 {
		t.Errorf("the checksums: %v\n%s", err, out)
	}

	for file, version := range map[string]string{"Chart.yaml": "v0.1.1", "CHANGELOG.md": "v0.1.0", "a release has": "main"} {
		write("CHANGELOG.md", "# Changes\n\n## Unreleased\n\n- Ours.\n")
		if out, err := release(version); err == nil || !strings.Contains(out, file) {
			t.Errorf("%s is not refused by %s, but: %v: %s", version, file, err, out)
		}
	}
	for file, another := range map[string][2]string{
		"deploy/base/kustomization.yaml": {"v0.1.0", "v0.0.9"},
		"deploy/chart/Chart.yaml":        {"appVersion: v0.1.0", "appVersion: v0.1.0-rc.1"},
	} {
		text := read(t, filepath.Join(tree, file))
		write(file, strings.Replace(text, another[0], another[1], 1))
		if out, err := release("v0.1.0"); err == nil || !strings.Contains(out, file) {
			t.Errorf("%s in %s is not refused, but: %v: %s", another[1], file, err, out)
		}
		write(file, text)
	}
}

// texts returns the files of a chart by their names.
func texts(c *chart.Chart) map[string]string {
	files := map[string]string{}
	for _, file := range c.Raw {
		files[file.Name] = string(file.Data)
	}
	return files
}
