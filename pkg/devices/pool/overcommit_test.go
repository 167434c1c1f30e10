package pool

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func thin(id string, bytes, overcommitPercent int64) Volume {
	return Volume{ID: id, Name: id, Bytes: bytes, Provisioning: Thin, OvercommitPercent: overcommitPercent}
}

// TestOvercommit: each volume counts for its claim, and no volume counts on
// what another was promised.
func TestOvercommit(t *testing.T) {
	p := small(t, 65*mib+mib/2)
	for _, v := range []Volume{thin("double", 40*mib, 200), volume("full", 20*mib, Thin), volume("thick", 12*mib, Thick), thin("triple", 15*mib, 300)} {
		_, err := p.Create(t.Context(), v)
		ok(t, err)
	}
	c := capacity(t, p)
	if c.Promised != 45*mib || c.Owed != 75*mib || c.Allocated != 12*mib || c.Available > 7*mib+mib/2 || c.Available < 7*mib {
		t.Fatalf("%+v", c)
	}
	_, err := p.Create(t.Context(), volume("w", 8*mib, Thick))
	wantError(t, err, state.ResourceExhausted)
	_, err = p.Create(t.Context(), volume("w", 8*mib, Thin))
	wantError(t, err, state.ResourceExhausted)
	_, err = p.Create(t.Context(), thin("w", 16*mib, 200))
	wantError(t, err, state.ResourceExhausted)
	wantError(t, p.Grow(t.Context(), "full", 28*mib), state.ResourceExhausted)
	wantError(t, p.Grow(t.Context(), "double", 56*mib), state.ResourceExhausted)
	ok(t, p.Grow(t.Context(), "double", 54*mib))
	if c := capacity(t, p); c.Promised != 52*mib || c.Available > mib/2 {
		t.Fatalf("grown: %+v", c)
	}

	// Up to its claim a volume takes what it was promised, beyond it what is free.
	fill := func(bytes int64) {
		t.Helper()
		f, err := os.OpenFile(p.path(volumesDir, "double", dataFile), os.O_WRONLY, 0)
		ok(t, err)
		ok(t, rawfile.Fallocate(int(f.Fd()), 0, 0, bytes))
		ok(t, f.Close())
	}
	fill(27 * mib)
	if c := capacity(t, p); c.Promised != 25*mib || c.Free < c.Promised {
		t.Errorf("the claim is taken: %+v", c)
	}
	fill(33 * mib)
	if c := capacity(t, p); c.Promised != 25*mib || c.Free >= c.Promised || c.Available != 0 {
		t.Errorf("more is taken: %+v", c)
	}
	ok(t, p.Delete(t.Context(), "double"))
	create(t, p, "w", 27*mib, Thick)
}

// TestAllThatIsAvailable can be had, whatever it is asked as, and not much more.
func TestAllThatIsAvailable(t *testing.T) {
	for title, p := range map[string]*Pool{"tmpfs": small(t, 32*mib), "ext4": onExt4(t, 64*mib)} {
		for _, v := range []Volume{volume("v", 0, Thick), volume("v", 0, Thin), thin("v", 0, 250), thin("v", 0, devices.MaxOvercommit)} {
			t.Run(fmt.Sprintf("%s %s %d", title, v.Provisioning, v.OvercommitPercent), func(t *testing.T) {
				room := devices.RoomFor(capacity(t, p).Available, max(v.OvercommitPercent, devices.NoOvercommit)) / blockSize * blockSize
				v.Bytes = room + ownBytes*max(v.OvercommitPercent, devices.NoOvercommit)/100
				_, err := p.Create(t.Context(), v)
				wantError(t, err, state.ResourceExhausted)
				v.Bytes = room
				_, err = p.Create(t.Context(), v)
				ok(t, err)
				if err := p.BeginFormat(t.Context(), "v"); err != nil {
					t.Errorf("no room for the pool's own files: %v", err)
				}
				ok(t, p.Delete(t.Context(), "v"))
			})
		}
	}
}

