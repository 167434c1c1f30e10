// Package loop attaches the volumes of a pool as loop devices.
//
// A device is the plugin's when its lo_file_name is the tag of the volume,
// which the plugin sets, and it shows its backing from the first byte to the
// last; whom it backs is told by the inode, as LOOP_GET_STATUS64 gives it:
//
//	csi-node:<8 digits of the pool's UUID>:<volume id>   a volume
//	csi-node:view                                        a read-only view of lo_rdevice
//
// Any other loop device over a volume's file is foreign: it is reported, and
// neither detached nor attached a second time. Tables of loop devices are not
// believed: an index remembers which device was last seen to stand for a
// volume, and the kernel is asked about that device each time. All devices are
// looked at when the backend is made. That none shows a file is asked of the file:
// a write lease proves that nobody has it open. Only when that is refused, as it is
// when anybody reads the file, are all devices looked at again. A device that does
// not answer may show any file of which a lease does not prove otherwise.
//
// A device has the sectors that the volume's metadata names, does direct I/O
// where the pool's file system can, and passes discards down for a thin volume
// only.
//
// The loop ioctls take no deadline: one that meets a hung disk blocks until
// the disk answers, and with it the calls for that volume only.
package loop

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices/internal/keylock"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	tagPrefix = "csi-node:"
	viewTag   = tagPrefix + "view"
	// tagSize is the room in lo_file_name, in bytes, without the final NUL.
	tagSize = 63
)

// Backend attaches the volumes of one pool. Its methods may be called
// concurrently; those for one volume take turns, but for Find.
type Backend struct {
	pool    *pool.Pool
	numbers Numbers // that are somebody's

	turns keylock.Map // by the tag of a volume, or the key of a view
	// nodes is held, by the name of a device of ours, while it is open here:
	// two O_EXCL probes at a time would take each other for a holder, and a
	// detach completes only when it has the device to itself.
	nodes keylock.Map

	mu    sync.Mutex
	hints map[string]hint // by the tag of a volume, or the key of a view
	looks map[string]*look
	asked map[string]*asking // by volume
	// silent are the devices that did not answer the last scan.
	silent []string
}

// hint is a device that was seen to stand for a volume or to be a view.
type hint struct {
	name    string // as "loop3"
	backing string // what sysfs said of its backing then
	was     device // what it said itself; nothing yet if sequence is 0
}

// New returns a Backend for the volumes of p, and finds the devices that were
// attached before. The error says what to do when the node has no loop devices.
func New(p *pool.Pool) (*Backend, error) {
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("this node offers no loop devices: load the module (modprobe loop), and in a container mount the host's /dev: %w", err)
	case err != nil:
		return nil, fmt.Errorf("loop devices need root (a privileged container): %w", err)
	}
	if err := control.Close(); err != nil {
		return nil, err
	}
	b := &Backend{pool: p, hints: map[string]hint{}, looks: map[string]*look{}, asked: map[string]*asking{}}
	return b, b.index(context.Background())
}

// index finds the devices that stand for volumes, also foreign ones, and the
// views. A crash may have come before a thick volume's device got its limit.
func (b *Backend) index(ctx context.Context) error {
	ids, err := b.pool.IDs(ctx)
	if err != nil { // of a pool that is away, or whose disk does not answer, the tags tell
		klog.FromContext(ctx).Error(err, "The volumes are not known, so devices over their data that the plugin did not attach are not either")
	}
	volumes, tags := map[string]string{}, map[fileID]string{}
	for _, id := range ids {
		volumes[b.tag(id)] = id
		path, err := b.pool.DataPath(id)
		if err != nil {
			return err
		}
		data, err := statFile(path)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Skipped a volume's data, so what uses it is not known", "volume", id)
		} else if data != nil {
			tags[data.id] = b.tag(id)
		}
	}
	all, _, err := b.scan(ctx)
	if err != nil {
		return err
	}
	for _, d := range all {
		switch tag := d.tag(); {
		case d.isView():
			b.remember(viewKey(d.over()), d)
		case strings.HasPrefix(tag, b.tag("")) && d.whole():
			b.remember(tag, d)
			if v, err := b.pool.Get(ctx, volumes[tag]); err == nil && v.Provisioning == pool.Thick && !d.readOnly && !b.pool.ReadOnly() {
				turnDiscardOff(ctx, d.name)
			}
		case tags[d.file()] != "" && b.hint(tags[d.file()]) == "":
			b.remember(tags[d.file()], d)
		}
	}
	return nil
}

// Any reports whether a device of one of the pool's volumes was seen.
func (b *Backend) Any() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key := range b.hints {
		if strings.HasPrefix(key, b.tag("")) { // else a view, perhaps of another pool
			return true
		}
	}
	return false
}

// tag returns the lo_file_name of a volume's device. Ids that do not fit are
// told apart by a hash.
func (b *Backend) tag(volume string) string {
	prefix := tagPrefix + b.pool.UUID()[:8] + ":"
	if room := tagSize - len(prefix); len(volume) > room {
		sum := sha256.Sum256([]byte(volume))
		hash := "~" + hex.EncodeToString(sum[:10])
		volume = volume[:room-len(hash)] + hash
	}
	return prefix + volume
}

// turn waits for the caller's turn to change a volume.
func (b *Backend) turn(ctx context.Context, volume string) (done func(), err error) {
	if err := pool.ValidateID(volume); err != nil {
		return nil, err
	}
	return b.turns.Lock(ctx, b.tag(volume))
}

func (b *Backend) remember(key string, d *device) {
	h := hint{name: d.name, backing: backingOf(d.name), was: *d}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hints[key] = h
}

func (b *Backend) forget(key string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.hints, key)
}

// hint returns the name of the device last seen for a key, "" when there is none.
func (b *Backend) hint(key string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.hints[key].name
}

// fileID is the identity of a file, or of a device node's file.
type fileID struct {
	device state.DeviceNumber
	inode  uint64
}

// file is what is known of a volume's data.
type file struct {
	id    fileID
	bytes int64
}

// statFile returns nil when there is no file at path.
func statFile(path string) (*file, error) {
	var st unix.Stat_t
	switch err := unix.Stat(path, &st); {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return &file{id: fileID{numberOf(st.Dev), st.Ino}, bytes: st.Size}, nil
}

func numberOf(dev uint64) state.DeviceNumber {
	return state.DeviceNumber{Major: unix.Major(dev), Minor: unix.Minor(dev)}
}
