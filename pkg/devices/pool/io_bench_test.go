package pool_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// BenchmarkIO tells what direct I/O is worth on the disk of the temporary
// directory: writes of 4 KiB that are each flushed, as a database's log is, and
// 16 MiB written or read in a row, through the device's page cache as a file
// system goes and past it (O_DIRECT) as the databases do that cache themselves.
func BenchmarkIO(b *testing.B) {
	const size, run = 64 << 20, 16 << 20
	for _, how := range []pool.Provisioning{pool.Thick, pool.Thin} {
		p, _ := newPool(b)
		backend := newBackend(b, p)
		if _, err := p.Create(b.Context(), pool.Volume{ID: "vol", Bytes: size, Provisioning: how, SectorBytes: 4096}); err != nil {
			b.Fatal(err)
		}
		d := attach(b, backend, "vol", false)
		for _, mode := range []string{"direct", "buffered"} {
			for _, w := range []struct {
				name  string
				flags int
				chunk int
				work  func(f *os.File, buffer []byte, i int) error
			}{
				{"write+fsync", os.O_RDWR, 4096, func(f *os.File, buffer []byte, i int) error {
					if _, err := f.WriteAt(buffer, int64(i)*1031%(size/4096)*4096); err != nil {
						return err
					}
					return unix.Fdatasync(int(f.Fd()))
				}},
				{"sequential write", os.O_RDWR, run, func(f *os.File, buffer []byte, i int) error { return writeRun(f, buffer, i, size) }},
				{"sequential write O_DIRECT", os.O_RDWR | unix.O_DIRECT, run, func(f *os.File, buffer []byte, i int) error { return writeRun(f, buffer, i, size) }},
				{"sequential read O_DIRECT", os.O_RDONLY | unix.O_DIRECT, run, func(f *os.File, buffer []byte, i int) error {
					_, err := f.ReadAt(buffer, int64(i)*run%size)
					return err
				}},
			} {
				b.Run(string(how)+"/"+mode+"/"+w.name, func(b *testing.B) { benchIO(b, d, mode == "direct", w.flags, w.chunk, w.work) })
			}
		}
	}
}

func writeRun(f *os.File, buffer []byte, i, size int) error {
	if _, err := f.WriteAt(buffer, int64(i*len(buffer)%size)); err != nil {
		return err
	}
	return unix.Fdatasync(int(f.Fd()))
}

func benchIO(b *testing.B, d state.Device, direct bool, flags, chunk int, work func(*os.File, []byte, int) error) {
	f, err := os.OpenFile(d.Path, flags, 0)
	require.NoError(b, err)
	defer f.Close()
	wanted := 0
	if direct {
		wanted = 1
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_DIRECT_IO, wanted); err != nil {
		b.Skipf("LOOP_SET_DIRECT_IO %d: %v", wanted, err)
	}
	buffer, err := unix.Mmap(-1, 0, chunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned
	require.NoError(b, err)
	defer func() {
		if err := unix.Munmap(buffer); err != nil {
			b.Error(err)
		}
	}()
	for i := range buffer {
		buffer[i] = byte(i)
	}
	b.SetBytes(int64(chunk))
	for i := 0; b.Loop(); i++ {
		require.NoError(b, work(f, buffer, i))
	}
}
