package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// act is one thing that a saboteur does to a volume, and what must come of it:
// it is repaired by itself, or told with those words until it is undone.
type act struct {
	name string
	// do does it, and returns what takes it back; nil if there is nothing to
	// take back. An error is the kernel's refusal, after which all is as before.
	do    func(s *scene) (undo func() error, err error)
	told  []string // words of the status; none: it is repaired, and told nowhere
	block bool     // to a raw block volume
	// idle says that the kernel refuses while pods have files open.
	idle bool
	// silent says that nobody tells the plugin: it comes to light when the volume
	// is next looked at.
	silent bool
	// all says that other volumes' pods are in it, too.
	all bool
	// replaces says that something else takes the place of the first target.
	replaces bool
	// again says that kubelet publishes once more when it is over: a container is
	// started again.
	again bool
}

func acts() []act {
	return []act{
		{name: "stage torn off", do: func(s *scene) (func() error, error) { return nil, tear(s.victim.Staging) }},
		{name: "bind torn off", do: func(s *scene) (func() error, error) { return nil, tear(s.victim.targets[0]) }},
		{name: "read-only bind torn off", do: func(s *scene) (func() error, error) { return nil, tear(s.victim.targets[1]) }},
		{name: "all torn off", do: func(s *scene) (func() error, error) {
			return nil, tear(s.victim.Staging, s.victim.targets[0], s.victim.targets[1])
		}},
		{name: "bind of a device torn off", block: true, do: func(s *scene) (func() error, error) { return nil, tear(s.victim.targets...) }},
		{name: "detach of a mounted device", silent: true, do: (*scene).detach},
		{name: "detach of an open device", block: true, silent: true, do: (*scene).detach},
		{name: "all torn off and detached", idle: true, do: func(s *scene) (func() error, error) {
			if _, err := s.detach(); err != nil {
				return nil, err
			}
			return nil, tear(s.victim.Staging, s.victim.targets[0], s.victim.targets[1])
		}},
		{name: "target removed", do: func(s *scene) (func() error, error) { return nil, removeTarget(s.victim.targets[0]) },
			told: []string{"target", "not there"}, again: true},
		{name: "pod directory removed", do: func(s *scene) (func() error, error) {
			dir := filepath.Dir(s.victim.targets[0])
			if err := removeTarget(s.victim.targets[0]); err != nil {
				return nil, err
			}
			return func() error { return os.MkdirAll(dir, 0o750) }, os.RemoveAll(s.podDirectory()) // nothing is mounted below it
		}, told: []string{"target", "not there"}, again: true},
		{name: "stage made read-only", idle: true, do: func(s *scene) (func() error, error) {
			remount := func(flags uintptr) error { return unix.Mount("", s.victim.Staging, "", unix.MS_REMOUNT|flags, "") }
			return func() error { return remount(unix.MS_NOATIME) }, remount(unix.MS_RDONLY | unix.MS_NOATIME)
		}, told: []string{"read-only"}},
		{name: "stage's mount made read-only", do: func(s *scene) (func() error, error) {
			return nil, unix.MountSetattr(unix.AT_FDCWD, s.victim.Staging, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
		}},
		{name: "bind made read-only", idle: true, do: func(s *scene) (func() error, error) {
			var err error
			harness.Eventually(s.t, "no program that a test starts beside this one has the pod's file any more, as until its exec", func() bool {
				err = unix.MountSetattr(unix.AT_FDCWD, s.victim.targets[0], 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
				return !errors.Is(err, unix.EBUSY)
			})
			return nil, err
		}},
		{name: "read-only bind made writable", do: func(s *scene) (func() error, error) {
			return nil, unix.MountSetattr(unix.AT_FDCWD, s.victim.targets[1], 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
		}},
		{name: "tmpfs over a target", do: func(s *scene) (func() error, error) { return cover(s.victim.targets[0]) }, told: []string{"tmpfs", "mounted at"}},
		{name: "tmpfs over the stage", do: func(s *scene) (func() error, error) { return cover(s.victim.Staging) }, told: []string{"tmpfs", "staging path"}},
		{name: "tmpfs over a pod", do: func(s *scene) (func() error, error) { return cover(s.podDirectory()) }, told: []string{"hidden by", "tmpfs"}},
		{name: "tmpfs over all pods", do: func(s *scene) (func() error, error) { return cover(filepath.Join(s.KubeletDir, "pods")) }, all: true,
			told: []string{"hidden by", "tmpfs"}},
		{name: "tmpfs in the place of a bind", do: func(s *scene) (func() error, error) { return replace(s.victim.targets[0], cover) },
			told: []string{"tmpfs", "mounted at"}, replaces: true},
		{name: "another volume over a target", do: func(s *scene) (func() error, error) { return s.bindOther(s.victim.targets[0]) },
			told: []string{"/dev/loop", "mounted at"}},
		{name: "another volume over the stage", do: func(s *scene) (func() error, error) { return s.bindOther(s.victim.Staging) },
			told: []string{"/dev/loop", "staging path"}},
		{name: "another volume in the place of a bind", do: func(s *scene) (func() error, error) { return replace(s.victim.targets[0], s.bindOther) },
			told: []string{"/dev/loop", "mounted at"}, replaces: true},
		{name: "device node of another over a target", block: true, do: func(s *scene) (func() error, error) {
			return bindOver("/dev/null", s.victim.targets[0])
		}, told: []string{"mounted at"}},
		{name: "bound twice", do: func(s *scene) (func() error, error) {
			return nil, unix.Mount(s.victim.Staging, s.victim.targets[0], "", unix.MS_BIND, "")
		}, idle: true},
		{name: "a second device over its file", silent: true, do: func(s *scene) (func() error, error) {
			device := machine.Losetup(s.t, "--read-only", s.victim.Data())
			return func() error { machine.LosetupDetach(s.t, device); return nil }, nil
		}},
	}
}

// tear unmounts lazily, as nothing that is in use could be otherwise.
func tear(paths ...string) error {
	for _, path := range paths {
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	return nil
}

func cover(path string) (func() error, error) {
	return func() error { return machine.Unmount(path) }, unix.Mount("theirs", path, "tmpfs", 0, "size=1m")
}

func bindOver(source, path string) (func() error, error) {
	return func() error { return machine.Unmount(path) }, unix.Mount(source, path, "", unix.MS_BIND, "")
}

func (s *scene) bindOther(path string) (func() error, error) { return bindOver(s.other.Staging, path) }

// replace unmounts a path and puts something else there, over what may have
// been repaired in between.
func replace(path string, by func(string) (func() error, error)) (func() error, error) {
	if err := tear(path); err != nil {
		return nil, err
	}
	return by(path)
}

// removeTarget unmounts and removes a target, again and again while it comes back.
func removeTarget(path string) error {
	for range 1000 {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		if err := unix.Rmdir(path); err != unix.EBUSY {
			return err
		}
	}
	return fmt.Errorf("%s comes back too fast to be removed", path)
}

// detach tells the kernel to let go of the volume's device when nobody uses it
// any more, as losetup -d does.
func (s *scene) detach() (func() error, error) {
	for _, loop := range s.Loops() {
		if loop.Backing == s.victim.Data() {
			_, err := machine.Detach(loop.Path, loop.Backing)
			return nil, err
		}
	}
	return nil, fmt.Errorf("volume %s has no device", s.victim.ID)
}

// scene is a volume that a saboteur is at, and one that he lets alone.
type scene struct {
	*harness.Plugin
	t             testing.TB
	victim, other *volume
	hasty         bool // kubelet and an operator do not wait for back-offs
	victims       pods
	others        pods
}

// newScene sets both volumes up and lets pods live.
func newScene(t testing.TB, p *harness.Plugin, name, fsType string) *scene {
	t.Helper()
	s := nameScene(t, p, name, fsType)
	s.live()
	return s
}

// nameScene is newScene before anything is asked of the plugin.
func nameScene(t testing.TB, p *harness.Plugin, name, fsType string) *scene {
	t.Helper()
	return &scene{Plugin: p, t: t, victim: newVolume(t, p, name, fsType, "thin", 16*mib, 2), other: newVolume(t, p, name+"-other", "ext4", "thick", 16*mib, 2)}
}

func (s *scene) live() {
	s.t.Helper()
	s.victim.up()
	s.other.up()
	s.victims, s.others = s.victim.run(), s.other.run()
	s.t.Cleanup(func() { // before the plugin's own
		s.victims.end()
		s.others.end()
	})
}

// podDirectory is that of the first pod.
func (s *scene) podDirectory() string {
	return filepath.Join(s.KubeletDir, "pods", s.victim.ID+"-pod-0")
}

// broken says what of the volume's mounts is not as it must be; "" if all is.
func (v *volume) broken() string {
	v.T.Helper()
	mounts := mountsOf(v.T, v.Plugin)
	var all []string
	for _, path := range append(v.targets[:len(v.targets):len(v.targets)], v.Staging) {
		if wrong := v.wrong(mounts, path, path != v.Staging || v.fsType != ""); wrong != "" {
			all = append(all, wrong)
		}
	}
	return strings.Join(all, "; ")
}

// awaitWhole blocks until the volume is as asked and the plugin says so.
func (v *volume) awaitWhole() {
	v.T.Helper()
	var last string
	defer func() {
		if v.T.Failed() {
			v.T.Logf("volume %s at last: %s", v.ID, last)
		}
	}()
	harness.Eventually(v.T, "volume "+v.ID+" is whole again", func() bool {
		unsettled, broken := v.Unsettled(), v.broken()
		last = broken + "\n" + unsettled
		return unsettled == "" && broken == ""
	})
}

// draw returns an act that suits the victim and hurts no other.
func (s *scene) draw(random *rand.Rand) act {
	suit := slices.DeleteFunc(acts(), func(a act) bool { return a.block != (s.victim.fsType == "") || a.all })
	return suit[random.IntN(len(suit))]
}

// undergo lets an act happen to the victim and sees what becomes of it.
func (s *scene) undergo(a act) {
	s.t.Helper()
	defer func() {
		if s.t.Failed() {
			s.t.Logf("volume %s underwent: %s", s.victim.ID, a.name)
		}
	}()
	if a.idle {
		s.victims.end()
	}
	undo, err := a.do(s)
	must(s.t, err)
	if a.silent || s.hasty {
		s.Retry(s.victim.ID)
	}
	if len(a.told) > 0 {
		s.awaitTold(a)
	}
	if undo != nil {
		must(s.t, undo())
	}
	if a.again {
		must(s.t, harness.Insist(s.t.Context(), func(ctx context.Context) error { return s.victim.publish(ctx, s.victim.targets[0]) }))
	}
	if a.silent || s.hasty {
		s.Retry(s.victim.ID)
	}
	s.victim.awaitWhole()
	if a.idle {
		s.victims.start()
	}
	s.mustBeWhole()
}

// mustBeWhole blocks until the victim is as it was asked for, and its pods and the
// other's find their volumes.
func (s *scene) mustBeWhole() {
	s.t.Helper()
	s.victim.awaitWhole()
	s.victims.find(s.t)
	s.others.find(s.t)
	if broken := s.other.broken(); broken != "" {
		s.t.Errorf("the other volume: %s", broken)
	}
}

func (s *scene) awaitTold(a act) {
	s.t.Helper()
	var text string
	defer func() {
		if s.t.Failed() {
			s.t.Logf("volume %s at last: %s", s.victim.ID, text)
		}
	}()
	harness.Eventually(s.t, fmt.Sprintf("the status says %q", a.told), func() bool {
		text = s.victim.Unsettled()
		if text == "" && a.replaces && s.victim.isAt(s.victim.targets[0]) { // a repair that was under way came over it
			must(s.t, tear(s.victim.targets[0]))
		}
		return !slices.ContainsFunc(a.told, func(word string) bool { return !strings.Contains(text, word) }) && strings.Contains(text, s.KubeletDir)
	})
}

// end takes both volumes down.
func (s *scene) end() {
	s.t.Helper()
	s.victims.end()
	s.others.end()
	s.victim.down()
	s.other.down()
}

// Each act alone: what can be repaired is, and what cannot is told, with its
// path and cause, until it is over; no pod loses a byte or sees a wrong one.
func TestEachAct(t *testing.T) {
	t.Parallel()
	for _, a := range acts() {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			fsType := "ext4"
			if a.block {
				fsType = ""
			}
			s := newScene(t, harness.Start(t, harness.Options{}), "victim", fsType)
			s.undergo(a)
			s.end()
		})
	}
}
