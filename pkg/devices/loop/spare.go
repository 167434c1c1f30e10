package loop

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// major is that of all loop devices: LOOP_MAJOR in the kernel's
// include/uapi/linux/major.h.
const major = 7

// Spare sets what tells whose publishes show a device number, "" for nobody's.
// Such a number is given to no other volume: what is bound at a target, or was
// made in a pod, is a number only, and would show the other volume's data. It
// must be set before anything is attached; owner is called concurrently.
func (b *Backend) Spare(owner func(state.DeviceNumber) (volume string)) { b.owner = owner }

// spared reports whether the number of a free device is kept for a volume other
// than the one with the tag.
func (b *Backend) spared(n int, tag string) bool {
	if b.owner == nil {
		return false
	}
	volume := b.owner(state.DeviceNumber{Major: major, Minor: uint32(n)})
	return volume != "" && b.tag(volume) != tag
}

// free returns the number of a device that nobody has, for the volume with the
// tag; another process may take it all the same.
func (b *Backend) free(control *os.File, tag string) (int, error) {
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	switch {
	case err != nil:
		return 0, fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
	case !b.spared(n, tag):
		return n, nil
	}
	dirs, err := filepath.Glob(filepath.Join(sysBlock, "loop*")) // the kernel names the lowest one only
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		name := filepath.Base(dir)
		n, err := strconv.Atoi(strings.TrimPrefix(name, "loop"))
		if err == nil && isFree(name) && !b.spared(n, tag) {
			return n, nil
		}
	}
	return b.addUnspared(control, tag)
}

// addUnspared makes devices until one's number is not kept for another volume:
// the kernel gives the lowest that has no device, be its number shown or not.
func (b *Backend) addUnspared(control *os.File, tag string) (int, error) {
	for range attachTries {
		if n, err := add(control); err != nil || !b.spared(n, tag) {
			return n, err
		}
	}
	return 0, fmt.Errorf("LOOP_CTL_ADD: %d numbers in a row are shown to other volumes' pods", attachTries)
}

// over returns the tag of the device with a number, "" when the index has none.
func (b *Backend) over(d state.Device) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, h := range b.hints {
		if h.name == filepath.Base(d.Path) && strings.HasPrefix(key, tagPrefix) {
			return key
		}
	}
	return ""
}
