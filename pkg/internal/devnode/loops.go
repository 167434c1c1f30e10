package devnode

import (
	"iter"
	"os"
	"path/filepath"
	"strings"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// Loops yields the names of the loop devices that show something, and the path of that as
// the kernel tells it. It opens none of them: that would keep one which is being detached.
func Loops() iter.Seq2[string, string] {
	return func(yield func(name, backing string) bool) {
		block, err := os.Open("/sys/block")
		if err != nil {
			return
		}
		defer block.Close()
		names, _ := block.Readdirnames(-1) // those that come before an error
		for _, name := range names {
			if !strings.HasPrefix(name, "loop") {
				continue
			}
			backing, err := rawfile.Read(filepath.Join("/sys/block", name, "loop/backing_file"))
			if err == nil && !yield(name, strings.TrimSuffix(string(backing), "\n")) { // else it shows nothing
				return
			}
		}
	}
}
