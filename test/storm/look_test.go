package storm

import (
	"encoding/json"
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

// known returns the answer that tells for sure whether what begins with the
// verb is there: the last OK of the verb or of its opposite that no call of the
// other kind came after, or at the same time, which may have had an effect.
func (v *volume) known(begins verb, path string) (call, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	about := func(c call, verb verb) bool { return c.verb == verb && (begins == create || c.path == path) }
	for _, c := range slices.Backward(v.calls) {
		if c.code != codes.OK || !about(c, begins) && !about(c, opposite[begins]) {
			continue
		}
		contradicted := slices.ContainsFunc(v.calls, func(o call) bool {
			return about(o, opposite[c.verb]) && o.end > c.start && (o.code == codes.OK || !final(o.code))
		})
		if !contradicted {
			return c, true
		}
	}
	return call{}, false
}

// look holds everything that is there against what is known.
func (s *storm) look() {
	s.t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(s.Dir))
	must(s.t, err)
	mounts := map[string][]*mountinfo.Info{}
	for _, info := range infos {
		mounts[info.Mountpoint] = append(mounts[info.Mountpoint], info)
	}
	loops := s.Loops()
	for _, v := range s.volumes {
		s.lookAt(v, mounts, loops)
	}
	for path, stack := range mounts {
		if len(stack) > 1 {
			s.t.Errorf("%d mounts are stacked at %s", len(stack), path)
		}
	}
}

func (s *storm) lookAt(v *volume, mounts map[string][]*mountinfo.Info, loops []harness.Loop) {
	s.t.Helper()
	created := s.generation(v)
	if c, ok := v.known(create, ""); ok && (c.verb == create) != (created != "") {
		s.complain(v, "is there: %t, after %s", created != "", c)
	}
	same := created != "" && created == v.created
	if !same {
		v.created, v.text = created, ""
	}
	device := slices.IndexFunc(loops, func(l harness.Loop) bool { return l.Backing == v.data(s) })
	if device >= 0 && created == "" {
		s.complain(v, "%+v stands for no volume", loops[device])
	}
	if slices.IndexFunc(loops[device+1:], func(l harness.Loop) bool { return l.Backing == v.data(s) }) >= 0 {
		s.complain(v, "it has two devices: %+v", loops)
	}
	ours := func(m *mountinfo.Info) bool {
		return device >= 0 && m.Root == "/" && fmt.Sprintf("%d:%d", m.Major, m.Minor) == number(s, loops[device].Path)
	}
	standing := false
	for _, path := range v.stagings {
		c, ok := v.known(stage, path)
		standing = standing || !ok || c.verb == stage
		switch {
		case !ok:
		case c.verb == unstage && len(mounts[path]) > 0:
			s.complain(v, "%d mounts at %s, after %s", len(mounts[path]), path, c)
		case c.verb == unstage:
			if entries, err := os.ReadDir(path); err != nil || len(entries) > 0 {
				s.complain(v, "%s holds %v (%v), after %s", path, entries, err, c)
			}
		case device < 0 || loops[device].ReadOnly != (c.readOnly || v.readOnlyFlag(c)):
			s.complain(v, "loop devices %+v, after %s", loops, c)
		case v.capability(c.ask).GetMount() != nil && (len(mounts[path]) != 1 || !ours(mounts[path][0]) || mounts[path][0].FSType != v.capability(c.ask).GetMount().GetFsType()):
			s.complain(v, "mounts %+v at %s, after %s", mounts[path], path, c)
		case v.capability(c.ask).GetMount() != nil:
			s.read(v, path)
		}
	}
	if !standing && device >= 0 {
		s.complain(v, "%+v is attached, and nothing is staged", loops[device])
	}
	for _, path := range v.targets {
		c, ok := v.known(publish, path)
		_, err := os.Lstat(path)
		switch {
		case !ok:
		case c.verb == unpublish:
			if len(mounts[path]) > 0 || !errors.Is(err, os.ErrNotExist) {
				s.complain(v, "%d mounts at %s, and a file there (%v), after %s", len(mounts[path]), path, err, c)
			}
		case len(mounts[path]) != 1 || device < 0:
			s.complain(v, "mounts %+v at %s and the device %d of %+v, after %s", mounts[path], path, device, loops, c)
		default:
			s.lookAtTarget(v, c, ours(mounts[path][0]), loops[device])
		}
	}
	size := s.size(v)
	if created != "" && size < v.bytes {
		s.complain(v, "it has only %d bytes", size)
	}
	for _, c := range v.calls {
		if same && c.start > v.looked && c.verb == expand && c.code == codes.OK && size < c.bytes {
			s.complain(v, "it has only %d bytes, after %s", size, c)
		}
	}
	v.looked = time.Since(s.began)
}

