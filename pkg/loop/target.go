package loop

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/lease"
	"github.com/csi-node/csi-node/pkg/state"
)

// Target is what a device is to show.
type Target struct {
	// Tag is that of the plugin's own device.
	Tag string
	// File is the file that the device is to show, at Path; nil when there is none, or
	// it is not known: then a device is recognised by its tag alone.
	File *File
	Path string
	// Place is a part of the path that no other path has, wherever the file system is
	// mounted. A device that does not answer may be the target's only if its backing's
	// name has it.
	Place string

	over state.DeviceNumber // what a view shows
}

// ViewOf returns what a read-only view of a block device is to show.
func ViewOf(device state.DeviceNumber) Target { return Target{Tag: viewTag, over: device} }

func (t Target) isView() bool { return t.Tag == viewTag }

// key is the key of the target's device in the index.
func (t Target) key() string {
	if t.isView() {
		return viewTag + " of " + t.over.String()
	}
	return t.Tag
}

// Owns reports whether the plugin attached a device, which Recall or Current returned, for the
// target.
func (t Target) Owns(d *Device) bool {
	if t.isView() {
		return d.isView() && d.over() == t.over
	}
	return d.Tag() == t.Tag && d.showsAll()
}

// mayBeAt reports whether a device whose backing has a name in sysfs may show an earlier
// file of the target.
func (t Target) mayBeAt(backing string) bool {
	return backing == "" || t.Place == "" || strings.Contains(backing, t.Place)
}

// isFor reports whether a target is that of a volume, by its tag.
func (t Target) isFor(volume string) bool {
	place, _, _ := strings.Cut(strings.TrimPrefix(t.Tag, tagPrefix), ":")
	return t.Tag == Tag(place, volume)
}

// is accepts the plugin's device, and any other over the file.
func (t Target) is(d *Device) bool { return t.Owns(d) || t.File != nil && d.File() == t.File.ID }

// mayShow reports whether a device that does not answer may be the target's, by the name
// of its backing, which is "" if sysfs does not tell it.
func (t Target) mayShow(backing string) bool {
	if t.isView() { // by the last name: the path depends on who attached it, and where
		number, err := devnode.ReadNumber(filepath.Join(sysClass, filepath.Base(strings.TrimSuffix(backing, deleted)), "dev"))
		return backing == "" || err == nil && number == t.over
	}
	return t.Place != "" && strings.Contains(backing, t.Place)
}

// deleted is what sysfs appends to the path of a deleted file.
const deleted = " (deleted)"

// candidates describes the devices that do not answer and may be the target's.
func (t Target) candidates(silent []string) (maybe []string) {
	if len(silent) == 0 {
		return nil
	}
	unopened := t.nobodyHasItOpen()
	for _, name := range silent {
		backing := backingOf(name)
		switch {
		case t.File != nil && !unopened:
		case !t.mayShow(backing):
			continue
		case unopened && !strings.HasSuffix(backing, deleted): // of the same name in another place
			continue
		}
		maybe = append(maybe, fmt.Sprintf("/dev/%s (backing %s)", name, state.Plain(backing)))
	}
	return maybe
}

// nobodyHasItOpen reports whether a lease proves that nobody, not even a device, has the
// file open. For that it opens the file itself, for microseconds.
func (t Target) nobodyHasItOpen() bool {
	if t.File == nil {
		return false
	}
	f, err := OpenFile(t.Path, t.File.ID, os.O_RDONLY)
	if err != nil {
		return false
	}
	defer f.Close()
	alone, err := lease.Alone(f)
	return alone && err == nil
}
