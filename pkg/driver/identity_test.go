package driver

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func TestProbe(t *testing.T) {
	for _, missing := range []error{nil, errors.New("mkfs.xfs is needed")} {
		i := &identity{lacks: func() error { return missing }}
		resp, err := i.Probe(t.Context(), &csi.ProbeRequest{})
		switch {
		case missing == nil && (err != nil || !resp.GetReady().GetValue()):
			t.Errorf("%v, %v", resp, err)
		case missing != nil && (state.ClassOf(err) != state.FailedPrecondition || !strings.Contains(err.Error(), missing.Error())):
			t.Errorf("without a program: %v, %v", resp, err)
		}
	}
}

// What Probe asks for are loop devices, too: without the node's /dev there are none.
func TestLacksLoopDevices(t *testing.T) {
	p := openPlugin(t)
	require.NoError(t, p.lacks())
	lacks := make(chan error)
	go func() {
		runtime.LockOSThread() // the mount namespace is the thread's, and ends with it
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
		}
		if err == nil {
			err = unix.Mount("tmpfs", "/dev", "tmpfs", 0, "")
		}
		if err == nil {
			err = p.lacks()
		}
		lacks <- err
	}()
	if err := <-lacks; err == nil || !strings.Contains(err.Error(), "this node offers no loop devices") {
		t.Errorf("without loop devices: %v", err)
	}
}
