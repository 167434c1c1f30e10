package filesystem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const (
	wholeLimit  = 1 << 30  // with no more than this to read, all is read
	edgeBytes   = 16 << 20 // beyond it: so much at the start and at the end,
	sampleCount = 4096     // so many places evenly spread over the rest,
	sampleBytes = 64 << 10 // and so much at each of them
	chunkBytes  = 1 << 20
)

// proof is the outcome of proveBlank.
type proof struct {
	found string // what speaks against it, for humans; "" when the device is blank
	whole bool   // every byte is known to be zero, none was left out
}

// proveBlank reads a device until it finds something, or can say that the
// device is blank. The caller has looked at the head for known signatures.
// It blocks as long as the reading takes and asks ctx between chunks of 1 MiB;
// the error is only ever that of ctx.
func proveBlank(ctx context.Context, d *device) (proof, error) {
	switch {
	case d.bytes <= 0:
		return proof{found: "a device without any bytes: nothing is attached to it"}, nil
	case d.bytes < d.facts.Capacity:
		return proof{found: fmt.Sprintf("a device of %d bytes that is %d bytes shorter than the volume", d.bytes, d.facts.Capacity-d.bytes)}, nil
	case d.missing() > 0:
		return proof{found: fmt.Sprintf("a device of %d bytes whose file %s was cut short by %d bytes", d.bytes, d.facts.Backing, d.missing())}, nil
	}
	if err := d.flush(); err != nil {
		return proof{found: fmt.Sprintf("a device that cannot be flushed: %v", err)}, nil
	}
	far, err := farSignatures(d)
	switch {
	case err != nil:
		return proof{found: unreadable(err)}, nil
	case len(far) > 0:
		return proof{found: and(far)}, nil
	}
	data, err := d.data(ctx)
	if err != nil {
		return proof{}, err
	}
	data, whole := sample(data, d.bytes)
	found, err := d.firstData(ctx, data)
	return proof{found: found, whole: whole && found == ""}, err
}

// flush writes what the page cache holds of the device, so that the file
// behind it shows where data is, and drops the pages, so that the next read
// asks the device.
func (d *device) flush() error {
	if err := d.Sync(); err != nil || !d.block {
		return err
	}
	if err := unix.IoctlSetInt(int(d.Fd()), unix.BLKFLSBUF, 0); err != nil {
		return fmt.Errorf("BLKFLSBUF: %w", err)
	}
	return nil
}

// extent is a range of bytes.
type extent struct{ start, end int64 }

// data returns the extents of the device that may hold anything but zeros. It
// is the whole device unless the file behind a loop device tells of holes and
// of extents never written (SEEK_DATA in lseek(2)). What was read ahead of a
// former proof counts as data and is read, too.
func (d *device) data(ctx context.Context) ([]extent, error) {
	whole := []extent{{0, d.bytes}}
	backing, size := d.openBacking()
	if backing == nil {
		return whole, nil
	}
	if size < d.bytes { // cut short just now
		return whole, backing.Close()
	}
	extents, err := dataExtents(ctx, backing, d.bytes)
	err = errors.Join(err, backing.Close())
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return whole, nil // the file does not tell, so the device is read
	}
	return extents, nil
}

// missing returns how many bytes of the device its file does not have. Some
// kernels read them as zeros (Linux 6.1 does), others fail to (6.18).
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
// size. Else there is nothing to trust, and the device itself will be read.
func (d *device) openBacking() (f *os.File, bytes int64) {
	if d.facts.Backing == "" || !d.block {
		return nil, 0
	}
	loop, err := unix.IoctlLoopGetStatus64(int(d.Fd()))
	if err != nil || loop.Offset != 0 || loop.Encrypt_type != 0 {
		return nil, 0
	}
	f, err = os.OpenFile(d.facts.Backing, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Ino == loop.Inode && numberOf(st.Dev) == numberOf(loop.Device) {
		return f, st.Size
	}
	f.Close()
	return nil, 0
}

// dataExtents returns where within its first size bytes the file has data.
func dataExtents(ctx context.Context, f *os.File, size int64) ([]extent, error) {
	var extents []extent
	for offset := int64(0); offset < size; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		start, err := f.Seek(offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // nothing but a hole up to the end
		}
		if err != nil {
			return nil, err
		}
		end, err := f.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		if start < size {
			extents = append(extents, extent{start, min(end, size)})
		}
		offset = end
	}
	return extents, nil
}

// sample returns what to read of the data: all of it up to wholeLimit bytes.
// Beyond, what lies in the first and the last 16 MiB of the device, 64 KiB at
// 4096 places that divide the data evenly, and the places where an ext4 or a
// btrfs keeps copies of its superblock. The places depend on nothing but the arguments.
func sample(data []extent, size int64) (places []extent, whole bool) {
	total := int64(0)
	for _, e := range data {
		total += e.end - e.start
	}
	if total <= wholeLimit {
		return data, true
	}
	special := append(ext4Copies(size), extent{0, edgeBytes}, extent{size - edgeBytes, size})
	for _, mirror := range btrfsMirrors {
		special = append(special, extent{mirror, mirror + btrfsLength})
	}
	before := int64(0) // bytes of data in front of e
	next := int64(0)   // number of the next sample
	for _, e := range data {
		for ; next < sampleCount && next*(total/sampleCount) < before+e.end-e.start; next++ {
			start := e.start + next*(total/sampleCount) - before
			places = append(places, extent{start, min(start+sampleBytes, e.end)})
		}
		for _, s := range special {
			if clipped := (extent{max(s.start, e.start), min(s.end, e.end)}); clipped.start < clipped.end {
				places = append(places, clipped)
			}
		}
		before += e.end - e.start
	}
	return places, false
}

// ext4Copies returns where an ext4 of one of its usual block sizes would keep
// copies of its superblock: the starts of group 1 and of the powers of 3, 5 and 7.
func ext4Copies(size int64) []extent {
	var copies []extent
	for _, block := range []int64{1 << 10, 2 << 10, 4 << 10} {
		group := 8 * block * block
		first := int64(0)
		if block == 1<<10 {
			first = block
		}
		for _, base := range []int64{3, 5, 7} {
			for g := int64(1); g*group+first < size; g *= base {
				copies = append(copies, extent{g*group + first, g*group + first + 4096})
			}
		}
	}
	return copies
}

// firstData says where the first byte is that is not zero, or why the device
// cannot be read; "" when all is zero.
func (d *device) firstData(ctx context.Context, places []extent) (string, error) {
	buffer := make([]byte, chunkBytes)
	for _, e := range places {
		for offset := e.start; offset < e.end; {
			if err := ctx.Err(); err != nil {
				return "", err
			}
			chunk := buffer[:min(chunkBytes-offset%chunkBytes, e.end-offset)]
			switch _, err := d.ReadAt(chunk, offset); {
			case errors.Is(err, io.EOF):
				return fmt.Sprintf("a device that ends before byte %d, though it should have %d", offset+int64(len(chunk)), d.bytes), nil
			case err != nil:
				return fmt.Sprintf("%s, between bytes %d and %d", unreadable(err), offset, offset+int64(len(chunk))), nil
			}
			if !zero(chunk) {
				i := bytes.IndexFunc(chunk, func(r rune) bool { return r != 0 })
				return fmt.Sprintf("data at byte %d", offset+int64(i)), nil
			}
			offset += int64(len(chunk))
		}
	}
	return "", nil
}

// zero reports whether b holds nothing but zeros: its first byte is zero, and
// each byte is like the one after it.
func zero(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}
