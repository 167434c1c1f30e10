package luks

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// tree is a directory as sysfs, with devices of the device mapper.
type tree struct {
	t       *testing.T
	dir     string
	numbers map[string]state.DeviceNumber
}

func newTree(t *testing.T) *tree {
	return &tree{t, t.TempDir(), map[string]state.DeviceNumber{}}
}

func (s *tree) mappers() mappers {
	return mappers{sysfs: s.dir, number: func(name string) (state.DeviceNumber, bool, error) {
		n, there := s.numbers[name]
		return n, there, nil
	}}
}

func (s *tree) file(text string, path ...string) {
	s.t.Helper()
	name := filepath.Join(append([]string{s.dir}, path...)...)
	require.NoError(s.t, os.MkdirAll(filepath.Dir(name), 0o755))
	require.NoError(s.t, os.WriteFile(name, []byte(text+"\n"), 0o644))
}

// add adds a device that stands on others, by name and number.
func (s *tree) add(minor int, name, uuid, suspended string, readOnly int, slaves map[string]string) {
	s.t.Helper()
	block, n := "dm-"+strconv.Itoa(minor), state.DeviceNumber{Major: 253, Minor: uint32(minor)}
	for file, text := range map[string]string{"dm/name": name, "dm/uuid": uuid, "dm/suspended": suspended, "ro": strconv.Itoa(readOnly), "size": "131072"} {
		s.file(text, "devices", block, file)
	}
	require.NoError(s.t, os.Mkdir(filepath.Join(s.dir, "devices", block, "slaves"), 0o755))
	for slave, number := range slaves {
		s.file(number, "devices", block, "slaves", slave, "dev")
	}
	link := filepath.Join(s.dir, "dev/block", n.String())
	require.NoError(s.t, os.MkdirAll(filepath.Dir(link), 0o755))
	require.NoError(s.t, os.Symlink("../../devices/"+block, link))
	s.numbers[name] = n
}

func TestDeviceOfTheMapper(t *testing.T) {
	l := New()
	l.owner = "driver"
	v := devices.Volume{ID: "v"}
	name := l.device(v)
	good := "CRYPT-LUKS2-" + strings.ReplaceAll(someUUID, "-", "") + "-" + name
	loop := map[string]string{"loop3": "7:3"}
	lower := state.Device{State: state.DeviceDetaching, Number: state.DeviceNumber{Major: 7, Minor: 3}} // whose header is not read
	for title, row := range map[string]struct {
		uuid, suspended string
		readOnly        int
		slaves          map[string]string
		lower           state.Device
		want            state.DeviceState
		stray           bool
		holder          string
		unknown         bool
	}{
		"open":                   {good, "0", 0, loop, lower, state.DeviceAttached, false, "", false},
		"open, read-only":        {good, "0", 1, loop, lower, state.DeviceAttached, false, "", false},
		"suspended":              {good, "1", 0, loop, lower, state.DeviceAttached, false, "", true},
		"on another":             {good, "0", 0, map[string]string{"loop4": "7:4"}, lower, state.DeviceForeign, true, "/dev/loop4", false},
		"on two":                 {good, "0", 0, map[string]string{"loop3": "7:3", "loop4": "7:4"}, lower, state.DeviceForeign, true, "/dev/loop3, /dev/loop4", false},
		"on nothing":             {good, "0", 0, nil, lower, state.DeviceForeign, true, "nothing", false},
		"the lower is gone":      {good, "0", 0, loop, state.Device{State: state.DeviceAbsent}, state.DeviceForeign, true, "/dev/loop3", false},
		"the lower is not known": {good, "0", 0, loop, state.Device{}, state.DeviceForeign, true, "/dev/loop3", false},
		"no LUKS":                {"LVM-" + name, "0", 0, loop, lower, state.DeviceForeign, false, "no LUKS2 device", false},
		"LUKS of another name":   {good + "x", "0", 0, loop, lower, state.DeviceForeign, false, "no LUKS2 device", false},
		"LUKS1":                  {strings.Replace(good, "LUKS2", "LUKS1", 1), "0", 0, loop, lower, state.DeviceForeign, false, "no LUKS2 device", false},
		"without any UUID":       {"", "0", 0, loop, lower, state.DeviceForeign, false, "no LUKS2 device", false},
		"a UUID that is cut off": {"CRYPT-LUKS2--" + name, "0", 0, loop, lower, state.DeviceForeign, false, "no LUKS2 device", false},
	} {
		s := newTree(t)
		s.add(1, "another", "LVM-x", "0", 0, nil)
		s.add(2, name, row.uuid, row.suspended, row.readOnly, row.slaves)
		l.mappers = s.mappers()
		d, err := l.Find(t.Context(), row.lower, v)
		if err != nil || d.State != row.want || d.Stray != row.stray || d.Path != "/dev/dm-2" || d.Number != s.numbers[name] || d.Size != 64<<20 || d.ReadOnly != (row.readOnly == 1) {
			t.Errorf("%s: %+v (%v)", title, d, err)
		}
		if !strings.Contains(d.Holder, row.holder) || (d.Holder == "") != (row.holder == "") || (d.Err != nil) != row.unknown {
			t.Errorf("%s: holder %q, %v", title, d.Holder, d.Err)
		}
	}
}

func TestNoDeviceOfTheMapper(t *testing.T) {
	s, l := newTree(t), New()
	l.mappers = s.mappers()
	for range 2 {
		if d, err := l.Find(t.Context(), state.Device{State: state.DeviceAbsent}, devices.Volume{ID: "v"}); err != nil || d.State != state.DeviceAbsent || d.Unmade || d.Fresh || !d.NeedsSecret {
			t.Errorf("%+v (%v)", d, err)
		}
		s.numbers[l.device(devices.Volume{ID: "v"})] = state.DeviceNumber{Major: 253, Minor: 9} // and is gone again when sysfs is asked
		l.mappers.number = func() func(string) (state.DeviceNumber, bool, error) {
			asked := 0
			return func(name string) (state.DeviceNumber, bool, error) {
				asked++
				return s.numbers[name], asked == 1, nil
			}
		}()
	}
	// Another device has the number by then: that is not the volume's.
	s.add(9, "another", "LVM-x", "0", 0, nil)
	l.mappers = s.mappers()
	if _, err := l.Find(t.Context(), state.Device{State: state.DeviceAbsent}, devices.Volume{ID: "v"}); err == nil {
		t.Error("a device of another name is the volume's, or none is")
	}
}
