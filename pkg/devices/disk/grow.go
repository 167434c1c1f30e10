package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// rescanTime is how long a disk that was asked for its size anew has to tell it, and
// lookInterval how often sysfs is asked for that meanwhile.
const (
	rescanTime   = 5 * time.Second
	lookInterval = 100 * time.Millisecond
)

// Grow sees that the disk is as large as is asked for: whoever keeps the disk makes it
// larger, and where the kernel has not noticed, the disk is asked anew.
// ResourceExhausted: it is smaller.
func (b *Backend) Grow(ctx context.Context, v devices.Volume, bytes int64) (err error) {
	defer state.Wrap(&err, "volume %s: grow", v.ID)
	if err := ctx.Err(); err != nil {
		return err
	}
	c, s, info, err := b.look(v)
	if err == nil {
		err = same(c, s, info)
	}
	if err == nil && info.Size < bytes {
		info, err = rescan(ctx, info, bytes)
	}
	switch {
	case err != nil:
		return err
	case info.Size < bytes && info.Partition != 0:
		return state.Errorf(state.ResourceExhausted, "the partition %s has %s, less than the %s that are asked for: make the partition larger first", info.Path, state.FormatSize(info.Size), state.FormatSize(bytes))
	case info.Size < bytes:
		return state.Errorf(state.ResourceExhausted, "the disk %s has %s, less than the %s that are asked for: make the disk larger first, where it is kept", info.Path, state.FormatSize(info.Size), state.FormatSize(bytes))
	}
	return nil
}

// rescan asks the disk for its size anew, if it can be asked, and waits for the answer.
func rescan(ctx context.Context, info blockdev.Info, bytes int64) (now blockdev.Info, err error) {
	if strings.HasPrefix(info.Name, "loop") && info.Partition == 0 {
		if err := rescanLoop(info); err != nil {
			return info, err
		}
		return again(info)
	}
	asked := false
	for _, file := range []string{"device/rescan", "device/rescan_controller", "device/nvme*/rescan_controller"} {
		paths, err := filepath.Glob(filepath.Join("/sys/class/block", info.Name, file))
		if err != nil {
			return info, err
		}
		for _, path := range paths {
			if err := os.WriteFile(path, []byte("1\n"), 0); err != nil {
				return info, fmt.Errorf("ask the disk for its size: %w", err)
			}
			asked = true
		}
	}
	if !asked {
		return info, nil
	}
	if poll.Until(ctx, lookInterval, rescanTime, func() bool {
		now, err = again(info)
		return err != nil || now.Size >= bytes
	}) {
		return now, err
	}
	return now, ctx.Err()
}

// again looks at a disk once more.
func again(info blockdev.Info) (blockdev.Info, error) {
	now, err := blockdev.InfoOf(info.Number)
	if err == nil && now.Identity() != info.Identity() {
		err = state.Errorf(state.Unavailable, "%s has become another disk meanwhile: it has %s", info.Path, told(now))
	}
	return now, err
}

// rescanLoop makes a loop device as large as its file.
func rescanLoop(info blockdev.Info) (err error) {
	f, now, err := blockdev.Open(info.Path, 0)
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(f, &err)
	if now.Identity() != info.Identity() {
		return errors.New("it has become another disk meanwhile")
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return &os.PathError{Op: "LOOP_SET_CAPACITY", Path: info.Path, Err: err}
	}
	return nil
}
