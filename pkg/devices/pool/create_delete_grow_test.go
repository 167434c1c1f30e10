package pool

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var ok, wantError, run = require.NoError, require.Class, machine.Command

const mib = 1 << 20

func newDir(t testing.TB) string { return filepath.Join(t.TempDir(), "pool") }

func open(t testing.TB, dir string) *Pool {
	t.Helper()
	p, err := Open(dir)
	ok(t, err)
	p.sweep(t.Context())
	return p
}

// small opens a pool on a file system of its own of so many bytes.
func small(t testing.TB, bytes int64) *Pool {
	t.Helper()
	dir := newDir(t)
	mountTmpfs(t, dir, bytes)
	return open(t, dir)
}

func mountTmpfs(t testing.TB, dir string, bytes int64) (unmount func()) {
	t.Helper()
	machine.Kernel(t)
	ok(t, os.MkdirAll(dir, 0o700))
	ok(t, unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)))
	mounted := true
	unmount = func() {
		if mounted {
			mounted = false
			if err := machine.Unmount(dir); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(unmount)
	return unmount
}

func create(t testing.TB, p *Pool, id string, bytes int64, how Provisioning) Volume {
	t.Helper()
	v, err := p.Create(t.Context(), volume(id, bytes, how))
	ok(t, err)
	return v
}

func volume(id string, bytes int64, how Provisioning) Volume {
	return Volume{ID: id, Name: id, Bytes: bytes, Provisioning: how}
}

// files returns the paths of all files below dir, relative to it.
func files(t testing.TB, dir string) []string {
	t.Helper()
	var found []string
	ok(t, filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			if strings.HasPrefix(entry.Name(), slotFile+"~") { // the name that an open Pool gives it
				path = filepath.Join(filepath.Dir(path), slotFile)
			}
			found = append(found, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	}))
	return found
}

func write(t testing.TB, path, text string) {
	t.Helper()
	ok(t, os.MkdirAll(filepath.Dir(path), 0o700))
	ok(t, os.WriteFile(path, []byte(text), 0o600))
}

func TestID(t *testing.T) {
	long := strings.Repeat("x", 129)
	ids := map[string]bool{}
	for name, want := range map[string]string{
		"pvc-6f9619ff-8b86-d011-b42d-00cf4fc964ff": "pvc-6f9619ff-8b86-d011-b42d-00cf4fc964ff",
		"a": "a", "9.b_c-9": "9.b_c-9", long[1:]: long[1:],
		"": "", long: "", "../x": "", ".x": "", "a..b": "", "a/b": "", "ä": "", "a b": "", "a\n": "", "-a": "", "a\x00": "", "a~b": "",
	} {
		id := ID(name)
		if want != "" && id != want || ValidateID(id) != nil || id != ID(name) || ids[id] {
			t.Errorf("ID(%q) = %q", name, id)
		}
		if err := ValidateID(name); (err == nil) != (want != "") || err != nil && state.ClassOf(err) != state.InvalidArgument {
			t.Errorf("ValidateID(%q): %v", name, err)
		}
		ids[id] = true
	}
}

// TestIDsOfTwoNames: they are never the same, not even to a file system that
// tells no capitals from small letters.
func TestIDsOfTwoNames(t *testing.T) {
	names := map[string]bool{"": true}
	for _, seed := range []string{"pvc-1", "PVC-1", "a/b", "..", "\x00", "\xff\xfe", "Å", "A\u030a", "ſ", "K", "CON", "vol-", "a b\n", strings.Repeat("x", 128), strings.Repeat("x", 129)} {
		for range 4 { // a name, its id, the id of its id, …
			for _, name := range []string{seed, strings.ToUpper(seed), seed + "~", seed + ".", "." + seed, seed + "/", seed + "\x00"} {
				names[name] = true
			}
			seed = ID(seed)
		}
	}
	ids := map[string]string{}
	for name := range names {
		id := ID(name)
		if other, taken := ids[strings.ToLower(id)]; taken {
			t.Errorf("%q and %q have the id %s", name, other, id)
		}
		ids[strings.ToLower(id)] = name
	}
}

