package blockdev

import (
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// tree writes a sysfs with the devices: each has a path below "devices" and files.
func tree(t *testing.T, devices map[string]map[string]string) sysfs {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"class/block", "dev/block"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	for name, files := range devices {
		dir := filepath.Join(root, "devices", name)
		files = maps.Clone(files)
		for file, text := range map[string]string{"size": "8192\n", "ro": "0\n", "uevent": "DEVNAME=" + filepath.Base(name) + "\n"} {
			if _, has := files[file]; !has {
				files[file] = text
			}
		}
		for file, text := range files {
			path := filepath.Join(dir, file)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			if strings.HasSuffix(file, "/") {
				continue
			}
			require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		}
		links := []string{"class/block/" + filepath.Base(name)}
		if number := strings.TrimSpace(files["dev"]); number != "" {
			links = append(links, "dev/block/"+number)
		}
		for _, link := range links {
			require.NoError(t, os.Symlink(dir, filepath.Join(root, link)))
		}
	}
	return sysfs(root)
}

// page83 is a page of designators, each with a code set, association and type, and a value.
func page83(designators ...[3]string) string {
	page := "\x00\x83\x00\x00"
	for _, d := range designators {
		head, err := hex.DecodeString(d[0])
		if err != nil {
			panic(err)
		}
		page += string(head) + "\x00" + string(rune(len(d[1]))) + d[1]
	}
	return page
}

func TestInfo(t *testing.T) {
	s := tree(t, map[string]map[string]string{
		"sda": {
			"dev": "8:0\n", "diskseq": "7\n", "ro": "1\n", "device/wwid": "naa.6001405A0b\n",
			"device/vpd_pg80": "\x00\x80\x00\x08  ab 12 \x00", "holders/dm-0": "", "holders/dm-1": "",
		},
		"sda/sda1":  {"dev": "8:1\n", "partition": "1\n", "start": "2048\n", "uevent": "DEVNAME=sda1\nPARTUUID=ABCD-01\n", "size": "16\n"},
		"sda/sda2":  {"dev": "8:2\n", "partition": "2\n", "start": "4096\n"},
		"sdb":       {"dev": "8:16\n", "device/vpd_pg83": page83([3]string{"0201", "LIO-ORG  disk "}, [3]string{"0113", "\x11\x22\x33\x44\x55\x66\x77\x88"}, [3]string{"0103", "\x60\x01\x40\x5a\x66\x77\x88\x99"}, [3]string{"0102", "\x01\x02\x03\x04\x05\x06\x07\x08"})},
		"sdc":       {"dev": "8:32\n", "device/vpd_pg83": page83([3]string{"0201", "LIO-ORG  disk "})},
		"nvme0n1":   {"dev": "259:0\n", "uuid": "6D1B-AA\n", "nguid": "0000-0000\n", "eui": "00 25 38 ff\n", "wwid": "uuid.6d1b-aa\n", "device/serial": "S1 \n"},
		"nvme0c0n1": {"hidden": "1\n"},
		"vda":       {"dev": "254:0\n", "serial": "vol-0123456789abcdef"},
		"dm-0":      {"dev": "253:0\n", "dm/uuid": "LVM-aBc\n", "dm/name": "vg-lv\n"},
		"zram0":     {"dev": "252:0\n"},
	})
	identities := map[string]struct{ identity, others string }{
		"8:0":   {"wwid:naa.6001405a0b", "serial:ab_12"},
		"8:1":   {"partUUID:abcd-01", "serial:ab_12-part1@2048 wwid:naa.6001405a0b-part1@2048"},
		"8:2":   {"wwid:naa.6001405a0b-part2@4096", "serial:ab_12-part2@4096"},
		"8:16":  {"wwid:naa.6001405a66778899", ""},
		"8:32":  {"wwid:t10.LIO-ORG_disk", ""},
		"259:0": {"nvmeUUID:6d1b-aa", "eui:002538ff serial:S1 wwid:uuid.6d1b-aa"},
		"254:0": {"serial:vol-0123456789abcdef", ""},
		"253:0": {"dmUUID:LVM-aBc", ""},
		"252:0": {"", ""},
	}
	numbers, err := s.numbers()
	if err != nil || len(numbers) != len(identities) {
		t.Fatalf("%d devices, want %d: %v", len(numbers), len(identities), err)
	}
	for _, number := range numbers {
		info, err := s.infoOf(number)
		require.NoError(t, err)
		var others []string
		for kind, value := range info.Identities {
			if text := string(kind) + ":" + value; text != info.Identity() {
				others = append(others, text)
			}
		}
		slices.Sort(others)
		if want := identities[number.String()]; info.Identity() != want.identity || strings.Join(others, " ") != want.others {
			t.Errorf("%s is %q and %q, want %q", number, info.Identity(), others, want)
		}
	}

	for _, c := range []struct {
		kind        IdentityKind
		value, want string
	}{
		{WWID, "naa.6001405a0b", "8:0"}, // and not its partitions
		{PartUUID, "ABCD-01", "8:1"},
		{WWID, "naa.6001405a0b-part1@2048", "8:1"}, // as kernels before 6.13 tell it
		{Serial, "ab 12", "8:0"},
	} {
		var found []string
		for _, number := range numbers {
			info, err := s.infoOf(number)
			require.NoError(t, err)
			if info.Is(c.kind, c.value) {
				found = append(found, number.String())
			}
		}
		if strings.Join(found, " ") != c.want {
			t.Errorf("%s %q is %q, want %s", c.kind, c.value, found, c.want)
		}
	}

	disk, err := s.infoOf(state.DeviceNumber{Major: 8})
	require.NoError(t, err)
	if disk.Size != 4<<20 || !disk.ReadOnly || disk.Sequence != 7 || disk.Path != "/dev/sda" || disk.Partition != 0 ||
		!slices.Equal(disk.Partitions, []string{"sda1", "sda2"}) || !slices.Equal(disk.Holders, []string{"dm-0", "dm-1"}) || disk.Disk != disk.Number {
		t.Errorf("%+v", disk)
	}
	part, err := s.infoOf(state.DeviceNumber{Major: 8, Minor: 1})
	require.NoError(t, err)
	if part.Size != 8192 || part.Partition != 1 || part.Parent != "sda" || part.Disk != disk.Number || part.Sequence != 7 {
		t.Errorf("%+v", part)
	}
	if _, err := s.infoOf(state.DeviceNumber{Major: 1}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a device that is not there: %v", err)
	}
}

func TestHas(t *testing.T) {
	info := Info{Identities: map[IdentityKind]string{PartUUID: "abcd-01", NGUID: "0025-part1@8"}}
	for identity, want := range map[string]bool{
		info.Identity(): true, "nguid:0025-part1@8": true, "nguid:0025": false, "serial:0025-part1@8": false, "serial:": false, "nguid": false, "": false,
	} {
		if has := info.Has(identity); has != want {
			t.Errorf("%q: %t", identity, has)
		}
	}
}

func TestNormal(t *testing.T) {
	for _, c := range []struct {
		kind      IdentityKind
		as, other string
		same      bool
	}{
		{WWID, "naa.6001405abc000000", "36001405ABC000000", true},
		{WWID, "naa.6001405abc0000006001405abc000000", "36001405abc0000006001405abc000000", true},
		{WWID, "naa.6001405abc000000", "0x6001405abc000000", true},
		{WWID, "eui.0025385b71b00a01", "20025385b71b00a01", true},
		{WWID, "t10.ATA     DISK 1  ", "1ATA_DISK_1", true},
		{WWID, "t10.ATA DISK 1", "t10.ata disk 1", false},
		{WWID, "naa.6001405abc000000", "naa.6001405abc000001", false},
		{NVMeUUID, "6D1BAA-1", "6d1baa-1\n", true},
		{NGUID, "0025-38", "002538", true},
		{EUI, "00 25 38", "0x002538", true}, // as the kernel prints it, with spaces
		{EUI, "00-25-38", "0x002538", true},
		{Serial, "vol-A", "vol-a", false},
	} {
		if same := Normal(c.kind, c.as) == Normal(c.kind, c.other); same != c.same {
			t.Errorf("%s: %q and %q are the same: %t (%q, %q)", c.kind, c.as, c.other, same, Normal(c.kind, c.as), Normal(c.kind, c.other))
		}
	}
}

// A device that goes while the others are listed is no reason to find none of them.
func TestDeviceGoesWhileAllAreListed(t *testing.T) {
	machine.Kernel(t)
	s := tree(t, map[string]map[string]string{"sda": {"dev": "8:0\n"}, "sdb": {"dev": "8:16\n"}})
	dev := filepath.Join(string(s), "class/block/sda/dev")
	const noMisc = 10<<8 | 250 // of no driver: to read it is ENODEV, as a file of sysfs whose device is gone
	require.NoError(t, os.Remove(dev))
	require.NoError(t, unix.Mknod(dev, unix.S_IFCHR|0o600, noMisc))
	if _, err := os.ReadFile(dev); !errors.Is(err, unix.ENODEV) {
		t.Fatalf("reading it: %v", err)
	}
	numbers, err := s.numbers()
	if want := []state.DeviceNumber{{Major: 8, Minor: 16}}; err != nil || !slices.Equal(numbers, want) {
		t.Errorf("%v, %v, want %v", numbers, err, want)
	}
}

// A partition table that is read again makes other partitions with the same numbers and the sequence
// number of the disk: what was read of both is of neither.
func TestPartitionIsMadeAgainMeanwhile(t *testing.T) {
	part := map[string]string{"dev": "8:1\n", "partition": "1\n", "start": "2048\n", "size": "16\n"}
	disk := map[string]string{"dev": "8:0\n", "diskseq": "7\n", "serial": "x\n"}
	s := tree(t, map[string]map[string]string{"sda": disk, "sda/sda1": part})
	dir := filepath.Join(string(s), "devices/sda/sda1")
	require.NoError(t, os.CopyFS(dir+"-again", os.DirFS(dir))) // this is no directory of a partition: it has no number
	for file, text := range map[string]string{"size": "32\n", "start": "4096\n"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir+"-again", file), []byte(text), 0o644))
	}
	stop := filepath.Join(dir, "ro") // is read after the size, and before the start
	require.NoError(t, errors.Join(os.Remove(stop), unix.Mkfifo(stop, 0o600)))
	replaced := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(stop, os.O_WRONLY, 0) // once somebody reads it
		if err == nil {
			_, err = f.WriteString("0\n")
			err = errors.Join(os.Rename(dir, dir+"-old"), os.Rename(dir+"-again", dir), err, f.Close())
		}
		replaced <- err
	}()
	info, err := s.infoOf(state.DeviceNumber{Major: 8, Minor: 1})
	require.NoError(t, errors.Join(err, <-replaced))
	if info.Size != 32*512 || info.Identities[Serial] != "x-part1@4096" {
		t.Errorf("%+v", info)
	}
}

