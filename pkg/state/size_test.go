package state

import "testing"

func TestFormatSize(t *testing.T) {
	for bytes, want := range map[int64]string{
		0: "0", 1023: "1023", 1024: "1Ki", 1536: "1.5Ki", 1 << 20: "1Mi", 1<<30 + 1: "1.0Gi", 5 << 40: "5Ti", 1 << 50: "1Pi", 1 << 62: "4Ei", -5: "-5",
	} {
		if got := FormatSize(bytes); got != want {
			t.Errorf("%d is %q, not %q", bytes, got, want)
		}
	}
}
