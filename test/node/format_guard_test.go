package node

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// Nothing is ever formatted over data, and nothing is left of a request for it. What is
// taken for data is told by TestGuard in pkg/filesystem.
func TestNothingIsFormattedOverData(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, row := range []struct {
		name   string
		fsType string // that is asked for
		bytes  int64
		fill   func(*testing.T, string)
		told   string
	}{
		{"ext4", "xfs", 320 * mib, tool("mkfs.ext4", "-q", "-F"), "ext4"},
		{"random", "ext4", 32 * mib, random, "data"},
		{"last sector", "ext4", 32 * mib, put(map[int64]string{32*mib - 512: "\x01"}), "data at byte 33553920"},
		{"truncated", "ext4", 32 * mib, func(t *testing.T, path string) { must(t, os.Truncate(path, 16*mib)) }, "truncated"},
	} {
		t.Run(row.name, func(t *testing.T) {
			v := create(t, p, strings.ReplaceAll(row.name, " ", "-"), row.bytes, mountAs(row.fsType, multiWriter))
			row.fill(t, v.Data())
			before := digest.Of(t, v.Data())
			for range 2 {
				mustRefuse(t, v.Stage(t.Context()), codes.FailedPrecondition, v.ID, row.told)
				mustHoldAsBefore(t, v.Data(), before)
			}
			mustHaveNoRecord(t, p)
			mustHaveNoLoop(t, p)
			must(t, v.Delete(t.Context()))
		})
	}
}

// What a pod wrote raw, wherever in a large volume, is not formatted over: the
// volume remembers that it was shown raw, and one of which an older version
// wrote down nothing is read.
func TestRawDataIsNotFormattedOver(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	const bytes, place = 3 << 30, 3 << 29
	v := createAs(t, p, "raw", bytes, blockAs(multiWriter), "thick")
	pod := v.Target("pod")
	must(t, v.Up(ctx, pod))
	written := make([]byte, 600<<10)
	_, _ = rand.Read(written) // never fails
	written[0] = 1            // a zero is no data
	device := openDevice(t, pod, os.O_RDWR)
	_, err := device.WriteAt(written, place)
	must(t, err)
	must(t, device.Close())
	must(t, v.Down(ctx, pod))
	before := digest.Of(t, v.Data())

	v.Capability = mountAs("ext4", multiWriter)
	found := fmt.Sprintf("data at byte %d", place)
	mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, found, "clear-device raw")
	mustHaveNoRecord(t, p)
	edit := func(change func(map[string]any)) { editFacts(t, v, change) }
	edit(func(all map[string]any) {
		if all["raw"] != true || all["formatting"] == true {
			t.Errorf("the volume's facts are %v", all)
		}
		delete(all, "raw")
		delete(all, "fresh")
	})
	mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, found, "clear-device raw")
	edit(func(all map[string]any) {
		if all["formatting"] == true {
			t.Error("the volume is marked as being formatted")
		}
		all["raw"] = true
	})
	mustHoldAsBefore(t, v.Data(), before)
	put(map[int64]string{place: string(make([]byte, len(written)))})(t, v.Data())
	mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, "published as a raw block device before", "clear-device raw")

	if result := shell(t, p, "csi-node volume clear-device raw --i-understand-this-destroys-data"); result.Code != 0 {
		t.Fatalf("clear-device: %+v", result)
	}
	must(t, v.Stage(ctx))
	must(t, v.Unstage(ctx))
	v.Capability = blockAs(multiWriter)
	must(t, v.Stage(ctx))
	v.End()
}

// readFacts returns what the pool says of a volume, and the file that says it.
func readFacts(t *testing.T, v *volume) (all map[string]any, path string) {
	t.Helper()
	path = filepath.Join(filepath.Dir(v.Data()), "volume.json")
	text, err := os.ReadFile(path)
	must(t, err)
	must(t, json.Unmarshal(text, &all))
	return all, path
}

// editFacts changes what the pool says of a volume.
func editFacts(t *testing.T, v *volume, change func(map[string]any)) {
	t.Helper()
	all, path := readFacts(t, v)
	change(all)
	text, err := json.Marshal(all)
	must(t, err)
	must(t, os.WriteFile(path, text, 0o600))
}

// A raw volume that an older version has published, which took no note of that,
// is noted as soon as this one sees it, and never formatted, though it reads blank.
func TestRawVolumeOfAnOlderVersionIsNotFormatted(t *testing.T) {
	t.Parallel()
	for _, heal := range []string{"true", "false"} {
		t.Run("heal="+heal, func(t *testing.T) {
			t.Parallel()
			p := harness.Start(t, harness.Options{})
			ctx := t.Context()
			v := create(t, p, "raw", 32*mib, blockAs(multiWriter))
			pod := v.Target("pod")
			must(t, v.Up(ctx, pod))
			p.Kill()
			editFacts(t, v, func(all map[string]any) {
				delete(all, "raw")
				delete(all, "fresh")
			})
			p.Start(harness.Options{Flags: []string{"--heal=" + heal}})
			harness.Eventually(t, "the raw volume is noted", func() bool {
				all, _ := readFacts(t, v)
				return all["raw"] == true
			})
			must(t, v.Down(ctx, pod))
			v.Capability = mountAs("ext4", multiWriter)
			mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, "published as a raw block device before", "clear-device raw")
		})
	}
}