func TestOpen(t *testing.T) {
	machine.Kernel(t)
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	require.NoError(t, os.WriteFile(file, make([]byte, 4<<20), 0o600))
	node := machine.Losetup(t, file)
	require.NoError(t, os.Symlink(node, link))
	for _, path := range []string{node, link} {
		f, info, err := Open(path, unix.O_EXCL)
		require.NoError(t, err)
		if info.Path != node || info.Size != 4<<20 || info.Identities[Backing] == "" || info.Sequence == 0 || info.ReadOnly {
			t.Errorf("%s: %+v", path, info)
		}
		if _, _, err := Open(path, unix.O_EXCL); !errors.Is(err, unix.EBUSY) {
			t.Errorf("opened twice: %v", err)
		}
		found, err := Search(Backing, info.Identities[Backing])
		if err != nil || len(found) != 1 || found[0].Number != info.Number {
			t.Errorf("found %+v, %v", found, err)
		}
		require.NoError(t, f.Close())
	}
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{file, fifo, "/dev/null", dir} {
		if _, _, err := Open(path, 0); state.ClassOf(err) != state.FailedPrecondition {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, _, err := Open(filepath.Join(dir, "none"), 0); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// What any device may tell of itself identifies none.
func TestIdentitiesThatSayNothing(t *testing.T) {
	for _, one := range []struct {
		kind    IdentityKind
		value   string
		nothing bool
	}{
		{WWID, "naa.0000000000000000", true}, {WWID, "t10.        ", true}, {WWID, "eui.00000000", true}, {WWID, "0", true},
		{WWID, "naa.6001405000000001", false}, {WWID, "t10.ATA_x", false},
		{PartUUID, "00000000-01", true}, {PartUUID, "0000000a-01", false}, {PartUUID, "00000000-0000-0000-0000-000000000001", false},
		{PartUUID, "00000000-0000-0000-0000-000000000000", true},
		{Serial, "00000000", true}, {Serial, "QM00001", false}, {NGUID, "0000-0000", true},
	} {
		e := entry{Info: Info{Identities: map[IdentityKind]string{}}}
		e.add(one.kind, one.value)
		if (e.Identity() == "") != one.nothing {
			t.Errorf("%s %q becomes %q", one.kind, one.value, e.Identity())
		}
		if one.kind == PartUUID && one.value == "00000000-01" && !e.Has("partUUID:00000000-01") {
			t.Error("what an earlier version noted is not known any more")
		}
	}
}
