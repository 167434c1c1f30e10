package devicestest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// Offset is a layer for tests on the real kernel: a loop device over the lower
// element, from offsetBytes on. What is before that is its header: a magic and the
// stamp that it is new. Volumes want it whose context says layer=offset, and it
// wants the secret "key" of those whose context says locked=true.
type Offset struct {
	Owner string // one test: another has a volume of the same id
}

const (
	offsetBytes  = 1 << 20
	offsetSector = 512
	offsetMagic  = "devicestest offset layer\n"
	offsetNew    = offsetMagic + "new\n"
	offsetUsed   = offsetMagic + "old\n"
)

// OffsetVolume is the context of a volume that wants the layer.
func OffsetVolume() map[string]string { return map[string]string{"layer": "offset"} }

// Name is what steps call the layer.
func (Offset) Name() string { return "offset" }

// Wanted reports whether the volume's context asks for the layer.
func (Offset) Wanted(v devices.Volume) bool { return v.Context["layer"] == "offset" }

// tag is the name of the volume's loop device, which the kernel keeps.
func (o Offset) tag(v devices.Volume) string { return "offset:" + o.Owner + ":" + v.ID }

// find returns the volume's loop device; an empty path: there is none. Absence is
// seen twice: other loop devices come and go meanwhile, and with them their entries.
func (o Offset) find(v devices.Volume) (path string, info *unix.LoopInfo64, err error) {
	for range 2 {
		entries, err := os.ReadDir("/sys/block")
		if err != nil {
			return "", nil, err
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), "loop") {
				continue
			}
			path := "/dev/" + e.Name()
			info, err := status(path)
			switch {
			case errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT): // it is nobody's now
			case errors.Is(err, unix.EIO): // it is over a file whose file system broke down, and never the layer's, which is over a device
			case err != nil:
				return "", nil, err
			case unix.ByteSliceToString(info.File_name[:]) == o.tag(v):
				return path, info, nil
			}
		}
	}
	return "", nil, nil
}

func status(path string) (*unix.LoopInfo64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	return info, errors.Join(err, f.Close())
}

// Find returns what there is of the layer.
func (o Offset) Find(_ context.Context, lower state.Device, v devices.Volume) (state.Device, error) {
	d := state.Device{State: state.DeviceAbsent, NeedsSecret: v.Context["locked"] == "true" && v.Secrets.Get("key") == ""}
	if lower.Attached() {
		header, err := readHeader(lower.Path)
		if err != nil {
			return state.Device{}, err
		}
		d.Fresh, d.Unmade = header == offsetNew, header != offsetNew && header != offsetUsed
		d.Capacity = lower.Size - offsetBytes
	}
	path, info, err := o.find(v)
	if err != nil || path == "" {
		return d, err
	}
	d.Path = path
	d.State, d.ReadOnly = state.DeviceAttached, info.Flags&unix.LO_FLAGS_READ_ONLY != 0
	if over := unix.Mkdev(lower.Number.Major, lower.Number.Minor); !lower.Present() || info.Rdevice != 0 && info.Rdevice != over || !showsOn(path, lower) {
		d.State, d.Stray, d.Unmade, d.Holder = state.DeviceForeign, true, false, path
	} else if info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0 {
		d.State = state.DeviceDetaching
	}
	d.Number, _ = devnode.NumberAt(path)
	d.Size, err = sizeOf(path)
	return d, err
}

// showsOn reports whether a loop device is over the lower element, which is all
// that the kernel tells of one over a block device.
func showsOn(path string, lower state.Device) bool {
	backing, err := os.ReadFile("/sys/block/" + filepath.Base(path) + "/loop/backing_file")
	return err == nil && strings.TrimSpace(string(backing)) == lower.Path
}

func readHeader(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	header := make([]byte, len(offsetNew))
	_, err = io.ReadFull(f, header)
	return string(header), errors.Join(err, f.Close())
}

func writeHeader(path, header string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(header)
	return errors.Join(err, f.Sync(), f.Close())
}