func TestCreate(t *testing.T) {
	for _, how := range []Provisioning{Thick, Thin} {
		t.Run(string(how), func(t *testing.T) {
			p := open(t, newDir(t))
			asked := Volume{ID: "v", Name: "name of v", Bytes: 8*mib - 5, Provisioning: how, FSType: "xfs", SectorBytes: 4096, Formatted: "ignored", Formatting: true}
			made, err := p.Create(t.Context(), asked)
			ok(t, err)
			if made.Bytes != 8*mib || made.Formatting || made.Formatted != "" || made.Created.IsZero() || made.Version != 1 || made.FSType != "xfs" || made.SectorBytes != 4096 || made.OvercommitPercent != devices.NoOvercommit {
				t.Errorf("made %+v", made)
			}
			path, err := p.DataPath("v")
			ok(t, err)
			info, err := os.Stat(path)
			ok(t, err)
			if a := machine.Allocated(t, path); info.Size() != 8*mib || how == Thick && a < 8*mib || how == Thin && a > mib {
				t.Errorf("%d bytes, %d allocated", info.Size(), a)
			}
			again, err := p.Create(t.Context(), asked)
			ok(t, err)
			got, err := open(t, p.dir).Get(t.Context(), "v")
			ok(t, err)
			for _, v := range []Volume{again, got} {
				if !v.Created.Equal(made.Created) || v.Bytes != made.Bytes || v.Name != made.Name {
					t.Errorf("%+v, made %+v", v, made)
				}
			}
			if left := files(t, p.dir); len(left) != 4 {
				t.Errorf("files %q", left)
			}
		})
	}
}

func TestCreateOfOtherAttributesShowsTheExisting(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thin)
	for name, change := range map[string]func(*Volume){
		"name":         func(v *Volume) { v.Name = "other" },
		"size":         func(v *Volume) { v.Bytes *= 2 },
		"provisioning": func(v *Volume) { v.Provisioning = Thick },
		"fs type":      func(v *Volume) { v.FSType = "xfs" },
		"overcommit":   func(v *Volume) { v.OvercommitPercent = 150 },
		"sectors":      func(v *Volume) { v.SectorBytes = 4096 },
	} {
		v := volume("v", mib, Thin)
		change(&v)
		have, err := p.Create(t.Context(), v)
		wantError(t, err, state.AlreadyExists, "v", fmt.Sprint(mib))
		if have.Name != "v" || have.Bytes != mib {
			t.Errorf("%s: %+v", name, have)
		}
	}
	v := volume("v", mib, Thin)
	v.SectorBytes = 512 // the default, as older versions noted it if it was spelled out
	if _, err := p.Create(t.Context(), v); err != nil {
		t.Errorf("with the default sectors: %v", err)
	}
}

// A deletion that was cut short after the data is ended before the volume is made again.
func TestCreateOfAHalfDeletedVolume(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thin)
	ok(t, os.Remove(p.path(volumesDir, "v", dataFile)))
	for _, bytes := range []int64{mib, 2 * mib} {
		if _, err := p.Create(t.Context(), volume("v", bytes, Thin)); state.ClassOf(err) != state.Aborted || !strings.Contains(err.Error(), "Delete the volume before") {
			t.Errorf("%d bytes: %v", bytes, err)
		}
	}
	ok(t, p.Delete(t.Context(), "v"))
	create(t, p, "v", mib, Thin)
}

func TestCreateRefuses(t *testing.T) {
	p := open(t, newDir(t))
	for name, test := range map[string]struct {
		v     Volume
		class state.Class
	}{
		"no size":      {volume("v", 0, Thin), state.InvalidArgument},
		"negative":     {volume("v", -1, Thin), state.InvalidArgument},
		"bad id":       {volume("../v", mib, Thin), state.InvalidArgument},
		"provisioning": {volume("v", mib, "fat"), state.InvalidArgument},
		"overcommit":   {Volume{ID: "v", Bytes: mib, Provisioning: Thin, OvercommitPercent: 99}, state.InvalidArgument},
		"more":         {Volume{ID: "v", Bytes: mib, Provisioning: Thin, OvercommitPercent: devices.MaxOvercommit + 1}, state.InvalidArgument},
		"of thick":     {Volume{ID: "v", Bytes: mib, Provisioning: Thick, OvercommitPercent: 101}, state.InvalidArgument},
		"sectors":      {Volume{ID: "v", Bytes: mib, Provisioning: Thin, SectorBytes: 1024}, state.InvalidArgument},
		"largest":      {volume("v", 1<<63-1, Thin), state.OutOfRange},
		"thin, full":   {volume("v", 1<<55, Thin), state.ResourceExhausted},
		"thick, full":  {volume("v", 1<<55, Thick), state.ResourceExhausted},
	} {
		_, err := p.Create(t.Context(), test.v)
		if state.ClassOf(err) != test.class || err == nil {
			t.Errorf("%s: %v, want %s", name, err, test.class)
		}
	}
	if left := files(t, p.dir); !slices.Equal(left, []string{markerFile}) {
		t.Errorf("files left: %q", left)
	}
}

