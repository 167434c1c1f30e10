package pool

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Capacity is how much room a pool has, in bytes.
type Capacity struct {
	Total     int64 // of the pool's file system
	Available int64 // for new volumes and growth: what is free and not promised
	Promised  int64 // to volumes that have not taken it yet
}

// Capacity counts the pool's room. It looks at every volume's file, and waits
// while another call takes room.
func (p *Pool) Capacity(ctx context.Context) (Capacity, error) {
	unlock, err := p.space.Lock(ctx, "")
	if err != nil {
		return Capacity{}, fmt.Errorf("pool %s: %w", p.dir, err)
	}
	defer unlock()
	return p.capacity(ctx)
}

// capacity counts the room; the caller holds p.space. Promises are counted
// before what is free: a volume that takes what it was promised meanwhile is
// counted twice rather than not at all.
func (p *Pool) capacity(ctx context.Context) (Capacity, error) {
	if err := p.Check(ctx); err != nil {
		return Capacity{}, err
	}
	promised, err := p.promised()
	if err != nil {
		return Capacity{}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(p.dir, &fs); err != nil {
		return Capacity{}, fmt.Errorf("pool %s: statfs: %w", p.dir, err)
	}
	return Capacity{
		Total:     int64(fs.Blocks) * fs.Bsize,
		Available: max(int64(fs.Bavail)*fs.Bsize-promised, 0),
		Promised:  promised,
	}, nil
}

// promised adds up what the volumes' files lack to be fully allocated, also
// those of thick volumes: a TRIM of the file system in them gives blocks back.
// Volumes being created count too. They come first, as they move from tmp to
// volumes meanwhile.
func (p *Pool) promised() (int64, error) {
	lacks := map[uint64]int64{} // by inode
	for _, name := range []string{tmpDir, volumesDir} {
		entries, err := os.ReadDir(p.path(name))
		if err != nil {
			return 0, fmt.Errorf("pool: %w", err)
		}
		for _, entry := range entries {
			var st unix.Stat_t
			path := p.path(name, entry.Name(), dataFile)
			switch err := unix.Stat(path, &st); {
			case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			case err != nil:
				return 0, fmt.Errorf("pool: stat %s: %w", path, err)
			default:
				lacks[st.Ino] = max(st.Size-st.Blocks*512, 0) // st_blocks counts 512 bytes each, see stat(2)
			}
		}
	}
	total := int64(0)
	for _, lack := range lacks {
		total += lack
	}
	return total, nil
}

// extend makes a volume's file that many bytes long, if it is shorter, and
// allocates all of it if it is thick. The file itself is the promise from then
// on. On failure the file is as long as before.
func (p *Pool) extend(ctx context.Context, f *os.File, bytes int64, how Provisioning) error {
	unlock, err := p.space.Lock(ctx, "")
	if err != nil {
		return err
	}
	defer unlock()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if missing := bytes - info.Size(); missing > 0 {
		c, err := p.capacity(ctx)
		if err != nil {
			return err
		}
		if missing > c.Available {
			return state.Errorf(state.ResourceExhausted, "the pool %s has no room for %d bytes more: %d of %d bytes are available, with %d promised to other volumes", p.dir, missing, c.Available, c.Total, c.Promised)
		}
	}
	if err := allocate(ctx, f, max(bytes, info.Size()), how); err != nil {
		return errors.Join(noRoom(err), f.Truncate(info.Size()))
	}
	return wrap(f.Sync(), "fsync %s", f.Name())
}

func allocate(ctx context.Context, f *os.File, bytes int64, how Provisioning) error {
	if how == Thin {
		return f.Truncate(bytes)
	}
	for {
		switch err := unix.Fallocate(int(f.Fd()), 0, 0, bytes); {
		case !errors.Is(err, unix.EINTR):
			return wrap(err, "fallocate %s to %d bytes", f.Name(), bytes)
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}
