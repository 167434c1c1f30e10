package note

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

type words struct{ Words string }

func TestDir(t *testing.T) {
	d := Dir(filepath.Join(t.TempDir(), "lib", "notes"))
	none := func(string, func(any) error) error { t.Error("a note that nobody wrote"); return nil }
	var got words
	if found, err := d.Read("a", &got); found || err != nil {
		t.Errorf("%t, %v", found, err)
	}
	require.NoError(t, d.Each(none))
	require.NoError(t, d.Remove("a"))
	want := map[string]string{"a": "1 < 2 & \"3\"", strings.Repeat("/../", 300): "2", "": "3"}
	for _, old := range []bool{true, false} {
		for key, text := range want {
			if old {
				text = "older, and longer than what comes"
			}
			require.NoError(t, d.Write(key, words{text}))
		}
	}
	for key, text := range want {
		if found, err := d.Read(key, &got); !found || err != nil || got.Words != text {
			t.Errorf("%.10q: %t, %q, %v", key, found, got.Words, err)
		}
	}
	if err := os.WriteFile(d.Path("half")+".new", []byte("{"), 0o600); err != nil { // a write that was cut short
		t.Fatal(err)
	}
	seen := 0
	err := d.Each(func(key string, read func(any) error) error {
		seen++
		if err := read(&got); err != nil || got.Words != want[key] {
			t.Errorf("%.10q: %q, %v", key, got.Words, err)
		}
		return nil
	})
	if err != nil || seen != len(want) {
		t.Errorf("%d notes, %v", seen, err)
	}
	require.NoError(t, d.Remove("a"))
	if found, err := d.Read("a", &got); found || err != nil {
		t.Errorf("removed: %t, %v", found, err)
	}
}

// Whatever byte of a note is lost or changed, it is told, and no other note suffers.
func TestDamagedNote(t *testing.T) {
	d := Dir(t.TempDir())
	for _, key := range []string{"a", "b"} {
		require.NoError(t, d.Write(key, words{"text of " + key}))
	}
	path := d.Path("a")
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	damage := map[string][]byte{"empty": {}, "zeros": make([]byte, len(whole)), "edited": bytes.Replace(whole, []byte("text of"), []byte("text by"), 1)}
	for i := range len(whole) - 1 {
		damage["cut short"+string(rune(i))] = whole[:i]
	}
	other, err := os.ReadFile(d.Path("b"))
	require.NoError(t, err)
	damage["another's"] = other
	for name, raw := range damage {
		require.NoError(t, os.WriteFile(path, raw, 0o600))
		var got words
		if found, err := d.Read("a", &got); found || state.ClassOf(err) != state.Internal || !strings.Contains(err.Error(), path) {
			if !bytes.Equal(bytes.TrimSpace(raw), bytes.TrimSpace(whole)) {
				t.Fatalf("%s: %t, %q, %v", name, found, got, err)
			}
		}
		if found, err := d.Read("b", &got); !found || err != nil {
			t.Fatalf("%s: the other: %t, %v", name, found, err)
		}
	}
	told := 0
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(string(d), "copy"+suffix), other, 0o600)) // is not told a second time
	if err := d.Each(func(string, func(any) error) error { told++; return nil }); err == nil || told != 1 {
		t.Errorf("told %d notes, %v", told, err)
	}
}
