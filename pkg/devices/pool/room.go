package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// ownBytes is kept free at least, for the pool's own files and the metadata of its file
// system. Half of it may be used up by the time that somebody asks for all the bytes that
// were said to be available; they are granted nevertheless.
const ownBytes = 1 << 20

// ledger is a count that is carried forward, so that not each of many creations has to
// read every volume.
//
// What volumes write within their claims, and what they give back, changes the free and
// the promised bytes alike, and so leaves spare as it is. Anything else that takes room
// lowers the free bytes, unless a volume gives as much back meanwhile. So whatever has
// gone from the free bytes since the count is treated as taken by somebody else, and a
// ledger is only used for ledgerAge. A refusal is always based on a new count.
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
			klog.FromContext(ctx).Info("The pool has no room", "pool", p.dir, "asked", bytes, "available", c.Available, "size", c.Total, "free", c.Free, "promised", c.Promised, "kept", c.Kept)
			return state.Errorf(state.ResourceExhausted, "the pool %s (%s) has no room for %s more, beside what is taken, promised to other volumes and kept free (--pool-reserve): delete volumes or data, enlarge the pool, or ask for less", p.dir, state.FormatSize(c.Total), state.FormatSize(bytes))
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
	// The file may still be in tmp, and the facts under the id those of a deleted volume
	// that had the same inode.
	delete(p.counted, v.ID)
	p.counted[filepath.Base(filepath.Dir(f.Name()))] = countedFactsOf(st.Ino, v)
	if v.Ephemeral != nil && bytes > st.Size && p.limits.inline() {
		c, err := p.capacity(ctx)
		if err == nil {
			err = p.limits.checkInline(bytes, c.Inline-st.Size, c.Total)
		}
		if err != nil {
			return err
		}
	}
	missing := devices.Claim(bytes, v.OvercommitPercent) - devices.Claim(st.Size, v.OvercommitPercent)
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
	return fallocate(ctx, f, 0, bytes)
}

// fallocate allocates the first bytes of a file. A signal may interrupt it, such as one of the
// Go runtime's: then it goes on, until ctx ends.
func fallocate(ctx context.Context, f *os.File, mode uint32, bytes int64) error {
	for {
		switch err := unix.Fallocate(int(f.Fd()), mode, 0, bytes); {
		case !errors.Is(err, unix.EINTR):
			return wrap(err, "fallocate %s to %d bytes", f.Name(), bytes)
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}
