package mounts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// bothSources runs a test once with each source of news.
func bothSources(t *testing.T, test func(t *testing.T, h *Host, root string, s eventSource)) {
	machine.Kernel(t)
	t.Run("fanotify", func(t *testing.T) {
		h, root := newHost(t)
		if s := wantFanotify(t, h); s != nil {
			test(t, h, root, s)
		}
	})
	t.Run("mountinfo", func(t *testing.T) {
		s, err := newMountinfoPoll()
		must(t, err)
		h, root := newHost(t)
		test(t, h, root, s)
	})
}

// wantFanotify returns the source where the kernel has it. An older kernel must
// be left with the other one, and nil is returned.
func wantFanotify(t *testing.T, h *Host) eventSource {
	t.Helper()
	machine.Kernel(t)
	s, err := newFanotify()
	if err == nil {
		return s
	}
	if !kernelBefore(t, 6, 15) {
		t.Fatalf("this kernel tells of mounts by fanotify: %v", err)
	}
	w, err := h.NewWatcher()
	must(t, err)
	mustBe(t, "the source", w.Source(), "mountinfo")
	must(t, w.Close())
	return nil
}

// watcher returns a Watcher that nobody runs, until the test ends.
func watcher(t *testing.T, h *Host, s eventSource) *Watcher {
	t.Helper()
	w, err := h.watch(s)
	must(t, err)
	t.Cleanup(func() { must(t, w.Close()) })
	return w
}

// news runs a Watcher and returns what it tells. The channel is closed at the end.
func news(t *testing.T, h *Host, s eventSource) <-chan string {
	t.Helper()
	w, err := h.watch(s)
	must(t, err)
	return newsOf(t, w)
}

// newsOf runs a Watcher that has begun before, as news does.
func newsOf(t *testing.T, w *Watcher) <-chan string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan string, 1000), make(chan error, 1)
	go func() {
		ended <- w.Run(ctx, func(path string) { told <- path })
		close(told)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the watch ends with %v", err)
		}
	})
	return told
}

// awaitPath waits until all paths are told, in whatever order, and passes over others.
func awaitPath(t *testing.T, told <-chan string, want ...string) {
	t.Helper()
	for path := range told {
		if want = slices.DeleteFunc(want, func(w string) bool { return w == path }); len(want) == 0 {
			return
		}
	}
	t.Fatalf("the watch ended and never told of %q", want)
}

// mountElsewhere makes a directory and has another process mount a tmpfs of that source there.
func mountElsewhere(t *testing.T, source, path string) {
	t.Helper()
	makeDirs(t, path)
	run(t, "mount", "-t", "tmpfs", source, path)
}

// makeDirs makes each directory.
func makeDirs(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		must(t, os.Mkdir(path, 0o700))
	}
}

// A child process does it: the deeds of this process are not news by fanotify.
func TestWatch(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		a, deep := filepath.Join(root, "a"), filepath.Join(root, "a/deep")
		mountElsewhere(t, "before", a)
		must(t, os.Mkdir(deep, 0o700))
		told := news(t, h, s)
		run(t, "mount", "-t", "tmpfs", "x", deep)
		awaitPath(t, told, deep)
		run(t, "umount", deep)
		awaitPath(t, told, deep)
		run(t, "mount", "-t", "tmpfs", "x", deep)
		awaitPath(t, told, deep)
		run(t, "umount", "--lazy", a)
		awaitPath(t, told, a, deep) // a tree that is taken down at once is told of mount by mount
	})
}

// A mount of this process's is taken away before its event was read.
func TestWatchTellsWhatWentBeforeItWasRead(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		source, target, later := filepath.Join(root, "source"), filepath.Join(root, "target"), filepath.Join(root, "later")
		mountElsewhere(t, "source", source)
		makeDirs(t, later)
		var st unix.Stat_t
		must(t, unix.Stat(source, &st))
		device := devnode.NumberOf(st.Dev)
		w, err := h.watch(s)
		must(t, err)
		must(t, h.BindMount(t.Context(), source, device, target, state.Flags{}))
		run(t, "umount", target)
		told := newsOf(t, w)
		run(t, "mount", "-t", "tmpfs", "later", later)
		for path := range told {
			switch path {
			case target:
				return
			case later:
				t.Fatal("what came later was told first")
			}
		}
		t.Fatal("the watch ended")
	})
}

