package driver

import (
	"context"
	"os"
	"runtime/debug"
	memory "runtime/metrics"
	"time"
)

// raiseGCPercent lets the heap grow to three times what is in use before it is collected, where
// GOGC does not say otherwise: it is small, a tenth of the processor's time goes for its
// collection while calls come, and at rest releaseIdleMemory gives all of it back.
func raiseGCPercent() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(200)
	}
}

// releaseIdleMemory gives the memory that a busy time has left unused back to the system
// once the plugin is at rest, until ctx ends. By itself Go keeps much of it for the next
// busy time, which on a node may be days away.
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

// idleDetector tells from what was allocated since the start, in bytes, when the plugin comes
// to rest after it was busy.
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
