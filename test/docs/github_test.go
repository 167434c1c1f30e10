package docs

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/csi-node/csi-node/test/require"
)

// TestGitHubFiles: they are YAML; the workflow runs what CI runs, with the Go of the Dockerfile, also before a release; and
// the form for bugs asks for what helps most.
func TestGitHubFiles(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(root, ".github", "*", "*.yml"))
	require.NoError(t, err)
	texts := map[string]string{}
	for _, name := range names {
		name, err := filepath.Rel(root, name)
		require.NoError(t, err)
		texts[filepath.Base(name)] = read(t, name)
		var any map[string]any
		if err := yaml.UnmarshalStrict([]byte(read(t, name)), &any); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	image := regexp.MustCompile(`golang:\S+`).FindString(read(t, "Dockerfile"))
	for name, words := range map[string][]string{
		"ci.yml":      {"run: .ci/run", "image: " + image},
		"release.yml": {"uses: ./.github/workflows/ci.yml", "needs: ci", `run: make release VERSION="$VERSION"`},
		"bug.yml":     {"csi-node explain VOLUME", "csi-node report"},
	} {
		for _, word := range words {
			if !strings.Contains(texts[name], word+"\n") {
				t.Errorf("%s lacks %q", name, word)
			}
		}
	}
}
