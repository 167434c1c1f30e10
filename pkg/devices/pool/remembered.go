package pool

import (
	"maps"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// remembered are facts as they were read, by the volume's id. They are good for as long
// as the file that they were read from is in its place and unchanged.
type remembered struct {
	mu    sync.Mutex
	facts map[string]rememberedFacts
}

type rememberedFacts struct {
	file fileState
	v    Volume
	raw  []byte
}

// fileState tells a file from any other, and from itself after a change.
type fileState struct {
	device, inode    uint64
	bytes            int64
	changed, written unix.Timespec // ctime and mtime
}

// mostRemembered bounds the memory: a volume that is at work is asked about again
// and again, and one at rest every ten minutes.
const mostRemembered = 64

func fileStateOf(st unix.Stat_t) fileState {
	return fileState{st.Dev, st.Ino, st.Size, st.Ctim, st.Mtim}
}

// stateOf returns the state of an open file.
func stateOf(f *os.File) (fileState, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return fileStateOf(st), wrap(err, "fstat %s", f.Name())
}

// get returns what is known of a volume whose facts are at a path. resolve says how the
// path is resolved (openat2(2)).
func (r *remembered) get(id, path string, resolve uint64) (v Volume, raw []byte, ok bool) {
	r.mu.Lock()
	known, ok := r.facts[id]
	r.mu.Unlock()
	if !ok {
		return v, nil, false
	}
	if now, err := openState(path, resolve); err != nil || now != known.file {
		return v, nil, false
	}
	return known.v, known.raw, true
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

func (r *remembered) put(id string, facts rememberedFacts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.facts == nil {
		r.facts = map[string]rememberedFacts{}
	}
	if len(r.facts) >= mostRemembered {
		for other := range maps.Keys(r.facts) { // any
			delete(r.facts, other)
			break
		}
	}
	r.facts[id] = facts
}

func (r *remembered) forget(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.facts, id)
}
