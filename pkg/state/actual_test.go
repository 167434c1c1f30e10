package state

import (
	"slices"
	"testing"
)

func TestMountIs(t *testing.T) {
	seven := DeviceNumber{Major: 7}
	for _, test := range []struct {
		mount  Mount
		device DeviceNumber
		want   bool
	}{
		{Mount{Device: seven, Root: "/"}, seven, true},
		{Mount{Device: seven, Root: "/sub"}, seven, false},
		{Mount{Device: seven, Root: "/loop0", Node: true}, seven, true},
		{Mount{Device: seven, Root: "/"}, DeviceNumber{Major: 8}, false},
		{Mount{Root: "/"}, DeviceNumber{}, false},
	} {
		if test.mount.Is(test.device) != test.want {
			t.Errorf("%+v is %s: %v", test.mount, test.device, !test.want)
		}
	}
}

func TestSourceIs(t *testing.T) {
	source := &Source{FSType: "nfs4", Source: "server:/export"}
	for _, test := range []struct {
		mount Mount
		want  bool
	}{
		{Mount{FSType: "nfs4", Source: "server:/export", Root: "/"}, true},
		{Mount{FSType: "nfs4", Source: "server:/export", Root: "/", Device: DeviceNumber{Minor: 50}}, true},
		{Mount{FSType: "nfs4", Source: "server:/export", Root: "/sub"}, false},
		{Mount{FSType: "nfs4", Source: "server:/other", Root: "/"}, false},
		{Mount{FSType: "tmpfs", Source: "server:/export", Root: "/"}, false},
		{Mount{FSType: "nfs4", Source: "server:/export", Root: "/", Node: true}, false},
	} {
		if source.Is(test.mount) != test.want {
			t.Errorf("%+v is %+v: %v", test.mount, *source, !test.want)
		}
	}
	if (*Source)(nil).Is(Mount{Root: "/"}) {
		t.Error("no source is a source")
	}
}

// TestDeviceStateNames: a backend may return any.
func TestDeviceStateNames(t *testing.T) {
	for s, want := range map[DeviceState]string{DeviceUnknown: "unknown", DeviceForeign: "foreign", 99: "DeviceState(99)", -1: "DeviceState(-1)"} {
		if got := s.String(); got != want {
			t.Errorf("%d is %q, not %q", int(s), got, want)
		}
	}
}

func TestMountpoints(t *testing.T) {
	var seen Mountpoints
	for _, path := range []string{"/b", "/c", "/a"} {
		seen.Set(path, Mountpoint{File: Directory})
	}
	seen.Set("/c", Mountpoint{File: NoFile})
	var all []string
	for path, m := range seen.All() {
		all = append(all, path+": "+m.File.String())
	}
	if want := []string{"/a: a directory", "/b: a directory", "/c: nothing"}; !slices.Equal(all, want) {
		t.Errorf("all are %q, not %q", all, want)
	}
	for path, want := range map[string]FileType{"/a": Directory, "/c": NoFile, "/d": UnknownFile, "": UnknownFile} {
		if m := seen.At(path); m.File != want {
			t.Errorf("at %q is %s, not %s", path, m.File, want)
		}
	}
}
