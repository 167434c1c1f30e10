package pool

import (
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestParseAmount(t *testing.T) {
	for text, want := range map[string]amount{
		"": {}, "0": {}, "0%": {}, "1Gi": {Bytes: 1 << 30}, "5%": {Percent: 5}, "100%": {Percent: 100},
		"1Gi,5%": {1 << 30, 5}, "5%,1Gi": {1 << 30, 5}, "500M": {Bytes: 500e6},
	} {
		got, err := parseAmount(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"x", "-1", "-1%", "101%", "1Gi,", ",", "%", "1Gi,2Gi", "5%,6%", "1e30", "1.5%", " 1Gi"} {
		if a, err := parseAmount(text); err == nil {
			t.Errorf("%q: %+v", text, a)
		}
	}
	if a := (amount{1 << 30, 5}); a.Of(10<<30) != 1<<30 || a.Of(100<<30)-5<<30 > 5<<30/100 {
		t.Errorf("%d of 10 GiB, %d of 100 GiB", a.Of(10<<30), a.Of(100<<30))
	}
}

// TestReserve: no volume is promised what is kept free.
func TestReserve(t *testing.T) {
	p := small(t, 64*mib)
	create(t, p, "before", 50*mib, Thin)
	p.limits = limits{Reserve: amount{Bytes: 8 * mib, Percent: 25}}
	c := capacity(t, p)
	if c.Kept < 15*mib || c.Kept > 16*mib || c.Available != 0 {
		t.Fatalf("%+v", c)
	}
	_, err := p.Create(t.Context(), volume("v", mib, Thick))
	wantError(t, err, state.ResourceExhausted, "--pool-reserve")
	wantError(t, p.Grow(t.Context(), "before", 51*mib), state.ResourceExhausted, "--pool-reserve")
	ok(t, p.Delete(t.Context(), "before"))
	room := capacity(t, p).Available
	if room < 47*mib || room > 48*mib {
		t.Errorf("%d bytes are available", room)
	}
	_, err = p.Create(t.Context(), volume("v", 49*mib, Thin))
	wantError(t, err, state.ResourceExhausted, "--pool-reserve")
	create(t, p, "v", room/blockSize*blockSize, Thick)
}

func inline(id string, bytes int64) Volume {
	return Volume{ID: id, Bytes: bytes, Provisioning: Thin, Ephemeral: &Owner{PodUID: id, Target: "/" + id}}
}

// TestInlineLimits: they bound inline volumes, no others, and none that is there.
func TestInlineLimits(t *testing.T) {
	p := small(t, 64*mib)
	_, err := p.Create(t.Context(), inline("before", 12*mib))
	ok(t, err)
	p.limits = limits{InlineSize: amount{Bytes: 8 * mib}, InlineTotal: amount{Percent: 50}}
	_, err = p.Create(t.Context(), inline("before", 12*mib)) // a republish
	ok(t, err)
	_, err = p.Create(t.Context(), inline("large", 8*mib+1))
	wantError(t, err, state.InvalidArgument, "--inline-max-size")
	for _, id := range []string{"a", "b"} {
		_, err = p.Create(t.Context(), inline(id, 8*mib))
		ok(t, err)
	}
	create(t, p, "claim", 12*mib, Thin)
	_, err = p.Create(t.Context(), inline("c", 8*mib))
	wantError(t, err, state.ResourceExhausted, "--inline-max-total")
	if c := capacity(t, p); c.Inline != 28*mib {
		t.Errorf("%+v", c)
	}
	ok(t, p.Delete(t.Context(), "before"))
	_, err = p.Create(t.Context(), inline("c", 8*mib))
	ok(t, err)
}
