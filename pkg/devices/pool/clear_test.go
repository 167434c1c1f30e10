package pool

import (
	"context"
	"os"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func facts(t testing.TB, p *Pool, id string) Volume {
	t.Helper()
	v, err := p.Get(t.Context(), id)
	ok(t, err)
	return v
}

// dataOf opens a volume's data for the test to write to.
func dataOf(t testing.TB, p *Pool, id string) *os.File {
	t.Helper()
	path, err := p.DataPath(id)
	ok(t, err)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	ok(t, err)
	return f
}

func fill(t testing.TB, p *Pool, id string) {
	t.Helper()
	f := dataOf(t, p, id)
	for _, offset := range []int64{0, 1 << 20, 4<<20 - 4} {
		_, err := f.WriteAt([]byte("data"), offset)
		ok(t, err)
	}
	ok(t, f.Close())
}

// zero reports whether all of a volume's bytes are.
func zero(t testing.TB, p *Pool, id string) bool {
	t.Helper()
	path, err := p.DataPath(id)
	ok(t, err)
	raw, err := os.ReadFile(path)
	ok(t, err)
	for _, b := range raw {
		if b != 0 {
			return false
		}
	}
	return true
}

func TestClear(t *testing.T) {
	for _, how := range []Provisioning{Thick, Thin} {
		t.Run(string(how), func(t *testing.T) {
			p := open(t, newDir(t))
			create(t, p, "v", 4<<20, how)
			path, err := p.DataPath("v")
			ok(t, err)
			before := machine.Allocated(t, path)
			fill(t, p, "v")
			ok(t, p.BeginFormat(t.Context(), "v"))
			ok(t, p.EndFormat(t.Context(), "v", "ext4"))
			ok(t, p.CheckClosed(t.Context(), "v"))
			ok(t, p.Clear(t.Context(), "v"))
			if v := facts(t, p, "v"); v.Formatting || v.Formatted != "" || v.Bytes != 4<<20 {
				t.Errorf("the facts are %+v", v)
			}
			if !zero(t, p, "v") {
				t.Error("not every byte is zero")
			}
			if after := machine.Allocated(t, path); after != before {
				t.Errorf("%d bytes are allocated, and were when it was created: %d", after, before)
			}
		})
	}
}

// A tmpfs cannot zero a range without giving it back.
func TestClearWhereZerosMustBeWritten(t *testing.T) {
	p := small(t, 32<<20)
	create(t, p, "v", 4<<20, Thick)
	fill(t, p, "v")
	ok(t, p.Clear(t.Context(), "v"))
	path, err := p.DataPath("v")
	ok(t, err)
	if !zero(t, p, "v") || machine.Allocated(t, path) < 4<<20 {
		t.Errorf("zero %t, %d bytes are allocated", zero(t, p, "v"), machine.Allocated(t, path))
	}
}

func TestClearRefusesOpenData(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", 4<<20, Thick)
	fill(t, p, "v")
	f := dataOf(t, p, "v")
	wantError(t, p.CheckClosed(t.Context(), "v"), state.FailedPrecondition, "open", f.Name())
	wantError(t, p.Clear(t.Context(), "v"), state.FailedPrecondition, "open", f.Name())
	if facts(t, p, "v").Formatting || zero(t, p, "v") {
		t.Error("a refused Clear has changed something")
	}
	ok(t, f.Close())
	ok(t, p.Clear(t.Context(), "v"))
	wantError(t, p.CheckClosed(t.Context(), "w"), state.NotFound, "w")
	wantError(t, p.Clear(t.Context(), "w"), state.NotFound, "w")
}

// endsAfter is a context that ends when it was asked some times.
type endsAfter struct {
	context.Context
	asks int
}

func (c *endsAfter) Err() error {
	if c.asks--; c.asks < 0 {
		return context.Canceled
	}
	return nil
}

// Wherever Clear ends early, the volume has its data or carries the mark.
func TestInterruptedClear(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", 4<<20, Thick)
	for asks := range 20 {
		fill(t, p, "v")
		ok(t, p.update(t.Context(), "v", func(v *Volume) error { v.Formatting, v.Formatted = false, "ext4"; return nil }))
		err := p.Clear(&endsAfter{t.Context(), asks}, "v")
		v := facts(t, p, "v")
		switch {
		case err == nil && !v.Formatting && v.Formatted == "" && zero(t, p, "v"):
			if asks == 0 {
				t.Fatal("nothing was interrupted")
			}
			return
		case err == nil:
			t.Fatalf("cleared, and the facts are %+v", v)
		case v.Formatting && v.Formatted == "":
		case !v.Formatting && v.Formatted == "ext4" && !zero(t, p, "v"):
		default:
			t.Fatalf("after %v the facts are %+v", err, v)
		}
	}
	t.Fatal("it never came to its end")
}