// Attributes that somebody changes are told of, each time.
func TestWatchAttributes(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
		mountElsewhere(t, "a", a)
		makeDirs(t, b)
		told := news(t, h, s)
		run(t, "mount", "-o", "remount,bind,ro", a)
		awaitPath(t, told, a)
		run(t, "mount", "--bind", a, b)
		awaitPath(t, told, b)
		run(t, "mount", "-o", "remount,bind,rw,noexec", b)
		awaitPath(t, told, b)
		run(t, "mount", "-o", "remount,bind,rw", a)
		awaitPath(t, told, a)
	})
}

func TestCompareTellsEachChangeOnce(t *testing.T) {
	h, root := newHost(t)
	s := wantFanotify(t, h)
	if s == nil {
		return // the mountinfo source compares by itself
	}
	var all []string
	for i := range 2*comparedAtOnce + 1 {
		all = append(all, filepath.Join(root, fmt.Sprintf("%04d", i)))
		mountTmpfs(t, "a", all[i], 0)
	}
	w := watcher(t, h, s)
	for _, change := range []unix.MountAttr{{Attr_set: unix.MOUNT_ATTR_RDONLY}, {Attr_clr: unix.MOUNT_ATTR_RDONLY, Attr_set: unix.MOUNT_ATTR_NOEXEC}} {
		for _, path := range all {
			must(t, unix.MountSetattr(unix.AT_FDCWD, path, 0, &change))
		}
		var told []string
		for range 2 {
			w.compare(func(path string) { told = append(told, path) })
		}
		if slices.Sort(told); !slices.Equal(told, all) {
			t.Errorf("told of %q", told)
		}
	}
}

// What is put right, and changed back before anybody looks, is told of again.
func TestCompareTellsOfWhatIsChangedBack(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		a := filepath.Join(root, "a")
		mountTmpfs(t, "a", a, 0)
		w := watcher(t, h, s)
		for range 2 {
			run(t, "mount", "-o", "remount,bind,ro", a)
			var told []string
			if w.attributes != nil {
				w.compare(func(path string) { told = append(told, path) })
			}
			w.mu.Lock()
			must(t, w.take(func(path string) { told = append(told, path) }))
			w.mu.Unlock()
			if !slices.Equal(told, []string{a}) {
				t.Errorf("told of %q", told)
			}
			must(t, h.SetAttributes(t.Context(), a, state.Flags{Clear: state.ReadOnly}))
		}
	})
}

// Of mounts that are not below the root nothing is asked.
func TestCompareLeavesOutOtherMounts(t *testing.T) {
	h, _ := newHost(t)
	s := wantFanotify(t, h)
	if s == nil {
		return
	}
	w := watcher(t, h, s)
	const odd = state.ReadOnly | state.NoExec | state.NoDev | state.NoSuid | state.NoSymFollow | state.NoDirAtime // none has all
	for id, m := range w.mounts {
		w.mounts[id] = watchedMount{point: m.point, attributes: odd}
	}
	w.compare(func(path string) { t.Errorf("told of %s", path) })
	for _, m := range w.mounts {
		if m.attributes != odd {
			t.Errorf("%s was asked", m.point)
		}
	}
}

func TestWatchMove(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		base, a, b := filepath.Join(root, "base"), filepath.Join(root, "base/a"), filepath.Join(root, "base/b")
		mountElsewhere(t, "base", base)
		run(t, "mount", "--make-private", base) // else nothing moves out of it
		mountElsewhere(t, "a", a)
		makeDirs(t, b)
		told := news(t, h, s)
		run(t, "mount", "--move", a, b)
		awaitPath(t, told, a, b)
	})
}

// A mount that is moved before its event is read was at its old
// place when the mounts were listed: that place is told, too.
func TestWatchMoveBehindNews(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		base, a, b, last := filepath.Join(root, "base"), filepath.Join(root, "base/a"), filepath.Join(root, "base/b"), filepath.Join(root, "base/last")
		mountElsewhere(t, "base", base)
		run(t, "mount", "--make-private", base) // else nothing moves out of it
		makeDirs(t, a, b, last)
		run(t, "mount", "-t", "tmpfs", "a", a) // its news waits in the source
		w, err := h.watch(s)
		must(t, err)
		run(t, "mount", "--move", a, b)
		run(t, "mount", "-t", "tmpfs", "last", last)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		seen := map[string]bool{}
		must(t, w.Run(ctx, func(path string) {
			if seen[path] = true; path == last {
				cancel()
			}
		}))
		if !seen[a] || !seen[b] {
			t.Errorf("told of %v only", seen)
		}
	})
}

