package luks

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// The header of LUKS2 ("LUKS2 On-Disk Format Specification" 1.1): a binary part of
// binaryBytes, then JSON. There are two copies; the one with the higher sequence
// number is valid, and one whose checksum is wrong is not.
const (
	binaryBytes = 4096
	firstMagic  = "LUKS\xba\xbe"
	secondMagic = "SKUL\xba\xbe"
)

// secondOffsets are where the second copy can begin, which is also the size of each.
var secondOffsets = []int64{16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20}

// What the header's subsystem, a text for whoever made it, says of a layer that Create
// made: nobody has had it yet, or somebody has.
const (
	stampNew  = "csi-node: new"
	stampUsed = "csi-node"
)

// header is what is known of a header.
type header struct {
	made       bool   // it is whole, and a passphrase opens it
	magic      bool   // there is something of a header, whole or not
	uuid       string // "8-4-4-4-12"
	subsystem  string
	sequence   uint64
	size       int64 // bytes of a copy; 0: it is not whole
	offset     int64 // bytes from the beginning of the element to the data
	sectorSize int64 // bytes, of a unit of encryption
	keyslots   int   // passphrases that open it
}

// fresh reports whether the layer is stamped new.
func (h header) fresh() bool { return h.subsystem == stampNew }

// room returns the bytes that the layer can have on an element of so many: with the
// header that Create would make if there is none.
func (h header) room(bytes int64) int64 {
	offset, unit := int64(HeaderBytes), int64(sectorFor(bytes))
	if h.made {
		offset, unit = h.offset, h.sectorSize
	}
	return max(bytes-offset, 0) / unit * unit
}

// sectorFor returns the unit of encryption, in bytes, for a new layer: the large one is
// faster, and the size of the element must be a multiple of it.
func sectorFor(bytes int64) int {
	if bytes%4096 == 0 {
		return 4096
	}
	return 512
}

// readHeader reads the header of an element. If thorough, it finds a second copy
// wherever that can be. What is no LUKS2 header, or is damaged, is not made; an error
// means that it is not known, or that nobody but cryptsetup may go on with it.
func readHeader(lower state.Device, thorough bool) (h header, err error) {
	f, err := devnode.Open(lower.Path, lower.Number, os.O_RDONLY)
	if err != nil {
		return header{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return parseHeader(f, thorough)
}

func parseHeader(from io.ReaderAt, thorough bool) (header, error) {
	best, err := parseCopy(from, 0, firstMagic)
	if err != nil {
		return best, err
	}
	offsets := secondOffsets
	switch {
	case best.size > 0:
		offsets = []int64{best.size} // the first copy says where it is
	case !thorough:
		offsets = offsets[:1]
	}
	for _, offset := range offsets {
		second, err := parseCopy(from, offset, secondMagic)
		if err != nil {
			return header{}, err
		}
		magic := best.magic || second.magic
		if second.made && (!best.made || second.sequence > best.sequence) {
			best = second
		}
		best.magic = magic
	}
	return best, nil
}

// area is the JSON of a header, as far as it matters here.
type area struct {
	Keyslots map[string]struct {
		Area struct {
			Encryption string `json:"encryption"`
		} `json:"area"`
	} `json:"keyslots"`
	Segments map[string]struct {
		Type       string `json:"type"`
		Offset     string `json:"offset"`
		SectorSize int64  `json:"sector_size"`
		Encryption string `json:"encryption"`
	} `json:"segments"`
	Config struct {
		Requirements struct {
			Mandatory []string `json:"mandatory"`
		} `json:"requirements"`
	} `json:"config"`
}

// encryptsNothing reports whether the data, or a copy of its key, is in clear: cipher_null
// encrypts nothing, and a key that it "encrypts" opens with any passphrase.
func (a area) encryptsNothing() bool {
	null := func(cipher string) bool { return strings.Contains(cipher, "null") }
	for _, k := range a.Keyslots {
		if null(k.Area.Encryption) {
			return true
		}
	}
	for _, s := range a.Segments {
		if null(s.Encryption) {
			return true
		}
	}
	return false
}

// parseCopy reads one copy. What ends too early is no header.
func parseCopy(from io.ReaderAt, offset int64, magic string) (h header, err error) {
	head := make([]byte, binaryBytes)
	if _, err := from.ReadAt(head, offset); errors.Is(err, io.EOF) {
		return h, nil
	} else if err != nil {
		return h, err
	}
	if !bytes.HasPrefix(head, []byte(magic)) {
		return h, nil
	}
	h.magic = true
	size := int64(binary.BigEndian.Uint64(head[8:]))
	if binary.BigEndian.Uint16(head[6:]) != 2 || int64(binary.BigEndian.Uint64(head[256:])) != offset || !slices.Contains(secondOffsets, size) {
		return h, nil
	}
	whole := make([]byte, size)
	if _, err := from.ReadAt(whole, offset); errors.Is(err, io.EOF) {
		return h, nil
	} else if err != nil {
		return h, err
	}
	sum := bytes.Clone(whole[448 : 448+sha256.Size])
	clear(whole[448 : 448+64])
	if got := sha256.Sum256(whole); text(whole[72:72+32]) != "sha256" || !bytes.Equal(sum, got[:]) {
		return h, nil
	}
	h.size = size
	h.sequence = binary.BigEndian.Uint64(whole[16:])
	h.uuid, h.subsystem = text(whole[168:168+40]), text(whole[208:208+48])
	var a area
	// As in cryptsetup, "Encryption" is another name than "encryption" (encoding/json takes both). A
	// name that stands twice is an error here.
	if err := json.Unmarshal(bytes.TrimRight(whole[binaryBytes:], "\x00"), &a); err != nil {
		// cryptsetup may understand it, and would open what is not known here.
		return h, state.Errorf(state.FailedPrecondition, "its header is not understood (%v): it is left as it is. cryptsetup luksDump may tell what it is; restore it from a backup (cryptsetup luksHeaderRestore), or, if nobody needs what is on it, csi-node volume clear-device makes it blank", err)
	}
	if len(a.Config.Requirements.Mandatory) > 0 || len(a.Segments) > 1 {
		return h, state.Errorf(state.FailedPrecondition, "it is being encrypted anew, or asks for a newer program (%.80q): finish that with cryptsetup", a.Config.Requirements.Mandatory)
	}
	if a.encryptsNothing() {
		return h, state.Errorf(state.FailedPrecondition, "it encrypts nothing (its cipher is cipher_null), or opens with any passphrase: whoever made it can read what is written to the volume. It is left as it is; if nobody needs what is on it, csi-node volume clear-device makes it blank")
	}
	data, ok := a.Segments["0"]
	if !ok || data.Type != "crypt" || data.SectorSize < 512 || data.SectorSize > 4096 {
		return h, nil
	}
	if h.offset, err = strconv.ParseInt(data.Offset, 10, 64); err != nil || h.offset < size {
		return h, nil
	}
	h.sectorSize, h.keyslots = data.SectorSize, len(a.Keyslots)
	h.made = h.keyslots > 0 // luksFormat writes a header without one first
	return h, nil
}

// text is what is before the first NUL.
func text(field []byte) string { return unix.ByteSliceToString(field) }

// syncDevice makes what was written to a device durable.
func syncDevice(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("making the header durable: %w", err)
	}
	return nil
}