// TestLargestFile: it can be made, and nothing larger.
func TestLargestFile(t *testing.T) {
	p := onExt4(t, 64*mib)
	largest := capacity(t, p).Largest
	f, err := os.Create(p.path(tmpDir, "largest"))
	ok(t, err)
	defer f.Close()
	if err := f.Truncate(largest); err != nil || largest%blockSize != 0 {
		t.Errorf("%d bytes: %v", largest, err)
	}
	if err := f.Truncate(largest + blockSize); err == nil {
		t.Errorf("a file can have more than %d bytes", largest)
	}
}

// onExt4 opens a pool on an ext4 of its own of so many bytes.
func onExt4(t testing.TB, bytes int64) *Pool {
	t.Helper()
	machine.Kernel(t)
	image, dir := machine.Image(t, bytes), newDir(t)
	run(t, "mkfs.ext4", "-q", "-m", "0", image)
	ok(t, os.Mkdir(dir, 0o700))
	device := machine.Losetup(t, image)
	run(t, "mount", device, dir)
	run(t, "losetup", "--detach", device) // when it is unmounted
	t.Cleanup(func() { run(t, "umount", dir) })
	ok(t, os.Remove(dir+"/lost+found"))
	return open(t, dir)
}

// TestRandomHistory: whatever happens to the volumes, what is remembered of
// them counts as what is read, and no guaranteed promise is given away.
func TestRandomHistory(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			p := small(t, 64*mib)
			for range 60 {
				id, before := fmt.Sprintf("v%d", r.IntN(6)), capacity(t, p)
				v := thin(id, r.Int64N(24*mib/blockSize)*blockSize+blockSize, []int64{0, 100, 125, 200, 700}[r.IntN(5)])
				if r.IntN(3) == 0 {
					v = volume(id, v.Bytes, Thick)
				}
				switch _, err := p.Get(t.Context(), id); {
				case err != nil:
					_, err := p.Create(t.Context(), v)
					takes := devices.Claim(v.Bytes, max(v.OvercommitPercent, devices.NoOvercommit))
					if err != nil && (state.ClassOf(err) != state.ResourceExhausted || takes <= before.Available) || err == nil && takes > before.Free-before.Promised {
						t.Errorf("%+v in %+v: %v", v, before, err)
					}
				case r.IntN(4) == 0:
					ok(t, p.Delete(t.Context(), id))
				case r.IntN(3) == 0:
					if err := p.Grow(t.Context(), id, v.Bytes); err != nil && state.ClassOf(err) != state.ResourceExhausted {
						t.Error(err)
					}
				default:
					scribble(t, r, p.path(volumesDir, id, dataFile))
				}
				have, fresh := capacity(t, p), capacity(t, open(t, p.dir))
				if have != fresh {
					t.Fatalf("remembered %+v, read %+v", have, fresh)
				}
				if have.Promised > have.Owed || have.Available > max(have.Free-have.Promised, 0) {
					t.Errorf("%+v", have)
				}
			}
		})
	}
}

// scribble allocates or frees a range of a file that is within its size.
func scribble(t testing.TB, r *rand.Rand, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	ok(t, err)
	defer f.Close()
	info, err := f.Stat()
	ok(t, err)
	offset := r.Int64N(info.Size()/blockSize) * blockSize
	bytes := r.Int64N((info.Size()-offset)/blockSize)*blockSize + blockSize
	mode := uint32(unix.FALLOC_FL_KEEP_SIZE)
	if r.IntN(2) == 0 {
		mode |= unix.FALLOC_FL_PUNCH_HOLE
	}
	if err := rawfile.Fallocate(int(f.Fd()), mode, offset, bytes); err != nil && err != unix.ENOSPC {
		t.Fatal(err)
	}
}

