package filesystem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// lookLimit is how much of what may be data Probe reads: a look must end soon.
	lookLimit = 64 << 20
	// ProveLimit is how much of what may be data, in bytes, is read before a
	// device is formatted: half a minute to eleven minutes at 2 GB/s to 100 MB/s, of a
	// disk twice that.
	// The proof goes on behind the retries of a CO. What holds more is refused.
	ProveLimit = 64 << 30

	chunkBytes  = 4 << 20
	someExtents = 1024    // that are known at a time
	pageBytes   = 4 << 10 // what direct reads are aligned to
)

// proof is the outcome of proveBlank.
type proof struct {
	found  string       // what is there that is not blank, for humans
	unread int64        // bytes that may be data and were not read, being more than the limit
	origin state.Origin // of what was found, if a format was begun
	failed bool         // what was found is only that the device cannot be read
}

// blank reports whether every byte is known to be zero.
func (p proof) blank() bool { return p.found == "" && p.unread == 0 }

// proveBlank reads a device until it finds something, or can say that the
// device is blank; with more than limit bytes to read it reads none of them, and
// believes the caller who knows that nobody has had the device yet (Device.Fresh).
// The caller has looked at the head for known signatures. It blocks as long as
// the reading takes, asks ctx between chunks and tells it how far it is
// (state.Progress); the error is only ever that of ctx.
func proveBlank(ctx context.Context, d *device, limit int64) (proof, error) {
	switch {
	case d.bytes <= 0:
		return proof{found: "a device without any bytes: nothing is attached to it"}, nil
	case d.bytes < d.facts.Capacity:
		return proof{found: fmt.Sprintf("a device of %d bytes that is %d bytes shorter than the volume", d.bytes, d.facts.Capacity-d.bytes)}, nil
	case d.missing() > 0:
		return proof{found: fmt.Sprintf("a device of %d bytes whose file %s was cut short by %d bytes", d.bytes, d.facts.Backing, d.missing())}, nil
	}
	if err := d.writeBack(); err != nil {
		return proof{found: fmt.Sprintf("a device that cannot be flushed: %v", err), failed: true}, nil
	}
	total := int64(0)
	if err := d.eachData(ctx, func(e extent) bool { total += e.end - e.start; return true }); err != nil {
		return proof{}, err
	}
	if total == 0 { // the file behind it is one hole
		return proof{}, nil
	}
	far, err := farSignatures(d)
	switch {
	case err != nil:
		return proof{found: describeReadError(err), failed: true}, nil
	case len(far) > 0:
		return proof{found: joinFindings(far), origin: state.OriginOther}, nil
	case total > lookLimit && d.facts.Fresh:
		return proof{}, nil
	case total > limit:
		return proof{unread: total}, nil
	}
	return d.firstData(ctx, total)
}

// isHole reports whether a device that nobody is known to have had (Device.Fresh) shows
// a file that is one hole still: then every byte of it is zero, its head too, and
// nothing of it need be read. False says nothing. The error is only ever that of ctx.
func (d *device) isHole(ctx context.Context) (bool, error) {
	if !d.facts.Fresh || !d.block || d.bytes <= 0 || d.bytes < d.facts.Capacity || d.writeBack() != nil {
		return false, nil
	}
	hole := true
	err := d.eachData(ctx, func(extent) bool { hole = false; return false })
	return hole, err
}

// flush makes durable what was written to the device, and drops the pages, so that the
// next read asks the device.
func (d *device) flush() error {
	if err := d.Sync(); err != nil {
		return err
	}
	return d.dropPages()
}

// writeBack writes what the page cache holds of the device, so that the file
// behind it shows where data is, and drops the pages as flush does. Nothing of it
// need be durable: the disk behind the file is not flushed.
func (d *device) writeBack() error {
	if err := rawfile.WriteBack(d.File); err != nil {
		return fmt.Errorf("sync_file_range: %w", err)
	}
	return d.dropPages()
}

// dropPages drops the pages that the cache has of a block device.
func (d *device) dropPages() error {
	if !d.block {
		return nil
	}
	if err := unix.IoctlSetInt(int(d.Fd()), unix.BLKFLSBUF, 0); err != nil {
		return fmt.Errorf("BLKFLSBUF: %w", err)
	}
	return nil
}

// extent is a range of bytes.
type extent struct{ start, end int64 }

// eachData yields, in order, the extents of the device that may hold anything
// but zeros, until yield returns false. It is the whole device unless the file
// behind a loop device, or the file that stands for a device, tells of holes
// and of extents never written (SEEK_DATA in lseek(2)). Where a file stops to
// tell, all the rest is data. The error is only ever that of ctx.
func (d *device) eachData(ctx context.Context, yield func(extent) bool) error {
	f, size := d.File, d.bytes
	if d.block {
		if f, size = d.openBacking(); f == nil {
			yield(extent{0, d.bytes})
			return ctx.Err()
		}
		defer f.Close()
	}
	if size < d.bytes { // cut short just now
		yield(extent{0, d.bytes})
		return ctx.Err()
	}
	// Pages in the cache of what was never written, which a look has read ahead,
	// would count as data, and so would those that yield reads ahead.
	unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	extents := make([]extent, 0, someExtents)
	for offset := int64(0); offset < d.bytes; {
		for extents = extents[:0]; offset < d.bytes && len(extents) < someExtents; {
			if err := ctx.Err(); err != nil {
				return err
			}
			e, err := nextData(f, offset)
			switch {
			case errors.Is(err, unix.ENXIO): // nothing but a hole up to the end
				e = extent{d.bytes, d.bytes}
			case err != nil:
				e = extent{offset, d.bytes}
			}
			if e.end = min(e.end, d.bytes); e.start < e.end {
				extents = append(extents, e)
			}
			offset = max(e.start, e.end)
		}
		for _, e := range extents {
			if !yield(e) {
				return nil
			}
		}
	}
	return nil
}

