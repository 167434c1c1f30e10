package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// roleVariable tells the test binary what it is.
const roleVariable = "CSI_NODE_E2E_ROLE"

// run is what a run leaves on the machine until it is cleaned up.
type run struct {
	Work   string // directory of the cluster's files
	Cgroup string // name of a directory in each cgroup hierarchy
	Init   int    // pid; 0 before it was started

	cache string
	built map[string]string
}

func (r *run) images() string { return filepath.Join(r.Work, "images") }
func (r *run) older() string  { return filepath.Join(r.Work, "older") } // the tree of olderVersion
func (r *run) logs() string   { return filepath.Join(r.cache, "logs") }
func (r *run) record() string { return filepath.Join(r.cache, "run.json") }

func (r *run) save() error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(r.record(), text, 0o600)
}

// supervise plays the supervisor and returns the exit code of the tests.
func supervise() (code int, err error) {
	if os.Getuid() != 0 {
		return 1, errors.New("the end-to-end test needs root")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	home, err := os.UserCacheDir()
	if err != nil {
		return 1, err
	}
	r := &run{cache: filepath.Join(home, "csi-node-e2e")}
	if err := os.MkdirAll(r.cache, 0o755); err != nil {
		return 1, err
	}
	lock, err := os.OpenFile(filepath.Join(r.cache, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return 1, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return 1, fmt.Errorf("another run is under way (%s): %w", lock.Name(), err)
	}
	if err := cleanUpLast(r.cache); err != nil {
		return 1, err
	}
	if r.built, err = buildAll(ctx, r.cache); err != nil {
		return 1, err
	}
	if r.Work, err = os.MkdirTemp("", "csi-node-e2e-"); err != nil {
		return 1, err
	}
	r.Cgroup = filepath.Base(r.Work)
	if err := r.save(); err != nil {
		return 1, errors.Join(err, os.Remove(r.Work))
	}
	defer func() {
		if cleanErr := r.cleanUp(); cleanErr != nil {
			code, err = 1, errors.Join(err, cleanErr)
		}
	}()
	if err := r.prepare(ctx); err != nil {
		return 1, err
	}
	return r.startInit(ctx)
}

// prepare makes what init finds: binaries, images, the pool's file system, cgroups.
func (r *run) prepare(ctx context.Context) error {
	say("building the plugin, making images")
	if err := r.checkOutOlder(ctx); err != nil {
		return err
	}
	for _, p := range []struct{ name, dir, pkg string }{
		{"csi-node-older", r.older(), "./cmd/csi-node"}, {"pause", ".", "./pause"},
		{"kubectl-csi_node", "../..", "./cmd/kubectl-csi_node"}, {"acme", "../..", "./examples/acme"},
	} {
		r.built[p.name] = filepath.Join(r.Work, p.name)
		if err := goBuild(ctx, p.dir, []string{"build"}, p.pkg, r.built[p.name], "-trimpath", "-ldflags", "-s -w"); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(r.logs()); err != nil {
		return err
	}
	for _, dir := range []string{r.images(), r.logs()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := errors.Join(makeImages(r.images(), r.built, r.older()), buildPlugin(ctx, r.cache, r.images())); err != nil {
		return err
	}
	return firstNode(r).prepare()
}

// olderVersion is what the plugin is upgraded from, and goes back to: a commit of this repository, or a tag.
const olderVersion = "16cbe37de2ef6940f16db95bf01f0828b441dc23" // the first whose chart is upgraded as docs/upgrade.md says

// checkOutOlder writes the tree of olderVersion, in which the manifests ask for the older image. A shallow clone gets it
// from where it was cloned.
func (r *run) checkOutOlder(ctx context.Context) error {
	archive := r.older() + ".tar"
	git := func(args ...string) error {
		args = append([]string{"-C", "../..", "-c", "safe.directory=*"}, args...) // whoever owns the clone
		if out, err := exec.CommandContext(ctx, "git", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if git("cat-file", "-e", olderVersion+"^{commit}") != nil {
		if err := git("fetch", "--depth=1", "origin", olderVersion); err != nil {
			return fmt.Errorf("commit %s, from which the plugin is upgraded, must be in this clone (git fetch --unshallow): %w", olderVersion, err)
		}
	}
	if err := git("archive", "--output="+archive, olderVersion); err != nil {
		return err
	}
	if err := os.Mkdir(r.older(), 0o755); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "tar", "--extract", "--file="+archive, "--directory="+r.older()).CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %w\n%s", err, out)
	}
	overlay := filepath.Join(r.older(), "test/e2e/deploy/kustomization.yaml")
	text, err := os.ReadFile(overlay)
	if err != nil {
		return err
	}
	return os.WriteFile(overlay, []byte(strings.Replace(string(text), "newTag: e2e", "newTag: older", 1)), 0o644)
}

// startInit starts init in namespaces of its own and waits until it ends.
func (r *run) startInit(ctx context.Context) (int, error) {
	// The kernel kills init when the thread that started it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	built, err := json.Marshal(r.built)
	if err != nil {
		return 1, err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(os.Interrupt) }, 10*time.Second // a signal ends the tests, if need be all at once
	cmd.Env = append(os.Environ(), roleVariable+"=init", "CSI_NODE_E2E_WORK="+r.Work, "CSI_NODE_E2E_CACHE="+r.cache, "CSI_NODE_E2E_BUILT="+string(built))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start init: %w", err)
	}
	r.Init = cmd.Process.Pid
	if err := r.save(); err != nil {
		return 1, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	say("to look inside: nsenter -t %d -m -n -p; logs: %s", r.Init, r.logs())
	err = cmd.Wait()
	if state := cmd.ProcessState; state != nil && state.Exited() {
		return state.ExitCode(), nil
	}
	return 1, err
}

// cleanUpLast cleans up after a supervisor that could not.
func cleanUpLast(cache string) error {
	last := &run{cache: cache}
	text, err := os.ReadFile(last.record())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, last); err != nil {
		return fmt.Errorf("%s: %w", last.record(), err)
	}
	say("cleaning up after the last run: %s", last.Work)
	return last.cleanUp()
}

// cleanUp removes what is left when init has ended: by name, nothing else.
func (r *run) cleanUp() error {
	if !strings.HasPrefix(r.Cgroup, "csi-node-e2e-") || filepath.Base(r.Work) != r.Cgroup {
		return fmt.Errorf("%s names no run: %+v", r.record(), r)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, step := range []func() error{r.detachLoops, r.removeCgroups} {
		if err := eventually(ctx, step); err != nil {
			return fmt.Errorf("clean up after %s: %w", r.Work, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	if strings.Contains(string(mounts), r.Work) {
		return fmt.Errorf("something is mounted below %s: it is left alone", r.Work)
	}
	if err := os.RemoveAll(r.Work); err != nil {
		return err
	}
	return os.Remove(r.record())
}

// eventually repeats f until it returns nil: the kernel takes down the namespaces of
// the dead after they have died.
func eventually(ctx context.Context, f func() error) error {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-ticker.C:
		}
	}
}

// loop is a loop device in use.
type loop struct {
	Name       string
	File       string `json:"back-file"`
	Filesystem string `json:"back-maj:min"` // with blanks around
	Inode      uint64 `json:"back-ino"`
}

// of tells whether it is a device on the device v, also if the path by which it was opened is gone with its namespace.
func (l loop) of(v loop) bool {
	var node syscall.Stat_t
	return l.File == v.Name || syscall.Stat(v.Name, &node) == nil && strings.TrimSpace(l.Filesystem) == formatDevice(node.Dev) && l.Inode == node.Ino
}

func loops() ([]loop, error) {
	out, err := exec.Command("losetup", "--list", "--json", "--output", "NAME,BACK-FILE,BACK-MAJ:MIN,BACK-INO").Output()
	if err != nil {
		return nil, fmt.Errorf("losetup: %w", err)
	}
	if len(out) == 0 {
		return nil, nil
	}
	var all struct{ LoopDevices []loop }
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("losetup: %w", err)
	}
	return all.LoopDevices, nil
}

// volumeLoops returns the devices whose files lie in the pools, and the views of these, first.
func (r *run) volumeLoops() ([]loop, error) {
	files, err := filepath.Glob(filepath.Join(r.Work, "*", poolDevice)) // none: init did not get as far
	if err != nil {
		return nil, err
	}
	return loopsOn(files...)
}

// loopsOn does it for pools, of which files have the numbers.
func loopsOn(files ...string) ([]loop, error) {
	var pools []string
	for _, file := range files {
		device, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		pools = append(pools, string(device))
	}
	all, err := loops()
	if err != nil {
		return nil, err
	}
	var volumes, views []loop
	for _, l := range all {
		if slices.Contains(pools, strings.TrimSpace(l.Filesystem)) {
			volumes = append(volumes, l)
		}
	}
	for _, l := range all {
		for _, v := range volumes {
			if l.of(v) {
				views = append(views, l)
			}
		}
	}
	return append(views, volumes...), nil
}

func (r *run) detachLoops() error {
	if err := detach(r.volumeLoops()); err != nil {
		return err
	}
	// A pool's own device detaches itself when the last volume is gone.
	all, err := loops()
	for _, l := range all {
		if strings.HasPrefix(l.File, r.Work+"/") {
			err = errors.Join(err, fmt.Errorf("still attached: %s", l.Name))
		}
	}
	return err
}

// detach detaches devices, and tells which were there.
func detach(all []loop, err error) error {
	for _, l := range all {
		out, detachErr := exec.Command("losetup", "--detach", l.Name).CombinedOutput()
		err = errors.Join(err, fmt.Errorf("still attached: %s on %s %s", l.Name, l.File, out), detachErr) // the next look tells
	}
	return err
}

// hierarchies returns the root directory of each cgroup hierarchy, of either version.
func hierarchies() ([]string, error) {
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err == nil {
		return []string{root}, nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, e := range entries {
		if e.IsDir() { // and no symlink, as cpu often is one to cpu,cpuacct
			all = append(all, filepath.Join(root, e.Name()))
		}
	}
	return all, nil
}

// makeCgroups makes a directory in each hierarchy, for a kubelet to make its own below.
func makeCgroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, hierarchy := range all {
		dir := filepath.Join(hierarchy, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		// In a cpuset of version 1 nothing runs before these are filled in.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			text, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, file), text, 0o644)
			}
			if err != nil {
				return err
			}
		}
		if filepath.Base(hierarchy) == "cpuset" {
			if err := os.WriteFile(filepath.Join(dir, "cgroup.clone_children"), []byte("1"), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeCgroups removes the run's directories, the deepest first.
func (r *run) removeCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, hierarchy := range all {
		for _, n := range []*node{firstNode(r), secondNode(r)} {
			errs = append(errs, removeCgroup(filepath.Join(hierarchy, n.cgroup())))
		}
	}
	return errors.Join(errs...)
}

func removeCgroup(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	for _, dir := range slices.Backward(dirs) {
		if rmErr := syscall.Rmdir(dir); rmErr != nil && !errors.Is(rmErr, syscall.ENOENT) {
			err = errors.Join(err, fmt.Errorf("rmdir %s: %w", dir, rmErr))
		}
	}
	return err
}

// deviceNumber returns the major and minor number of the file system at path, as losetup prints it.
func deviceNumber(path string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return "", err
	}
	return formatDevice(st.Dev), nil
}

func formatDevice(dev uint64) string {
	major, minor := (dev>>8)&0xfff|(dev>>32)&^0xfff, dev&0xff|(dev>>12)&^0xff
	return strconv.FormatUint(major, 10) + ":" + strconv.FormatUint(minor, 10)
}
