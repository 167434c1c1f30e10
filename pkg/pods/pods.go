// Package pods finds out, from kubelet's directory, whether the pod that a target path
// belongs to is gone. Directory.Gone is all of it.
package pods

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Directory is kubelet's directory of pods. Its methods may be called
// concurrently; they block for as long as its file system does.
type Directory struct {
	roots []string // spellings of kubelet's directory

	mu     sync.Mutex
	device uint64 // that the directory pods/ was on when it was first seen; 0: not seen yet
}

// New returns the Directory below kubelet's directory, an absolute path. Paths
// may be written with it as it is given here or without its symbolic links.
func New(kubeletDir string) (*Directory, error) {
	real, err := filepath.EvalSymlinks(kubeletDir)
	if err != nil {
		return nil, err
	}
	d := &Directory{roots: []string{filepath.Clean(kubeletDir), real}}
	d.trusted()
	return d, nil
}

// Gone reports whether the pod of a target path is known not to exist any more:
// its directory does not exist, while the directory of all pods is the one that was
// first seen, and holds others. A path that names no pod is not gone, and neither is
// one that cannot be looked at.
func (d *Directory) Gone(target string) bool {
	uid := d.uid(target)
	if uid == "" || d.seen() && d.has(uid) { // which nearly all are: a single look
		return false
	}
	return d.trusted() && !d.has(uid)
}

// has reports whether a pod has a directory, or may have one.
func (d *Directory) has(uid string) bool {
	_, err := os.Lstat(filepath.Join(d.pods(), uid))
	return !errors.Is(err, os.ErrNotExist)
}

// seen reports whether the directory of all pods was seen before.
func (d *Directory) seen() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.device != 0
}

func (d *Directory) pods() string { return filepath.Join(d.roots[1], "pods") }

// uid returns the pod's uid in either form of a target path, "" in others:
//
//	pods/<uid>/volumes/…
//	plugins/kubernetes.io/csi/volumeDevices/publish/<volume>/<uid>
func (d *Directory) uid(target string) string {
	for _, root := range d.roots {
		rel, below := strings.CutPrefix(target, strings.TrimSuffix(root, "/")+"/")
		if !below {
			continue
		}
		if names := strings.Split(rel, "/"); len(names) > 3 && names[0] == "pods" && names[2] == "volumes" {
			return names[1]
		}
		block, below := strings.CutPrefix(rel, "plugins/kubernetes.io/csi/volumeDevices/publish/")
		if names := strings.Split(block, "/"); below && len(names) == 2 {
			return names[1]
		}
	}
	return ""
}

// trusted reports whether the directory of all pods is the one that was first seen, and is
// not empty. Otherwise a disk that is not mounted would make every pod look gone.
func (d *Directory) trusted() bool {
	f, err := os.Open(d.pods())
	if err != nil {
		return false
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.device == 0 {
		d.device = st.Dev
	}
	names, err := f.Readdirnames(1)
	return err == nil && len(names) > 0 && d.device == st.Dev
}
