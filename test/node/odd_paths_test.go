package node

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// Paths may hold whatever a file name may hold.
func TestPathsMayHoldAnyCharacter(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for i, name := range []string{"with spaces ", "new\nline", "tab\tand \"quotes\" 'both'", "#hash # tag", `back\slash\040`, "ümlaut ☃", "%s,$HOME;&|*?", "-o", "...", strings.Repeat("ü", 127)} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			v := create(t, p, "volume-"+string(rune('a'+i)), 32*mib, mountAs("ext4", multiWriter))
			v.Staging = v.Path("staging", name, name)
			target := v.Path("pods", name, name)
			makeDir(t, filepath.Dir(v.Staging))
			makeDir(t, filepath.Dir(target))
			must(t, v.Up(ctx, target, target))
			write(t, filepath.Join(target, "file"), name)
			mustRead(t, filepath.Join(v.Staging, "file"), name)
			v.Total(target)
			if mountsAt(p, v.Staging) != 1 || mountsAt(p, target) != 1 {
				t.Errorf("mounts: %q", p.Mounts())
			}
			p.Kill()
			p.Start(harness.Options{})
			must(t, v.Publish(ctx, target))
			v.End(target)

			v = create(t, p, "block-"+string(rune('a'+i)), 32*mib, blockAs(multiWriter))
			must(t, v.Up(ctx, target, target))
			if mountsAt(p, target) != 1 {
				t.Errorf("mounts: %q", p.Mounts())
			}
			v.End(target)
		})
	}
}
