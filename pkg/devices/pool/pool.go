// Package pool keeps volumes as files in a directory, the pool, and attaches them
// as loop devices. A Pool is the files and knows nothing of devices; a Backend is
// what package devices asks for, over a Pool.
//
//	<dir>.uuid               the UUID of the pool once seen at <dir>, outside of it
//	<dir>/.csi-node-pool     the marker: {"version":1,"uuid":"…"}
//	<dir>/volumes/<id>/data         the bytes of a volume
//	<dir>/volumes/<id>/volume.json      the facts about it: Volume
//	<dir>/volumes/<id>/volume.json.new…  the slot: blocks for the next facts; its contents mean nothing
//	<dir>/tmp/<id>~…         a volume being created
//	<dir>/trash/<id>~…       a volume being deleted
//
// A volume is built in tmp and renamed into volumes when all of it is on the
// disk, and it is renamed into trash before it is taken apart: what is in
// volumes is whole, whenever the power goes. Each start empties tmp and trash.
//
// On a full pool no volume is lost, and every volume can be deleted: a deletion needs only
// renames, and new facts are written to blocks that the volume has had since it was
// created, see writeFacts.
//
// <dir>.uuid must live as long as the node: in a container, mount the parent
// of the pool's directory from the host. It tells a pool whose disk is not
// mounted from a directory that is to become a pool.
//
// A volume's device is known by its tag, csi-node:<8 digits of the pool's UUID>:<volume
// id>, which package loop explains: it is found and taken down though the pool is away.
//
// One process at a time should use a pool, see Lock: two would not see each
// other's changes of one volume. Emptying tmp and trash is safe even then, as
// whoever builds in tmp holds a lock.
//
// Read first: volume.go (the facts about a volume) and create.go, then capacity.go and
// room.go (who has how much), clear.go and delete.go. The backend is in backend.go and
// backend_*.go, a file for each ability; it leaves loop devices to package loop.
package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
)

const (
	volumesDir = "volumes"
	tmpDir     = "tmp"
	trashDir   = "trash"
	dataFile   = "data"
	volumeFile = "volume.json"
	slotFile   = volumeFile + durable.NewSuffix
)

// Pool is an open pool. Its methods may be called concurrently; those that
// change a volume take turns for that volume. They block for as long as the
// pool's file system does; ctx ends waiting for a turn, not a system call.
type Pool struct {
	dir      string
	uuid     string // the pool's identity, which its marker keeps
	slot     string // the name that slots have when this Pool uses them
	readOnly bool   // it was opened to look at it only
	limits   limits

	volumes keylock.Map // by volume id
	facts   keylock.Map // by volume id; held while the facts are read, and while the slot is written
	cache   factsCache
	durable durability
	// space is held, under the key "", while room is counted and taken.
	space keylock.Map
	// The results of the last count, of each volume's file by the name of its directory,
	// and in all. The holder of space may use them.
	counted map[string]countedFacts
	ledger  ledger
}

// Open opens the pool in dir, an absolute path, and makes an empty or missing
// directory a pool. It is an error, which says what to do, when the pool that
// was seen here before is not here now, or when dir holds anything else. What a
// crash left in tmp and trash stays: see sweep.
func Open(dir string) (*Pool, error) {
	dir = filepath.Clean(dir)
	if !filepath.IsAbs(dir) || dir == "/" {
		return nil, fmt.Errorf("pool directory %s: must be an absolute path below /", dir)
	}
	uuid, err := identify(dir)
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", dir, err)
	}
	p := newPool(dir, uuid)
	if err := p.makeDirs(); err != nil {
		return nil, fmt.Errorf("pool: %w", err)
	}
	return p, nil
}

func newPool(dir, identity string) *Pool {
	return &Pool{dir: dir, uuid: identity, slot: slotFile + "~" + uuid.NewString()[:8], counted: map[string]countedFacts{}}
}

// openAbsent opens the pool that was seen in dir before, of which Open says
// errAbsent: what needs the pool fails until it is there.
func openAbsent(dir string) (*Pool, error) {
	dir = filepath.Clean(dir)
	seen, err := readSeen(dir)
	if err == nil && seen == "" {
		err = errors.New("none was seen there")
	}
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", dir, err)
	}
	return newPool(dir, seen), nil
}

