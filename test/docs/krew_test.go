package docs

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

var (
	// addURIAndSha is what hack/krew-manifest, or krew-release-bot, replaces by the lines uri and sha256.
	addURIAndSha = regexp.MustCompile(`(?m)^( +)\{\{addURIAndSha "([^"]+)" \.TagName }}$`)
	platforms    = regexp.MustCompile(`(?m)^PLATFORMS \?= (.+)$`)
)

// krewPlugin is what krew reads of a manifest.
type krewPlugin struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Version          string `json:"version"`
		Homepage         string `json:"homepage"`
		ShortDescription string `json:"shortDescription"`
		Description      string `json:"description"`
		Caveats          string `json:"caveats"`
		Platforms        []struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
			URI    string `json:"uri"`
			SHA256 string `json:"sha256"`
			Bin    string `json:"bin"`
		} `json:"platforms"`
	} `json:"spec"`
}

// TestKrewManifest: hack/krew-manifest fills it in for a release: it is a manifest of krew, and names the archives that
// `make kubectl-plugin` makes, by their checksums, with the program in them.
func TestKrewManifest(t *testing.T) {
	template, archives := read(t, ".krew.yaml"), t.TempDir()
	sums := map[string]string{}
	for _, m := range addURIAndSha.FindAllStringSubmatch(template, -1) {
		name := path.Base(m[2])
		require.NoError(t, os.WriteFile(filepath.Join(archives, name), []byte(name), 0o600))
		sums[name] = fmt.Sprintf("%x", sha256.Sum256([]byte(name)))
	}
	text := harness.Command(t, filepath.Join(root, "hack", "krew-manifest"), "v1.2.3", archives)
	var p krewPlugin
	require.NoError(t, yaml.UnmarshalStrict([]byte(text), &p))
	if p.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || p.Kind != "Plugin" || p.Spec.Version != "v1.2.3" {
		t.Errorf("it is %s %s of the version %s", p.APIVersion, p.Kind, p.Spec.Version)
	}
	if p.Spec.Homepage == "" || p.Spec.Description == "" || p.Spec.ShortDescription == "" || len(p.Spec.ShortDescription) > 50 {
		t.Error("a homepage, a description, or one of at most 50 letters is missing: krew's index refuses that")
	}

	// kubectl finds the plugin csi-node as kubectl-csi_node.
	bin := "kubectl-" + strings.ReplaceAll(p.Metadata.Name, "-", "_")
	makefile := read(t, "Makefile")
	if archive := "LICENSE -C cmd/" + bin + " " + completion + " -C $(CURDIR)/bin/$$p " + bin + " | gzip -n > bin/" + bin + "-$$p.tar.gz;"; !strings.Contains(makefile, archive) {
		t.Fatalf("make kubectl-plugin does not run %q", archive)
	}
	if !strings.Contains(p.Spec.Caveats, "install ~/.krew/store/"+p.Metadata.Name+"/v1.2.3/"+completion+" ") {
		t.Errorf("whoever installs it is told %q", p.Spec.Caveats)
	}
	made := platforms.FindStringSubmatch(makefile)
	if made == nil {
		t.Fatal("the Makefile names no PLATFORMS")
	}
	var named []string
	for _, platform := range p.Spec.Platforms {
		name := platform.Selector.MatchLabels["os"] + "-" + platform.Selector.MatchLabels["arch"]
		named = append(named, name)
		if want := p.Spec.Homepage + "/releases/download/v1.2.3/" + bin + "-" + name + ".tar.gz"; platform.URI != want {
			t.Errorf("the archive for %s is %s, and not %s", name, platform.URI, want)
		}
		if platform.SHA256 != sums[path.Base(platform.URI)] {
			t.Errorf("the checksum for %s is %q", name, platform.SHA256)
		}
		if platform.Bin != bin {
			t.Errorf("the program for %s is %s, and not %s", name, platform.Bin, bin)
		}
	}
	if want := strings.Fields(made[1]); !slices.Equal(named, want) {
		t.Errorf("the platforms are %v, and make kubectl-plugin is for %v", named, want)
	}
}

// completion is what kubectl looks for in the PATH to complete what is typed after `kubectl csi-node`.
const completion = "kubectl_complete-csi_node"

// TestCompletionIsInstalled: by the command of docs/tools.md kubectl finds what completes its plugin.
func TestCompletionIsInstalled(t *testing.T) {
	bin := t.TempDir()
	i := slices.IndexFunc(pageNamed(t, "docs/tools.md").code(), func(line string) bool { return strings.HasPrefix(line, "install ") })
	if i < 0 {
		t.Fatal("docs/tools.md does not install it")
	}
	command := strings.Replace(pageNamed(t, "docs/tools.md").code()[i], "/usr/local/bin", bin, 1)
	harness.Command(t, "sh", "-c", "cd "+root+" && "+command+" && go build -o "+bin+" ./cmd/kubectl-csi_node")
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	if out := harness.Command(t, completion, "orp"); !strings.HasPrefix(out, "orphans\tList devices and mounts that no record explains, of all nodes\n:4\n") {
		t.Errorf("it offers %q", out)
	}
}
