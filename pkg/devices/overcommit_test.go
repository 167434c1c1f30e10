package devices

import (
	"math"
	"testing"
)

func TestOvercommitText(t *testing.T) {
	for text, want := range map[string]int64{"1": 100, "1.0": 100, "2.75": 275, "1.5": 150, "100": 10000, "100.00": 10000} {
		if percent, ok := ParseOvercommit(text); !ok || percent != want {
			t.Errorf("%s is %d, %t", text, percent, ok)
		}
		if again, ok := ParseOvercommit(FormatOvercommit(want)); !ok || again != want {
			t.Errorf("%d is written as %s", want, FormatOvercommit(want))
		}
	}
	for _, text := range []string{"", "0", "0.99", "100.01", "1000", "-1", "1.", ".5", "1.234", "1e2", "1,5", " 1"} {
		if percent, ok := ParseOvercommit(text); ok {
			t.Errorf("%q is %d", text, percent)
		}
	}
}

func TestClaimAndRoom(t *testing.T) {
	for _, percent := range []int64{NoOvercommit, 101, 150, 333, 9999, MaxOvercommit} {
		for _, available := range []int64{0, 1, 99, 4096, 1<<30 + 1, 1 << 45, 1<<62 - 1} {
			room := RoomFor(available, percent)
			if room < available || room < math.MaxInt64 && Claim(room, percent) > available {
				t.Errorf("at %d%%, %d bytes are room for %d, which claim %d", percent, available, room, Claim(room, percent))
			}
			if room < math.MaxInt64 && Claim(room+1, percent) <= available {
				t.Errorf("at %d%%, %d bytes are room for more than %d", percent, available, room)
			}
		}
		if Claim(0, percent) != 0 || Claim(1, percent) != 1 {
			t.Errorf("at %d%%, a byte claims %d, none %d", percent, Claim(1, percent), Claim(0, percent))
		}
	}
	if Claim(3<<20, 150) != 2<<20 || Claim(1<<20, NoOvercommit) != 1<<20 {
		t.Errorf("claims of %d and %d", Claim(3<<20, 150), Claim(1<<20, NoOvercommit))
	}
}
