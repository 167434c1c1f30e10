package client

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Paths are where a volume is staged and published. Both are absolute.
type Paths struct {
	Staging string
	Target  string
	own     string // the volume's own directory, when the paths are the default ones
}

// DefaultPaths returns kubelet's staging path of a volume (Kubernetes 1.24 and
// later), and a target path beside it. Targets are not in kubelet's pods directory:
// kubelet removes what it finds there of pods that it does not know.
func DefaultPaths(kubeletDir, driver, volume string) Paths {
	sum := sha256.Sum256([]byte(volume))
	own := filepath.Join(kubeletDir, "plugins/kubernetes.io/csi", driver, hex.EncodeToString(sum[:]))
	return Paths{Staging: filepath.Join(own, "globalmount"), Target: filepath.Join(own, "by-hand", "mount"), own: own}
}

// tidyTarget removes the directories that the client created for a publish at the
// default path.
func (p Paths) tidyTarget() error { return p.tidy(filepath.Dir(p.Target)) }

// tidyStaging is tidyTarget for a stage.
func (p Paths) tidyStaging() error { return p.tidy(p.Staging) }

// tidy removes a directory and the volume's own one, if they are empty.
func (p Paths) tidy(dir string) error {
	if p.own == "" || filepath.Dir(dir) != p.own {
		return nil
	}
	return removeEmpty([]string{p.own, dir})
}

// makeDirs creates a directory and its parents, and returns those that did not exist
// before, the highest first.
func makeDirs(path string) ([]string, error) {
	var made []string
	if parent := filepath.Dir(path); parent != path {
		if _, err := os.Lstat(parent); errors.Is(err, fs.ErrNotExist) {
			if made, err = makeDirs(parent); err != nil {
				return made, err
			}
		}
	}
	switch err := os.Mkdir(path, 0o750); {
	case errors.Is(err, fs.ErrExist):
		return made, nil
	case err != nil:
		return made, fmt.Errorf("creating the directories that a caller of CSI creates: %w", err)
	}
	return append(made, path), nil
}

// removeEmpty removes directories, the last first. Those that do not exist or are not
// empty are no error.
func removeEmpty(dirs []string) error {
	for i := len(dirs) - 1; i >= 0; i-- {
		err := syscall.Rmdir(dirs[i])
		if err != nil && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, syscall.EBUSY) {
			return fmt.Errorf("removing the directory %s: %w", dirs[i], err)
		}
	}
	return nil
}
