//go:build vm

package lvm

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
	"github.com/csi-node/csi-node/test/vm"
)

// step is something that a volume was promised.
type step struct {
	name string
	end  int // how many entries the log has up to there
}

const (
	cutGroup       = "cut"
	cutDisk        = 68 * mib // one of the group
	cutGap         = mib      // before the first one: all are parts of what keeps the log
	cutBytes       = 8 * mib  // of the volume
	cutGrown       = 16 * mib
	cutFile        = "kept"
	created        = "create"
	attached       = "attach" // and zero it
	marked         = "begin-format"
	made           = "mkfs"
	formatted      = "end-format"
	written        = "write"
	grown          = "grow"
	cutLogCapacity = 512 * mib
)

// More cuts than CI has time for, and how to repeat them.
var (
	cutsWithin = flag.Int("lvm.cuts", 1, "cuts of the power within each step")
	cutSeed    = flag.Uint64("lvm.seed", 0, "chooses their instants, and what is lost; 0: a new one")
)

// The power is cut at every step of a volume's life: what was promised holds, and nobody
// sees what was there before. The log is that of dm-log-writes. After a step all is lost
// that no flush covers. In a step, all that was written up to the cut is kept; while no
// lvm writes, any page that no flush covers may be lost, too. (LVM does not flush between
// its metadata and the header that names them: there, only the order is kept.)
func TestPowerCuts(t *testing.T) {
	machine.Kernel(t)
	t.Setenv("DM_DISABLE_UDEV", "1")
	seed := cmp.Or(*cutSeed, rand.Uint64())
	t.Logf("-lvm.seed %d", seed)
	t.Run("linear", func(t *testing.T) { powerCuts(t, rand.New(rand.NewPCG(seed, 1)), 1, nil) })
	t.Run("mirrored", func(t *testing.T) {
		powerCuts(t, rand.New(rand.NewPCG(seed, 2)), mirrors, map[string]string{raidKey: raid1})
	})
}

func powerCuts(t *testing.T, random *rand.Rand, disks int, parameters map[string]string) {
	dir := t.TempDir()
	blank, logFile := filepath.Join(dir, "blank"), filepath.Join(dir, "log")
	require.NoError(t, os.WriteFile(blank, bytes.Repeat(junk, (cutGap+disks*cutDisk)/mib), 0o600))
	require.NoError(t, os.WriteFile(logFile, nil, 0o600))
	require.NoError(t, os.Truncate(logFile, cutLogCapacity))
	var v devices.Volume
	if !t.Run("life", func(t *testing.T) { v = live(t, blank, logFile, disks, parameters) }) {
		return
	}
	log, err := vm.OpenLog(logFile)
	require.NoError(t, err)
	defer func() { _ = log.Close() }() // only read from
	var steps []step
	for i, e := range log.Entries {
		if e.Mark != "" && e.Mark != "dm-log-writes-end" { // which the kernel adds
			steps = append(steps, step{e.Mark, i + 1})
		}
	}
	if len(steps) != 8 {
		t.Fatalf("the log of %d entries tells of the steps %+v", len(log.Entries), steps)
	}
	begin := steps[0].end // before it there was no group
	type cut struct {
		name    string
		entries int
		keep    func(int64) bool
	}
	for i, s := range steps[1:] {
		var cuts []cut
		for range *cutsWithin {
			cuts = append(cuts, cut{"in " + s.name, begin + 1 + random.IntN(max(s.end-begin-1, 1)), func(int64) bool { return s.name != made && s.name != written || random.IntN(2) == 0 }})
		}
		cuts = append(cuts, cut{"after " + s.name, s.end, func(int64) bool { return false }})
		if disks > 1 && *cutsWithin == 1 { // it takes long, so of each step one: in the create, after the zeroing, and so on
			cuts = cuts[i%2 : i%2+1]
		}
		for _, cut := range cuts {
			promised := i
			if cut.entries >= s.end {
				promised++
			}
			t.Run(cut.name, func(t *testing.T) {
				t.Logf("after %d of %d entries", cut.entries, len(log.Entries))
				copied := filepath.Join(t.TempDir(), "pv")
				require.NoError(t, exec.Command("cp", blank, copied).Run())
				disk, err := os.OpenFile(copied, os.O_WRONLY, 0)
				require.NoError(t, err)
				require.NoError(t, errors.Join(log.Replay(disk, cut.entries, cut.keep), disk.Close()))
				node := machine.Losetup(t, copied)
				_ = split(t, node, disks)
				survive(t, v, parameters, steps[:promised+1])
			})
		}
		begin = s.end
	}
}

