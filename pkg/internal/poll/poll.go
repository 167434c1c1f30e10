// Package poll tries again what the kernel sends no event for, such as the end of somebody's
// claim of a device.
package poll

import (
	"context"
	"time"
)

// Until calls done, at once and then each interval, until that returns true, and reports
// whether it did. It gives up when ctx ends, or after a call that was made when the limit
// was over.
func Until(ctx context.Context, interval, limit time.Duration, done func() bool) bool {
	began := time.Now()
	if done() {
		return true
	}
	again := time.NewTicker(interval)
	defer again.Stop()
	for late := false; !late; {
		select {
		case <-again.C:
		case <-ctx.Done():
			return false
		}
		late = time.Since(began) >= limit
		if done() {
			return true
		}
	}
	return false
}
