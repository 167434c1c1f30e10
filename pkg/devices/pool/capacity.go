package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/filesystem"
)

// Capacity is how much room a pool has, in bytes, and who has it.
//
// Every volume has a claim: its size, or the share of its size that its overcommit leaves.
// What it has not taken of the claim is promised to it, and given to no other volume. So
// the claims never exceed the room, and thick, thin and overcommitted volumes are counted
// in the same way. An overcommitted volume may take more than its claim from what is free;
// when that brings Free below Promised, the promises are broken.
type Capacity struct {
	Total     int64 // of the pool's file system
	Free      int64 // of that, free blocks
	Allocated int64 // that volumes have taken
	Promised  int64 // to volumes that have not taken it yet
	Owed      int64 // that volumes may yet take; more than Free if the pool is overcommitted
	Kept      int64 // of Free, that is given to no volume (see limits)
	Inline    int64 // sizes of the inline ephemeral volumes
	Available int64 // for the claims of new volumes and of growth
	Largest   int64 // the largest size that a volume can have, even if there is room for more
	ReadOnly  bool  // the pool's file system takes no writes, so that nothing is Available
	NoFiles   bool  // it has no inodes for a new volume, so that nothing is Available

	Thick, Thin, Damaged int // numbers of volumes, by provisioning; damaged: it is not known
}

// filesForVolume is how many files and directories a volume has (four), and is made and changed with.
const filesForVolume = 8

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

// capacity counts the room; the caller holds p.space. Promises are counted before the free
// bytes, so that what a volume takes of its promise meanwhile is counted twice rather than
// not at all.
func (p *Pool) capacity(ctx context.Context) (Capacity, error) {
	if err := p.Check(ctx); err != nil {
		return Capacity{}, err
	}
	c, err := p.countFiles(ctx)
	if err != nil {
		return Capacity{}, fmt.Errorf("pool: %w", err)
	}
	fs, err := p.statfs()
	if err != nil {
		return Capacity{}, err
	}
	c.Total, c.Free = int64(fs.Blocks)*fs.Bsize, free(fs)
	c.Kept = p.kept(c.Total)
	if c.ReadOnly, err = filesystem.RefusesWrites(p.dir); err != nil {
		return Capacity{}, fmt.Errorf("pool %s: %w", p.dir, err)
	}
	c.NoFiles = fs.Files > 0 && fs.Ffree < filesForVolume // btrfs tells no number of files
	if !c.ReadOnly && !c.NoFiles {
		c.Available = max(c.Free-c.Promised-c.Kept, 0)
	}
	c.Largest = largestFile(fs)
	p.ledger = ledger{at: time.Now(), free: c.Free, spare: c.Free - c.Promised}
	return c, nil
}

func (p *Pool) statfs() (unix.Statfs_t, error) {
	var fs unix.Statfs_t
	err := unix.Statfs(p.dir, &fs)
	return fs, wrap(err, "pool %s: statfs", p.dir)
}

func free(fs unix.Statfs_t) int64 { return int64(fs.Bavail) * fs.Bsize }

// largestFile returns the size of the largest file, a multiple of blockSize.
// ext4 numbers a file's blocks with 32 bits; no other file system that pools
// are kept on has a limit below what sizes are computed with.
func largestFile(fs unix.Statfs_t) int64 {
	if fs.Type == unix.EXT4_SUPER_MAGIC {
		return (1<<32 - 1) * fs.Bsize / blockSize * blockSize
	}
	return devices.LargestBytes
}

// countedFacts are the facts of a volume that counting its room needs. They never change
// while the volume's file is the same.
type countedFacts struct {
	inode        uint64
	provisioning Provisioning // empty: the facts are damaged
	overcommit   int64        // percent
	inline       bool         // ephemeral
}

// countFiles adds up the volumes' files, also those of thick volumes: a TRIM
// of the file system in them gives blocks back. Volumes being created count,
// too. They come first, as they move from tmp to volumes meanwhile.
func (p *Pool) countFiles(ctx context.Context) (Capacity, error) {
	var c Capacity
	counted, moving := make(map[string]countedFacts, len(p.counted)), map[uint64]bool{}
	for _, name := range []string{tmpDir, volumesDir} {
		err := p.eachFile(name, func(entry string, st unix.Stat_t) {
			switch {
			case name == tmpDir:
				moving[st.Ino] = true
			case moving[st.Ino]:
				return // it is counted
			}
			v := p.factsForCount(ctx, name, entry, st.Ino)
			if v.provisioning != "" { // others may still be written or repaired: they are read again by the next count
				counted[entry] = v
			}
			c.add(st, v)
			if name == volumesDir {
				c.count(v.provisioning)
			}
		})
		if err != nil {
			return Capacity{}, err
		}
	}
	if err := ctx.Err(); err != nil { // then facts were not read, and their volumes counted as if they had none
		return Capacity{}, err
	}
	p.counted = counted
	return c, nil
}

// add adds what a volume's file has and is to have.
func (c *Capacity) add(st unix.Stat_t, v countedFacts) {
	taken := st.Blocks * 512 // see stat(2)
	c.Allocated += taken
	c.Promised += max(devices.Claim(st.Size, v.overcommit)-taken, 0)
	c.Owed += max(st.Size-taken, 0)
	if v.inline {
		c.Inline += st.Size
	}
}

func (c *Capacity) count(how Provisioning) {
	switch how {
	case Thick:
		c.Thick++
	case Thin:
		c.Thin++
	default:
		c.Damaged++
	}
}

func countedFactsOf(inode uint64, v Volume) countedFacts {
	return countedFacts{inode, v.Provisioning, v.OvercommitPercent, v.Ephemeral != nil}
}

// eachFile looks at the volumes' files below a directory of the pool.
func (p *Pool) eachFile(name string, look func(entry string, st unix.Stat_t)) error {
	dir, err := os.Open(p.path(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	entries, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	fd := int(dir.Fd())
	for _, entry := range entries {
		var st unix.Stat_t
		switch err := unix.Fstatat(fd, entry+"/"+dataFile, &st, unix.AT_SYMLINK_NOFOLLOW); {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		case err != nil:
			return fmt.Errorf("stat %s: %w", p.path(name, entry, dataFile), err)
		case st.Mode&unix.S_IFMT != unix.S_IFREG: // it takes none of the room of volumes
		default:
			look(entry, st)
		}
	}
	return nil
}

// factsForCount returns the facts of the volume that a file belongs to, and reads them if
// no earlier count did. A file without facts counts for all of its size.
func (p *Pool) factsForCount(ctx context.Context, name, entry string, inode uint64) countedFacts {
	if v, ok := p.counted[entry]; ok && v.inode == inode {
		return v
	}
	none := countedFacts{inode: inode, overcommit: devices.NoOvercommit}
	if name != volumesDir {
		return none // its facts are not written yet
	}
	raw, err := p.readFacts(ctx, entry)
	if err != nil {
		return none
	}
	v, err := decode(raw, entry)
	if err != nil {
		return none
	}
	return countedFactsOf(inode, v)
}
