package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// fromEnvironment returns the run that the supervisor has told of.
func fromEnvironment() (*run, error) {
	r := &run{Work: os.Getenv("CSI_NODE_E2E_WORK"), cache: os.Getenv("CSI_NODE_E2E_CACHE")}
	r.Cgroup = filepath.Base(r.Work)
	if err := json.Unmarshal([]byte(os.Getenv("CSI_NODE_E2E_BUILT")), &r.built); err != nil {
		return nil, fmt.Errorf("%s is set by the supervisor only: %w", roleVariable, err)
	}
	return r, nil
}

// beInit plays process 1: it makes the namespaces usable, starts the tests and
// reaps until they end. It returns their exit code.
func beInit() (int, error) {
	if os.Getpid() != 1 {
		return 1, errors.New("init must be process 1 of its namespace")
	}
	r, err := fromEnvironment()
	if err != nil {
		return 1, err
	}
	first := firstNode(r)
	if err := errors.Join(first.mountAll(), first.network()); err != nil {
		return 1, err
	}
	if err := os.Setenv(roleVariable, "test"); err != nil {
		return 1, err
	}
	tests, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return 1, err
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	go func() {
		for s := range interrupts {
			_ = tests.Signal(s) // if they are still there
		}
	}()
	for {
		var status syscall.WaitStatus
		switch pid, err := syscall.Wait4(-1, &status, 0, nil); {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 1, fmt.Errorf("wait: %w", err)
		case pid != tests.Pid: // an orphan
		case status.Exited():
			return status.ExitStatus(), nil
		case status.Signaled():
			return 1, fmt.Errorf("the tests ended by a signal: %s", status.Signal())
		}
	}
}

// mountAll puts private directories over those of the host that a node writes to.
func (n *node) mountAll() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make all mounts private: %w", err)
	}
	if n.name != nodeName { // it knows nothing of what the first has mounted
		for _, dir := range []string{"/run", "/var/lib", "/var/log"} {
			if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
				return fmt.Errorf("drop the copy of %s: %w", dir, err)
			}
		}
	}
	if err := letGo(); err != nil {
		return err
	}
	if err := errors.Join(syscall.Mount("proc", "/proc", "proc", 0, ""), syscall.Mount("run", "/run", "tmpfs", 0, "mode=755")); err != nil {
		return fmt.Errorf("mount /proc and /run: %w", err)
	}
	for _, dir := range []string{"/var/lib", "/var/log"} {
		own := n.file(dir)
		if err := errors.Join(os.MkdirAll(own, 0o755), syscall.Mount(own, dir, "", syscall.MS_BIND, "")); err != nil {
			return fmt.Errorf("bind %s: %w", dir, err)
		}
	}
	for _, dir := range []string{"/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/volumeplugins", "/var/lib/csi-node"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	// `mount` makes the loop device one that detaches itself.
	if out, err := exec.Command("mount", "-o", "loop", n.file("pool.img"), "/var/lib/csi-node").CombinedOutput(); err != nil {
		return fmt.Errorf("mount the pool: %w\n%s", err, out)
	}
	device, err := deviceNumber("/var/lib/csi-node")
	if err != nil {
		return err
	}
	if err := os.WriteFile(n.file(poolDevice), []byte(device), 0o600); err != nil {
		return err
	}
	// As systemd does it on a node: mounts of kubelet and of the plugin reach each other.
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make all mounts shared: %w", err)
	}
	return nil
}

// letGo drops this namespace's copies of mounts of loop devices, which would keep
// them busy for whoever has mounted them outside. They are private, so that nobody notices.
func letGo() error {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, line := range slices.Backward(lines) {
		before, after, _ := strings.Cut(line, " - ")
		at, of := strings.Fields(before), strings.Fields(after)
		if len(at) < 5 || len(of) < 2 || at[4] == "/" || !strings.HasPrefix(of[1], "/dev/loop") {
			continue
		}
		// EINVAL: an outer one was dropped with what is in it, or the path has blanks.
		if err := syscall.Unmount(at[4], syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("drop the copy of %s: %w", at[4], err)
		}
	}
	return nil
}

// network gives the first node's namespace a bridge with its address. No route leads out of it.
func (n *node) network() error {
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"address", "add", serviceIP + "/32", "dev", "lo"},
		{"link", "add", "e2e0", "type", "bridge"},
		{"address", "add", n.ip + "/24", "dev", "e2e0"},
		{"link", "set", "e2e0", "up"},
		{"route", "add", "default", "dev", "e2e0"}, // kubelet wants one
	} {
		if err := runQuietly(context.Background(), "ip", args...); err != nil {
			return err
		}
	}
	return forward()
}

// forward has this network pass on what is for pods.
func forward() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644) }
