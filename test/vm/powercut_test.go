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

// cut is an instant to cut the power at.
type cut struct {
	why     string
	entries int  // of the log that come before it
	lossy   bool // of the writes that no flush covers some are kept; else none
}

// TestPowerCuts runs a node once, on a disk that keeps a log of its writes, and
// cuts its power. From the log it makes the disks that cuts at other instants
// would have left: the disk has a volatile cache, so that any of the writes
// which no flush has covered may be lost, whole pages at a time. Another
// node boots with those disks and looks whether every promise was kept.
//
// Killing QEMU alone would lose what the guest had in its page cache, and
// never a write that the host had already got: too kind.
func TestPowerCuts(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv(Seed); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%s=%d", Seed, seed)
	image := newImage(t)
	binaries := t.TempDir()
	require.NoError(t, harness.BuildAll(binaries))
	blank := newDisk(t, "disk", DiskBytes)
	if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", blank.Path, strconv.Itoa(FilesystemBytes>>10)+"k").CombinedOutput(); err != nil {
		t.Fatalf("mke2fs: %v: %s", err, out)
	}

	log := live(t, image, binaries, blank)
	cuts := choose(t, log, rand.New(rand.NewPCG(seed, 0)))

	// Half of the disks in each of two guests.
	var erased atomic.Int64
	t.Run("after", func(t *testing.T) {
		for half := range 2 {
			t.Run(strconv.Itoa(half), func(t *testing.T) {
				t.Parallel()
				var disks []Disk
				for i := half; i < len(cuts); i += 2 {
					d := Disk{Serial: fmt.Sprintf("cut%d", i)}
					d.Path = filepath.Join(t.ArtifactDir(), d.Serial+".raw") // go test -artifacts keeps it
					replay(t, log, cuts[i], rand.New(rand.NewPCG(seed, uint64(i+1))), blank.Path, d.Path)
					disks = append(disks, d)
					t.Logf("%s: %s, after %d entries", d.Serial, cuts[i].why, cuts[i].entries)
				}
				after(t, image, binaries, disks, func(line string) {
					if strings.HasPrefix(line, Erased) {
						erased.Add(1)
					}
				})
			})
		}
	})
	if erased.Load() == 0 {
		t.Error("no cut left half a file system: nothing was proved of them")
	}
}

// live runs a node on a copy of the disk until its power is cut, and returns
// the log of that.
func live(t *testing.T, image, binaries string, blank Disk) *WriteLog {
	t.Helper()
	disk := Disk{Serial: "disk", Path: filepath.Join(t.TempDir(), "disk.raw"), Log: filepath.Join(t.TempDir(), "log")}
	copySparse(t, blank.Path, disk.Path)
	write(t, disk.Log, "")
	lived := false
	g := Guest{Image: image, Job: lifeJob(t, binaries, "TestLive", []Disk{disk}), Disks: []Disk{disk}, Line: func(line string) bool {
		t.Log(line)
		lived = line == Lived
		return lived
	}}
	require.NoError(t, g.Run(within(t, 10*time.Minute)))
	if !lived {
		t.Fatal("the life of the node ended before its power was cut")
	}
	log, err := OpenLog(disk.Log)
	require.NoError(t, err)
	t.Cleanup(func() { _ = log.Close() }) // only read from
	return log
}

// after runs a node that looks at disks.
func after(t *testing.T, image, binaries string, disks []Disk, line func(string)) {
	t.Helper()
	g := Guest{Image: image, Job: lifeJob(t, binaries, "TestAfter", disks), Disks: disks, Line: func(l string) bool {
		t.Log(l)
		line(l)
		return false
	}}
	if err := g.Run(within(t, 30*time.Minute)); err != nil {
		t.Error(err)
	}
}

// lifeJob makes a job of a test of package life.
func lifeJob(t *testing.T, binaries, test string, disks []Disk) string {
	t.Helper()
	job := t.TempDir()
	link(t, binaries, filepath.Join(job, "bin"))
	compile(t, job, []string{"test/vm/life"})
	var devices []string
	for _, d := range disks {
		devices = append(devices, "/dev/by-serial/"+d.Serial)
	}
	script := fmt.Sprintf("#!/bin/bash\nexport CSI_NODE_BINARIES=/job/bin CSI_NODE_GUEST=\"%s\"\nexec ./life.test -test.v -test.run '^%s$' -test.timeout 25m\n", strings.Join(devices, " "), test)
	require.NoError(t, os.WriteFile(filepath.Join(job, "run"), []byte(script), 0o755))
	return job
}

// mostCuts bounds how many cuts one run makes.
const mostCuts = 24

// choose returns the instants to cut at: one in each first format, one in that on a new
// layer, and some of these: for everything that the node did, one while it did it, and
// the moment of its promise, when nothing may be lost that the promise covers.
func choose(t *testing.T, log *WriteLog, random *rand.Rand) []cut {
	t.Helper()
	var formats, others []cut
	begun, mark, made, flushes := 0, 0, 0, 0
	for i, e := range log.Entries {
		data, err := log.Data(e)
		require.NoError(t, err)
		note, isNote, err := log.NoteIn(e)
		require.NoError(t, err)
		switch {
		case e.Flush:
			flushes++
		case isNote && note.Done:
			others = append(others,
				cut{fmt.Sprintf("before %s", note), begun + 1 + random.IntN(i-begun), true},
				cut{fmt.Sprintf("at %s", note), i + 1, false})
			if note.Do == "stage" && note.Volume == Encrypted { // whose layer bears a mark of its own
				formats = append(formats, cut{"in a format on a new layer", made + 1 + random.IntN(i-made), true})
			}
		case isNote:
			begun = i
		case bytes.Contains(data, []byte(`"formatting": true`)):
			mark = i
		case bytes.Contains(data, []byte(`"formatting": false`)) && mark > 0:
			// Right before this write, mkfs is done and the mark is there; earlier,
			// in the last third of a format, there is the mark and a part of that.
			back := 0
			if len(formats) > 0 {
				back = random.IntN((i-mark)/3 + 1)
			}
			formats = append(formats, cut{"in a format", i - back, true})
			mark, made = 0, i
		}
	}
	if len(others) == 0 || len(formats) == 0 {
		t.Fatalf("among %d entries of the log are %d notes and %d formats", len(log.Entries), len(others)/2, len(formats))
	}
	random.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	cuts := append(formats, others[:min(len(others), mostCuts-len(formats))]...)
	t.Logf("%d writes and %d flushes, %d cuts", len(log.Entries)-flushes, flushes, len(cuts))
	return cuts
}

// replay makes the disk that a cut leaves.
func replay(t *testing.T, log *WriteLog, c cut, random *rand.Rand, blank, path string) {
	t.Helper()
	keep := func() bool { return c.lossy && random.IntN(2) == 0 }
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
