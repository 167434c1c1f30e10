package chaos

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// certain returns the answer that decides whether what the verb begins must be there: the
// last OK of the verb or of its opposite, unless a call of the other kind that may have
// had an effect ran at the same time or later. If the store was damaged after that answer,
// it decides only if its call was orderly, for then the plugin adopts what it finds mounted, and
// if no disorderly call came since, of which the plugin does not know any more what it contradicts.
func (m *member) certain(begins verb, path string) (call, bool) {
	m.c.mu.Lock()
	damaged := m.c.damaged
	m.c.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	about := func(c call, verb verb) bool { return c.verb == verb && (begins == create || c.path == path) }
	for _, c := range slices.Backward(m.calls) {
		if c.code != codes.OK || !about(c, begins) && !about(c, opposite[begins]) {
			continue
		}
		since := func(began time.Duration, is func(call) bool) bool { // whether such a call may have had an effect
			return slices.ContainsFunc(m.calls, func(o call) bool {
				return is(o) && o.end > began && (o.code == codes.OK || !harness.Final(o.err))
			})
		}
		contradicted := since(c.start, func(o call) bool { return about(o, opposite[c.verb]) })
		remembered := c.start > damaged || c.orderly(m) && !since(damaged, func(o call) bool { return opposite[o.verb] != "" && !o.orderly(m) })
		if !contradicted && remembered {
			return c, true
		}
	}
	return call{}, false
}

// dropUncertain keeps only the calls that decide what must be there. No call is under way.
func (m *member) dropUncertain() {
	var keep []call
	add := func(begins verb, path string) {
		if c, ok := m.certain(begins, path); ok {
			keep = append(keep, c)
		}
	}
	add(create, "")
	for _, path := range m.stagings {
		add(stage, path)
	}
	for _, path := range m.targets {
		add(publish, path)
	}
	m.calls = keep
}

// judgePart compares a stage or a target with the answer that decides about it.
func (m *member) judgePart(a ask) {
	m.T.Helper()
	c, ok := m.certain(a.verb, a.path)
	if !ok {
		return
	}
	if there := c.verb == a.verb; a.verb == stage && m.capability(c.ask).GetBlock() != nil {
		if devices := m.Devices(); there != (len(devices) == 1) {
			m.complain("devices %+v, after %s", devices, c)
		}
	} else if n := len(mountsOf(m.T, m.Plugin)[a.path]); there != (n == 1) || !there && n > 0 {
		m.complain("%d mounts at %s, after %s", n, a.path, c)
	}
	if c.verb == unpublish {
		if _, err := os.Lstat(a.path); !errors.Is(err, os.ErrNotExist) {
			m.complain("%s is there (%v), after %s", a.path, err, c)
		}
	}
}

// judge compares everything that is there with the answers that decide about it.
func (c *chaos) judge() {
	c.t.Helper()
	mounts, loops, formats := mountsOf(c.t, c.Plugin), c.Loops(), c.mkfs.runs()
	paths := map[string]bool{}
	for _, m := range c.fleet {
		m.judge(mounts, loops, formats)
		m.dropUncertain()
		for _, path := range slices.Concat(m.stagings, m.targets) {
			paths[path] = true
		}
	}
	for _, s := range c.scenes {
		for _, v := range []*volume{s.victim, s.other} {
			for _, path := range append(v.targets[:len(v.targets):len(v.targets)], v.Staging) {
				paths[path] = true
			}
		}
	}
	for path, stack := range mounts {
		if len(stack) > 1 || !paths[path] {
			c.t.Errorf("%d mounts are stacked at %s, where something was asked for: %t", len(stack), path, paths[path])
		}
	}
	c.mkfs.check()
}

func (m *member) judge(mounts mountTable, loops []harness.Loop, formats map[string][]mkfsRun) {
	m.T.Helper()
	created := m.generation()
	if c, ok := m.certain(create, ""); ok && (c.verb == create) != (created != "") {
		m.complain("is there: %t, after %s", created != "", c)
	}
	same := created != "" && created == m.created
	if !same {
		m.created, m.text, m.formats = created, "", 0
	}
	device := slices.IndexFunc(loops, func(l harness.Loop) bool { return l.Backing == m.Data() })
	if device >= 0 && created == "" {
		m.complain("%+v stands for no volume", loops[device])
	}
	if slices.IndexFunc(loops[device+1:], func(l harness.Loop) bool { return l.Backing == m.Data() }) >= 0 {
		m.complain("it has two devices: %+v", loops)
	}
	ours := func(i *mountinfo.Info) bool {
		return device >= 0 && i.Root == "/" && fmt.Sprintf("%d:%d", i.Major, i.Minor) == numberOf(m.T, loops[device].Path)
	}
	mayBeStaged := false
	for _, path := range m.stagings {
		c, ok := m.certain(stage, path)
		mayBeStaged = mayBeStaged || !ok || c.verb == stage
		mount := m.capability(c.ask).GetMount()
		switch {
		case !ok:
		case c.verb == unstage && len(mounts[path]) > 0:
			m.complain("%d mounts at %s, after %s", len(mounts[path]), path, c)
		case c.verb == unstage:
			if entries, err := os.ReadDir(path); err != nil || len(entries) > 0 {
				m.complain("%s holds %v (%v), after %s", path, entries, err, c)
			}
		case device < 0 || loops[device].ReadOnly != (c.readOnly || m.readOnlyFlag(c)):
			m.complain("loop devices %+v, after %s", loops, c)
		case mount != nil && (len(mounts[path]) != 1 || !ours(mounts[path][0]) || mounts[path][0].FSType != mount.GetFsType()):
			m.complain("mounts %+v at %s, after %s", mounts[path], path, c)
		case mount != nil:
			if m.inOrder(c) {
				m.read(path)
			}
			m.lookAtFormats(formats[created])
		}
	}
	if !mayBeStaged && device >= 0 {
		m.complain("%+v is attached, and nothing is staged", loops[device])
	}
	for _, path := range m.targets {
		c, ok := m.certain(publish, path)
		_, err := os.Lstat(path)
		switch {
		case !ok:
		case c.verb == unpublish:
			if len(mounts[path]) > 0 || !errors.Is(err, os.ErrNotExist) {
				m.complain("%d mounts at %s, and a file there (%v), after %s", len(mounts[path]), path, err, c)
			}
		case len(mounts[path]) != 1 || device < 0:
			m.complain("mounts %+v at %s and the device %d of %+v, after %s", mounts[path], path, device, loops, c)
		default:
			m.lookAtTarget(c, ours(mounts[path][0]), loops[device])
		}
	}
	size := m.size()
	if created != "" && size < m.bytes {
		m.complain("it has only %d bytes", size)
	}
	for _, c := range m.calls {
		if same && c.start > m.judged && c.verb == expand && c.code == codes.OK && size < c.bytes {
			m.complain("it has only %d bytes, after %s", size, c)
		}
	}
	m.judged = m.c.now()
}

