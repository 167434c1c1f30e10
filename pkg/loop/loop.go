// Package loop attaches files and block devices as loop devices. It does not know what
// they hold, or for whom: a Target names what a device is to show.
//
// A device is the plugin's if its lo_file_name is a tag, which the plugin sets, and if it
// shows its backing from the first byte to the last. LOOP_GET_STATUS64 gives the inode, or
// the device number, of the backing:
//
//	csi-node:<place>:<name>   a file: see Tag
//	csi-node:view             a read-only view of the block device lo_rdevice
//
// A pod can change the tag of a device that it has raw, which is undone, or attach that device
// anew with the tag of another volume, which is not believed: see restore.go.
//
// Any other loop device over the file of a Target is foreign: it is reported, and
// neither detached nor attached a second time. An index remembers which device was last
// seen to show a Target, but is never trusted: the kernel is asked about that device each
// time. All devices are looked at at the start. To prove that no device shows a file, the
// file is asked: a write lease on it is granted only if nobody has it open. If the lease
// is refused, such as when anybody reads the file, all devices are looked at again. A
// device that does not answer may show any file for which there is no lease.
//
// A device does direct I/O if the file system of its backing supports it. It passes
// discards on to its backing unless it is Solid.
//
// The loop ioctls take no deadline: on a hung disk, one blocks until the disk answers,
// and holds up the calls for that Target only.
//
// Read first: target.go (what a device is to show) and device.go (what the kernel
// says of one). Then attach.go and detach.go, scan.go (the index, and the look at all
// devices), numbers.go (device numbers that are kept for somebody), discard.go, restore.go.
package loop

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	tagPrefix = "csi-node:"
	viewTag   = tagPrefix + "view"
	// tagSize is the room in lo_file_name, in bytes, without the final NUL.
	tagSize = 63
)

// Tag returns the tag of a name in a place, which must not contain a colon. The name is that
// of the volume, as in Numbers. If it is too long it is cut, and gets a hash at its end.
func Tag(place, name string) string {
	prefix := tagPrefix + place + ":"
	if room := tagSize - len(prefix); len(name) > room {
		sum := sha256.Sum256([]byte(name))
		hash := "~" + hex.EncodeToString(sum[:10])
		name = name[:room-len(hash)] + hash
	}
	return prefix + name
}

// isTag reports whether a lo_file_name is a tag of this plugin.
func isTag(name string) bool { return strings.HasPrefix(name, tagPrefix) }

// Devices are the loop devices of the node. A process should have only one Devices. The
// methods may be called concurrently, but those that change the device of one Target must
// take turns.
type Devices struct {
	numbers Numbers // device numbers that are in use

	// nodes is held, by the name of a device, while it is open here: two O_EXCL
	// opens at a time would take each other for a holder, and a detach completes
	// only when it has the device to itself.
	nodes keylock.Map

	// looks are the questions to devices whose backing may not answer, by name.
	looks hang.Calls[*Device]

	mu    sync.Mutex
	index map[string]indexEntry // by the key of a Target
	shows map[string]string     // the key that each device was last remembered for, by its name
	// unresponsive are the devices that did not answer when they were last asked.
	unresponsive map[string]bool
	// discarding are the devices that passed discards on when they were last attached here.
	discarding map[string]bool
}

// indexEntry is a device that was seen to show a Target.
type indexEntry struct {
	name    string // such as "loop3"
	backing string // what sysfs said of its backing then
	was     Device // what it said itself; empty, with sequence 0, until it was asked
}

// New finds the devices that were attached before. The error says what to do when
// the node has no loop devices.
func New(ctx context.Context) (*Devices, error) {
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
	s := &Devices{index: map[string]indexEntry{}, shows: map[string]string{}, unresponsive: map[string]bool{}, discarding: map[string]bool{}}
	all, _, err := s.scan(ctx, nil)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		switch {
		case d.isView():
			s.remember(ViewOf(d.over()).key(), d)
		case isTag(d.Tag()) && d.showsAll():
			s.remember(d.Tag(), d)
		}
	}
	return s, nil
}

// Check returns an error when the node offers no loop devices any more.
func (s *Devices) Check() error {
	if _, err := os.Stat(controlPath); err != nil {
		return fmt.Errorf("this node offers no loop devices: %w", err)
	}
	return nil
}

// Known is what is known of a file that a device may show.
type Known struct {
	Tag    string // that the plugin's own device over it has
	Volume string // as in Numbers
}

