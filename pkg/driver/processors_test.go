package driver

import (
	"runtime"
	"testing"
)

func TestRaiseProcessors(t *testing.T) {
	t.Cleanup(runtime.SetDefaultGOMAXPROCS)
	runtime.SetDefaultGOMAXPROCS()
	n := runtime.GOMAXPROCS(0)
	t.Setenv("GOMAXPROCS", "1")
	if raiseProcessors(); runtime.GOMAXPROCS(0) != n {
		t.Error("what the environment says is changed")
	}
	t.Setenv("GOMAXPROCS", "")
	for range 2 {
		if raiseProcessors(); runtime.GOMAXPROCS(0) != n+(n+1)/2 {
			t.Errorf("%d in place of %d", runtime.GOMAXPROCS(0), n)
		}
	}
}
