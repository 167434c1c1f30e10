//go:build vm

package vm

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// Seed is the environment variable that chooses the instants of the cuts and
// what each of them loses; each run prints its own.
const Seed = "CSI_NODE_VM_SEED"

// Cuts is the environment variable of how many cuts are made of each life; without it,
// as many as CI has time for.
const Cuts = "CSI_NODE_VM_CUTS"

// cut is an instant to cut the power at.
type cut struct {
	why     string
	entries int  // of the log that come before it
	lossy   bool // of the writes that no flush covers some are kept; else none
}

// life is one that a node has, and where its power is cut.
type life struct {
	name    string
	blank   func(t *testing.T, disk string) // makes the disk ready
	ordered int64                           // so many bytes at the start of the disk are kept in the order in which they were written
	formats bool                            // its log tells of formats: cuts are made in each first one
	always  map[string]int                  // how many cuts are made in what is done, such as "stage encrypted"
	cuts    int                             // in all, at most
}

var lives = []life{
	{name: Pool, formats: true, cuts: 24, blank: func(t *testing.T, disk string) {
		if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", disk, strconv.Itoa(FilesystemBytes>>10)+"k").CombinedOutput(); err != nil {
			t.Fatalf("mke2fs: %v: %s", err, out)
		}
	}},
	// LVM does not flush between its metadata and the header that names them: they are in the
	// first MiB of its disk.
	{name: Group, ordered: GroupStart + 1<<20, cuts: 4, blank: func(*testing.T, string) {},
		always: map[string]int{"stage " + Encrypted: 1, "grow " + Encrypted: 1, "stage thin-encrypted": 1}},
}

// atOnce is how many disks a guest looks at.
const atOnce = 12

// TestPowerCuts runs a node once, on a disk that keeps a log of its writes, and
// cuts its power. From the log it makes the disks that cuts at other instants
// would have left: the disk has a volatile cache, so that any of the writes
// which no flush has covered may be lost, whole pages at a time. Another
// node boots with those disks and looks whether every promise was kept.
//
// Killing QEMU alone would lose what the guest had in its page cache, and
// never a write that the host had already got: too kind.
func TestPowerCuts(t *testing.T) {
	t.Parallel()
	seed := number(t, Seed, uint64(time.Now().UnixNano()))
	t.Logf("%s=%d", Seed, seed)
	image := newImage(t)
	binaries := t.TempDir()
	require.NoError(t, harness.BuildAll(binaries))
	for i, l := range lives {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			l.cuts = int(number(t, Cuts, uint64(l.cuts)))
			powerCuts(t, l, image, binaries, func(cut int) *rand.Rand { return rand.New(rand.NewPCG(seed+uint64(i), uint64(cut))) })
		})
	}
}

// powerCuts has a node live and its power cut. random is that of a cut, from 1 on, and of
// the choice of them.
func powerCuts(t *testing.T, l life, image, binaries string, random func(cut int) *rand.Rand) {
	blank := newDisk(t, "disk", DiskBytes)
	l.blank(t, blank.Path)
	log := live(t, l, image, binaries, blank)
	cuts := choose(t, l, log, random(0))
	guests := (len(cuts) + atOnce - 1) / atOnce
	var erased atomic.Int64
	t.Run("after", func(t *testing.T) {
		for g := range guests {
			t.Run(strconv.Itoa(g), func(t *testing.T) {
				t.Parallel()
				var disks []Disk
				for i := g; i < len(cuts); i += guests {
					d := Disk{Serial: fmt.Sprintf("cut%d", i)}
					d.Path = filepath.Join(t.ArtifactDir(), d.Serial+".raw") // go test -artifacts keeps it
					replay(t, l, log, cuts[i], random(i+1), blank.Path, d.Path)
					disks = append(disks, d)
					t.Logf("%s: %s, after %d entries", d.Serial, cuts[i].why, cuts[i].entries)
				}
				after(t, l, image, binaries, disks, func(line string) {
					if strings.HasPrefix(line, Erased) {
						erased.Add(1)
					}
				})
			})
		}
	})
	if l.formats && erased.Load() == 0 {
		t.Error("no cut left half a file system: nothing was proved of them")
	}
}

// number is that of an environment variable, or another if it is not set.
func number(t *testing.T, name string, other uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return other
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err)
	return n
}

// live runs a node on a copy of the disk until its power is cut, and returns
// the log of that.
func live(t *testing.T, l life, image, binaries string, blank Disk) *WriteLog {
	t.Helper()
	disk := Disk{Serial: "disk", Path: filepath.Join(t.TempDir(), "disk.raw"), Log: filepath.Join(t.TempDir(), "log")}
	copySparse(t, blank.Path, disk.Path)
	write(t, disk.Log, "")
	lived := false
	g := Guest{Image: image, Job: lifeJob(t, l, binaries, "TestLive", []Disk{disk}), Disks: []Disk{disk}, Line: func(line string) bool {
		t.Log(line)
		lived = line == Lived
		return lived
	}}
	require.NoError(t, g.Run(within(t, 15*time.Minute)))
	if !lived {
		t.Fatal("the life of the node ended before its power was cut")
	}
	log, err := OpenLog(disk.Log)
	require.NoError(t, err)
	t.Cleanup(func() { _ = log.Close() }) // only read from
	return log
}

