package store

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
)

// stores are of older versions, within the test program: it may run on a machine
// without the repository.
//
//go:embed testdata/*.gz
var stores embed.FS

// older returns intents.db of an older version: one with volumes 0 to 9 and 20 to
// 29, or one that has just begun.
func older(t testing.TB, name string) []byte {
	t.Helper()
	f, err := stores.Open("testdata/" + name)
	must(t, err)
	defer f.Close() // only read from
	unzipped, err := gzip.NewReader(f)
	must(t, err)
	raw, err := io.ReadAll(unzipped)
	must(t, err)
	return raw
}

// writeOlder leaves what an older version would leave that ran after this one.
func writeOlder(t *testing.T, s *Store, raw []byte) {
	t.Helper()
	must(t, s.Close())
	if info, err := os.Stat(s.lockPath()); err != nil || info.Size() != 0 {
		t.Fatalf("an older version would find %v (%v), not a new store", info, err)
	}
	must(t, os.WriteFile(s.lockPath(), raw, 0o600))
}

// The records of an older version count, once, whatever this one has left from
// before, and whether or not there is room for both. What is damaged is kept aside.
// One that began, and was ended before it did anything, has none that count.
func TestOlderVersion(t *testing.T) {
	sound := older(t, "intents.db.gz")
	bad := bytes.ReplaceAll(sound, []byte("/stage/volume-29"), []byte("/stagf/volume-29"))
	for title, row := range map[string]struct {
		raw                   []byte
		records, kept, asides int // kept is how many of this version still count
	}{
		"sound":   {sound, 20, 0, 0},
		"bad":     {bad, 19, 0, 1},
		"full":    {bad, 19, 0, 0},
		"garbage": {bytes.Repeat([]byte("garbage\n"), 4096), 0, 0, 1},
		"begun":   {older(t, "begun.db.gz"), 0, 2, 0},
	} {
		dir := mountAt(t, "tmpfs", "size=1m")
		s := openStore(t, dir, testBoot)
		mustEdit(t, s, "stale", staged("/stage/stale"))
		mustEdit(t, s, "volume-07", staged("/stale"))
		writeOlder(t, s, row.raw)
		give := func() {}
		if title == "full" {
			give = fill(t, dir, 4096)
		}
		r, err := OpenReadOnly(t.Context(), dir)
		if must(t, err); idsOf(r) != "" { // they are of another boot
			t.Errorf("%s: there are %s for a reader", title, idsOf(r))
		}
		for round := range 2 {
			s = openStore(t, dir, testBoot)
			if len(s.List()) != row.records+row.kept || len(asides(t, dir)) != row.asides {
				t.Fatalf("%s: there are %s, set aside %q", title, idsOf(s), asides(t, dir))
			}
			if row.records > 0 {
				if v := s.Get("volume-07"); len(v.Targets) != 31 || v.Stage.Path != "/stage/volume-07" || s.Get("volume-00").Stage.Accepted != (round == 1) {
					t.Errorf("%s: there is %s", title, text(v))
				}
				give()
				if w := mustEdit(t, s, "volume-00", toggled); w.Revision <= 100 {
					t.Errorf("%s: revision %d", title, w.Revision)
				}
			}
			must(t, s.Close())
		}
		writeOlder(t, s, row.raw)
		if s = openStore(t, dir, "another boot"); idsOf(s) != "" {
			t.Errorf("%s: of another boot: %s", title, idsOf(s))
		}
	}
}

// Whatever befalls the file of an older version, it kills nobody, and one that was
// cut is known as such.
func TestDamageOfOlderVersion(t *testing.T) {
	sound := older(t, "intents.db.gz")
	for i := range 2000 {
		raw := bytes.Clone(sound)
		at := (i * 7919) % len(raw)
		if i%2 == 0 { // headers and elements are where it hurts
			at = at/os.Getpagesize()*os.Getpagesize() + i/2%256
		}
		if raw[at] ^= byte(1 + i%255); i%100 == 0 {
			raw = sound[:at+1]
		}
		c, err := readLegacy(bytes.NewReader(raw), testBoot)
		if err != nil || len(c.records) > 21 { // there is one more in the transaction before the last
			t.Fatalf("%v (%v)", c, err)
		}
		if damage := fmt.Sprint(c.bad[lockName]); len(raw) < len(sound) && !strings.Contains(damage, "truncated") && !strings.Contains(damage, "meta page") {
			t.Errorf("cut to %d bytes: %v", len(raw), damage)
		}
	}
}