// live is the life of a volume on a disk that keeps a log of its writes, with a mark of
// each step that has ended.
func live(t *testing.T, blank, logFile string, disks int, parameters map[string]string) (v devices.Volume) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pv")
	require.NoError(t, exec.Command("cp", blank, file).Run())
	below, log := machine.Losetup(t, file), machine.Losetup(t, logFile)
	disk := losable{name: "logged"}
	disk.dmsetup(t, fmt.Sprintf("0 %d log-writes %s %s\n", (cutGap+disks*cutDisk)/512, below, log), "create", disk.name)
	t.Cleanup(func() { disk.dmsetup(t, "", "remove", "--retry", disk.name) })
	nodes := split(t, nodeOf(t, disk.name), disks)
	lvmOn(t, nodes, append([]string{"vgcreate", "--yes", cutGroup}, nodes...)...)
	promised := func(name string) {
		t.Helper()
		disk.dmsetup(t, "", "message", disk.name, "0", "mark", name)
	}
	require.NoError(t, flush(nodes))
	b, ctx := newBackend(t, cutGroup), t.Context()
	promised("vgcreate")
	v = create(t, b, "volume", cutBytes, parameters)
	promised(created)
	d := attach(t, b, v)
	t.Cleanup(func() {
		if t.Failed() {
			_ = b.Detach(ctx, v)
		}
	})
	promised(attached)
	require.NoError(t, b.BeginFormat(ctx, v))
	promised(marked)
	machine.Mkfs(t, "ext4", d.Path)
	promised(made)
	require.NoError(t, b.EndFormat(ctx, v, "ext4"))
	promised(formatted)
	mounted(t, d.Path, func(dir string) {
		write(t, newFile(t, filepath.Join(dir, cutFile)), cutFile)
		parent, err := os.Open(dir)
		require.NoError(t, err)
		require.NoError(t, errors.Join(parent.Sync(), parent.Close()))
		promised(written)
		require.NoError(t, b.Grow(ctx, v, cutGrown))
		promised(grown)
	})
	require.NoError(t, b.Detach(ctx, v))
	return v
}

// split makes disks of the parts of a device.
func split(t *testing.T, device string, disks int) (nodes []string) {
	t.Helper()
	for i := range disks {
		part := losable{name: fmt.Sprint("part", i)}
		part.dmsetup(t, fmt.Sprintf("0 %d linear %s %d\n", cutDisk/512, device, (cutGap+i*cutDisk)/512), "create", part.name)
		t.Cleanup(func() { part.dmsetup(t, "", "remove", "--retry", part.name) })
		nodes = append(nodes, nodeOf(t, part.name))
	}
	return nodes
}

// newFile makes an empty file.
func newFile(t *testing.T, path string) string {
	t.Helper()
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	return path
}

// mounted does something with the file system on a device.
func mounted(t *testing.T, path string, do func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, unix.Mount(path, dir, "ext4", 0, ""))
	defer func() { require.NoError(t, machine.Unmount(dir)) }()
	do(dir)
}

// survive holds what a cut has left against what was promised, and takes the volume
// through the rest of its life.
func survive(t *testing.T, v devices.Volume, parameters map[string]string, promised []step) {
	t.Helper()
	has := func(name string) bool {
		for _, s := range promised {
			if s.name == name {
				return true
			}
		}
		return false
	}
	b, ctx := newBackend(t, cutGroup), t.Context()
	if !has(created) {
		v = create(t, b, "volume", cutBytes, parameters) // as the CO does again
	}
	if ids, err := b.ListVolumes(ctx); err != nil || len(ids) != 1 || ids[0] != v.ID {
		t.Fatalf("there are the volumes %q, %v", ids, err)
	}
	d := attach(t, b, v)
	defer func() { require.NoError(t, errors.Join(b.Detach(ctx, v), b.DeleteVolume(ctx, v))) }()
	mustHaveNoTenant(t, d.Path)
	switch {
	case has(formatted) && d.Formatted != "ext4", has(marked) && !d.Formatting && d.Formatted == "", has(grown) && d.Size < cutGrown:
		t.Errorf("after %q: %+v", promised[len(promised)-1].name, d)
	case d.Fresh:
		mustBeZero(t, d.Path, 0, d.Size)
	}
	if d.Formatted == "" {
		require.NoError(t, b.BeginFormat(ctx, v))
		require.NoError(t, b.Erase(ctx, v))
		mustBeZero(t, d.Path, 0, d.Size)
		machine.Mkfs(t, "ext4", d.Path)
		require.NoError(t, b.EndFormat(ctx, v, "ext4"))
	}
	mounted(t, d.Path, func(dir string) {
		if got, err := os.ReadFile(filepath.Join(dir, cutFile)); has(written) && (err != nil || string(got) != cutFile) {
			t.Errorf("lost: the file, which was synced: %q, %v", got, err)
		}
		require.NoError(t, b.Grow(ctx, v, cutGrown+4*mib))
		mustHaveNoTenant(t, d.Path)
	})
	if d = find(t, b, v); d.Size != cutGrown+4*mib {
		t.Errorf("grown: %+v", d)
	}
}

// mustHaveNoTenant fails if a device shows what an earlier tenant has left.
func mustHaveNoTenant(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	all, err := io.ReadAll(f)
	require.NoError(t, errors.Join(err, f.Close()))
	if at := bytes.Index(all, []byte("tenant tenant")); at >= 0 {
		t.Errorf("%s shows what an earlier tenant has left at byte %d: %q", path, at, strings.ToValidUTF8(string(all[at:min(at+64, len(all))]), "?"))
	}
}