// makeDirs makes only the directories that are missing, because even a mkdir of an existing
// one hangs on a disk that takes no writes any more. If none is missing, such a disk is no
// error: its volumes must still be taken down.
func (p *Pool) makeDirs() error {
	made := false
	for _, name := range []string{volumesDir, tmpDir, trashDir} {
		info, err := os.Lstat(p.path(name))
		switch {
		case errors.Is(err, os.ErrNotExist):
			err = os.Mkdir(p.path(name), 0o700)
			made = true
		case err == nil && !info.IsDir() && name != volumesDir: // of a link the sweep would empty what it leads to
			err = fmt.Errorf("%s is no directory: move it away", p.path(name))
		}
		if err != nil {
			return err
		}
	}
	if err := durable.SyncDir(p.dir); made {
		return err
	}
	return nil
}

// openReadOnly opens the pool in dir to look at it: nothing is made or removed,
// and whoever uses the pool may go on. Of a pool that is away, the attached devices of
// its volumes are seen. It is an error when there never was a pool.
func openReadOnly(dir string) (*Pool, error) {
	dir = filepath.Clean(dir)
	seen, err := readSeen(dir)
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", dir, err)
	}
	m, err := readMarker(dir)
	switch {
	case seen != "" && (err != nil || m == nil):
		m = &marker{UUID: seen} // away, or its marker is damaged
	case err != nil:
		return nil, fmt.Errorf("pool %s: %w", dir, err)
	case m == nil:
		return nil, fmt.Errorf("pool %s: there is no pool", dir)
	case seen != "" && m.UUID != seen:
		return nil, fmt.Errorf("pool %s: %w", dir, otherError(dir, m.UUID, seen))
	}
	return &Pool{dir: dir, uuid: m.UUID, readOnly: true, counted: map[string]countedFacts{}}, nil
}

// Check returns an error when the pool is not in its directory any more, as
// when its disk was unmounted.
func (p *Pool) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	switch m, err := readMarker(p.dir); {
	case err != nil:
		return fmt.Errorf("pool %s: %w", p.dir, err)
	case m == nil:
		return fmt.Errorf("pool %s: %w", p.dir, absentError(p.dir, p.uuid))
	case m.UUID != p.uuid:
		return fmt.Errorf("pool %s: %w", p.dir, otherError(p.dir, m.UUID, p.uuid))
	}
	return nil
}

// DataPath returns the path of a volume's data file, which need not exist.
// InvalidArgument: no volume can have that id.
func (p *Pool) DataPath(id string) (string, error) {
	if err := ValidateID(id); err != nil {
		return "", err
	}
	return p.path(volumesDir, id, dataFile), nil
}

// sweep removes what a crash left in tmp and trash. What cannot be removed
// costs space but harms no volume, so it is logged and left.
func (p *Pool) sweep(ctx context.Context) {
	for _, name := range []string{tmpDir, trashDir} {
		entries, err := os.ReadDir(p.path(name))
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot look for remains in the pool", "pool", p.dir)
		}
		for _, entry := range entries {
			path := p.path(name, entry.Name())
			removed, err := removeUnlocked(path)
			if err != nil {
				klog.FromContext(ctx).Error(err, "Cannot remove remains from the pool", "path", path)
			} else if removed {
				klog.FromContext(ctx).Info("Removed remains of an interrupted creation or deletion", "path", path)
			}
		}
	}
}

// removeUnlocked removes a tree unless the process that builds it still lives,
// which holds its lock.
func removeUnlocked(path string) (removed bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // it may be a FIFO
	if err != nil {
		return false, ignore(err, os.ErrNotExist)
	}
	defer f.Close() // also lets go of the lock
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("flock %s: %w", path, err)
	}
	return true, os.RemoveAll(path)
}

// path returns the path of something in the pool, by clean names.
func (p *Pool) path(names ...string) string {
	return p.dir + "/" + strings.Join(names, "/")
}
