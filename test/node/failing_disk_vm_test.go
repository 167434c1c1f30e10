//go:build vm

package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/harness"
)

// failingDisk is a disk that can be made to fail: a device of the device mapper over one
// that does not.
type failingDisk struct {
	t     *testing.T
	name  string
	node  string
	below string // the device that does not fail
	file  string // behind it
	bytes int64

	// Where the volume is: all of the disk, or the first logical volume of the group on it.
	start, end int64
}

const sectorBytes = 512

func newFailingDisk(t *testing.T, name string, bytes int64) *failingDisk {
	t.Helper()
	d := &failingDisk{t: t, name: name, bytes: bytes, end: bytes}
	d.below, d.file = newDisk(t, bytes)
	d.dmsetup(d.whole(), "create", "--noudevsync", name)
	t.Cleanup(func() { d.dmsetup("", "remove", "--noudevsync", "--retry", name) })
	minor := d.dmsetup("", "info", "--columns", "--noheadings", "--options", "minor", name)
	d.node = "/dev/dm-" + strings.TrimSpace(minor)
	return d
}

func (d *failingDisk) dmsetup(table string, args ...string) string {
	d.t.Helper()
	cmd := exec.Command("dmsetup", args...)
	cmd.Env = append(os.Environ(), "DM_DISABLE_UDEV=1") // as the guest has none
	cmd.Stdin = strings.NewReader(table)
	out, err := cmd.CombinedOutput()
	if err != nil {
		d.t.Fatalf("dmsetup %q: %v: %s", args, err, out)
	}
	return string(out)
}

// become gives the disk another table.
func (d *failingDisk) become(table string) {
	d.t.Helper()
	d.dmsetup(table, "load", d.name)
	d.dmsetup("", "suspend", "--noflush", d.name)
	d.dmsetup("", "resume", d.name)
}

// whole is the table of the disk when it is well.
func (d *failingDisk) whole() string {
	return fmt.Sprintf("0 %d linear %s 0\n", d.bytes/sectorBytes, d.below)
}

// unreadable is the table of the disk without the volume's bytes from start to end.
func (d *failingDisk) unreadable(start, end int64) string {
	return d.but(d.start+start, d.start+end, "error")
}

// zeros is the table of a disk that has lost the volume's data and says nothing.
func (d *failingDisk) zeros() string { return d.but(d.start, d.end, "zero") }

// flaky is the table of a disk whose bytes from start to end of the volume can be read for
// a second, cannot for the next, and so on.
func (d *failingDisk) flaky(start, end int64) string {
	start, end = d.start+start, d.start+end
	return d.but(start, end, fmt.Sprintf("flakey %s %d 1 1", d.below, start/sectorBytes))
}

// but is the table of the disk with another target in the place of some bytes.
func (d *failingDisk) but(start, end int64, target string) string {
	table, start, end, all := "", start/sectorBytes, end/sectorBytes, d.bytes/sectorBytes
	if start > 0 {
		table += fmt.Sprintf("0 %d linear %s 0\n", start, d.below)
	}
	table += fmt.Sprintf("%d %d %s\n", start, end-start, target)
	if end < all {
		table += fmt.Sprintf("%d %d linear %s %d\n", end, all-end, d.below, end)
	}
	return table
}

// mustBeAsBefore ends the test unless the volume's bytes have the sum that they had.
func (d *failingDisk) mustBeAsBefore(before string) {
	d.t.Helper()
	if d.sum() != before {
		d.t.Fatalf("the volume on %s has changed", d.name)
	}
}

// sum is a digest of the volume's bytes.
func (d *failingDisk) sum() string {
	d.t.Helper()
	return digest.OfRange(d.t, d.file, d.start, d.end)
}

// kind is a kind of volume on a disk that can fail.
type kind struct {
	p *harness.Plugin
	o harness.Options

	slow bool // to stage and unstage

	// make makes a volume of so many bytes, and the disk that it is on. A logical volume
	// is as one that was zeroed, and was not used yet.
	make func(id string, bytes int64) (*volume, *failingDisk)
}

// kindsOfDisk are a disk, and one with a layer on it.
func kindsOfDisk(t *testing.T, test func(t *testing.T, k kind)) {
	for name, attributes := range map[string]map[string]string{"plain": nil, "encrypted": {luks.EncryptionKey: luks.LUKS2}} {
		t.Run(name, func(t *testing.T) {
			p, o := disks(t, harness.Options{})
			p.Start(o)
			test(t, kind{p, o, false, func(id string, bytes int64) (*volume, *failingDisk) {
				d := newFailingDisk(t, id+"-"+name, bytes)
				v := onDisk(p, t, id, d.node, "ext4")
				for key, value := range attributes {
					v.Context[key] = value
				}
				if attributes != nil {
					v.Secrets = map[string]string{luks.PassphraseKey: "of " + id}
				}
				return v, d
			}})
		})
	}
}

