package filesystem

import (
	"encoding/binary"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// A loop device that nothing backs any more has no bytes at all.
func TestGuardProof(t *testing.T) {
	empty, err := open(state.Device{Path: newImage(t, 0)}, 0)
	must0(t, err)
	defer empty.Close()
	if p, err := proveBlank(t.Context(), empty, ProveLimit); err != nil || !strings.Contains(p.found, "without any bytes") || p.blank() {
		t.Errorf("a device without bytes: %+v, %v", p, err)
	}

	image := newImage(t, 4*mib)
	write(t, image, 0, make([]byte, 4096))
	write(t, image, mib, make([]byte, 3*mib))
	d, err := open(state.Device{Path: image}, 0)
	must0(t, err)
	defer d.Close()
	var extents []extent
	err = d.eachData(t.Context(), func(e extent) bool { extents = append(extents, e); return e.start < mib })
	if err != nil || !slices.Equal(extents, []extent{{0, 4096}, {mib, 4 * mib}}) {
		t.Errorf("the data is %v (%v)", extents, err)
	}
}

// Neither zeros that the page cache remembers nor an error is a proof.
func TestGuardAsksTheDevice(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 16*mib))
	image := device.Backing
	device.Backing = ""
	held, err := open(device, 0) // the last close would drop the pages
	must0(t, err)
	defer held.Close()
	if c := probe(t, h, device, ""); c.Kind != state.ContentsBlank {
		t.Fatalf("blank: %+v", c)
	}
	write(t, image, 9*mib, []byte("x"))
	if c := probe(t, h, device, ""); c.Found != "data at byte 9437184" {
		t.Errorf("after a write beneath the device: %+v", c)
	}

	closed, err := open(device, 0)
	must0(t, err)
	must0(t, closed.Close())
	if found, err := closed.firstData(t.Context(), mib); err != nil || !strings.Contains(found, "cannot be read") {
		t.Errorf("a device that fails: %q, %v", found, err)
	}
}

// headOf makes a file system and returns what parse gets of it.
func headOf(t *testing.T, size int64, mkfs ...string) []byte {
	t.Helper()
	image := newImage(t, size)
	command(t, mkfs[0], append(mkfs[1:], image)...)
	f, err := os.Open(image)
	must0(t, err)
	defer f.Close()
	head := make([]byte, headSize)
	_, err = f.ReadAt(head, 0)
	must0(t, err)
	return head
}

func wantDamaged(t *testing.T, k kind, head []byte, words string) {
	t.Helper()
	if _, err := k.parse(head); err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("parse: %v, want an error with %q", err, words)
	}
}

// Without a checksum the sums within the superblock must be right.
func TestDamagedExt4(t *testing.T) {
	head := headOf(t, 16*mib, "mkfs.ext4", "-q", "-O", "^metadata_csum")
	if sb, err := (ext4{}).parse(head); err != nil || sb == nil {
		t.Fatalf("undamaged: %+v, %v", sb, err)
	}
	head[ext4Offset]++ // s_inodes_count
	wantDamaged(t, ext4{}, head, "inodes in")
}

func TestDamagedXFS(t *testing.T) {
	seal := func(head []byte) { binary.LittleEndian.PutUint32(head[224:], xfsChecksum(head[:512])) }
	sound := headOf(t, 300*mib, "mkfs.xfs", "-q", "-s", "size=512")
	for words, damage := range map[string]func(head []byte){
		"interrupted": func(head []byte) { head[126] = 1 },
		"xfs_repair":  func(head []byte) { head[219] |= xfsNeedsRepair },
	} {
		head := append([]byte{}, sound...)
		damage(head)
		wantDamaged(t, xfs{}, head, "its checksum is wrong")
		seal(head)
		wantDamaged(t, xfs{}, head, words)
	}
}

// mkfs is not believed how much of the device it has used.
func TestFormatHalf(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	script(t, "mkfs.ext4", `for last; do :; done; exec mke2fs -t ext4 -q -b 4096 "$last" 2000`)
	wantClass(t, h.Format(t.Context(), device, "ext4"), state.Unavailable, "only 8192000 of the device's 67108864 bytes")
}

// resize2fs is not believed that the file system has grown.
func TestGrowVerified(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), device, "ext4"))
	device = resize(t, device, 128*mib)
	script(t, "resize2fs", "exit 0")
	wantClass(t, h.Grow(t.Context(), device, "ext4", ""), state.Unavailable, "fewer than the device allows")
}

// Boot code may look like an entry of a partition table further on.
func TestBootCodeIsNoPartitionTable(t *testing.T) {
	head := []byte(mbr())
	if !hasPartitions(head) {
		t.Fatal("a partition table is none")
	}
	copy(head[mbrEntries+16:], head[mbrEntries:mbrEntries+16])
	head[mbrEntries] = 0x13
	if hasPartitions(head) {
		t.Error("code is a partition table")
	}
}

// Without the capability the operator is told which one is missing.
func TestGrowNamesTheCapability(t *testing.T) {
	h := newHost(t)
	h.growsMounted["ext4"] = false
	device := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), device, "ext4"))
	dir := mount(t, device, "ext4")
	device = resize(t, device, 128*mib)
	wantClass(t, h.Grow(t.Context(), device, "ext4", dir), state.FailedPrecondition, "CAP_SYS_RESOURCE")
}
