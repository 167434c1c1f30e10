package driver

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	memory "runtime/metrics"
	"time"
)

// raiseGCPercent sets GOGC to 200, unless the environment sets it. The default would spend
// a tenth of the processor's time on collection while calls come. The heap is small, and
// releaseIdleMemory gives it back.
func raiseGCPercent() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(200)
	}
}

// releaseIdleMemory gives unused memory back to the system whenever the plugin comes to
// rest after it was busy, until ctx ends. Go by itself would keep much of it.
func releaseIdleMemory(ctx context.Context) {
	var idle idleDetector
	sample := []memory.Sample{{Name: "/gc/heap/allocs:bytes"}}
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		memory.Read(sample)
		if idle.begins(sample[0].Value.Uint64()) {
			debug.FreeOSMemory()
		}
	}
}

// idleDetector tells when the plugin comes to rest after it was busy, by the bytes that
// were allocated since the start.
type idleDetector struct{ last, served uint64 }

func (r *idleDetector) begins(allocated uint64) bool {
	const little, much = 1 << 20, 16 << 20
	quiet := allocated-r.last < little
	r.last = allocated
	if !quiet || allocated-r.served < much {
		return false
	}
	r.served = allocated
	return true
}

// memoryLimit returns the limit of Go's memory, in bytes; 0: none.
func memoryLimit() int64 {
	if limit := debug.SetMemoryLimit(-1); limit != math.MaxInt64 {
		return limit
	}
	return 0
}
