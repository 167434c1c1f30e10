package filesystem

import (
	"encoding/binary"
	"os"
	"strings"
	"testing"
)

// headOf makes a file system and returns what parse gets of it.
func headOf(t *testing.T, size int64, mkfs ...string) []byte {
	t.Helper()
	image := newImage(t, size)
	command(t, mkfs[0], append(mkfs[1:], image)...)
	return readHead(t, image)
}

func readHead(t *testing.T, image string) []byte {
	t.Helper()
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