// nextData returns the first extent of a file that has data, from offset on.
func nextData(f *os.File, offset int64) (e extent, err error) {
	if e.start, err = f.Seek(offset, unix.SEEK_DATA); err != nil {
		return extent{}, err
	}
	if e.end, err = f.Seek(e.start, unix.SEEK_HOLE); err == nil && e.end <= e.start {
		err = fmt.Errorf("%s ends its data at byte %d, before it begins at byte %d", f.Name(), e.end, e.start)
	}
	return e, err
}

// missing returns by how many bytes the device is larger than its file. Some kernels
// read these bytes as zeros (Linux 6.1), others fail to (6.18).
func (d *device) missing() int64 {
	backing, size := d.openBacking()
	if backing == nil {
		return 0
	}
	backing.Close()
	return max(d.bytes-size, 0)
}

// openBacking opens the file behind a loop device, if it is indeed the one that
// the caller named and the device shows it from its first byte, and returns its
// size. Otherwise the device itself is read.
func (d *device) openBacking() (f *os.File, bytes int64) {
	if d.facts.Backing == "" || !d.block {
		return nil, 0
	}
	loop, err := unix.IoctlLoopGetStatus64(int(d.Fd()))
	if err != nil || loop.Offset != 0 || loop.Encrypt_type != 0 {
		return nil, 0
	}
	f, err = rawfile.Open(d.facts.Backing, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Ino == loop.Inode && devnode.NumberOf(st.Dev) == devnode.NumberOf(loop.Device) {
		return f, st.Size
	}
	f.Close()
	return nil, 0
}

// firstData says where the first byte is that is not zero, or why the device
// cannot be read. total is how much there is to read.
func (d *device) firstData(ctx context.Context, total int64) (proof, error) {
	r, err := newReader(d)
	if err != nil {
		return proof{found: describeReadError(err), failed: true}, nil
	}
	defer r.close()
	read, found, origin, failed := int64(0), "", state.OriginUnknown, false
	err = d.eachData(ctx, func(e extent) bool {
		for offset := e.start - e.start%pageBytes; offset < e.end && found == "" && ctx.Err() == nil; {
			state.Progress(ctx, "proving that it is blank: %s of %s read", state.Tenths(read, total), state.FormatSize(total))
			chunk, err := r.read(offset, min(chunkBytes, e.end-offset))
			end := offset + int64(len(chunk))
			switch {
			case errors.Is(err, io.EOF):
				found = fmt.Sprintf("a device that ends before byte %d, though it should have %d", min(offset+chunkBytes, e.end), d.bytes)
			case err != nil:
				found, failed = fmt.Sprintf("%s, between bytes %d and %d", describeReadError(err), offset, min(offset+chunkBytes, e.end)), true
			case !isZero(chunk):
				i := bytes.IndexFunc(chunk, func(r rune) bool { return r != 0 })
				found, origin = fmt.Sprintf("data at byte %d", offset+int64(i)), state.OriginUnnamed
			}
			read, offset = read+end-max(offset, e.start), end
		}
		return found == "" && ctx.Err() == nil
	})
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return proof{}, err
	}
	return proof{found: found, origin: origin, failed: failed}, nil
}

func gib(bytes int64) float64 { return float64(bytes) / (1 << 30) }

// reader reads a device in one buffer, past the page cache where it can.
type reader struct {
	d      *device
	direct *os.File // nil: through the page cache
	buffer []byte   // aligned
}

func newReader(d *device) (*reader, error) {
	buffer, err := unix.Mmap(-1, 0, chunkBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	r := &reader{d: d, buffer: buffer}
	// Reopen the device that is open, even if its path leads elsewhere now.
	if f, err := rawfile.Open(fmt.Sprintf("/proc/self/fd/%d", d.Fd()), os.O_RDONLY|unix.O_DIRECT, 0); err == nil {
		r.direct = f
	}
	return r, nil
}

func (r *reader) close() {
	if r.direct != nil {
		r.direct.Close()
	}
	unix.Munmap(r.buffer)
}

// read reads n bytes, at most chunkBytes, from an offset that is a multiple of
// pageBytes. io.EOF: there are fewer.
func (r *reader) read(offset, n int64) ([]byte, error) {
	if r.direct != nil {
		whole := min((n+pageBytes-1)/pageBytes*pageBytes, chunkBytes)
		got, err := r.direct.ReadAt(r.buffer[:whole], offset)
		switch {
		case int64(got) >= n:
			return r.buffer[:n], nil
		case !errors.Is(err, unix.EINVAL): // direct reads want another alignment
			return nil, err
		}
		r.direct.Close()
		r.direct = nil
	}
	_, err := r.d.ReadAt(r.buffer[:n], offset)
	unix.Fadvise(int(r.d.Fd()), offset, n, unix.FADV_DONTNEED) // advice: what it does not do costs memory, and no more
	if err != nil {
		return nil, err
	}
	return r.buffer[:n], nil
}

// isZero reports whether b holds nothing but zeros: its first byte is zero, and
// each byte is like the one after it.
func isZero(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}
