package mounts

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/process"
)

// Unmount takes away exactly one mount, the top one at path. It is neither lazy
// nor forced: when it returns nil the mount has gone, and all is written if no
// other mount, in whatever namespace, shows the file system. It blocks until then.
//
// A path that is no mount point is an error. A busy mount is an error without a
// class that names what keeps it: mounts below it and processes, see Holders. What
// keeps it for a moment only is waited for.
func (h *Host) Unmount(ctx context.Context, path string) error {
	return h.unmountAfter(ctx, path, func(*place) {})
}

// UnmountDevice is Unmount for what MountDevice has mounted. A file system that somebody has
// frozen, such as for a backup, is thawed first: once no mount shows it nobody can do that,
// and it would keep its device, and each write to it would hang when it is mounted again.
func (h *Host) UnmountDevice(ctx context.Context, path string) error {
	return h.unmountAfter(ctx, path, func(p *place) {
		if h.showedDisk(path) {
			thaw(p)
		}
	})
}

func (h *Host) unmountAfter(ctx context.Context, path string, prepare func(*place)) error {
	p, err := h.begin(ctx, path)
	if err == nil {
		defer p.close()
		prepare(p)
		err = unmountSoon(ctx, p)
	}
	if err == unix.EBUSY {
		err = inUse(h.users(ctx, p))
	}
	switch {
	case err == nil:
		h.setDisk(path, false)
		return nil
	case err == unix.EINVAL, missing(err):
		err = fmt.Errorf("it is not a mount point (%w)", err)
	}
	return fmt.Errorf("unmount %s: %w", path, err)
}

// fiThaw is FITHAW of linux/fs.h.
const fiThaw = 0xc0045878

// thaw ends a freeze of the file system that is mounted at a place. Whatever hinders it is left
// to the unmount, and that nothing is frozen is an error of the kernel, too.
func thaw(p *place) {
	fd, err := openat2(p.dir, p.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return
	}
	_ = unix.IoctlSetInt(fd, fiThaw, 0)
	unix.Close(fd)
}

func unmount(p *place) error { return unix.Unmount(p.proc(), unix.UMOUNT_NOFOLLOW) }

const (
	// busyLimit is how long a busy mount is tried again. Somebody's stat of it keeps it
	// busy for microseconds; a process that forked with a file open on it does so until the
	// exec of the child. No event tells when that ends.
	busyLimit    = 500 * time.Millisecond
	busyInterval = 5 * time.Millisecond
)

// unmountSoon unmounts what is busy for a moment only; else it returns EBUSY.
func unmountSoon(ctx context.Context, p *place) (err error) {
	poll.Until(ctx, busyInterval, busyLimit, func() bool {
		err = unmount(p)
		return err != unix.EBUSY
	})
	return err
}

// users names what keeps the mount at a place busy.
func (h *Host) users(ctx context.Context, p *place) []string {
	users := mountsBelow(p.real)
	if m, err := h.Look(ctx, p.path, namesTime); err == nil && len(m.Mounts) > 0 {
		device := m.Mounts[0].Device
		key, names := fmt.Sprintf("users of %s", device), process.Users(device, mountsOn(device))
		if m.Mounts[0].Node { // of which an open node keeps the mount through which it was opened
			key, names = key+" at "+p.real, process.NodeUsers(device, p.real, mountsOn(device))
		}
		found, _ := process.Collect(ctx, namesTime, key, names)
		users = append(users, found...)
	}
	return users
}

func inUse(users []string) error {
	if len(users) == 0 {
		return fmt.Errorf("it is in use, but by no process or mount that can be seen from here: look for one on the node (%w)", unix.EBUSY)
	}
	return fmt.Errorf("it is in use by %s: end that first (%w)", strings.Join(users, ", "), unix.EBUSY)
}

// mountsBelow names the first few mounts below a path.
func mountsBelow(path string) []string {
	infos, err := mounttable.Own(func(i *mountinfo.Info) (bool, bool) {
		return !strings.HasPrefix(i.Mountpoint, path+"/"), false
	})
	if err != nil {
		return nil // the error it would explain says enough
	}
	var found []string
	for _, i := range infos[:min(len(infos), process.NameLimit)] {
		found = append(found, "the mount at "+i.Mountpoint)
	}
	return found
}
