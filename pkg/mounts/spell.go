package mounts

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Spell returns the one spelling, of those that a path below the root may have,
// by which paths are compared: that of the mount table, without the symbolic
// links on the way to the root. Below the root none is followed, so nothing that
// is mounted there is touched. A path that is not below the root, or not
// absolute and clean, comes back as it is.
//
// The root as it was given to New, and as it was resolved then, is known without
// any look. Other ways to the root are looked up now, and may lead over a file
// system that does not answer: Spell waits for it until ctx ends, and no longer
// than two seconds (DeadlineExceeded, Canceled). Unavailable: a directory on the
// way could not be looked at.
func (h *Host) Spell(ctx context.Context, path string) (string, error) {
	if rel, err := h.relative(path); err == nil {
		return filepath.Join(h.real, rel), nil
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsRune(path, 0) || len(path) >= unix.PathMax {
		return path, nil
	}
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("find out whether %s lies below %s: %w", path, h.real, err)
	}
	ctx, cancel := context.WithTimeout(ctx, spellTime)
	defer cancel()
	spelled, err := answered(h.spellings.Do(ctx, path, hang.NoLimit, func() (string, error) { return h.spell(path) }))
	if err != nil {
		return "", fmt.Errorf("find out whether %s lies below %s: %w", path, h.real, err)
	}
	return spelled, nil
}

const spellTime = 2 * time.Second

// spell looks for the root among the directories that a path leads through. The
// same directory in another mount is another place: what is mounted in one of
// them is not seen in the other.
func (h *Host) spell(path string) (string, error) {
	root, err := h.directory(h.real)
	if err != nil {
		return "", state.Errorf(state.Unavailable, "open %s, which was there at start: %v", h.real, err)
	}
	for end := range path {
		if end == 0 || path[end] != '/' {
			continue
		}
		switch dir, err := h.directory(path[:end]); {
		case missing(err), err == unix.ELOOP, err == unix.ENAMETOOLONG:
			return path, nil
		case err != nil:
			return "", state.Errorf(state.Unavailable, "open %s: %w", path[:end], err)
		case dir == root:
			return filepath.Join(h.real, path[end:]), nil
		}
	}
	return path, nil
}

// directory identifies a directory as it is seen in its mount.
type directory struct{ mount, inode uint64 }

// directory follows symbolic links, but not those of /proc, which lead into
// other mount namespaces.
func (h *Host) directory(path string) (directory, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS}
	fd, err := rawfile.Retry(func() (int, error) { return unix.Openat2(unix.AT_FDCWD, path, &how) })
	if err != nil {
		return directory{}, err
	}
	defer unix.Close(fd)
	st, err := statx(fd, "", h.table.mask())
	return directory{st.Mnt_id, st.Ino}, err
}
