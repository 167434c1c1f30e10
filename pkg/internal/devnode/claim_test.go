package devnode

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// A claim that ends in a moment is waited for, and any other is not.
func TestClaim(t *testing.T) {
	for name, tt := range map[string]struct {
		ended  bool
		busy   int // how often
		then   error
		want   error
		waited time.Duration
	}{
		"free":              {false, 0, nil, nil, 0},
		"gone in a moment":  {false, 3, nil, nil, 7 * time.Millisecond},
		"held":              {false, 1000, nil, unix.EBUSY, 31 * time.Millisecond},
		"no device":         {false, 0, unix.ENXIO, unix.ENXIO, 0},
		"no device by then": {false, 1, unix.ENXIO, unix.ENXIO, time.Millisecond},
		"called off":        {true, 1000, nil, unix.EBUSY, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.ended {
					cancel()
				}
				start, asked := time.Now(), 0
				_, err := Claim(ctx, state.DeviceNumber{}, func() (*os.File, error) {
					if asked++; asked <= tt.busy {
						return nil, &os.PathError{Op: "open", Path: "device", Err: unix.EBUSY}
					}
					return nil, tt.then
				})
				if waited := time.Since(start); !errors.Is(err, tt.want) || waited != tt.waited {
					t.Errorf("%v after %s, want %v after %s", err, waited, tt.want, tt.waited)
				}
			})
		})
	}
}

// A claim that a program may have, which is being started, is waited for.
func TestClaimWaitsForProgramsBeingStarted(t *testing.T) {
	for name, tt := range map[string]struct {
		starts, ends, want time.Duration // when the program is in exec, and when it has closed its parent's files
		err                error
	}{
		"for a while":         {200 * time.Millisecond, 200 * time.Millisecond, 207 * time.Millisecond, nil}, // 31 ms, and 16 each time
		"its files are later": {200 * time.Millisecond, 220 * time.Millisecond, 223 * time.Millisecond, nil},
		"its files stay":      {200 * time.Millisecond, time.Hour, 239 * time.Millisecond, unix.EBUSY},
		"for ever":            {time.Hour, time.Hour, 511 * time.Millisecond, unix.EBUSY},
	} {
		t.Run(name, func(t *testing.T) {
			syscall.ForkLock.Lock() // as from a fork to its exec
			unlock := sync.OnceFunc(syscall.ForkLock.Unlock)
			defer unlock()
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				_, err := Claim(t.Context(), state.DeviceNumber{}, func() (*os.File, error) {
					if time.Since(start) >= tt.starts {
						unlock()
					}
					if time.Since(start) < tt.ends {
						return nil, &os.PathError{Op: "open", Path: "device", Err: unix.EBUSY}
					}
					return nil, nil
				})
				if waited := time.Since(start); !errors.Is(err, tt.err) || waited != tt.want {
					t.Errorf("%v after %s, want %v after %s", err, waited, tt.err, tt.want)
				}
			})
		})
	}
}
