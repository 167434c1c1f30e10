package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// Mounts returns the mount points below Dir in the order of their mounting: a
// path twice for two mounts stacked there.
func (p *Plugin) Mounts() []string {
	p.t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(p.Dir))
	require.NoError(p.t, err)
	var paths []string
	for _, info := range infos {
		paths = append(paths, info.Mountpoint)
	}
	return paths
}

// Loop is an attached loop device.
type Loop struct {
	Path     string // of the device node
	Backing  string // file or device
	ReadOnly bool
}

// Loops returns the loop devices that are backed by a file below Dir, and the
// loop devices over those.
func (p *Plugin) Loops() []Loop {
	p.t.Helper()
	all := p.allLoops()
	var ours []Loop
	known := func(path string) bool {
		return slices.ContainsFunc(ours, func(l Loop) bool { return l.Path == path })
	}
	for before := -1; before != len(ours); {
		before = len(ours)
		for _, l := range all {
			if !known(l.Path) && (strings.HasPrefix(l.Backing, p.Dir+"/") || known(l.Backing)) {
				ours = append(ours, l)
			}
		}
	}
	return ours
}

func (p *Plugin) allLoops() []Loop {
	p.t.Helper()
	dirs, err := filepath.Glob("/sys/block/loop*/loop")
	require.NoError(p.t, err)
	var all []Loop
	for _, dir := range dirs {
		backing, err := os.ReadFile(filepath.Join(dir, "backing_file"))
		if err != nil {
			continue // detached meanwhile
		}
		readOnly, err := os.ReadFile(filepath.Join(dir, "..", "ro"))
		if err != nil {
			continue
		}
		all = append(all, Loop{
			Path:     "/dev/" + filepath.Base(filepath.Dir(dir)),
			Backing:  strings.TrimSuffix(strings.TrimSuffix(string(backing), "\n"), " (deleted)"),
			ReadOnly: strings.TrimSpace(string(readOnly)) == "1",
		})
	}
	return all
}

// cleanUp stops the plugin, tells what is left, and removes it.
func (p *Plugin) cleanUp() {
	if p.t.Failed() {
		p.logStatus()
	}
	for _, process := range p.processes {
		p.stop(process)
	}
	if p.conn != nil {
		if err := p.conn.Close(); err != nil {
			p.t.Error(err)
		}
	}
	// What is left after a test has failed anyway is its consequence.
	leak, interrupted := p.t.Errorf, p.Interrupted != nil && p.Interrupted()
	switch {
	case interrupted:
		leak = func(string, ...any) {}
	case p.t.Failed():
		leak = p.t.Logf
	}
	for _, err := range []error{p.killHelpers(p.processes, leak), p.unmountAll(leak), p.detachAll(leak), os.RemoveAll(p.Dir)} {
		if err != nil {
			p.t.Error(err)
		}
	}
	if p.t.Failed() && !interrupted {
		for _, process := range p.processes {
			p.t.Logf("log of process %d:\n%s", process.PID(), process.Log)
		}
	}
}

// logStatus logs what the plugin, if it runs, says of its volumes.
func (p *Plugin) logStatus() {
	if !slices.ContainsFunc(p.processes, func(process *Process) bool {
		select {
		case <-process.Exited():
			return false
		default:
			return true
		}
	}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // the test's own has ended
	defer cancel()
	report, err := driver.ReadReport(ctx, p.StateDir, driver.Options{Backends: []devices.Kind{pool.Kind()}})
	if err != nil {
		p.t.Logf("no status: %v", err)
		return
	}
	text, err := json.MarshalIndent(report.Volumes, "", "  ")
	p.t.Logf("status: %s (%v)", text, err)
}

// Discard forgets the processes that have ended, and their logs, after it has
// seen to them as the end of the test does: for tests that start hundreds. It
// fails the test if one has left a helper program.
func (p *Plugin) Discard() {
	p.t.Helper()
	var ended []*Process
	p.processes = slices.DeleteFunc(p.processes, func(process *Process) bool {
		select {
		case <-process.Exited():
			ended = append(ended, process)
			return true
		default:
			return false
		}
	})
	if err := p.killHelpers(ended, p.t.Errorf); err != nil {
		p.t.Error(err)
	}
	for _, process := range ended {
		p.checkLog(process)
		if p.t.Failed() {
			p.t.Logf("log of process %d:\n%s", process.PID(), process.Log)
		}
	}
}

func (p *Plugin) killHelpers(of []*Process, leak func(string, ...any)) error {
	var errs []error
	for _, process := range of {
		for _, h := range process.Helpers(p.t) {
			if ended, err := h.AwaitEnd(); err != nil || ended {
				errs = append(errs, err)
				continue
			}
			leak("left behind: process %s", h)
			errs = append(errs, unix.PidfdSendSignal(h.fd, unix.SIGKILL, nil, 0))
		}
	}
	return errors.Join(errs...)
}

func (p *Plugin) unmountAll(leak func(string, ...any)) error {
	var errs []error
	for _, path := range slices.Backward(p.Mounts()) {
		leak("left behind: a mount at %s", path)
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Plugin) detachAll(leak func(string, ...any)) error {
	var errs []error
	for _, l := range slices.Backward(p.Loops()) {
		leak("left behind: %s, backed by %s", l.Path, l.Backing)
		_, err := machine.Detach(l.Path, l.Backing)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
