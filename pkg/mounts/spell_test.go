package mounts

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// Every way to the root over symbolic links leads to one spelling; what only
// looks like one stays as it is.
func TestSpell(t *testing.T) {
	bothTables(t, func(t *testing.T, old *Host, dir string) {
		real := filepath.Join(dir, "data/lib/kubelet")
		for _, d := range []string{real + "/pods/1", dir + "/bound", dir + "/elsewhere"} {
			must(t, os.MkdirAll(d, 0o700))
		}
		for name, to := range map[string]string{"given": "lib/kubelet", "lib": "data/lib", "twice": "given", "lost": "nowhere", "self": "self"} {
			must(t, os.Symlink(to, filepath.Join(dir, name)))
		}
		must(t, os.Symlink(real+"/pods", filepath.Join(dir, "into")))
		must(t, os.Symlink("pods", filepath.Join(real, "below")))
		machine.Kernel(t)
		must(t, unix.Mount(real, dir+"/bound", "", unix.MS_BIND, ""))
		h, err := New(filepath.Join(dir, "given"))
		must(t, err)
		h.table = old.table
		for path, want := range map[string]string{
			"given/pods/1":         "data/lib/kubelet/pods/1",
			"lib/kubelet/pods/1":   "data/lib/kubelet/pods/1",
			"twice/pods/1":         "data/lib/kubelet/pods/1",
			"twice/not/yet/there":  "data/lib/kubelet/not/yet/there",
			"data/lib/kubelet/x":   "data/lib/kubelet/x",
			"twice/below/1":        "data/lib/kubelet/below/1", // Check refuses it
			"twice":                "twice",                    // the root itself holds no mount
			"lost/pods/1":          "lost/pods/1",
			"self/pods/1":          "self/pods/1",
			"elsewhere/pods/1":     "elsewhere/pods/1",
			"data/lib/kubelet-2/x": "data/lib/kubelet-2/x",
			"into/1":               "into/1",
			"bound/pods/1":         "bound/pods/1", // another mount: what is mounted in one is not seen in the other
			"given/../given/x":     "given/../given/x",
			"given/x/":             "given/x/",
			"elsewhere/" + strings.Repeat("x", 300) + "/x": "elsewhere/" + strings.Repeat("x", 300) + "/x",
		} {
			got, err := h.Spell(t.Context(), dir+"/"+path)
			if err != nil || got != dir+"/"+want {
				t.Errorf("%s is %s (%v), want %s", path, got, err, want)
			}
		}
		for _, path := range []string{"", "/", "relative/given", "/\x00/x", "/proc/self/root" + real + "/pods/1"} {
			if got, err := h.Spell(t.Context(), path); err != nil || got != path {
				t.Errorf("%q is %q (%v)", path, got, err)
			}
		}
		must(t, os.Remove(dir+"/lib")) // what was known at start stays known
		if got, err := h.Spell(t.Context(), dir+"/given/x"); err != nil || got != real+"/x" {
			t.Errorf("%s (%v)", got, err)
		}
	})
}

// A file system outside that does not answer keeps paths over it waiting, not
// for long, and no other path.
func TestSpellOverWhatDoesNotAnswer(t *testing.T) {
	h, root := newHost(t)
	outside := t.TempDir()
	path := outside + "/x/y"
	release := make(chan struct{})
	defer close(release)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := h.spellings.Do(ctx, path, hang.NoLimit, func() (string, error) { <-release; return "", nil })
	wantClass(t, err, state.DeadlineExceeded)
	_, err = h.Spell(ctx, path)
	wantClass(t, err, state.DeadlineExceeded, path)
	for _, other := range []string{root + "/x", outside + "/z/y"} {
		if got, err := h.Spell(t.Context(), other); err != nil || got != other {
			t.Errorf("%s is %s (%v)", other, got, err)
		}
	}
}
