package lvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/internal/helper"
	"github.com/csi-node/csi-node/pkg/state"
)

// runner runs lvm with arguments and returns what it prints. It blocks until lvm has
// ended: for commandLimit, and for as long after that as the kernel does not let go of it.
type runner func(ctx context.Context, args ...string) (output []byte, err error)

// commandLimit is how long lvm may run. It waits for its own locks and for udev of other
// programs meanwhile.
const commandLimit = time.Minute

// newRunner returns a runner of a program that may run for so long.
//
// It is not killed with the plugin: in the middle of a change it would leave a device
// suspended. A successor's lvm waits for it by LVM's own locks.
func newRunner(program string, limit time.Duration) runner {
	return func(ctx context.Context, args ...string) ([]byte, error) {
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer stop()
		var out bytes.Buffer
		err := helper.Program{
			Name: program, Title: "lvm " + args[0], Args: args, Stdout: &out, Outlives: true,
			// Without udev, whether the node has one or not: a container's lvm and the node's udev wait for each other in vain.
			Env: []string{"DM_DISABLE_UDEV=1", "LVM_SUPPRESS_FD_WARNINGS=1"},
		}.Check(ctx)
		switch {
		case err != nil && ctx.Err() != nil:
			return nil, fmt.Errorf("%w: it had not ended after %s", err, limit)
		case errors.As(err, new(*exec.Error)):
			return nil, state.Errorf(state.FailedPrecondition, "the program lvm is not there: %w: install lvm2 where the plugin runs", err)
		case err != nil:
			return nil, err
		}
		return out.Bytes(), nil
	}
}

// config returns lvm's settings, as the value of --config. Only the group's own disks are
// looked at: others may hang, or hold a group that is somebody else's. The settings
// do without udev, and match DM_DISABLE_UDEV. Nothing is kept below /etc/lvm. What an
// operator's lvm.conf there says of output changes none that is parsed: with another
// separator, the tags of a volume would be one that nobody knows.
func config(paths []string) string {
	filter := make([]string, 0, len(paths)+1)
	for _, path := range paths {
		filter = append(filter, `"a|^`+strings.ReplaceAll(path, ".", `\\.`)+`$|"`)
	}
	filter = append(filter, `"r|.*|"`)
	return `activation{udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0} ` +
		`devices{obtain_device_list_from_udev=0 external_device_info_source="none" use_devicesfile=0 hints="none" global_filter=[` + strings.Join(filter, ",") + `]} ` +
		`global{use_lvmlockd=0 use_lvmpolld=0 test=0} backup{backup=0 archive=0} ` +
		`report{list_item_separator="," binary_values_as_numeric=0 compact_output=0 compact_output_cols="" prefixes=0} ` +
		`log{verbose=0 prefix="  " report_command_log=0}`
}
