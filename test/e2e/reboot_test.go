package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TestReboot: the node loses power and starts again. The pods that are still wanted see their data, and those that were
// deleted meanwhile leave nothing, an inline ephemeral volume least of all.
func TestReboot(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("stays", "data", idle), pod("goes", "data", idle), scratch("scratch", "ext4", "16Mi"),
		claim("raw", "e2e-ext4", "32Mi", "volumeMode: Block"),
		podOf("raw", idle, "volumeDevices: [{name: data, devicePath: /dev/data}]", "volumes: [{name: data, persistentVolumeClaim: {claimName: raw}}]"))
	s.ready("stays", "goes", "scratch", "raw")
	s.sh("stays", "echo kept | dd of=/data/file conv=fsync 2>/dev/null")
	s.sh("raw", "echo kept raw | dd of=/dev/data conv=fsync,notrunc 2>/dev/null")

	reboot(t, func() { s.kubectl("delete", "pod", "goes", "scratch", "--force", "--grace-period=0") })
	for _, pod := range []struct{ name, script, want string }{
		{"stays", "cat /data/file", "kept"}, {"raw", "head -c 8 /dev/data", "kept raw"},
	} {
		await(t, "pod "+pod.name, func() error {
			if got := s.kubectl("get", "pod", pod.name, "--output=jsonpath={.status.containerStatuses[0].restartCount}"); got != "1" {
				return fmt.Errorf("it was restarted %s times", got)
			}
			out, err := s.try("exec", pod.name, "--", "sh", "-c", pod.script)
			if err == nil && strings.TrimSpace(out) != pod.want {
				err = fmt.Errorf("it sees %q", out)
			}
			return err
		})
	}
	await(t, "volumes of the pods that went", func() error {
		left, err := filepath.Glob("/var/lib/csi-node/pool/volumes/*")
		if err == nil && len(left) != 2 {
			err = fmt.Errorf("in the pool are %q", left)
		}
		return err
	})
	s.remove("pod/stays", "pod/raw", "persistentvolumeclaim/data", "persistentvolumeclaim/raw")
	assertNothingLeft(t)
}

// reboot takes the power from the node, but not from the control plane: all else ends at once, and mounts, loop devices
// and what is in memory only are gone. It runs off and starts the node again.
func reboot(t *testing.T, off func()) {
	t.Helper()
	restartKubelet(t, syscall.SIGKILL, func() {
		if err := the.containerd.stop(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		await(t, "end of all processes", endProcesses)
		await(t, "end of kubelet's loop devices", func() error { return detach(kubeletLoops()) }) // while mounts tell whose they are
		await(t, "end of all mounts", endMounts)
		if err := clearRun(); err != nil {
			t.Fatal(err)
		}
		await(t, "end of the volumes' loop devices", func() error { return detach(the.volumeLoops()) })
		off()
		if err := the.startContainerd(); err != nil {
			t.Fatal(err)
		}
	})
}

// endProcesses kills what runs in this pid namespace, but for the test and the control plane, and tells who is left.
func endProcesses() error {
	self, err1 := os.Executable()
	executables, err2 := filepath.Glob("/proc/[0-9]*/exe")
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	stays := []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", filepath.Base(self)}
	var left []error
	for _, exe := range executables {
		path, err := os.Readlink(exe)
		if err != nil || slices.Contains(stays, filepath.Base(path)) { // it has ended, or it stays
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(exe)))
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
		if !errors.Is(err, syscall.ESRCH) {
			left = append(left, errors.Join(fmt.Errorf("process %d, %s", pid, path), err))
		}
	}
	return errors.Join(left...)
}

// endMounts unmounts all that kubelet, the plugin and containerd have mounted, the last first, and tells what was there.
func endMounts() error {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var left []error
	for _, line := range slices.Backward(strings.Split(strings.TrimSpace(string(text)), "\n")) {
		path := strings.Fields(line)[4]
		if !strings.HasPrefix(path, "/var/lib/kubelet/") && !strings.HasPrefix(path, "/run/") {
			continue
		}
		left = append(left, errors.Join(fmt.Errorf("mount %s", path), syscall.Unmount(path, syscall.MNT_DETACH))) // the next look tells
	}
	return errors.Join(left...)
}

// clearRun empties the tmpfs that a reboot makes anew.
func clearRun() error {
	all, err := filepath.Glob("/run/*")
	for _, path := range all {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// kubeletLoops returns the devices with which kubelet keeps raw ones busy.
func kubeletLoops() (ours []loop, err error) {
	all, err := loops()
	for _, l := range all {
		if _, err := os.Lstat(l.File); err == nil && strings.HasPrefix(l.File, "/var/lib/kubelet/") {
			ours = append(ours, l)
		}
	}
	return ours, err
}
