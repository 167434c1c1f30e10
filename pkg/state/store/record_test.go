package store

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// quietly opens a store whose damage would be logged at length.
func quietly(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(klog.NewContext(t.Context(), logr.Discard()), dir, testBoot)
	must(t, err)
	return s
}

// Whatever befalls one file, it costs one record, which is kept aside as it was
// found, and the volume can have another one.
func TestDamagedFileCostsOneRecord(t *testing.T) {
	dir := onTmpfs(t) // there are many of them
	s := quietly(t, dir)
	good := mustEdit(t, s, "good", staged("/stage/good"))
	mustEdit(t, s, "bad", staged("/stage/bad"))
	sound := text(mustEdit(t, s, "bad", published("/pod")))
	must(t, s.Close())

	damaged := []string{"", "{", "{}", "null", "garbage\n", text(good), sound + "\n", sound + sound, strings.Replace(sound, "/stage", "/stagf", 1)}
	for _, object := range []string{`{"id":"bad","boot":"boot-1","targets":{"/pod":null}}`, `{"id":"bad","boot":"boot-1","targets":{"/pod":{"path":"/p"}}}`, `{"id":7}`, `{"id":"bad"`, `{"id":"bad"}{}`} {
		damaged = append(damaged, string(seal([]byte(object))))
	}
	for n := range sound {
		damaged = append(damaged, sound[:n])
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		raw := []byte(sound)
		for range 1 + random.IntN(3) {
			raw[random.IntN(len(raw))] ^= byte(1 + random.IntN(255))
		}
		damaged = append(damaged, string(raw))
	}
	check := func(raw string) (aside string) {
		t.Helper()
		s := quietly(t, dir)
		aside = strings.Join(asides(t, dir), " ")
		if idsOf(s) != "good" || text(s.Get("good")) != text(good) {
			t.Fatalf("of %q there are %s, set aside %s", raw, idsOf(s), aside)
		}
		mustEdit(t, s, "bad", staged("/stage/anew"))
		must(t, s.Close())
		return aside
	}
	for _, raw := range damaged {
		if raw == sound {
			continue
		}
		must(t, os.WriteFile(fileOf(dir, "bad"), []byte(raw), 0o600))
		aside := check(raw)
		if kept, err := os.ReadFile(aside); err != nil || string(kept) != raw {
			t.Fatalf("of %q %q was kept (%v)", raw, kept, err)
		}
		must(t, os.Remove(aside))
	}
	must(t, os.Remove(fileOf(dir, "bad")))
	must(t, os.MkdirAll(filepath.Join(fileOf(dir, "bad"), "in", "the", "way"), 0o700))
	must(t, os.WriteFile(fileOf(dir, "other")+nextSuffix, []byte("half"), 0o600))
	aside := check("a directory in the way")
	if _, err := os.Stat(fileOf(dir, "other") + nextSuffix); !os.IsNotExist(err) || aside == "" {
		t.Errorf("a directory in the way is set aside as %q; half a file: %v", aside, err)
	}
}

// What a newer version wrote is kept in every part for as long as the part is there.
func TestUnknownFieldsAreKept(t *testing.T) {
	dir := t.TempDir()
	must(t, openStore(t, dir, testBoot).Close())
	const capability = `"capability":{"access":"mount","mode":"SINGLE_NODE_MULTI_WRITER","fsType":"ext4","future":"capability"}`
	object := `{"boot":"boot-1","id":"v","revision":7,"future":["volume",12345678901234567890],
		"stage":{"revision":7,"since":"2026-01-01T00:00:00Z","path":"/stage","future":{"a":"stage"},"inline":{"target":"/pod","future":"inline"},` + capability + `},
		"targets":{"/pod":{"revision":7,"since":"2026-01-01T00:00:00Z","path":"/pod","future":"target","gone":true,` + capability + `,
			"next":{"revision":8,"since":"2026-01-01T00:00:00Z","path":"/pod","future":"next","device":{"major":7,"minor":1,"future":"device"},` + capability + `}}},
		"size":{"revision":7,"since":"2026-01-01T00:00:00Z","bytes":1,"future":"size"}}`
	must(t, os.WriteFile(fileOf(dir, "v"), seal([]byte(object)), 0o600))
	stored := func() string {
		raw, err := os.ReadFile(fileOf(dir, "v"))
		must(t, err)
		return string(raw)
	}
	for range 2 {
		s := openStore(t, dir, testBoot)
		if v := s.Get("v"); v == nil || v.Stage.Path != "/stage" || len(v.Targets) != 1 {
			t.Fatalf("the record is read as %+v", v)
		}
		if v := mustEdit(t, s, "v", toggled); v.Revision <= 7 {
			t.Errorf("revision %d", v.Revision)
		}
		for want, n := range map[string]int{`"future":["volume",12345678901234567890]`: 1, `"future":{"a":"stage"}`: 1, `"future":"target"`: 1, `"future":"next"`: 1, `"future":"device"`: 1, `"future":"size"`: 1, `"future":"inline"`: 1, `"future":"capability"`: 3} {
			if strings.Count(stored(), want) != n {
				t.Errorf("%s is not kept in %s", want, stored())
			}
		}
		must(t, s.Close())
	}
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "v", func(v *state.Volume) error { v.Drop(state.TargetPart("/pod")); return nil })
	if got := stored(); strings.Contains(got, `"future":"target"`) || !strings.Contains(got, `"future":"next"`) {
		t.Errorf("after the next took its place there is %s", got)
	}
	mustEdit(t, s, "v", func(v *state.Volume) error { v.Targets = nil; return emptied(v) })
	mustEdit(t, s, "v", staged("/stage"))
	if strings.Contains(stored(), "future") {
		t.Errorf("a new stage has fields of the one before: %s", stored())
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"id":"v","revision":1,"stage":{"path":"/stage"},"targets":{"/pod":{"path":"/pod"}},"size":{"bytes":1}}`))
	f.Add([]byte(`{"id":"v","targets":{"/pod":null}}`))
	f.Add([]byte(`{"id":"v","stage":null,"new":{"a":[1]},"size":{"new":{}}}`))
	f.Fuzz(func(t *testing.T, object []byte) {
		if _, _, err := decode(bytes.Clone(object)); err == nil && !bytes.Contains(object, []byte("crc32c")) {
			t.Error("an object without its checksum was read")
		}
		if len(object) == 0 {
			return
		}
		boot, v, err := decode(seal(object))
		if err != nil {
			return
		}
		raw, err := encode(boot, v)
		if err != nil {
			t.Fatalf("%+v was read and cannot be written: %v", v, err)
		}
		if _, again, err := decode(raw); err != nil || text(v) != text(again) {
			t.Errorf("%+v was read back as %+v (%v)", v, again, err)
		}
	})
}
