package node

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

const demoSteps = 15

// demoPlace makes a directory for the directories of demos. What a failed test
// leaves there is taken down.
func demoPlace(t *testing.T) string {
	t.Helper()
	place := t.TempDir()
	t.Cleanup(func() {
		dirs, err := os.ReadDir(place)
		must(t, err)
		for _, dir := range dirs {
			if result := harness.Run(t, nil, harness.Binary(t), "demo", "keeper", filepath.Join(place, dir.Name())); result.Code != 0 {
				t.Error(result.Stderr)
			}
		}
	})
	return place
}

// leftOf returns what demos have left on the machine: files, mounts, loop devices, processes.
func leftOf(t *testing.T, place string) (left []string) {
	t.Helper()
	dirs, err := os.ReadDir(place)
	must(t, err)
	for _, dir := range dirs {
		left = append(left, "directory "+dir.Name())
	}
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(place))
	must(t, err)
	for _, info := range infos {
		left = append(left, "mount "+info.Mountpoint)
	}
	for glob, what := range map[string]string{"/sys/block/loop*/loop/backing_file": "loop device of ", "/proc/[0-9]*/cmdline": "process "} {
		files, err := filepath.Glob(glob)
		must(t, err)
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), place) {
				left = append(left, what+strings.ReplaceAll(strings.TrimSpace(string(text)), "\x00", " "))
			}
		}
	}
	return left
}

func TestDemo(t *testing.T) {
	t.Parallel()
	machine.Kernel(t)
	place := demoPlace(t)
	result := harness.Run(t, []string{"TMPDIR=" + place}, harness.Binary(t), "demo")
	if result.Code != 0 || result.Stderr != "" || !strings.Contains(result.Stdout, fmt.Sprintf("\n%d. DeleteVolume\n", demoSteps)) || !strings.HasSuffix(result.Stdout, "nothing is left.\n") {
		t.Errorf("the demo ended with %+v", result)
	}
	if left := leftOf(t, place); len(left) > 0 {
		t.Errorf("the demo left %q", left)
	}
}

// A demo leaves nothing however it ends, in whatever step: not even when it is
// killed, or nobody reads on.
func TestDemoThatIsEndedLeavesNothing(t *testing.T) {
	t.Parallel()
	machine.Kernel(t)
	const closed = syscall.Signal(0) // stands for closing the demo's output
	ends := []syscall.Signal{syscall.SIGINT, closed, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}
	for step := 1; step <= demoSteps; step++ {
		for _, end := range []syscall.Signal{ends[step%len(ends)], syscall.SIGKILL} {
			place := demoPlace(t)
			endDemo(t, place, step, end)
			if end == syscall.SIGKILL { // nobody waits for what cleans up then
				harness.Eventually(t, "nothing is left of a killed demo", func() bool { return len(leftOf(t, place)) == 0 })
			} else if left := leftOf(t, place); len(left) > 0 {
				t.Errorf("ended in step %d by %v, the demo left %q", step, end, left)
			}
		}
	}
}

// endDemo starts a demo and ends it at a random moment of a step, or soon after that.
func endDemo(t *testing.T, place string, step int, end syscall.Signal) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), harness.Binary(t), "demo")
	cmd.Env = append(os.Environ(), "TMPDIR="+place, "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	output, err := cmd.StdoutPipe()
	must(t, err)
	var said, complaint strings.Builder
	cmd.Stderr = &complaint
	must(t, cmd.Start())
	lines, reached := bufio.NewScanner(output), false
	for !reached && lines.Scan() {
		said.WriteString(lines.Text() + "\n")
		reached = strings.HasPrefix(lines.Text(), fmt.Sprintf("%2d. ", step))
	}
	time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond)
	switch end {
	case 0:
		must(t, output.Close())
	case syscall.SIGINT: // a terminal's goes to all of the process group
		err = syscall.Kill(-cmd.Process.Pid, end)
	default:
		err = cmd.Process.Signal(end)
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) && !errors.Is(err, syscall.ESRCH) {
		t.Error(err)
	}
	if err := cmd.Wait(); !reached {
		t.Fatalf("the demo ended before step %d: %v: %s\n%s", step, err, complaint.String(), said.String())
	}
}

// What the demo cannot do it says before it begins, in a line that names what
// is missing and how to run it elsewhere.
func TestDemoSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	machine.Kernel(t)
	binary := filepath.Join(t.TempDir(), "csi-node") // that anybody may run
	text, err := os.ReadFile(harness.Binary(t))
	must(t, err)
	machine.WriteProgram(t, binary, string(text))
	must(t, os.Chmod(filepath.Dir(filepath.Dir(binary)), 0o755))
	for what, test := range map[string]struct{ command, word string }{
		"no root":         {"setpriv --reuid 65534 --regid 65534 --clear-groups " + binary + " demo", "root"},
		"no capability":   {"setpriv --bounding-set -sys_admin " + binary + " demo", "CAP_SYS_ADMIN"},
		"a user's root":   {"unshare -Ur " + binary + " demo", "user namespace"},
		"no loop devices": {"unshare -m sh -c 'mount -t tmpfs none /dev && " + binary + " demo'", "loop"},
		"no programs":     {"PATH=/no/such " + binary + " demo", "mkfs.xfs"},
	} {
		place := demoPlace(t)
		result := harness.Run(t, []string{"TMPDIR=" + place}, "sh", "-c", test.command)
		if result.Code != 1 || result.Stdout != "" || strings.Count(result.Stderr, "\n") != 1 || !strings.Contains(result.Stderr, test.word) || !strings.Contains(result.Stderr, "make demo-vm") {
			t.Errorf("%s: %+v", what, result)
		}
		if left := leftOf(t, place); len(left) > 0 {
			t.Errorf("%s: left %q", what, left)
		}
	}
}
