package poll

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestUntil(t *testing.T) {
	for _, c := range []struct {
		name  string
		calls int // the last of which is true; 0: none is
		ends  time.Duration
		want  bool
		took  time.Duration
	}{
		{"at once", 1, time.Hour, true, 0},
		{"at once, though nobody waits", 1, 0, true, 0},
		{"later", 3, time.Hour, true, 20 * time.Millisecond},
		{"when the limit is over", 6, time.Hour, true, 50 * time.Millisecond},
		{"never", 0, time.Hour, false, 50 * time.Millisecond},
		{"until nobody waits", 0, 35 * time.Millisecond, false, 35 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), c.ends)
			defer cancel()
			began, calls := time.Now(), 0
			done := Until(ctx, 10*time.Millisecond, 45*time.Millisecond, func() bool { calls++; return calls == c.calls })
			if took := time.Since(began); done != c.want || took != c.took {
				t.Errorf("%s: %t after %s, want %t after %s", c.name, done, took, c.want, c.took)
			}
		})
	}
}