// after runs a node that looks at disks.
func after(t *testing.T, l life, image, binaries string, disks []Disk, line func(string)) {
	t.Helper()
	g := Guest{Image: image, Job: lifeJob(t, l, binaries, "TestAfter", disks), Disks: disks, Line: func(text string) bool {
		t.Log(text)
		line(text)
		return false
	}}
	if err := g.Run(within(t, 30*time.Minute)); err != nil {
		t.Error(err)
	}
}

// lifeJob makes a job of a test of package life.
func lifeJob(t *testing.T, l life, binaries, test string, disks []Disk) string {
	t.Helper()
	job := t.TempDir()
	link(t, binaries, filepath.Join(job, "bin"))
	compile(t, job, "", []string{"test/vm/life"})
	var devices []string
	for _, d := range disks {
		devices = append(devices, "/dev/by-serial/"+d.Serial)
	}
	script := fmt.Sprintf("#!/bin/bash\nexport CSI_NODE_BINARIES=/job/bin CSI_NODE_GUEST=\"%s\" CSI_NODE_LIFE=%s\nexec ./life.test -test.v -test.run '^%s$' -test.timeout 25m\n", strings.Join(devices, " "), l.name, test)
	require.NoError(t, os.WriteFile(filepath.Join(job, "run"), []byte(script), 0o755))
	return job
}

// step is something that the node did, from the entry of its begin to that of its end.
type step struct {
	note       Note
	begin, end int
}

// within is a cut while a step was done.
func (s step) within(random *rand.Rand) cut {
	return cut{fmt.Sprintf("before %s", s.note), s.begin + 1 + random.IntN(s.end-s.begin), true}
}

// choose returns the instants to cut at: those that a life always has, and some of these:
// for everything that the node did, one while it did it, and the moment of its promise,
// when nothing may be lost that the promise covers. If there is time for more, others
// are added while something was done.
func choose(t *testing.T, l life, log *WriteLog, random *rand.Rand) []cut {
	t.Helper()
	var steps []step
	begun, flushes := 0, 0
	for i, e := range log.Entries {
		note, isNote, err := log.NoteIn(e)
		require.NoError(t, err)
		switch {
		case e.Flush:
			flushes++
		case isNote && note.Done:
			steps = append(steps, step{note, begun, i})
		case isNote:
			begun = i
		}
	}
	var always, others []cut
	if l.formats {
		always = formats(t, log, steps, random)
	}
	for _, s := range steps {
		for range l.always[s.note.Do+" "+s.note.Volume] {
			always = append(always, s.within(random))
		}
		others = append(others, s.within(random), cut{fmt.Sprintf("at %s", s.note), s.end + 1, false})
	}
	if len(others) == 0 || len(always) == 0 {
		t.Fatalf("among %d entries of the log are %d steps, and %d cuts are always made", len(log.Entries), len(steps), len(always))
	}
	random.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	for len(always)+len(others) < l.cuts {
		others = append(others, steps[random.IntN(len(steps))].within(random))
	}
	cuts := append(always, others[:max(l.cuts-len(always), 0)]...)
	t.Logf("%d writes and %d flushes, %d cuts", len(log.Entries)-flushes, flushes, len(cuts))
	return cuts
}

// formats returns cuts in the formats that the log of a pool tells of: one in each first
// one, and one in that on a new layer.
func formats(t *testing.T, log *WriteLog, steps []step, random *rand.Rand) (cuts []cut) {
	t.Helper()
	mark, made := 0, 0
	for i, e := range log.Entries {
		data, err := log.Data(e)
		require.NoError(t, err)
		switch {
		case e.Flush || e.Offset >= FilesystemBytes:
		case bytes.Contains(data, []byte(`"formatting": true`)):
			mark = i
		case bytes.Contains(data, []byte(`"formatting": false`)) && mark > 0:
			// Right before this write, mkfs is done and the mark is there; earlier,
			// in the last third of a format, there is the mark and a part of that.
			back := 0
			if len(cuts) > 0 {
				back = random.IntN((i-mark)/3 + 1)
			}
			cuts = append(cuts, cut{"in a format", i - back, true})
			mark, made = 0, i
		}
		for _, s := range steps {
			if s.end == i && s.note.Do == "stage" && s.note.Volume == Encrypted { // whose layer bears a mark of its own
				cuts = append(cuts, cut{"in a format on a new layer", made + 1 + random.IntN(i-made), true})
			}
		}
	}
	return cuts
}

// replay makes the disk that a cut leaves.
func replay(t *testing.T, l life, log *WriteLog, c cut, random *rand.Rand, blank, path string) {
	t.Helper()
	keep := func(offset int64) bool { return c.lossy && (offset < l.ordered || random.IntN(2) == 0) }
	copySparse(t, blank, path)
	disk, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		err = log.Replay(disk, c.entries, keep)
	}
	require.NoError(t, err)
	require.NoError(t, disk.Close())
}

func copySparse(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.Command("cp", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
}
