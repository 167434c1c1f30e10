package pool

import (
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestRoomLeft(t *testing.T) {
	for title, test := range map[string]struct {
		c    Capacity
		full bool
	}{
		"room":                        {Capacity{Total: 1000, Free: 500, Available: 100, Promised: 400, Owed: 400}, false},
		"all promised":                {Capacity{Total: 1000, Free: 500, Promised: 500, Owed: 500}, true},
		"all allocated":               {Capacity{Total: 1000}, true},
		"nearly all allocated":        {Capacity{Total: 1000, Free: 50, Available: 50}, false},
		"overcommitted":               {Capacity{Total: 1000, Free: 500, Available: 100, Promised: 400, Owed: 4000}, false},
		"overcommitted, nearly full":  {Capacity{Total: 1000, Free: 99, Available: 50, Promised: 49, Owed: 100}, true},
		"overcommitted, yet all fits": {Capacity{Total: 1000, Free: 99, Available: 50, Promised: 49, Owed: 99}, false},
		"no inodes":                   {Capacity{Total: 1000, Free: 500, NoFiles: true}, true},
		"promises broken":             {Capacity{Total: 1000, Free: 500, Promised: 501, Owed: 501}, true},
	} {
		if err := roomLeft("/pool", test.c); (err != nil) != test.full || err != nil && state.ClassOf(err) != state.ResourceExhausted {
			t.Errorf("%s: %v", title, err)
		}
	}
}
