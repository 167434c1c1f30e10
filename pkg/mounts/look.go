package mounts

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"k8s.io/mount-utils"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Look returns what is at a path. A path that does not exist, or whose parent
// does not, is NoFile and no error. A symbolic link at the path is OtherFile; one
// on the way to it is InvalidArgument. Unavailable: what is mounted there is
// hidden by a mount on a directory above.
//
// ctx and the limit end the wait, not the look: a file system that does not answer keeps one
// goroutine a path, and later looks at that path wait for it, until it has taken that long.
//
// Where the kernel has statmount(2) the cost does not depend on the number of
// mounts, except for a Corrupt one.
func (h *Host) Look(ctx context.Context, path string, limit time.Duration) (state.Mountpoint, error) {
	if m, ok := h.lookInCache(path); ok {
		return m, nil
	}
	m, err := answered(h.looks.Do(ctx, path, limit, func() (state.Mountpoint, error) {
		m, err := h.look(path)
		if err == nil && len(m.Mounts) == 0 {
			m.Apart, err = h.hidden(path)
		}
		return m, err
	}))
	if err != nil {
		return state.Mountpoint{}, fmt.Errorf("look at %s: %w", path, err)
	}
	h.noteDisk(path, m)
	return m, nil
}

// lookInCache is look where the kernel has all that it takes in its caches and asks no file
// system (RESOLVE_CACHED, Linux 5.12), so that the call cannot hang and needs no goroutine
// of its own. ok is false if the caches do not suffice, or if there is more to look at, such
// as what hides a path. It goes to a mount only if the last look found only file systems of
// disks there: for others, such as NFS, the kernel may ask the server in spite of
// RESOLVE_CACHED. A directory is read only if it is in the mount of the root, without whose
// disk nothing can be mounted anyway.
func (h *Host) lookInCache(path string) (m state.Mountpoint, ok bool) {
	if h.showedDisk(path) {
		if m, ok = h.lookAtMountInCache(path); ok {
			return m, true
		}
	}
	p, err := h.openResolving(path, rawfile.ResolveCached)
	if err != nil {
		return m, false
	}
	defer p.close()
	fd, err := openat2(p.dir, p.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, rawfile.ResolveCached|unix.RESOLVE_NO_XDEV)
	switch {
	case err == unix.ENOENT && h.onRoot(p.dir):
		m.File = state.NoFile
	case err != nil:
		return m, false
	default:
		defer unix.Close(fd)
		if !h.onRoot(fd) {
			return m, false
		}
		m.File = state.Directory
		if m.Empty, err = noEntries(fd); err != nil {
			return m, false
		}
	}
	m.Apart = true
	h.noteDisk(path, m)
	return m, true
}

// lookAtMountInCache is lookInCache for a path that was a mount point when it was last
// looked at.
func (h *Host) lookAtMountInCache(path string) (m state.Mountpoint, ok bool) {
	fd, err := h.openWhole(path, unix.O_PATH|unix.O_NOFOLLOW, rawfile.ResolveCached)
	if err != nil {
		return m, false
	}
	defer unix.Close(fd)
	st, err := statx(fd, "", h.table.mask())
	if err != nil || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return m, false
	}
	if m, err = h.lookAtMount(st); err != nil {
		return m, false
	}
	h.noteDisk(path, m)
	return m, true
}

// onRoot reports whether an open directory is in the mount of the root, so that nothing
// that is mounted on the way hides what is there.
func (h *Host) onRoot(fd int) bool {
	dir, err := statx(fd, "", unix.STATX_MNT_ID_UNIQUE)
	return err == nil && dir.Mask&unix.STATX_MNT_ID_UNIQUE != 0 && dir.Mnt_id == h.rootMount
}

// noteDisk keeps for lookInCache whether all that is mounted at a path are file systems of disks.
func (h *Host) noteDisk(path string, m state.Mountpoint) {
	disk := len(m.Mounts) > 0
	for _, m := range m.Mounts {
		disk = disk && !m.Corrupt && filesystem.IsDiskFilesystem(m.FSType)
	}
	h.setDisk(path, disk)
}

func (h *Host) setDisk(path string, disk bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if disk {
		h.disks[path] = true
	} else {
		delete(h.disks, path)
	}
}

func (h *Host) showedDisk(path string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.disks[path]
}

// lookAttempts bounds how often a look begins anew because the mount table changed
// beneath it.
const lookAttempts = 5

func (h *Host) look(path string) (state.Mountpoint, error) {
	p, err := h.open(path)
	switch {
	case missing(err):
		return state.Mountpoint{File: state.NoFile, InFile: errors.Is(err, unix.ENOTDIR)}, nil
	case err != nil:
		return state.Mountpoint{}, err
	}
	defer p.close()
	for range lookAttempts {
		m, err := h.lookOnce(p)
		if !errors.Is(err, errChanged) {
			return m, err
		}
	}
	return state.Mountpoint{}, errChanged
}

