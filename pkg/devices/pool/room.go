package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// ownBytes is kept free at least, for the pool's own files and what its file
// system writes about them. The half of it may be taken by the time that
// somebody asks for all that was told to be available, and gets it.
const ownBytes = 1 << 20

// ledger is a count that is carried forward, so that not each of many
// creations looks at every volume.
//
// What volumes write within their claims, and give back, changes free and
// promised alike, and spare not at all. All else that takes room shows in what
// is free, unless a volume gives as much back meanwhile: so what went from
// there is taken for somebody else's, and a ledger does not get old. A refusal
// is never founded on it.
type ledger struct {
	at    time.Time // of the count
	free  int64     // bytes then, less what thick volumes have taken since
	spare int64     // bytes free and not promised then, less what was promised since
}

const ledgerAge = 5 * time.Second

// covers reports whether that many bytes are spare when so many are free, and
// so many are to stay free.
func (l ledger) covers(bytes, free, kept int64) bool {
	return bytes <= l.spare-max(l.free-free, 0)-kept+ownBytes/2
}

// take takes bytes from what is spare. The caller holds p.space.
func (p *Pool) take(ctx context.Context, bytes int64) error {
	fs, err := p.statfs()
	if err != nil {
		return err
	}
	kept := p.kept(int64(fs.Blocks) * fs.Bsize)
	if time.Since(p.ledger.at) > ledgerAge || !p.ledger.covers(bytes, free(fs), kept) {
		c, err := p.capacity(ctx)
		if err != nil {
			return err
		}
		if !p.ledger.covers(bytes, c.Free, kept) {
			return state.Errorf(state.ResourceExhausted, "the pool %s has no room for %d bytes more: %d of %d bytes are available, with %d promised to other volumes and %d kept free (--pool-reserve)", p.dir, bytes, c.Available, c.Total, c.Promised, c.Kept)
		}
	}
	p.ledger.spare -= bytes
	return nil
}

// extend makes the volume's file that many bytes long, if it is shorter, and
// allocates all of it if it is thick. The file itself is the promise from then
// on. On failure the file is as long as before. Nothing is durable yet: other
// volumes wait for room meanwhile, and need not wait for the disk.
func (p *Pool) extend(ctx context.Context, f *os.File, v Volume, bytes int64) error {
	unlock, err := p.space.Lock(ctx, "")
	if err != nil {
		return err
	}
	defer unlock()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("fstat %s: %w", f.Name(), err)
	}
	// The file may be in tmp yet, and what is known under the id be of a volume
	// that was deleted and had the same inode.
	delete(p.parts, v.ID)
	p.parts[filepath.Base(filepath.Dir(f.Name()))] = partOf(st.Ino, v)
	if v.Ephemeral != nil && bytes > st.Size && p.limits.inline() {
		c, err := p.capacity(ctx)
		if err == nil {
			err = p.limits.checkInline(bytes, c.Inline-st.Size, c.Total)
		}
		if err != nil {
			return err
		}
	}
	missing := claim(bytes, v.OvercommitPercent) - claim(st.Size, v.OvercommitPercent)
	if missing > 0 {
		if err := p.take(ctx, missing); err != nil {
			return err
		}
	}
	if err := allocate(ctx, f, max(bytes, st.Size), v.Provisioning); err != nil {
		return errors.Join(noRoom(err), f.Truncate(st.Size))
	}
	if v.Provisioning == Thick {
		p.ledger.free -= max(missing, 0)
	}
	return nil
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