// TestLedger: a count is carried forward while nobody else takes room.
func TestLedger(t *testing.T) {
	p := small(t, 64*mib)
	capacity(t, p)
	count := func() time.Time { // of which the age is no matter
		p.ledger.at = time.Now().Add(time.Hour)
		return p.ledger.at
	}
	last := count()
	spare := p.ledger.spare
	create(t, p, "thick", 8*mib, Thick)
	_, err := p.Create(t.Context(), thin("thin", 16*mib, 200))
	ok(t, err)
	ok(t, p.Grow(t.Context(), "thick", 12*mib))
	ok(t, p.Grow(t.Context(), "thin", 32*mib))
	if p.ledger.at != last || p.ledger.spare != spare-28*mib {
		t.Errorf("counted anew, or %d bytes were taken", spare-p.ledger.spare)
	}
	if c := capacity(t, p); p.ledger.spare > spare-28*mib || p.ledger.spare < spare-28*mib-ownBytes/2 {
		t.Errorf("%d are spare in %+v, and were %d", p.ledger.spare, c, spare)
	}

	last = count()
	ok(t, p.Delete(t.Context(), "thick"))
	create(t, p, "instead", 40*mib, Thick) // more than was spare
	if p.ledger.at == last {
		t.Error("what a deletion gave back is not counted")
	}

	last = count()
	f, err := os.Create(p.dir + "/somebody-elses")
	ok(t, err)
	ok(t, rawfile.Fallocate(int(f.Fd()), 0, 0, 5*mib))
	ok(t, f.Close())
	_, err = p.Create(t.Context(), volume("w", 4*mib, Thin))
	wantError(t, err, state.ResourceExhausted)
	if p.ledger.at == last {
		t.Error("what somebody else takes is not counted")
	}

	ok(t, os.Remove(p.dir+"/somebody-elses"))
	capacity(t, p)
	p.ledger.at = p.ledger.at.Add(-ledgerAge)
	last = p.ledger.at
	create(t, p, "w", mib, Thin)
	if p.ledger.at == last {
		t.Error("an old count is believed")
	}
}

// TestFailedGrowthTakesNothing: an ext4 makes a file longer as far as it gets.
func TestFailedGrowthTakesNothing(t *testing.T) {
	p := onExt4(t, 64*mib)
	create(t, p, "v", 4*mib, Thick)
	before := capacity(t, p)
	p.ledger.at, p.ledger.spare = time.Now().Add(time.Hour), 1<<40 // somebody takes the room meanwhile
	wantError(t, p.Grow(t.Context(), "v", 256*mib), state.ResourceExhausted)
	if info, err := os.Stat(p.path(volumesDir, "v", dataFile)); err != nil || info.Size() != 4*mib {
		t.Errorf("the file has %d bytes (%v)", info.Size(), err)
	}
	if after := capacity(t, p); after.Allocated > before.Allocated+mib || after.Promised != before.Promised {
		t.Errorf("%+v, before %+v", after, before)
	}
}

// TestConcurrentChanges: whoever comes when, no promise is made twice.
func TestConcurrentChanges(t *testing.T) {
	p := small(t, 64*mib)
	var group sync.WaitGroup
	for worker := range uint64(6) {
		group.Go(func() {
			r := rand.New(rand.NewPCG(worker, 0))
			for range 30 {
				v := thin(fmt.Sprintf("v%d", r.IntN(8)), r.Int64N(12*mib/blockSize)*blockSize+blockSize, []int64{100, 200, 1000}[r.IntN(3)])
				if r.IntN(2) == 0 {
					v.Provisioning, v.OvercommitPercent = Thick, devices.NoOvercommit
				}
				var err error
				switch r.IntN(4) {
				case 0:
					err = p.Delete(t.Context(), v.ID)
				case 1:
					err = p.Grow(t.Context(), v.ID, v.Bytes)
				default:
					_, err = p.Create(t.Context(), v)
				}
				if c := state.ClassOf(err); err != nil && c != state.ResourceExhausted && c != state.AlreadyExists && c != state.NotFound {
					t.Error(err)
				}
				if c, err := p.Capacity(t.Context()); err != nil || c.Promised > c.Free {
					t.Errorf("%+v (%v)", c, err)
				}
			}
		})
	}
	group.Wait()
	if have, fresh := capacity(t, p), capacity(t, open(t, p.dir)); have != fresh {
		t.Errorf("remembered %+v, read %+v", have, fresh)
	}
}
