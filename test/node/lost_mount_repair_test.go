package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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

// What is unmounted behind the plugin's back comes back by itself, with its
// data and its flags; nobody calls.
func TestLostMountsComeBack(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			p, v, one, two := publishedTwice(t, fsType)
			write(t, filepath.Join(one, "file"), "kept")
			for _, torn := range [][]string{{one}, {two}, {v.Staging}, {v.Staging, one, two}} {
				before := p.Mounts()
				for _, path := range torn {
					harness.Command(t, "umount", "--lazy", path)
				}
				harness.Eventually(t, "the mounts are back", func() bool { return len(p.Mounts()) == len(before) })
				mustRead(t, filepath.Join(one, "file"), "kept")
				mustRead(t, filepath.Join(two, "file"), "kept")
				if flags := harness.Command(t, "findmnt", "--noheadings", "--output", "VFS-OPTIONS", two); !strings.Contains(flags, "ro") || !strings.Contains(flags, "noatime") {
					t.Errorf("the read-only target has the flags %s", flags)
				}
			}
			v.End(one, two)
		})
	}
}

// Attributes that somebody changes, of which fanotify does not tell, are put
// right though nobody calls.
func TestChangedAttributesArePutRight(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noexec"))
	must(t, v.Stage(t.Context()))
	target := v.Target("pod")
	must(t, v.PublishReadOnly(t.Context(), target))
	is := func(path string, words ...string) bool {
		flags := strings.Split(harness.Command(t, "findmnt", "--noheadings", "--output", "VFS-OPTIONS", path), ",")
		return !slices.ContainsFunc(words, func(w string) bool { return !slices.Contains(flags, w) })
	}
	for range 2 {
		harness.Command(t, "mount", "-o", "remount,bind,rw,exec", target)
		harness.Eventually(t, "the target is as asked", func() bool { return is(target, "ro", "noexec") })
		harness.Command(t, "mount", "-o", "remount,bind,ro", v.Staging)
		harness.Eventually(t, "the stage is as asked", func() bool { return is(v.Staging, "rw", "noexec") })
	}
	v.End(target)
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

func TestNothingIsRepairedWithHealingOff(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Flags: []string{"--heal=false"}})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	must(t, v.Stage(t.Context()))
	target := v.Target("pod")
	must(t, v.Publish(t.Context(), target))
	harness.Command(t, "umount", target)
	harness.Eventually(t, "the loss is told", func() bool {
		for _, part := range p.Status().Volumes[0].Parts {
			if strings.Contains(part.Error, "--heal") {
				return true
			}
		}
		return false
	})
	if mountsAt(p, target) != 0 {
		t.Error("restored")
	}
	must(t, v.Publish(t.Context(), target))
	v.End(target)
}

// A pod that is gone does not come back to be unpublished.
func TestPublishOfAPodThatIsGoneRetires(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, blockAs(multiWriter))
	must(t, v.Stage(t.Context()))
	dead, alive := v.Target("dead"), v.Target("alive")
	must(t, v.Publish(t.Context(), dead))
	must(t, os.Remove(v.Path("pods/dead")))
	must(t, v.Publish(t.Context(), alive)) // the volume is looked at; a minute later it is looked at again
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	must(t, p.Log.Await(ctx, "Retired the publish"))
	must(t, v.Publish(t.Context(), alive))
	p.AwaitRest()
	mustBeGone(t, dead)
	v.End(alive)
}
