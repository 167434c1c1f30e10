package pool

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// factsCache holds facts as they were read, by the volume's id. They are valid for as long
// as the file that they were read from is in its place and unchanged.
type factsCache struct {
	mu    sync.Mutex
	facts map[string]cachedFacts
}

type cachedFacts struct {
	file fileState
	v    Volume
	raw  []byte
}

// fileState tells a file from any other, and from itself after a change. Before Linux 6.13
// the kernel counts times in ticks: it does not tell a change by somebody else, to as many
// bytes, in the 10 ms after the last one. The pool's own changes are told by forget.
type fileState struct {
	device, inode    uint64
	bytes            int64
	changed, written unix.Timespec // ctime and mtime
}

// maxCachedFacts bounds the memory. Only volumes at work are asked about often; one at rest
// is asked about every ten minutes.
const maxCachedFacts = 64

func fileStateOf(st unix.Stat_t) fileState {
	return fileState{st.Dev, st.Ino, st.Size, st.Ctim, st.Mtim}
}

// stateOf returns the state of an open file.
func stateOf(f *os.File) (fileState, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return fileStateOf(st), wrap(err, "fstat %s", f.Name())
}

// get returns the facts of a volume if they are in the cache and the file at the path is
// unchanged. resolve says how the path is resolved (openat2(2)).
func (c *factsCache) get(id, path string, resolve uint64) (v Volume, raw []byte, ok bool) {
	c.mu.Lock()
	cached, ok := c.facts[id]
	c.mu.Unlock()
	if !ok {
		return v, nil, false
	}
	if now, err := openState(path, resolve); err != nil || now != cached.file {
		return v, nil, false
	}
	return cached.v, cached.raw, true
}

// openState opens a file for its state: a file system that was shut down still
// answers stat(2), and refuses open(2).
func openState(path string, resolve uint64) (fileState, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: resolve})
	if err != nil {
		return fileState{}, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	return fileStateOf(st), err
}

func (c *factsCache) put(id string, facts cachedFacts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.facts == nil {
		c.facts = map[string]cachedFacts{}
	}
	if len(c.facts) >= maxCachedFacts {
		for other := range c.facts { // any
			delete(c.facts, other)
			break
		}
	}
	c.facts[id] = facts
}

func (c *factsCache) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.facts, id)
}
