package store

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Whatever befalls one file, it costs one record, which is kept aside as it was
// found, and the volume can have another one.
func TestDamagedFileCostsOneRecord(t *testing.T) {
	dir := mountAt(t, "tmpfs", "") // there are many of them
	s := openStore(t, dir, testBoot)
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
	for _, raw := range damaged {
		if raw == sound {
			continue
		}
		must(t, os.WriteFile(fileOf(dir, "bad"), []byte(raw), 0o600))
		s := openStore(t, dir, testBoot)
		aside := asides(t, dir)
		if idsOf(s) != "good" || text(s.Get("good")) != text(good) || len(aside) != 1 {
			t.Fatalf("of %q there are %s, set aside %q", raw, idsOf(s), aside)
		}
		if kept, err := os.ReadFile(aside[0]); err != nil || string(kept) != raw {
			t.Fatalf("of %q %q was kept (%v)", raw, kept, err)
		}
		must(t, os.Remove(aside[0]))
		mustEdit(t, s, "bad", staged("/stage/anew"))
		must(t, s.Close())
	}
	must(t, os.Remove(fileOf(dir, "bad")))
	must(t, os.MkdirAll(filepath.Join(fileOf(dir, "bad"), "in", "the", "way"), 0o700))
	must(t, os.WriteFile(fileOf(dir, "other")+spareSuffix, []byte("half"), 0o600))
	s = openStore(t, dir, testBoot)
	mustEdit(t, s, "bad", staged("/stage/anew"))
	if _, err := os.Stat(fileOf(dir, "other") + spareSuffix); !os.IsNotExist(err) || len(asides(t, dir)) != 1 {
		t.Errorf("a directory in the way is set aside as %q; half a file: %v", asides(t, dir), err)
	}
}

// A file that cannot be read now may be sound: it is neither set aside nor taken for no record, and the start says which
// one it is.
func TestFileThatCannotBeReadNowIsKept(t *testing.T) {
	dir := mountAt(t, "tmpfs", "")
	s := openStore(t, dir, testBoot)
	want := text(mustEdit(t, s, "v", staged("/stage/v")))
	must(t, s.Close())
	must(t, syscall.Mount("/proc/self/mem", fileOf(dir, "v"), "", syscall.MS_BIND, "")) // a read of its first byte is an I/O error
	mounted := true
	t.Cleanup(func() {
		if mounted {
			must(t, syscall.Unmount(fileOf(dir, "v"), syscall.MNT_DETACH))
		}
	})
	opened, err := Open(t.Context(), dir, testBoot)
	if err == nil {
		must(t, opened.Close())
	}
	if err == nil || !strings.Contains(err.Error(), fileOf(dir, "v")+": input/output error") {
		t.Errorf("one record cannot be read, and the store opens: %v", err)
	}
	must(t, syscall.Unmount(fileOf(dir, "v"), syscall.MNT_DETACH))
	mounted = false
	if s = openStore(t, dir, testBoot); text(s.Get("v")) != want || len(asides(t, dir)) > 0 {
		t.Errorf("there is %s, set aside %q", text(s.Get("v")), asides(t, dir))
	}
	if _, err := os.Stat(fileOf(dir, "v") + spareSuffix); err != nil {
		t.Errorf("its spare file: %v", err)
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
		if strings.Count(stored(), `"future":`) != strings.Count(object, `"future":`) || !strings.Contains(stored(), "12345678901234567890") {
			t.Errorf("not all is kept in %s", stored())
		}
		must(t, s.Close())
	}
}

// Whatever is read can be written, and read again.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"id":"v","revision":1,"stage":{"path":"/stage"},"targets":{"/pod":{"path":"/pod"}},"size":{"bytes":1}}`))
	f.Add([]byte(`{"id":"v","targets":{"/pod":null}}`))
	f.Add([]byte(`null`))
	f.Add([]byte(`{"id":"v","stage":null,"new":{"a":[1]},"size":{"new":{}}}`))
	f.Fuzz(func(t *testing.T, object []byte) {
		boot, v, err := decodeObject(object)
		if err != nil {
			return
		}
		raw, err := encode(boot, v)
		must(t, err)
		if _, again, err := decode(raw); err != nil || text(v) != text(again) {
			t.Errorf("%+v was read back as %+v (%v)", v, again, err)
		}
	})
}
