package lvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// runner runs lvm with arguments and returns what it prints. It blocks until lvm has
// ended: for commandLimit, and for as long after that as the kernel does not let go of it.
type runner func(ctx context.Context, args ...string) (output []byte, err error)

const (
	// commandLimit is how long lvm may run. It waits for its own locks and for udev
	// of other programs meanwhile.
	commandLimit = time.Minute
	pipeDelay    = 10 * time.Second // for output after lvm has ended
	messageBytes = 2 << 10          // of what lvm complains of that are told
)

// newRunner returns a runner of a program that may run for so long.
//
// What runs is a process group of its own, so that what lvm starts (thin_check) is killed
// with it. It is not killed with the plugin: in the middle of a change it would leave a
// device suspended. A successor's lvm waits for it by LVM's own locks.
func newRunner(program string, limit time.Duration) runner {
	return func(ctx context.Context, args ...string) ([]byte, error) { return run(ctx, program, limit, args...) }
}

func run(ctx context.Context, program string, limit time.Duration, args ...string) ([]byte, error) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer stop()
	var out, complaints bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	// Without udev, whether the node has one or not: a container's lvm and the node's udev wait for each other in vain.
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DM_DISABLE_UDEV=1", "LVM_SUPPRESS_FD_WARNINGS=1")
	cmd.Stdout, cmd.Stderr = &out, &complaints
	cmd.WaitDelay = pipeDelay
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, state.Errorf(state.DeadlineExceeded, "lvm %s was killed, as it had not ended after %s: %s", args[0], limit, told(complaints.Bytes()))
	case errors.Is(err, exec.ErrNotFound):
		return nil, state.Errorf(state.FailedPrecondition, "the program lvm is not there: %w: install lvm2 where the plugin runs", err)
	case err != nil:
		return nil, fmt.Errorf("lvm %s: %w: %s", args[0], err, told(complaints.Bytes()))
	}
	return out.Bytes(), nil
}

// told returns the end of what lvm complains of, as one line.
func told(complaints []byte) string {
	text := strings.ToValidUTF8(string(complaints[max(len(complaints)-messageBytes, 0):]), "?")
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "; ")
}

// config returns lvm's settings, as the value of --config. Only the group's own disks are
// looked at: others may hang, or hold a group that is somebody else's. The settings
// do without udev, and match DM_DISABLE_UDEV. Nothing is kept below /etc/lvm.
func config(paths []string) string {
	filter := make([]string, 0, len(paths)+1)
	for _, path := range paths {
		filter = append(filter, `"a|^`+strings.ReplaceAll(path, ".", `\\.`)+`$|"`)
	}
	filter = append(filter, `"r|.*|"`)
	return `activation{udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0} ` +
		`devices{obtain_device_list_from_udev=0 external_device_info_source="none" use_devicesfile=0 hints="none" global_filter=[` + strings.Join(filter, ",") + `]} ` +
		`global{use_lvmlockd=0 use_lvmpolld=0} backup{backup=0 archive=0}`
}