// Recognize finds devices over files that the plugin did not attach, or of which somebody
// has changed the tag. One that a volume is published as is the plugin's, whatever its tag.
func (s *Devices) Recognize(ctx context.Context, files map[FileID]Known) error {
	s.mu.Lock()
	maps.DeleteFunc(s.index, func(key string, h indexEntry) bool { // a tag alone may be a lie
		known, is := files[h.was.File()]
		return is && known.Tag != key
	})
	s.mu.Unlock()
	all, _, err := s.scan(ctx, nil)
	if err != nil {
		return err
	}
	for _, d := range all {
		known, is := files[d.File()]
		if !is {
			continue
		}
		own := Target{Tag: known.Tag}
		if !own.Owns(d) && s.owner(d.number) == known.Volume {
			done, err := s.Turn(ctx, d.name)
			if err != nil {
				return err
			}
			d = restore(ctx, d, known.Tag)
			done()
		}
		s.mu.Lock()
		seen := s.index[known.Tag]
		s.mu.Unlock()
		switch {
		case seen.name == "":
			s.remember(known.Tag, d)
		case own.Owns(d) && seen.was.File() != d.File(): // which beats a tag alone
			logForged(ctx, &seen.was)
			s.remember(known.Tag, d)
		}
	}
	return nil
}

// Seen returns the name of the device last seen for a tag, such as "loop3"; "" when
// there is none. It reads only the index.
func (s *Devices) Seen(tag string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.index[tag].name
}

// Tagged returns the plugin's devices whose tag begins with the prefix, but for
// those that skip names. It blocks for as long as one of them does.
func (s *Devices) Tagged(ctx context.Context, prefix string, skip func(tag string) bool) ([]*Device, error) {
	s.mu.Lock()
	var tags []string
	for tag := range s.index {
		if strings.HasPrefix(tag, prefix) && !skip(tag) {
			tags = append(tags, tag)
		}
	}
	s.mu.Unlock()
	var tagged []*Device
	for _, tag := range tags {
		if d, err := s.Recall(ctx, Target{Tag: tag}); err != nil {
			return nil, err
		} else if d != nil {
			tagged = append(tagged, d)
		}
	}
	others, _, err := s.scan(ctx, nil)
	if err != nil {
		return nil, err
	}
	for _, d := range others {
		again := slices.ContainsFunc(tagged, func(other *Device) bool { return other.number == d.number })
		if strings.HasPrefix(d.Tag(), prefix) && d.showsAll() && !skip(d.Tag()) && !again {
			tagged = append(tagged, d)
		}
	}
	return tagged, nil
}

func (s *Devices) remember(key string, d *Device) { s.rememberOver(key, d, backingOf(d.name)) }

// rememberOver is remember for a caller that has read the backing's name in sysfs already.
// If that name is outdated, the device is only asked more often. What the device showed before,
// perhaps for another plugin, is forgotten; if it was asked anew since, d is.
func (s *Devices) rememberOver(key string, d *Device, backing string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before := s.shows[d.name]; before != key && s.index[before].name == d.name {
		if s.index[before].was.sequence > d.sequence {
			return
		}
		delete(s.index, before)
	}
	s.shows[d.name] = key
	s.index[key] = indexEntry{name: d.name, backing: backing, was: *d}
}

func (s *Devices) forget(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.index, key)
}

// FileID is the identity of a file, or of a device node's file.
type FileID struct {
	Device state.DeviceNumber
	Inode  uint64
}

// File is what is known of a file.
type File struct {
	ID    FileID
	Bytes int64
}

// StatFile looks at a file; nil: there is none at the path.
func StatFile(path string) (*File, error) {
	var st unix.Stat_t
	switch err := unix.Lstat(path, &st); {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return fileOf(path, st)
}

// StatInCache is StatFile for a file that the kernel has in its caches (RESOLVE_CACHED, Linux
// 5.12). EAGAIN: it has not.
func StatInCache(path string) (*File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: rawfile.ResolveCached})
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: path, Err: err}
	}
	return fileOf(path, st)
}

func fileOf(path string, st unix.Stat_t) (*File, error) {
	if st.Mode&unix.S_IFMT != unix.S_IFREG { // an open may block, or show another file
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	return &File{ID: FileID{devnode.NumberOf(st.Dev), st.Ino}, Bytes: st.Size}, nil
}

// OpenFile opens a file, which must still be the one that was looked at.
func OpenFile(path string, id FileID, mode int) (*os.File, error) {
	f, err := rawfile.Open(path, mode|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(rawfile.PathError("fstat", f, err), f.Close())
	}
	if id != (FileID{devnode.NumberOf(st.Dev), st.Ino}) {
		return nil, errors.Join(fmt.Errorf("%s was replaced meanwhile", path), f.Close())
	}
	return f, nil
}
