package pool

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// Facts that are remembered are those on the disk, whoever wrote them.
func TestRememberedFactsAreThoseOnTheDisk(t *testing.T) {
	p, err := Open(t.Context(), t.TempDir()+"/pool")
	if err != nil {
		t.Fatal(err)
	}
	v, err := p.Create(t.Context(), Volume{Name: "vol", Bytes: BlockSize, Provisioning: Thin})
	if err != nil {
		t.Fatal(err)
	}
	mark := func(want bool) {
		t.Helper()
		for range 2 {
			if have, err := p.Get(t.Context(), v.ID); err != nil || have.Formatting != want {
				t.Fatalf("the mark is %t, want %t: %v", have.Formatting, want, err)
			}
		}
	}
	mark(false)
	for range 3 {
		if err := p.BeginFormat(t.Context(), v.ID); err != nil {
			t.Fatal(err)
		}
		mark(true)
		path := p.path(volumesDir, v.ID, volumeFile)
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		other := strings.Replace(string(raw), `"formatting": true`, `"formatting":false`, 1) // of the same size, in place
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(other); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		mark(false)
	}
	if err := p.Delete(t.Context(), v.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Get(t.Context(), v.ID); state.ClassOf(err) != state.NotFound {
		t.Errorf("of a volume that was deleted: %v", err)
	}
}

func TestFewFactsAreRemembered(t *testing.T) {
	var r remembered
	for i := range 10 * mostRemembered {
		r.put(fmt.Sprint(i), rememberedFacts{})
	}
	if n := len(r.facts); n != mostRemembered {
		t.Errorf("%d are remembered", n)
	}
}