// lookAtFormats fails the test if mkfs was run again once the volume was mounted.
func (m *member) lookAtFormats(runs []mkfsRun) {
	m.T.Helper()
	if m.formats == 0 {
		m.formats = len(runs)
	}
	if len(runs) == 0 || len(runs) != m.formats {
		m.complain("mkfs was run %d times, and %d times before it was first mounted: %+v", len(runs), m.formats, runs)
	}
}

// readOnlyFlag reports whether a call asked for a mount that nobody writes to by
// a mount flag, which makes the device of a stage read-only, too.
func (m *member) readOnlyFlag(c call) bool {
	return m.capability(c.ask).GetMount() != nil && slices.Contains(c.flags, "ro")
}

// lookAtTarget checks a target that is published for sure, and uses it.
func (m *member) lookAtTarget(c call, ours bool, device harness.Loop) {
	m.T.Helper()
	readOnly := c.readOnly || device.ReadOnly
	if m.capability(c.ask).GetMount() != nil {
		var fs unix.Statfs_t
		must(m.T, unix.Statfs(c.path, &fs))
		readOnly = readOnly || m.readOnlyFlag(c)
		if !ours || fs.Flags&unix.ST_RDONLY != 0 != readOnly {
			m.complain("another file system at %s, or another mode (flags %#x), after %s", c.path, fs.Flags, c)
			return
		}
	} else if !m.shows(c.path, device, readOnly) {
		m.complain("another device at %s, after %s", c.path, c)
		return
	}
	if m.inOrder(c) && !(m.fsType == "" && readOnly) { // a view has a page cache of its own
		m.read(c.path)
		if !readOnly {
			m.write(c.path)
		}
	}
}

// inOrder reports whether a call asks for raw bytes of a raw volume, or for files of
// another.
func (m *member) inOrder(c call) bool {
	return (m.capability(c.ask).GetBlock() != nil) == (m.fsType == "")
}

// shows reports whether the node at a path is that of the device, or of a
// device over it that takes no writes.
func (m *member) shows(path string, device harness.Loop, readOnly bool) bool {
	m.T.Helper()
	var st unix.Stat_t
	must(m.T, unix.Stat(path, &st))
	at := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	if readOnly == device.ReadOnly {
		return at == numberOf(m.T, device.Path)
	}
	return slices.ContainsFunc(m.Loops(), func(l harness.Loop) bool {
		return l.Backing == device.Path && l.ReadOnly && at == numberOf(m.T, l.Path)
	})
}

// generation tells volumes of one name apart; "" when there is none.
func (m *member) generation() string {
	m.T.Helper()
	if facts := m.facts(); facts != nil {
		return facts.Created
	}
	return ""
}

func (m *member) size() int64 {
	info, err := os.Stat(m.Data())
	if err != nil {
		return 0
	}
	return info.Size()
}

const textBytes = 4096

// write puts a text of its own into the volume by way of a path.
func (m *member) write(path string) {
	m.T.Helper()
	text := strings.Repeat(fmt.Sprintf("%016x", m.c.random.Uint64()), textBytes/16)
	file, offset, flags := path, int64(mib), os.O_WRONLY
	if m.fsType != "" {
		file, offset, flags = filepath.Join(path, "text"), 0, os.O_WRONLY|os.O_CREATE
	}
	f, err := os.OpenFile(file, flags, 0o640)
	if err == nil {
		_, err = f.WriteAt([]byte(text), offset)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		m.complain("writing at %s: %v", path, err)
		return
	}
	m.text = text
}

// read looks for the text that was written last.
func (m *member) read(path string) {
	m.T.Helper()
	if m.text == "" {
		return
	}
	file, offset := path, int64(mib)
	if m.fsType != "" {
		file, offset = filepath.Join(path, "text"), 0
	}
	got := make([]byte, textBytes)
	f, err := os.Open(file)
	if err == nil {
		_, err = f.ReadAt(got, offset)
		err = errors.Join(err, f.Close())
	}
	if err != nil || string(got) != m.text {
		m.complain("at %s it reads %.32q (%v), not %.32q", path, got, err, m.text)
	}
}
