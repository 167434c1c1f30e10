package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// publishedTwice starts a plugin and publishes a volume of it at two targets, the second of
// which is read-only.
func publishedTwice(t *testing.T, fsType string) (p *harness.Plugin, v *volume, one, two string) {
	t.Helper()
	p = harness.Start(t, harness.Options{})
	v = create(t, p, "volume", smallest(fsType), mountAs(fsType, multiWriter, "noatime"))
	one, two = v.Target("one"), v.Target("two")
	must(t, v.Up(t.Context(), one))
	must(t, v.PublishReadOnly(t.Context(), two))
	return p, v, one, two
}

// A file system that was shut down comes back by itself, with its data, once
// nobody uses it; the first to notice is whoever asks how full it is.
func TestBrokenFilesystemComesBack(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			p, v, one, two := publishedTwice(t, fsType)
			file := filepath.Join(one, "file")
			write(t, file, "kept")
			harness.Command(t, "sync", file)

			machine.ShutDown(t, v.Staging)
			if !tellsOfShutDown(t, v.Staging) { // then it comes back with the next stage
				must(t, v.Down(t.Context(), one, two))
				must(t, v.Up(t.Context(), one))
				mustRead(t, file, "kept")
				v.End(one)
				return
			}
			if err := v.Stats(t.Context(), one); err == nil {
				t.Error("a file system that was shut down has a usage")
			}
			works := func() bool {
				text, err := os.ReadFile(filepath.Join(two, "file"))
				return err == nil && string(text) == "kept"
			}
			harness.Eventually(t, "the file system works again", works)
			must(t, v.Publish(t.Context(), one))
			write(t, filepath.Join(one, "other"), "written again")

			user := exec.Command("sleep", "1000")
			held, err := os.Open(file)
			must(t, err)
			user.Stdin = held
			must(t, user.Start())
			must(t, held.Close())
			end := sync.OnceFunc(func() {
				_ = user.Process.Kill()
				_ = user.Wait() // always an error, of one that was killed
			})
			t.Cleanup(end)
			p.AwaitRest() // or a look under way finds the stage whole and a target broken
			machine.ShutDown(t, v.Staging)
			before := p.Mounts()
			mustRefuse(t, v.Publish(t.Context(), one), codes.Unavailable, "is broken", fmt.Sprintf("pid %d (sleep)", user.Process.Pid))
			mustEqual(t, before, p.Mounts())
			end()
			harness.Eventually(t, "a publish succeeds", func() bool { return v.Publish(t.Context(), one) == nil })
			must(t, v.PublishReadOnly(t.Context(), two))
			mustRead(t, filepath.Join(two, "file"), "kept")
			v.End(one, two)
		})
	}
}

// tellsOfShutDown reports whether the kernel tells that a mount was shut down: an
// xfs fails a look at it, an ext4 says so since Linux 6.15.
func tellsOfShutDown(t *testing.T, path string) bool {
	t.Helper()
	if _, err := os.Stat(path); err != nil {
		return true
	}
	return strings.Contains(harness.Command(t, "findmnt", "--noheadings", "--output", "FS-OPTIONS", path), "shutdown")
}