func TestDelete(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thick)
	create(t, p, "v.v", mib, Thin)
	for range 2 {
		ok(t, p.Delete(t.Context(), "v"))
		_, err := p.Get(t.Context(), "v")
		wantError(t, err, state.NotFound, "v")
	}
	wantError(t, p.Delete(t.Context(), ".."), state.InvalidArgument)
	ids, err := p.IDs(t.Context())
	ok(t, err)
	if left := files(t, p.dir); !slices.Equal(ids, []string{"v.v"}) || len(left) != 4 {
		t.Errorf("volumes %q, files %q", ids, left)
	}
	trash, err := os.ReadDir(p.path(trashDir))
	ok(t, err)
	if len(trash) > 0 {
		t.Errorf("left in trash: %v", trash)
	}
}

func TestGrow(t *testing.T) {
	for _, how := range []Provisioning{Thick, Thin} {
		t.Run(string(how), func(t *testing.T) {
			p := open(t, newDir(t))
			create(t, p, "v", mib, how)
			path, err := p.DataPath("v")
			ok(t, err)
			for _, step := range []struct{ ask, want int64 }{{2*mib - 1, 2 * mib}, {mib, 2 * mib}, {3 * mib, 3 * mib}} {
				ok(t, p.Grow(t.Context(), "v", step.ask))
				v, err := p.Get(t.Context(), "v")
				ok(t, err)
				info, err := os.Stat(path)
				ok(t, err)
				if v.Bytes != step.want || info.Size() != step.want || how == Thick && machine.Allocated(t, path) < step.want {
					t.Errorf("grown to %d: volume %d, file %d, allocated %d", step.ask, v.Bytes, info.Size(), machine.Allocated(t, path))
				}
			}
			wantError(t, p.Grow(t.Context(), "v", 1<<55), state.ResourceExhausted)
			wantError(t, p.Grow(t.Context(), "v", 0), state.InvalidArgument)
			wantError(t, p.Grow(t.Context(), "w", mib), state.NotFound)

			ok(t, os.Truncate(path, 5*mib)) // as a crash before the facts were written leaves it
			ok(t, p.Grow(t.Context(), "v", 4*mib))
			if v, err := p.Get(t.Context(), "v"); err != nil || v.Bytes != 4*mib || how == Thick && machine.Allocated(t, path) < 4*mib {
				t.Errorf("%+v, %v", v, err)
			}
			ok(t, os.Truncate(path, mib))
			wantError(t, p.Grow(t.Context(), "v", 6*mib), state.FailedPrecondition, path, "truncated")
		})
	}
}

// A volume is fresh until anybody may have had it, whoever wrote to it.
func TestFresh(t *testing.T) {
	p := open(t, newDir(t))
	for name, use := range map[string]func(){
		"marked":  func() { ok(t, p.BeginFormat(t.Context(), "v")) },
		"raw":     func() { ok(t, p.BeginRaw(t.Context(), "v")) },
		"written": func() { fill(t, p, "v") },
		"written by a version that knows nothing of it": func() {
			path := p.path(volumesDir, "v", volumeFile)
			raw, err := os.ReadFile(path)
			ok(t, err)
			fill(t, p, "v")
			write(t, path, string(raw))
		},
	} {
		if v := create(t, p, "v", 4*mib, Thick); !p.IsFresh(v) || !p.IsFresh(facts(t, open(t, p.dir), "v")) {
			t.Errorf("new: %+v", v)
		}
		use()
		if v := facts(t, p, "v"); p.IsFresh(v) {
			t.Errorf("%s: %+v", name, v)
		}
		ok(t, p.Clear(t.Context(), "v"))
		if v := facts(t, p, "v"); !p.IsFresh(v) {
			t.Errorf("%s and cleared: %+v", name, v)
		}
		ok(t, p.Delete(t.Context(), "v"))
	}
}