func sizeOf(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	return size, errors.Join(err, f.Close())
}

// Create writes the header.
func (Offset) Create(_ context.Context, lower state.Device, _ devices.Volume) error {
	return writeHeader(lower.Path, offsetNew)
}

// Open makes the loop device. Unauthenticated: the volume is locked, and its key is not at hand.
func (o Offset) Open(ctx context.Context, lower state.Device, v devices.Volume, readOnly bool) (err error) {
	if v.Context["locked"] == "true" && v.Secrets.Get("key") != "secret" {
		return state.Errorf(state.Unauthenticated, "the key is missing or wrong")
	}
	have, err := o.Find(ctx, lower, v)
	switch {
	case err != nil || have.State == state.DeviceAttached:
		return err
	case have.State == state.DeviceDetaching:
		return o.reclaim(v)
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, control.Close()) }()
	mode, flags := os.O_RDWR, uint32(0)
	if readOnly {
		mode, flags = os.O_RDONLY, unix.LO_FLAGS_READ_ONLY
	}
	backing, err := os.OpenFile(lower.Path, mode, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, backing.Close()) }()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
		}
		f, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), mode, 0)
		if err != nil {
			return err
		}
		config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: offsetSector, Info: unix.LoopInfo64{Offset: offsetBytes, Flags: flags}}
		copy(config.Info.File_name[:], o.tag(v))
		err = unix.IoctlLoopConfigure(int(f.Fd()), &config)
		if err == nil && !readOnly {
			err = unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0) // which outlives the backing that it was meant for
		}
		err = errors.Join(err, f.Close())
		if !errors.Is(err, unix.EBUSY) { // somebody was faster
			return err
		}
	}
}

// reclaim keeps a loop device that would go with the last who has it open.
func (o Offset) reclaim(v devices.Volume) error {
	return o.with(v, os.O_RDONLY, func(f *os.File) error {
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if err != nil {
			return err
		}
		info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
		return unix.IoctlLoopSetStatus64(int(f.Fd()), info)
	})
}

// Close detaches the loop device. It fails when anybody has it open for ten seconds:
// udev looks at each device, and so does whoever looks for one of his own.
func (o Offset) Close(ctx context.Context, _ state.Device, v devices.Volume) error {
	path, _, err := o.find(v)
	if err != nil || path == "" {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	for limit := time.Now().Add(10 * time.Second); ctx.Err() == nil && time.Now().Before(limit); time.Sleep(50 * time.Millisecond) {
		if path, _, err := o.find(v); err != nil || path == "" {
			return err
		}
	}
	return fmt.Errorf("%s is still open", path)
}

// Grow lets the loop device fill the lower element.
func (o Offset) Grow(_ context.Context, _ state.Device, v devices.Volume) error {
	return o.with(v, os.O_RDONLY, func(f *os.File) error {
		return unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0)
	})
}

// Erase writes zeros.
func (o Offset) Erase(_ context.Context, lower state.Device, v devices.Volume) error {
	switch header, err := readHeader(lower.Path); {
	case err != nil:
		return err
	case header != offsetNew:
		return state.Errorf(state.FailedPrecondition, "the layer is not new")
	}
	return o.with(v, os.O_RDWR|unix.O_EXCL, func(f *os.File) error {
		size, err := f.Seek(0, io.SeekEnd)
		if err != nil {
			return err
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		_, err = io.Copy(f, io.LimitReader(zeros{}, size))
		return errors.Join(err, f.Sync())
	})
}

// with runs act on the open loop device.
func (o Offset) with(v devices.Volume, mode int, act func(*os.File) error) error {
	path, _, err := o.find(v)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, mode, 0)
	if err != nil {
		return err
	}
	return errors.Join(act(f), f.Close())
}

// zeros reads as zeros without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return copy(p, bytes.Repeat([]byte{0}, len(p))), nil }

// Used takes the stamp away.
func (Offset) Used(_ context.Context, lower state.Device, _ devices.Volume) error {
	return writeHeader(lower.Path, offsetUsed)
}