// hidden returns Unavailable if there is a mount at a path at which none can be
// seen. It reads the mount table only if another file system, or a bind, is
// mounted on the way to the path, or on the root or above it since New; otherwise
// the path is apart.
func (h *Host) hidden(path string) (apart bool, err error) {
	rel, err := h.relative(path)
	if err != nil {
		return false, err
	}
	covered := h.rootCovered()
	if !covered && !h.crossed(rel) {
		return true, nil
	}
	real := filepath.Join(h.real, rel)
	infos, err := mounttable.Own(func(i *mountinfo.Info) (bool, bool) {
		return real != i.Mountpoint && (!strings.HasPrefix(real, strings.TrimSuffix(i.Mountpoint, "/")+"/") || !covered && len(i.Mountpoint) <= len(h.real)), false
	})
	if err != nil {
		return false, err
	}
	var above *mountinfo.Info // the last one is the one that is seen
	below := false
	for _, i := range infos {
		if i.Mountpoint == real {
			below = true
		} else {
			above = i
		}
	}
	if !below || above == nil {
		return false, nil
	}
	return false, state.Errorf(state.Unavailable, "what is mounted there is hidden by %s (%s), which is mounted at %s: unmount that", above.Source, above.FSType, above.Mountpoint)
}

// rootCovered reports whether something is mounted on the root, or above it, since New.
func (h *Host) rootCovered() bool {
	st, err := statx(unix.AT_FDCWD, h.real, unix.STATX_MNT_ID)
	return err == nil && st.Mnt_id != h.rootID
}

// crossed reports whether the way from the root to the directory of a path leads over a mount.
func (h *Host) crossed(rel string) bool {
	root, err := openat2(unix.AT_FDCWD, h.real, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return false // the look has told
	}
	defer unix.Close(root)
	fd, err := openat2(root, filepath.Dir(rel), unix.O_PATH, unix.RESOLVE_NO_XDEV)
	if err == nil {
		unix.Close(fd)
	}
	return err == unix.EXDEV // else it ends before it comes to a mount
}

// errChanged: the mount table changed during the look.
var errChanged = errors.New("mounts come and go there too fast to be seen")

func (h *Host) lookOnce(p *place) (state.Mountpoint, error) {
	st, err := statx(p.dir, p.name, h.table.mask())
	switch {
	case missing(err):
		return state.Mountpoint{File: state.NoFile}, nil
	case mount.IsCorruptedMnt(err):
		return lookCorrupt(p, err)
	case err != nil:
		return state.Mountpoint{}, err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		m := state.Mountpoint{File: fileType(st.Mode)}
		m.Empty, err = p.empty(m.File, st.Size)
		return m, err
	}
	return h.lookAtMount(st)
}

// lookAtMount tells of the mount whose root was looked at, and of those that it covers.
func (h *Host) lookAtMount(st unix.Statx_t) (state.Mountpoint, error) {
	m := state.Mountpoint{File: fileType(st.Mode)}
	stack, err := h.table.stack(st.Mnt_id)
	switch {
	case errors.Is(err, unix.ENOENT):
		return state.Mountpoint{}, errChanged
	case err != nil:
		return state.Mountpoint{}, fmt.Errorf("mount id %d: %w", st.Mnt_id, err)
	}
	for _, e := range stack {
		m.Mounts = append(m.Mounts, e.mount())
	}
	if top := &m.Mounts[0]; m.File == state.BlockDevice {
		top.Node, top.Device = true, state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
	}
	return m, nil
}

// lookCorrupt finds the mount whose root cannot be looked at. Of its file no
// more is known than that file systems have directories for roots.
func lookCorrupt(p *place, cause error) (state.Mountpoint, error) {
	stack, err := stackAt(p.real)
	switch {
	case err != nil:
		return state.Mountpoint{}, err
	case len(stack) == 0:
		return state.Mountpoint{}, cause
	}
	m := state.Mountpoint{File: state.Directory}
	for _, e := range stack {
		m.Mounts = append(m.Mounts, e.mount())
	}
	m.Mounts[0].Corrupt = true
	m.Mounts[0].Lost = errors.Is(cause, unix.ESTALE) || errors.Is(cause, unix.ENOTCONN)
	return m, nil
}

// empty reports whether a directory has no entries or a file no bytes, provided
// that nothing is mounted there.
func (p *place) empty(kind state.FileType, size uint64) (bool, error) {
	switch kind {
	case state.RegularFile:
		return size == 0, nil
	case state.Directory:
	default:
		return false, nil
	}
	fd, err := openat2(p.dir, p.name, unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_XDEV)
	switch {
	case missing(err), err == unix.EXDEV, err == unix.ELOOP:
		return false, errChanged
	case err != nil:
		return false, fmt.Errorf("open: %w", err)
	}
	defer unix.Close(fd)
	return noEntries(fd)
}

// noEntries reports whether an open directory has none. errChanged: it was
// removed since it was opened, which getdents(2) tells by ENOENT.
func noEntries(fd int) (bool, error) {
	buf := make([]byte, 1<<10) // holds "." and ".." and at least one more
	for {
		n, err := rawfile.Retry(func() (int, error) { return unix.Getdents(fd, buf) })
		switch {
		case err == unix.ENOENT:
			return false, errChanged
		case err != nil || n <= 0:
			return err == nil, err
		}
		if _, _, names := unix.ParseDirent(buf[:n], 1, nil); len(names) > 0 { // leaves out "." and ".."
			return false, nil
		}
	}
}
