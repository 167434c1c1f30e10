package note

import (
	"errors"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/test/require"
)

// A note that is found as it should be is durable before that is believed: its sync may have failed, or its process may
// have been killed before. Once that is known no further sync is made.
func TestNoteThatIsFoundIsDurable(t *testing.T) {
	lost, failing, synced := errors.New("the sync failed"), 0, 0
	lib, v := t.TempDir(), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newDevice(t)
	d.Identity = "wwid:naa.60"
	f := open(t, lib)
	require.NoError(t, f.BeginFormat(t.Context(), v, d)) // which makes the directory
	count := func(path string) error {
		if failing--; failing >= 0 {
			return lost
		}
		synced++
		return durable.SyncDir(path)
	}
	f.sync = count
	is := func(title string, err error, fails bool) {
		t.Helper()
		if errors.Is(err, lost) != fails || !fails && err != nil {
			t.Errorf("%s: %v, and it should fail: %t", title, err, fails)
		}
	}
	end := func() error { return f.EndFormat(t.Context(), v, d, "xfs") }
	failing = 1
	is("the end of a format", end(), true)
	failing = 1
	is("a look at what was not synced", f.told(v, d).Err, true)
	failing = 1
	is("the end once more", end(), true)
	is("a look", f.told(v, d).Err, false)
	if now := f.told(v, d); now.Formatted != "xfs" {
		t.Errorf("it was noted, and synced: %+v", now)
	}
	synced = 0
	is("the end of what is known to be durable", end(), false)
	f = open(t, lib)
	f.sync = count
	is("a look after a start", f.told(v, d).Err, false)
	if synced != 0 {
		t.Errorf("what is known to be durable, or is only looked at, was synced %d times", synced)
	}
	failing = 1
	is("the end after a start", end(), true)
	is("the end", end(), false)
	synced = 0
	is("the end", end(), false)
	if synced != 0 {
		t.Errorf("what is known to be durable was synced %d times", synced)
	}
}