// kindsOfVolume are those of kindsOfDisk, and a logical volume.
func kindsOfVolume(t *testing.T, test func(t *testing.T, k kind)) {
	kindsOfDisk(t, test)
	t.Run("logical", func(t *testing.T) {
		const groupStart = mib // of the first extent on a disk of LVM
		p, o := disks(t, harness.Options{Flags: []string{"--lvm-groups", "unwell"}})
		p.Start(o)
		test(t, kind{p, o, true, func(id string, bytes int64) (*volume, *failingDisk) {
			d := newFailingDisk(t, id, groupStart+bytes+4*mib)
			d.start, d.end = groupStart, groupStart+bytes
			lvm := volumeGroupOf(t, "unwell", d.node)
			v := logical(t, p, "unwell", id, bytes, mountAs("ext4", multiWriter))
			p.Restart(harness.Options{Flags: o.Flags, Faults: true, Env: []string{"CSI_NODE_FAULT=after:attach=die"}})
			if err := v.Stage(t.Context()); err == nil {
				t.Error("staged, and the plugin should have died")
			}
			<-p.Exited()
			p.Start(o)
			must(t, v.Unstage(t.Context()))
			if told := lvm("lvs", "--noheadings", "--options", "lv_tags,seg_start_pe,seg_pe_ranges", "unwell"); strings.Contains(told, "unzeroed") || strings.Contains(told, "formatting") || !strings.Contains(told, d.node+":0-") {
				t.Fatalf("the logical volume is not as the test wants it: %s", told)
			}
			return v, d
		}})
	})
}

// A disk is not blank unless each of its bytes was read: wherever a read of a blank one
// fails, nothing is written to it. Once it can be read it is formatted.
func TestDiskThatCannotBeReadIsNotFormatted(t *testing.T) {
	const bytesOf = 40 * mib
	var signatures, places [][2]int64
	for _, at := range []int64{0, 4 << 10, 64 << 10, bytesOf - 64<<10, bytesOf - 4<<10} {
		signatures = append(signatures, [2]int64{at, at + 4<<10})
	}
	for at := int64(mib); at < bytesOf; at += 8 * mib { // in every second chunk of the proof
		places = append(places, [2]int64{at, at + sectorBytes})
	}
	places = append(places, signatures...)
	kindsOfVolume(t, func(t *testing.T, k kind) {
		ctx := t.Context()
		v, d := k.make("unreadable", bytesOf)
		before := d.sum()
		for i, place := range places {
			if k.slow && testing.Short() && i%3 > 0 {
				continue
			}
			d.become(d.unreadable(place[0], place[1]))
			if err := v.Stage(ctx); err == nil {
				t.Fatalf("staged, though the bytes from %d on cannot be read", place[0])
			}
			must(t, v.Unstage(ctx))
			d.mustBeAsBefore(before)
		}
		d.become(d.whole())
		must(t, v.Stage(ctx))
		write(t, filepath.Join(v.Staging, "file"), "kept")
		must(t, v.Unstage(ctx))

		for _, place := range signatures {
			d.become(d.unreadable(place[0], place[1]))
			if v.Stage(ctx) == nil { // the file system does not need these bytes
				mustRead(t, filepath.Join(v.Staging, "file"), "kept")
				must(t, v.Unstage(ctx))
				continue
			}
			must(t, v.Unstage(ctx))
		}
		d.become(d.whole())
		must(t, v.Stage(ctx))
		mustRead(t, filepath.Join(v.Staging, "file"), "kept")
		must(t, v.Unstage(ctx))
		mustBeFree(t, d.node)
	})
}

// A disk that reads as zeros when it is first staged here has data that nobody here knows
// of. Nothing that is written is there: it is not taken for formatted, and its data is
// neither formatted over nor erased when it is back, be it a file system or anything else.
func TestDataBehindZerosIsKept(t *testing.T) {
	kindsOfDisk(t, func(t *testing.T, k kind) {
		ctx := t.Context()
		for _, kind := range []string{"filesystem", "anything"} {
			v, d := k.make(kind, 100*mib)
			if kind == "filesystem" {
				harness.Command(t, "mkfs.ext4", "-q", d.node)
			} else {
				harness.Command(t, "dd", "if=/dev/urandom", "of="+d.node, "bs=1M", "seek=70", "count=1", "conv=fsync,notrunc")
			}
			before := digest.Of(t, d.file)
			d.become(d.zeros())
			for range 2 {
				if err := v.Stage(ctx); err == nil {
					t.Fatal("staged, though the disk keeps nothing")
				}
			}
			d.become(d.whole())
			err := v.Stage(ctx)
			if kind == "filesystem" && len(v.Secrets) == 0 {
				must(t, err)
			} else if err == nil {
				t.Error("staged, though the disk holds something else")
			}
			must(t, v.Unstage(ctx))
			if kind == "anything" || len(v.Secrets) > 0 {
				mustHoldAsBefore(t, d.file, before)
			}
			mustBeFree(t, d.node)
		}
	})
}

