//go:build vm

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/devices/luks"
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
}

const sectorBytes = 512

func newFailingDisk(t *testing.T, name string, bytes int64) *failingDisk {
	t.Helper()
	d := &failingDisk{t: t, name: name, bytes: bytes}
	d.below, d.file = rack{t, t.TempDir()}.disk(name, bytes)
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

// unreadable is the table of the disk without the bytes from start to end.
func (d *failingDisk) unreadable(start, end int64) string {
	table, start, end, all := "", start/sectorBytes, end/sectorBytes, d.bytes/sectorBytes
	if start > 0 {
		table += fmt.Sprintf("0 %d linear %s 0\n", start, d.below)
	}
	table += fmt.Sprintf("%d %d error\n", start, end-start)
	if end < all {
		table += fmt.Sprintf("%d %d linear %s %d\n", end, all-end, d.below, end)
	}
	return table
}

// zeros is the table of a disk that has lost its data and says nothing.
func (d *failingDisk) zeros() string { return fmt.Sprintf("0 %d zero\n", d.bytes/sectorBytes) }

// kindsOfDisk are a disk, and one with a layer on it.
func kindsOfDisk(t *testing.T, test func(t *testing.T, p *harness.Plugin, newVolume func(id, node string) *volume)) {
	for kind, attributes := range map[string]map[string]string{"plain": nil, "encrypted": {luks.EncryptionKey: luks.LUKS2}} {
		t.Run(kind, func(t *testing.T) {
			p, o, _ := disks(t, harness.Options{})
			p.Start(o)
			test(t, p, func(id, node string) *volume {
				v := onDisk(p, t, id, node, "ext4")
				for key, value := range attributes {
					v.Context[key] = value
				}
				if attributes != nil {
					v.Secrets = map[string]string{luks.PassphraseKey: "of " + id}
				}
				return v
			})
		})
	}
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
	kindsOfDisk(t, func(t *testing.T, p *harness.Plugin, newVolume func(id, node string) *volume) {
		ctx := t.Context()
		d := newFailingDisk(t, "unreadable-"+filepath.Base(t.Name()), bytesOf)
		v := newVolume("a-disk", d.node)
		before := sum(t, d.file)
		for _, place := range places {
			d.become(d.unreadable(place[0], place[1]))
			if err := v.Stage(ctx); err == nil {
				t.Fatalf("staged, though the bytes from %d on cannot be read", place[0])
			}
			must(t, v.Unstage(ctx))
			mustHoldAsBefore(t, d.file, before)
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
	kindsOfDisk(t, func(t *testing.T, _ *harness.Plugin, newVolume func(id, node string) *volume) {
		ctx := t.Context()
		for _, kind := range []string{"filesystem", "anything"} {
			d := newFailingDisk(t, "behind-"+kind+"-"+filepath.Base(t.Name()), 100*mib)
			if kind == "filesystem" {
				harness.Command(t, "mkfs.ext4", "-q", d.node)
			} else {
				harness.Command(t, "dd", "if=/dev/urandom", "of="+d.node, "bs=1M", "seek=70", "count=1", "conv=fsync,notrunc")
			}
			before := sum(t, d.file)
			v := newVolume(kind, d.node)
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

// A disk that reads as zeros for a while, as behind a controller that has lost its map, is
// not formatted when it was before, and has its data when they are back: also when the
// plugin was restarted meanwhile, and has lost its record.
func TestDiskThatReadsAsZerosIsNotFormatted(t *testing.T) {
	kindsOfDisk(t, func(t *testing.T, p *harness.Plugin, newVolume func(id, node string) *volume) {
		ctx := t.Context()
		d := newFailingDisk(t, "zeros-"+filepath.Base(t.Name()), 40*mib)
		v := newVolume("a-disk", d.node)
		must(t, v.Stage(ctx))
		write(t, filepath.Join(v.Staging, "file"), "kept")
		must(t, v.Unstage(ctx))

		for _, lost := range []bool{false, true} {
			if lost {
				p.Terminate()
				must(t, os.RemoveAll(p.StateDir))
				p.Start(harness.Options{Flags: []string{"--lib-dir", filepath.Join(p.Dir, "lib")}})
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