// readOnlyFlag reports whether a call asked for a mount that nobody writes to by
// a mount flag, which makes the device of a stage read-only, too.
func (v *volume) readOnlyFlag(c call) bool {
	return v.capability(c.ask).GetMount() != nil && slices.Contains(c.flags, "ro")
}

// lookAtTarget checks a target that is published for sure, and uses it.
func (s *storm) lookAtTarget(v *volume, c call, ours bool, device harness.Loop) {
	s.t.Helper()
	readOnly := c.readOnly || device.ReadOnly
	if v.capability(c.ask).GetMount() != nil {
		var fs unix.Statfs_t
		must(s.t, unix.Statfs(c.path, &fs))
		readOnly = readOnly || v.readOnlyFlag(c)
		if !ours || fs.Flags&unix.ST_RDONLY != 0 != readOnly {
			s.complain(v, "another file system at %s, or another mode (flags %#x), after %s", c.path, fs.Flags, c)
			return
		}
	} else if !s.shows(c.path, device, readOnly) {
		s.complain(v, "another device at %s, after %s", c.path, c)
		return
	}
	if v.fsType == "" && readOnly {
		return // a view has a page cache of its own
	}
	s.read(v, c.path)
	if !readOnly {
		s.write(v, c.path)
	}
}

// shows reports whether the node at a path is that of the device, or of a
// device over it that takes no writes.
func (s *storm) shows(path string, device harness.Loop, readOnly bool) bool {
	s.t.Helper()
	var st unix.Stat_t
	must(s.t, unix.Stat(path, &st))
	at := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	if readOnly == device.ReadOnly {
		return at == number(s, device.Path)
	}
	return slices.ContainsFunc(s.Loops(), func(l harness.Loop) bool {
		return l.Backing == device.Path && l.ReadOnly && at == number(s, l.Path)
	})
}

// number is that of a device node, as mountinfo writes it.
func number(s *storm, path string) string {
	s.t.Helper()
	var st unix.Stat_t
	must(s.t, unix.Stat(path, &st))
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
}

// generation tells volumes of one name apart; "" when there is none.
func (s *storm) generation(v *volume) string {
	s.t.Helper()
	raw, err := os.ReadFile(filepath.Join(s.PoolDir, "volumes", v.name, "volume.json"))
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	must(s.t, err)
	var facts struct{ Created string }
	must(s.t, json.Unmarshal(raw, &facts))
	return facts.Created
}

func (s *storm) size(v *volume) int64 {
	info, err := os.Stat(v.data(s))
	if err != nil {
		return 0
	}
	return info.Size()
}

const textBytes = 4096

// write puts a text of its own into the volume by way of a path.
func (s *storm) write(v *volume, path string) {
	s.t.Helper()
	text := strings.Repeat(fmt.Sprintf("%016x", s.random.Uint64()), textBytes/16)
	file, offset, flags := path, int64(mib), os.O_WRONLY
	if v.fsType != "" {
		file, offset, flags = filepath.Join(path, "text"), 0, os.O_WRONLY|os.O_CREATE
	}
	f, err := os.OpenFile(file, flags, 0o640)
	if err == nil {
		_, err = f.WriteAt([]byte(text), offset)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		s.complain(v, "writing at %s: %v", path, err)
		return
	}
	v.text = text
}

// read looks for the text that was written last.
func (s *storm) read(v *volume, path string) {
	s.t.Helper()
	if v.text == "" {
		return
	}
	file, offset := path, int64(mib)
	if v.fsType != "" {
		file, offset = filepath.Join(path, "text"), 0
	}
	got := make([]byte, textBytes)
	f, err := os.Open(file)
	if err == nil {
		_, err = f.ReadAt(got, offset)
		err = errors.Join(err, f.Close())
	}
	if err != nil || string(got) != v.text {
		s.complain(v, "at %s it reads %.32q (%v), not %.32q", path, got, err, v.text)
	}
}