// What this process does itself is not told, and is known afterwards; where the
// kernel does not say who did it, it is told.
func TestWatchLeavesOutOwnDeeds(t *testing.T) {
	h, root := newHost(t)
	s := wantFanotify(t, h)
	knowsWho := s != nil
	if !knowsWho {
		var err error
		s, err = newMountinfoPoll()
		must(t, err)
	}
	own, other := filepath.Join(root, "own"), filepath.Join(root, "other")
	makeDirs(t, own, other)
	told := news(t, h, s)
	must(t, unix.Mount("own", own, "tmpfs", 0, ""))
	if !knowsWho {
		awaitPath(t, told, own)
	}
	run(t, "mount", "-t", "tmpfs", "other", other)
	if path := <-told; path != other {
		t.Errorf("told of %s first", path)
	}
	run(t, "umount", own)
	awaitPath(t, told, own)
}

// A root with a symbolic link in it: mounts are told as Spell spells them. What
// covers the root, or a directory above it, is told as the root.
func TestWatchSpelling(t *testing.T) {
	bothSources(t, func(t *testing.T, _ *Host, root string, s eventSource) {
		real, link := filepath.Join(root, "real/kubelet"), filepath.Join(root, "link")
		must(t, os.MkdirAll(filepath.Join(real, "x"), 0o700))
		must(t, os.Symlink("real/kubelet", link))
		h, err := New(link)
		must(t, err)
		told := news(t, h, s)
		run(t, "mount", "-t", "tmpfs", "x", filepath.Join(real, "x"))
		awaitPath(t, told, filepath.Join(real, "x"))
		run(t, "mount", "-t", "tmpfs", "above", filepath.Join(root, "real"))
		awaitPath(t, told, real)
	})
}

// A queue that overflowed, and a table that says only that it changed, are made
// up for by comparing.
func TestWatchResync(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
		mountElsewhere(t, "a", a)
		makeDirs(t, b)
		w := watcher(t, h, s)
		run(t, "umount", a)
		run(t, "mount", "-t", "tmpfs", "b", b)
		told := map[string]bool{}
		w.mu.Lock()
		err := w.resync(func(path string) { told[path] = true })
		w.mu.Unlock()
		must(t, err)
		if !told[a] || !told[b] || len(told) != 2 {
			t.Errorf("told of %v", told)
		}
	})
}

// A mount gets the id of the one that was at its place, on kernels that give ids again.
func TestWatchMountInPlaceOfAnother(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		a := filepath.Join(root, "a")
		mountElsewhere(t, "first", a)
		w := watcher(t, h, s)
		run(t, "umount", a)
		run(t, "mount", "-t", "tmpfs", "second", a)
		told := false
		w.mu.Lock()
		err := w.take(func(path string) { told = told || path == a })
		w.mu.Unlock()
		must(t, err)
		if !told {
			t.Error("it is not told of")
		}
	})
}

// unlisted is a source that cannot list the mounts, for a while.
type unlisted struct {
	eventSource
	fails atomic.Int64
}

func (u *unlisted) read() ([]change, bool, error) {
	changes, _, err := u.eventSource.read()
	return changes, true, err
}

func (u *unlisted) list() (map[uint64]watchedMount, error) {
	if u.fails.Add(-1) >= 0 {
		return nil, unix.EMFILE
	}
	return u.eventSource.list()
}

// What could not be listed once is listed again, though nothing more happens.
func TestWatchListsAgain(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		a := filepath.Join(root, "a")
		mountElsewhere(t, "a", a)
		u := &unlisted{eventSource: s}
		told := news(t, h, u)
		u.fails.Store(2)
		run(t, "umount", a)
		awaitPath(t, told, a)
	})
}

func TestParseFanotify(t *testing.T) {
	s := &fanotify{pid: 7}
	event := func(mask uint64, pid int32, record []byte) []byte {
		buf := make([]byte, eventSize, eventSize+len(record))
		buf[0], buf[4], buf[6] = byte(eventSize+len(record)), unix.FANOTIFY_METADATA_VERSION, byte(eventSize)
		for i := range 8 {
			buf[8+i] = byte(mask >> (8 * i))
		}
		buf[20] = byte(pid)
		return append(buf, record...)
	}
	mount := []byte{unix.FAN_EVENT_INFO_TYPE_MNT, 0, infoMountLen, 0, 0, 0, 0, 0, 42, 0, 0, 0, 0, 0, 0, 0}
	changes, all, err := s.parse(append(event(unix.FAN_MNT_ATTACH, 7, mount), event(unix.FAN_Q_OVERFLOW, 0, nil)...))
	if err != nil || !all || len(changes) != 1 || changes[0] != (change{id: 42, attached: true, own: true}) {
		t.Errorf("%+v, all %v (%v)", changes, all, err)
	}
	whole := event(unix.FAN_MNT_DETACH, 1, mount)
	for n := 1; n < len(whole); n++ {
		if changes, _, err := s.parse(whole[:n]); err == nil {
			t.Errorf("%d of %d bytes are %+v", n, len(whole), changes)
		}
	}
	whole[eventSize+2] = 200 // a record longer than its event
	if _, _, err := s.parse(whole); err == nil {
		t.Error("a record that is too long is taken")
	}
}

