package driver

import (
	"os"
	"runtime"
)

// raiseProcessors sets GOMAXPROCS to one and a half times Go's default, unless the
// environment sets it. The plugin's system calls are long (an unmount waits for others, a
// look for a disk): a thread in one keeps its right to run Go code until the runtime's
// monitor takes it away, at first 20 µs later. With as many rights as processors, callers
// wait while processors are idle.
func raiseProcessors() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.SetDefaultGOMAXPROCS() // a limit of the container counts
		n := runtime.GOMAXPROCS(0)
		runtime.GOMAXPROCS(n + (n+1)/2)
	}
}
