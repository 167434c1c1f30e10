package pool

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
)

// FuzzFacts reads a volume.json, changes it as Grow and EndFormat do, and reads
// it again: the changes are there, and so is what this version does not know.
func FuzzFacts(f *testing.F) {
	const good = `{"version":1,"id":"v","name":"n","bytes":4096,"provisioning":"thin","fsType":"xfs","sectorBytes":0,"parameters":{"a":"b"},"created":"2026-01-01T00:00:00Z","formatting":true,"formatted":""}`
	for _, raw := range []string{
		good, "", "null", "{}", "[]", strings.Replace(good, `"v"`, `"w"`, 1), strings.Replace(good, "4096", "-4096", 1),
		strings.Replace(good, `"fsType"`, `"future":{"a":[1,2.50,"<é>"]},"fsType"`, 1), // of a later version
		strings.Replace(good, `"fsType"`, `"fstype"`, 1),                               // another case
		strings.Replace(good, `"name":"n"`, `"name":"n","bytes":8192`, 1),              // twice
		strings.Replace(good, "2026-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999+23:59", 1),
	} {
		f.Add([]byte(raw), int64(16<<20), "ext4")
	}
	f.Fuzz(func(t *testing.T, raw []byte, bytes int64, fsType string) {
		v, err := decode(raw, "v")
		if err != nil {
			return
		}
		v.Formatting, v.Formatted, v.FSType = false, strings.ToValidUTF8(fsType, "?"), strings.ToValidUTF8(fsType, "?")
		if bytes, err = roundUp(bytes); err == nil {
			v.Bytes = bytes
		}
		after, err := encode(v, raw)
		if err != nil {
			t.Fatalf("%s was read and cannot be written: %v", raw, err)
		}
		again, err := decode(after, "v")
		if err != nil {
			t.Fatalf("%s was written and cannot be read: %v", after, err)
		}
		again.Created, v.Created = again.Created.UTC(), v.Created.UTC()
		if !reflect.DeepEqual(again, v) {
			t.Errorf("written as\n%+v, read as\n%+v, from\n%s", v, again, after)
		}
		before, kept := fields(t, raw), fields(t, after)
		for name, value := range before {
			if !known(name) && !reflect.DeepEqual(kept[name], value) {
				t.Errorf("the unknown field %q was %v and is %v", name, value, kept[name])
			}
		}
	})
}

// known reports whether encoding/json would read the field into a Volume.
func known(name string) bool {
	for i := range reflect.TypeFor[Volume]().NumField() {
		if strings.EqualFold(reflect.TypeFor[Volume]().Field(i).Tag.Get("json"), name) {
			return true
		}
	}
	return false
}

func fields(t *testing.T, raw []byte) map[string]any {
	t.Helper()
	var m map[string]any
	decoder := json.NewDecoder(strings.NewReader(string(raw)))
	decoder.UseNumber()
	ok(t, decoder.Decode(&m))
	return m
}

// FuzzCreated makes a volume whose name and overcommit are anything, and reads
// it back.
func FuzzCreated(f *testing.F) {
	f.Add("pvc-1", int64(100), int64(1), true)
	f.Add("../<&>\u2028\x00\"\\", int64(150), int64(1)<<62, false)
	f.Fuzz(func(t *testing.T, name string, overcommit, bytes int64, thin bool) {
		bytes, err := roundUp(bytes)
		if err != nil {
			return
		}
		valid := func(s string) string { return strings.ToValidUTF8(s, "?") } // as protobuf sees to
		v := Volume{Version: volumeVersion, ID: ID(name), Name: valid(name), Bytes: bytes, Provisioning: Thick, FSType: "ext4",
			OvercommitPercent: devices.NoOvercommit, Created: time.Unix(0, bytes).UTC()}
		if thin {
			v.Provisioning, v.OvercommitPercent = Thin, min(max(overcommit, devices.NoOvercommit), devices.MaxOvercommit)
		}
		raw, err := encode(v, nil)
		ok(t, err)
		if again, err := decode(raw, v.ID); err != nil || !reflect.DeepEqual(again, v) {
			t.Errorf("written as\n%+v, read as\n%+v (%v)", v, again, err)
		}
		if _, err := decode(raw, v.ID+"x"); err == nil {
			t.Error("the facts of one volume were taken for another's")
		}
	})
}

// FuzzMarker opens a directory with that marker and that memory of a pool. It is
// taken for a pool only if the two agree, and never overwritten.
func FuzzMarker(f *testing.F) {
	const uuid = "6f9619ff-8b86-4011-b42d-00cf4fc964ff"
	f.Add([]byte(`{"version":1,"uuid":"`+uuid+`"}`), []byte(uuid+"\n"))
	f.Add([]byte(`{"version":1,"uuid":"`+uuid+`"}`), []byte("another"))
	f.Add([]byte(`{"version":2,"UUID":"x","more":1}`), []byte(nil))
	f.Add([]byte(`{"uuid":" "}`), []byte(nil))
	f.Add([]byte(`{"uuid":"x "}`), []byte(nil))
	f.Add([]byte(`null`), []byte(uuid))
	f.Add([]byte(nil), []byte("\n"))
	f.Fuzz(func(t *testing.T, marker, seen []byte) {
		dir := newDir(t)
		path := filepath.Join(dir, markerFile)
		write(t, path, string(marker))
		if len(seen) > 0 {
			write(t, dir+seenSuffix, string(seen))
		}
		uuid, err := identify(dir)
		if now, readErr := os.ReadFile(path); readErr != nil || string(now) != string(marker) {
			t.Errorf("the marker was %q and is %q (%v)", marker, now, readErr)
		}
		if err != nil {
			return
		}
		if uuid == "" || len(seen) > 0 && uuid != strings.TrimSpace(string(seen)) {
			t.Errorf("%q was seen here, and %q is taken for it", seen, uuid)
		}
		if again, err := identify(dir); err != nil || again != uuid {
			t.Errorf("opened again it is %q, not %q (%v)", again, uuid, err)
		}
	})
}
