package docs

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/csi-node/csi-node/test/require"
)

// The manifest for krew names the archives that make kubectl-plugin makes, and the program
// in them.
func TestKrewManifest(t *testing.T) {
	raw, err := os.ReadFile("../../.krew.yaml")
	require.NoError(t, err)
	// What krew-release-bot puts in the places of its template.
	text := regexp.MustCompile(`(?m)^( *)\{\{ ?addURIAndSha "([^"]*)" \.TagName ?\}\}$`).ReplaceAllString(string(raw), "${1}uri: $2\n${1}sha256: 00")
	text = strings.ReplaceAll(text, "{{ .TagName }}", "v1.2.3")
	var manifest struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Metadata   struct{ Name string }
		Spec       struct {
			Version, Homepage string
			ShortDescription  string `yaml:"shortDescription"`
			Description       string
			Platforms         []struct {
				Selector struct {
					MatchLabels struct{ OS, Arch string } `yaml:"matchLabels"`
				}
				URI, Bin string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(text), &manifest))
	spec := manifest.Spec
	if manifest.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || manifest.Kind != "Plugin" || manifest.Metadata.Name != "csi-node" ||
		spec.Version != "v1.2.3" || spec.Homepage == "" || spec.ShortDescription == "" || len(spec.ShortDescription) > 50 || spec.Description == "" {
		t.Errorf("%+v", manifest)
	}
	makefile, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	made := regexp.MustCompile(`(?m)^PLATFORMS \?= (.*)$`).FindSubmatch(makefile)
	var named []string
	for _, p := range spec.Platforms {
		named = append(named, p.Selector.MatchLabels.OS+"-"+p.Selector.MatchLabels.Arch)
		if want := "kubectl-csi_node-" + named[len(named)-1] + ".tar.gz"; path.Base(p.URI) != want || !strings.Contains(p.URI, "/v1.2.3/") {
			t.Errorf("%s is had from %s", want, p.URI)
		}
		if p.Bin != "kubectl-csi_node" { // kubectl finds csi-node by that name
			t.Errorf("the program is %s", p.Bin)
		}
	}
	if made == nil || !slices.Equal(strings.Fields(string(made[1])), named) {
		t.Errorf("archives are made for %q, and named for %q", made, named)
	}
}
