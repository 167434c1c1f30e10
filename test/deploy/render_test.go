package deploy

import (
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/csi-node/csi-node/test/harness"
)

const root = "../../deploy"

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // Helm names each symbolic link that it follows
	harness.Main(m)
}

// object is a manifest as it is read from YAML.
type object map[string]any

// key names an object as a person would.
func (o object) key() string { return fmt.Sprint(o["kind"], " ", o.at("metadata", "name")) }

// at returns what is at a path, or nil.
func (o object) at(path ...string) any {
	var value any = map[string]any(o)
	for _, name := range path {
		fields, _ := value.(map[string]any)
		value = fields[name]
	}
	return value
}

// parse reads the objects of a YAML stream.
func parse(t testing.TB, text string) (objects []object) {
	t.Helper()
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		var o object
		if err := yaml.UnmarshalStrict([]byte(document), &o); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if len(o) > 0 {
			objects = append(objects, o)
		}
	}
	return objects
}

func loadChart(t testing.TB) *chart.Chart {
	t.Helper()
	c, err := loader.LoadDir(filepath.Join(root, "chart"))
	must(t, err)
	return c
}

// release is where and as what a chart is rendered.
type release struct{ name, namespace string }

var usual = release{"csi-node", "csi-node"}

// tryHelm renders the chart as `helm install --values` does.
func tryHelm(t testing.TB, r release, values string) (string, error) {
	t.Helper()
	all, err := chartutil.ReadValues([]byte(values))
	must(t, err)
	c := loadChart(t)
	v, err := chartutil.ToRenderValues(c, all, chartutil.ReleaseOptions{Name: r.name, Namespace: r.namespace, Revision: 1, IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	// What is null is not there, which is an error to a strict engine, as a misspelt value is.
	files, err := engine.Engine{Strict: !strings.Contains(values, ": null")}.Render(c, v)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") {
			fmt.Fprintf(&text, "---\n%s\n", files[name])
		}
	}
	return text.String(), nil
}

func helm(t testing.TB, r release, values string) []object {
	t.Helper()
	text, err := tryHelm(t, r, values)
	must(t, err)
	return parse(t, text)
}

// kustomize builds a directory as `kubectl apply --kustomize` does.
func kustomize(t testing.TB, dir string) []object {
	t.Helper()
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatalf("%s: %v", dir, err)
	}
	text, err := built.AsYaml()
	must(t, err)
	return parse(t, string(text))
}

// overlays returns the directories below deploy/overlays by name.
func overlays(t testing.TB) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "overlays", "*", "kustomization.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal("no overlays", err)
	}
	all := map[string]string{}
	for _, file := range files {
		dir := filepath.Dir(file)
		all[filepath.Base(dir)] = dir
	}
	return all
}

// over returns a copy of an overlay with another one in the place of the base.
func over(t testing.TB, name, below string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS(root)))
	overlay := filepath.Join(dir, "overlays", name)
	file := filepath.Join(overlay, "kustomization.yaml")
	must(t, os.WriteFile(file, []byte(strings.Replace(read(t, file), "../../base", "../"+below, 1)), 0o600))
	return overlay
}

func read(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	return string(text)
}