// Blankness that is lost after a format is data loss, not a new volume.
func TestLostFilesystemIsNotMadeAnew(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	must(t, v.Stage(t.Context()))
	must(t, v.Unstage(t.Context()))
	must(t, os.Truncate(v.Data(), 0))
	must(t, os.Truncate(v.Data(), 32*mib))
	before := digest.Of(t, v.Data())
	mustRefuse(t, v.Stage(t.Context()), codes.FailedPrecondition, "lost", "formatted as ext4 before")
	mustHoldAsBefore(t, v.Data(), before)
	must(t, v.Delete(t.Context()))
}

// The mark of a format that was interrupted is this node's. A disk that was away since is
// formatted if it is blank, and keeps what others have put there.
func TestStaleFormatMarkErasesNothing(t *testing.T) {
	t.Parallel()
	p, o, w, v, file := diskThatWasAway(t)
	node, before := v.Context["path"], digest.Of(t, file)
	w.open()
	p.Start(o)
	mustRefuse(t, v.Stage(t.Context()), codes.FailedPrecondition, v.ID, "has not ended", "ext4 file system", "clear-device")
	mustHoldAsBefore(t, file, before)
	random(t, file) // without any signature
	before = digest.Of(t, file)
	mustRefuse(t, v.Stage(t.Context()), codes.FailedPrecondition, v.ID, "data at byte 0")
	mustHoldAsBefore(t, file, before)
	must(t, exec.Command("blkdiscard", "-f", "-z", node).Run())
	must(t, v.Stage(t.Context()))
	must(t, v.Unstage(t.Context()))
	mustBeFree(t, node)
}

// diskThatWasAway interrupts a format of a disk, which then comes back with an ext4 of
// another node. While it is away its number is free, and if somebody else is given it,
// another disk is tried.
func diskThatWasAway(t *testing.T) (p *harness.Plugin, o harness.Options, w *wrapper, v *volume, file string) {
	t.Helper()
	for try := 1; ; try++ {
		p, o, w, v = interruptedFormat(t)
		node := v.Context["path"]
		file = backingOf(node)
		var st unix.Stat_t
		must(t, unix.Stat(node, &st))
		machine.LosetupDetach(t, node)
		machine.RemoveLoops(t, unix.Minor(st.Rdev)) // losetup makes it anew
		must(t, os.WriteFile(file, make([]byte, 32*mib), 0o600))
		machine.Mkfs(t, "ext4", "-q", file)
		out, err := exec.Command("losetup", node, file).CombinedOutput()
		if err == nil {
			return p, o, w, v, file
		}
		if try == 5 || !strings.Contains(string(out), "busy") {
			t.Fatalf("losetup %s %s: %v: %s", node, file, err, out)
		}
	}
}

// What a refusal tells an operator to run does what it says.
func TestClearingAsTheRefusalSaysWorks(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, provisioning := range []string{"thick", "thin"} {
		v := createAs(t, p, provisioning, 32*mib, mountAs("ext4", multiWriter), provisioning)
		random(t, v.Data())
		err := v.Stage(t.Context())
		mustRefuse(t, err, codes.FailedPrecondition, v.ID)
		_, command, found := strings.Cut(status.Convert(err).Message(), "unstage the volume and run ")
		if !found {
			t.Fatalf("the refusal names no command: %v", err)
		}
		for _, word := range []string{"csi-node volume clear-device", v.ID} {
			if !strings.Contains(command, word) {
				t.Fatalf("the command does not say %q: %s", word, command)
			}
		}
		if result := shell(t, p, command); result.Code != 0 {
			t.Fatalf("%s: %+v", command, result)
		}
		must(t, v.Stage(t.Context()))
		v.End()
	}
}

// tool fills a file by a program that takes its path last.
func tool(name string, args ...string) func(*testing.T, string) {
	return func(t *testing.T, path string) { harness.Command(t, name, append(args, path)...) }
}

// put writes the beginnings and ends of things that no tool here makes.
func put(places map[int64]string) func(*testing.T, string) {
	return func(t *testing.T, path string) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		must(t, err)
		for offset, text := range places {
			_, err := f.WriteAt([]byte(text), offset)
			must(t, err)
		}
		must(t, errors.Join(f.Sync(), f.Close()))
	}
}

func random(t *testing.T, path string) {
	text := make([]byte, 32*mib)
	_, _ = rand.Read(text) // never fails
	text[0] = 1            // where data is found first
	must(t, os.WriteFile(path, text, 0o600))
}
