package devnode

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// Loops returns the loop devices that show something, by name, and the path of that as the
// kernel tells it. It opens none of them: that would keep one which is being detached. With an
// error some may be missing.
func Loops() (loops map[string]string, err error) {
	block, err := os.Open("/sys/block")
	if err != nil {
		return nil, err
	}
	defer block.Close()
	names, err := block.Readdirnames(-1) // those that come before an error
	loops = map[string]string{}
	for _, name := range names {
		if !strings.HasPrefix(name, "loop") {
			continue
		}
		backing, readErr := rawfile.Read(filepath.Join("/sys/block", name, "loop/backing_file"))
		switch {
		case readErr == nil:
			loops[name] = strings.TrimSuffix(string(backing), "\n")
		case errors.Is(readErr, os.ErrNotExist), errors.Is(readErr, unix.ENODEV): // it shows nothing
		case errors.Is(readErr, unix.ENAMETOOLONG): // a file in a page of directories, and so no node in /dev
		default:
			err = errors.Join(err, readErr)
		}
	}
	return loops, err
}
