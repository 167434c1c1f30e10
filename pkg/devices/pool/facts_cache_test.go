package pool

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Facts that are remembered are those on the disk, whoever wrote them.
func TestRememberedFactsAreThoseOnTheDisk(t *testing.T) {
	p, err := Open(t.TempDir() + "/pool")
	ok(t, err)
	v, err := p.Create(t.Context(), Volume{ID: "vol", Name: "vol", Bytes: blockSize, Provisioning: Thin})
	ok(t, err)
	mark := func(want bool) {
		t.Helper()
		for range 2 {
			if have, err := p.Get(t.Context(), v.ID); err != nil || have.Formatting != want {
				t.Fatalf("the mark is %t, want %t: %v", have.Formatting, want, err)
			}
		}
	}
	mark(false)
	for range 3 {
		ok(t, p.BeginFormat(t.Context(), v.ID))
		mark(true)
		path := p.path(volumesDir, v.ID, volumeFile)
		raw, err := os.ReadFile(path)
		ok(t, err)
		awaitTick(t, path)
		other := strings.Replace(string(raw), `"formatting": true`, `"formatting":false`, 1) // of the same size, in place
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		ok(t, err)
		if _, err := f.WriteString(other); err != nil {
			t.Fatal(err)
		}
		ok(t, f.Close())
		mark(false)
	}
	ok(t, p.Delete(t.Context(), v.ID))
	if _, err := p.Get(t.Context(), v.ID); state.ClassOf(err) != state.NotFound {
		t.Errorf("of a volume that was deleted: %v", err)
	}
}

// awaitTick waits until a change of a file has another time than the last one had: before
// Linux 6.13 the kernel counts the times of files in ticks.
func awaitTick(t *testing.T, path string) {
	t.Helper()
	var st unix.Stat_t
	ok(t, unix.Stat(path, &st))
	for {
		var now unix.Timespec
		ok(t, unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now))
		if now.Nano() > st.Ctim.Nano() {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func TestFewFactsAreRemembered(t *testing.T) {
	var r factsCache
	for i := range 10 * maxCachedFacts {
		r.put(fmt.Sprint(i), cachedFacts{})
	}
	if n := len(r.facts); n != maxCachedFacts {
		t.Errorf("%d are remembered", n)
	}
}

// A volume that was used before is looked at without the goroutine that a disk which hangs
// would keep; what is told is the same.
func TestInspectCached(t *testing.T) {
	p, err := Open(t.TempDir() + "/pool")
	ok(t, err)
	v, err := p.Create(t.Context(), Volume{ID: "vol", Name: "vol", Bytes: blockSize, Provisioning: Thin})
	ok(t, err)
	b := &Backend{pool: p}
	if k, seen := b.inspectCached(v.ID); seen {
		t.Errorf("a volume that may be fresh, which its data tells: %+v", k)
	}
	ok(t, p.BeginFormat(t.Context(), v.ID))
	ok(t, p.EndFormat(t.Context(), v.ID, "ext4"))
	same := func(what string) {
		t.Helper()
		whole, err := b.inspect(t.Context(), v.ID)
		ok(t, err)
		if k, seen := b.inspectCached(v.ID); !seen || !reflect.DeepEqual(k, whole) {
			t.Errorf("%s: %t, %+v; a whole look sees %+v", what, seen, k, whole)
		}
	}
	same("formatted")
	path, err := p.DataPath(v.ID)
	ok(t, err)
	ok(t, os.Truncate(path, 2*blockSize))
	same("grown")
	ok(t, os.Remove(path))
	same("without data")
	ok(t, os.Remove(p.path(volumesDir, v.ID, volumeFile)))
	if k, seen := b.inspectCached(v.ID); seen {
		t.Errorf("without facts: %+v", k)
	}
}