// So it is wherever the plugin is killed before the disk has its data again.
func TestDataBehindZerosIsKeptWhenThePluginIsKilled(t *testing.T) {
	kindsOfDisk(t, func(t *testing.T, k kind) {
		ctx, p := t.Context(), k.p
		for _, kind := range []string{"filesystem", "anything"} {
			v, d := k.make("killed-"+kind, 100*mib)
			if kind == "filesystem" {
				with := t.TempDir()
				write(t, filepath.Join(with, "file"), "kept")
				harness.Command(t, "mkfs.ext4", "-q", "-d", with, d.node)
			} else {
				harness.Command(t, "dd", "if=/dev/urandom", "of="+d.node, "bs=1M", "seek=70", "count=1", "conv=fsync,notrunc")
			}
			mounted := kind == "filesystem" && len(v.Secrets) == 0
			before, last := digest.Of(t, d.file), "format"
			if len(v.Secrets) > 0 {
				last = "create-layer"
			}
			for _, at := range []string{"after:attach", "before:begin-format", "after:begin-format", "before:" + last} {
				d.become(d.zeros())
				p.Restart(harness.Options{Flags: k.o.Flags, Faults: true, Env: []string{"CSI_NODE_FAULT=" + at + "=die"}})
				if err := v.Stage(ctx); err == nil {
					t.Fatalf("%s: staged, and the plugin should have died", at)
				}
				<-p.Exited()
				d.become(d.whole())
				p.Start(k.o)
				switch err := v.Stage(ctx); {
				case mounted:
					must(t, err)
					mustRead(t, filepath.Join(v.Staging, "file"), "kept")
				case err == nil:
					t.Errorf("%s: staged, though the disk holds something else", at)
				}
				must(t, v.Unstage(ctx))
				if !mounted {
					mustHoldAsBefore(t, d.file, before)
				}
				mustBeFree(t, d.node)
			}
		}
	})
}

// Whenever cryptsetup is killed while it makes a layer, the next plugin takes that up by itself.
func TestCryptsetupOnADiskIsKilled(t *testing.T) {
	formatsAfterAKill(t, "ext4", "cryptsetup", "luksFormat", map[string]string{luks.EncryptionKey: luks.LUKS2}, "0.1", "0.3", "0.5", "60")
}

// A disk that reads as zeros for a while, as behind a controller that has lost its map, is
// not formatted when it was before, and has its data when they are back: also when the
// plugin was restarted meanwhile, and has lost its record.
func TestDiskThatReadsAsZerosIsNotFormatted(t *testing.T) {
	kindsOfVolume(t, func(t *testing.T, k kind) {
		ctx, p := t.Context(), k.p
		v, d := k.make("zeros", 40*mib)
		must(t, v.Stage(ctx))
		write(t, filepath.Join(v.Staging, "file"), "kept")
		must(t, v.Unstage(ctx))

		for _, lost := range []bool{false, true} {
			if lost {
				p.Terminate()
				must(t, os.RemoveAll(p.StateDir))
				p.Start(k.o)
			}
			d.become(d.zeros())
			mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, "before")
			must(t, v.Unstage(ctx))
			d.become(d.whole())
			must(t, v.Stage(ctx))
			mustRead(t, filepath.Join(v.Staging, "file"), "kept")
			must(t, v.Unstage(ctx))
		}
		mustBeFree(t, d.node)
	})
}

// A place that can be read only now and then is never taken for blank, be there data or not,
// unless it was read just then.
func TestDataOnAFlakyDiskIsKept(t *testing.T) {
	const bytesOf, at = 40 * mib, 21 * mib
	kindsOfVolume(t, func(t *testing.T, k kind) {
		if testing.Short() && !k.slow { // one is enough
			return
		}
		ctx := t.Context()
		v, d := k.make("flaky", bytesOf)
		f, err := os.OpenFile(d.file, os.O_WRONLY, 0)
		must(t, err)
		_, err = f.WriteAt([]byte("somebody's"), d.start+at)
		must(t, errors.Join(err, f.Sync(), f.Close()))
		before, told := d.sum(), map[string]bool{}
		d.become(d.flaky(at, at+4<<10))
		harness.Eventually(t, "the data was seen, and could not be read", func() bool {
			err := v.Stage(ctx)
			if err == nil {
				t.Fatal("staged, over somebody's data")
			}
			for _, words := range []string{fmt.Sprintf("data at byte %d", at), "cannot be read"} {
				told[words] = told[words] || strings.Contains(err.Error(), words)
			}
			must(t, v.Unstage(ctx))
			d.mustBeAsBefore(before)
			return told["cannot be read"] && len(told) == 2 && told[fmt.Sprintf("data at byte %d", at)]
		})
		d.become(d.whole())
		mustBeFree(t, d.node)
	})
}