// Descriptors that were closed may be somebody else's by now.
func TestPollAfterClose(t *testing.T) {
	s, err := newMountinfoPoll()
	must(t, err)
	must(t, s.close())
	if err := s.wait(); err != os.ErrClosed {
		t.Errorf("wait: %v", err)
	}
	if _, all, err := s.read(); err != os.ErrClosed {
		t.Errorf("all %v, %v", all, err)
	}
}

// A node that is bound anywhere is known when Bound is asked, whether or not the
// news are read by then; nobody who is told of mounts misses one for it.
func TestBoundNodes(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		node := func(name string, minor uint32) (string, state.DeviceNumber) {
			path := filepath.Join(root, name)
			must(t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(240, minor)))) // of no driver
			return path, state.DeviceNumber{Major: 240, Minor: minor}
		}
		run(t, "mount", "-t", "tmpfs", "dev", root)
		t.Cleanup(func() { run(t, "umount", "--lazy", root) })
		early, first := node("early", 1)
		late, second := node("late", 2)
		never, third := node("never", 3)
		outside := t.TempDir()
		at := func(name string) string {
			path := filepath.Join(outside, name)
			must(t, os.WriteFile(path, nil, 0o600))
			t.Cleanup(func() {
				for unix.Unmount(path, unix.MNT_DETACH) == nil {
				}
			})
			return path
		}
		one, two, below := at("one"), at("two"), filepath.Join(root, "below")
		must(t, os.WriteFile(below, nil, 0o600))
		run(t, "mount", "--bind", early, one)
		w, err := h.watch(s)
		must(t, err)
		bound := func(number state.DeviceNumber, want bool) {
			t.Helper()
			if got, err := w.Bound(number); err != nil || got != want {
				t.Fatalf("%s is bound: %t, %v; want %t", number, got, err, want)
			}
		}
		bound(first, true)
		bound(second, false)
		run(t, "mount", "--bind", late, two)
		bound(second, true)
		run(t, "mount", "--bind", late, below)
		run(t, "umount", two)
		bound(second, true)
		run(t, "umount", below)
		bound(second, false)
		run(t, "mount", "--bind", never, one) // covers the other
		bound(first, true)
		bound(third, true)
		told := newsOf(t, w)
		awaitPath(t, told, below)
		run(t, "umount", one)
		bound(third, false)
		bound(first, true)
		run(t, "umount", one)
		bound(first, false)
	})
}

// What covers a bound node does not hide it.
func TestBoundNodeThatIsCovered(t *testing.T) {
	bothSources(t, func(t *testing.T, h *Host, root string, s eventSource) {
		point, image := filepath.Join(root, "point"), filepath.Join(root, "image")
		must(t, os.WriteFile(point, nil, 0o600))
		must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
		d := attach(t, root, image)
		run(t, "mount", "--bind", d.Path, point)
		run(t, "mount", "--bind", "/dev/null", point)
		w := watcher(t, h, s)
		if bound, err := w.Bound(d.Number); err != nil || !bound {
			t.Errorf("%s is bound: %t, %v", d.Path, bound, err)
		}
	})
}

// The event of its own mount may be read after somebody has changed the attributes:
// nothing else would tell of that.
func TestWatchAttributesChangedBeforeTheNewsIsRead(t *testing.T) {
	h, root := newHost(t)
	s := wantFanotify(t, h)
	if s == nil {
		return // mountinfo tells of no mount by itself
	}
	w := watcher(t, h, s)
	own := filepath.Join(root, "own")
	mountTmpfs(t, "own", own, 0)
	dir, err := os.Open(own)
	must(t, err)
	w.mu.Lock()
	must(t, w.made(int(dir.Fd()), own, state.Directory))
	w.mu.Unlock()
	must(t, dir.Close())
	must(t, unix.Mount("", own, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOEXEC, ""))
	var told []string
	w.mu.Lock()
	defer w.mu.Unlock()
	must(t, w.take(func(path string) { told = append(told, path) }))
	if !slices.Contains(told, own) {
		t.Errorf("told of %q", told)
	}
}
