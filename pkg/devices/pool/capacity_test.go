package pool

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func capacity(t testing.TB, p *Pool) Capacity {
	t.Helper()
	c, err := p.Capacity(t.Context())
	ok(t, err)
	return c
}

func TestCapacityCountsPromises(t *testing.T) {
	p := small(t, 64*mib)
	empty := capacity(t, p)
	if empty.Total != 64*mib || empty.Promised != 0 || empty.Available < 62*mib || empty.Free < 63*mib {
		t.Fatalf("empty: %+v", empty)
	}
	create(t, p, "thick", 16*mib, Thick)
	create(t, p, "thin", 16*mib, Thin)
	before := capacity(t, p)
	if before.Promised != 16*mib || before.Owed != 16*mib || before.Allocated != 16*mib || before.Available > 31*mib || before.Available < 30*mib || before.Thick != 1 || before.Thin != 1 {
		t.Errorf("%+v", before)
	}

	thin, err := os.OpenFile(p.path(volumesDir, "thin", dataFile), os.O_WRONLY, 0)
	ok(t, err)
	_, err = thin.Write(make([]byte, 8*mib))
	ok(t, err)
	if c := capacity(t, p); c.Promised != 8*mib || c.Available != before.Available {
		t.Errorf("half of thin is written: %+v, before %+v", c, before)
	}
	ok(t, thin.Close())

	thick, err := os.OpenFile(p.path(volumesDir, "thick", dataFile), os.O_RDWR, 0)
	ok(t, err)
	ok(t, rawfile.Fallocate(int(thick.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4*mib))
	ok(t, thick.Close())
	if c := capacity(t, p); c.Promised != 12*mib || c.Available != before.Available {
		t.Errorf("a part of thick was trimmed: %+v, before %+v", c, before)
	}
	ok(t, p.Grow(t.Context(), "thick", 20*mib)) // allocates that again
	if a := machine.Allocated(t, p.path(volumesDir, "thick", dataFile)); a != 20*mib {
		t.Errorf("%d bytes allocated", a)
	}

	for _, id := range []string{"thin", "thick"} {
		ok(t, p.Delete(t.Context(), id))
	}
	if c := capacity(t, p); c != empty {
		t.Errorf("empty again: %+v, before %+v", c, empty)
	}
}

// TestConcurrentChangesOfOneVolume: none is lost.
func TestConcurrentChangesOfOneVolume(t *testing.T) {
	p := open(t, newDir(t))
	create(t, p, "v", mib, Thin)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			if err := p.Grow(t.Context(), "v", int64(i+2)*mib); err != nil {
				t.Error(err)
			}
		})
	}
	group.Go(func() {
		if err := p.BeginFormat(t.Context(), "v"); err != nil {
			t.Error(err)
		}
	})
	group.Wait()
	if v, err := p.Get(t.Context(), "v"); err != nil || v.Bytes != 9*mib || !v.Formatting {
		t.Errorf("%+v, %v", v, err)
	}
}

func TestThickNeedsFallocate(t *testing.T) {
	wantError(t, noRoom(fmt.Errorf("fallocate: %w", unix.EOPNOTSUPP)), state.FailedPrecondition, "ext4", "thin")
	wantError(t, noRoom(fmt.Errorf("write: %w", unix.EDQUOT)), state.ResourceExhausted)
	wantError(t, noRoom(fmt.Errorf("fallocate: %w", unix.EFBIG)), state.OutOfRange)
}

// TestNoRoomWithoutThePool: a pool whose disk is away, or is another one, has no room; that is no error, after which
// Kubernetes would count with the room of before.
func TestNoRoomWithoutThePool(t *testing.T) {
	dir, other := newDir(t), newDir(t)
	p := open(t, dir)
	open(t, other)
	available := func() int64 {
		c, err := Provisioner{Volumes: p}.GetCapacity(t.Context(), nil)
		ok(t, err)
		return c.Available
	}
	if available() == 0 {
		t.Fatal("the disk of the tests is full")
	}
	ok(t, os.Rename(dir, dir+".away"))
	if room := available(); room != 0 {
		t.Errorf("%d bytes without the pool", room)
	}
	ok(t, os.Rename(other, dir))
	if room := available(); room != 0 {
		t.Errorf("%d bytes with another pool in its place", room)
	}
	ok(t, os.RemoveAll(dir))
	ok(t, os.Rename(dir+".away", dir))
	if available() == 0 {
		t.Error("no room with the pool")
	}
}

// Who has blocks and no inodes has no room: pods are not sent to a node where their claim cannot be made.
func TestNoRoomWithoutInodes(t *testing.T) {
	machine.Kernel(t)
	dir := newDir(t)
	ok(t, os.MkdirAll(dir, 0o700))
	ok(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m,nr_inodes=40"))
	t.Cleanup(func() { ok(t, unix.Unmount(dir, 0)) })
	p := open(t, dir)
	for i := 0; ; i++ {
		c, err := p.Capacity(t.Context())
		ok(t, err)
		if c.NoFiles {
			if i == 0 || c.Available != 0 {
				t.Errorf("after %d volumes: %+v", i, c)
			}
			return
		}
		_, err = p.Create(t.Context(), Volume{ID: fmt.Sprint("v", i), Bytes: mib, Provisioning: Thin})
		ok(t, err) // none is refused that was promised room
	}
}