func TestDamagedFactsHarmOneVolume(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "garbage": "\x00\x00\x00", "half": `{"id":"v","by`, "not ours": `{"id":"w","bytes":4096,"provisioning":"thin"}`,
		"no size": `{"id":"v","provisioning":"thin"}`, "odd size": `{"id":"v","bytes":77,"provisioning":"thin"}`, "no provisioning": `{"id":"v","bytes":4096}`,
		"odd overcommit": `{"id":"v","bytes":4096,"provisioning":"thin","overcommitPercent":-1}`,
	} {
		t.Run(name, func(t *testing.T) {
			p := open(t, newDir(t))
			create(t, p, "good", mib, Thin)
			create(t, p, "v", mib, Thin)
			write(t, p.path(volumesDir, "v", volumeFile), text)
			p = open(t, p.dir)
			_, err := p.Get(t.Context(), "v")
			wantError(t, err, state.Internal, volumeFile, "v")
			wantError(t, p.BeginFormat(t.Context(), "v"), state.Internal, volumeFile)
			_, err = p.Create(t.Context(), volume("v", mib, Thin))
			wantError(t, err, state.Internal)
			if ids, err := p.IDs(t.Context()); err != nil || !slices.Equal(ids, []string{"good", "v"}) {
				t.Errorf("volumes %q, %v", ids, err)
			}
			create(t, p, "another", mib, Thin)
			if c := capacity(t, p); c.Promised != 3*mib || c.Thin != 2 || c.Damaged != 1 {
				t.Errorf("%+v", c)
			}
			write(t, p.path(volumesDir, "v", volumeFile), `{"id":"v","bytes":1048576,"provisioning":"thin","overcommitPercent":200}`)
			if c := capacity(t, p); c.Promised != 5*mib/2 || c.Thin != 3 || c.Damaged != 0 {
				t.Errorf("mended: %+v", c)
			}
			ok(t, p.Delete(t.Context(), "v"))
		})
	}
}

func TestOpenAfterACrash(t *testing.T) {
	dir := newDir(t)
	p := open(t, dir)
	create(t, p, "kept", mib, Thick)
	before := files(t, dir)
	for name, left := range map[string][]string{
		"creation, nothing yet":       {"tmp/v~1/"},
		"creation, data":              {"tmp/v~1/data"},
		"creation, facts half":        {"tmp/v~1/data", "tmp/v~1/volume.json.new"},
		"creation, all but rename":    {"tmp/v~1/data", "tmp/v~1/volume.json"},
		"deletion, renamed":           {"trash/v~1/data", "trash/v~1/volume.json"},
		"deletion, half taken apart":  {"trash/v~1/volume.json"},
		"deletion, empty":             {"trash/v~1/"},
		"stray files":                 {"tmp/file", "trash/file"},
		"nested deletions and builds": {"trash/v~1/a/b/c", "tmp/v~1/a/b/c"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, path := range left {
				if strings.HasSuffix(path, "/") {
					ok(t, os.MkdirAll(filepath.Join(dir, path), 0o700))
				} else {
					write(t, filepath.Join(dir, path), "half")
				}
			}
			p := open(t, dir)
			_, err := p.Get(t.Context(), "v")
			wantError(t, err, state.NotFound)
			for _, name := range []string{tmpDir, trashDir} {
				entries, err := os.ReadDir(p.path(name))
				if err != nil || len(entries) > 0 {
					t.Errorf("%s holds %v, %v", name, entries, err)
				}
			}
			create(t, p, "v", mib, Thin)
			ok(t, p.Delete(t.Context(), "v"))
			if after := files(t, dir); !slices.Equal(after, before) {
				t.Errorf("files %q, before %q", after, before)
			}
		})
	}
	t.Run("facts half replaced", func(t *testing.T) {
		write(t, filepath.Join(dir, "volumes/kept/volume.json.new"), "{")
		p := open(t, dir)
		ok(t, p.BeginFormat(t.Context(), "kept"))
		if after := files(t, dir); !slices.Equal(after, before) {
			t.Errorf("files %q, before %q", after, before)
		}
	})
}

// TestOpenSparesAVolumeUnderConstruction: another process builds it.
func TestOpenSparesAVolumeUnderConstruction(t *testing.T) {
	dir := newDir(t)
	p := open(t, dir)
	write(t, p.path(tmpDir, "v~1", dataFile), "half")
	builder := exec.Command("flock", "--exclusive", p.path(tmpDir, "v~1"), "sh", "-c", "echo locked; read -r line")
	in, err := builder.StdinPipe()
	ok(t, err)
	out, err := builder.StdoutPipe()
	ok(t, err)
	ok(t, builder.Start())
	_, err = out.Read(make([]byte, 16))
	ok(t, err)
	open(t, dir)
	if _, err := os.Stat(p.path(tmpDir, "v~1", dataFile)); err != nil {
		t.Error(err)
	}
	_ = in.Close()
	_ = builder.Wait() // read ends with 1 at the end of its input
	open(t, dir)
	if _, err := os.Stat(p.path(tmpDir, "v~1")); !os.IsNotExist(err) {
		t.Errorf("left after the builder's end: %v", err)
	}
}
