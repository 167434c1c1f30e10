package luks

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

const (
	someUUID = "0f9d5c6e-6d2c-4b6a-9a44-0d7c5a1f2b3c"
	crypt    = `{"type":"crypt","offset":"16777216","size":"dynamic","iv_tweak":"0","encryption":"aes-xts-plain64","sector_size":4096}`
)

// written is a copy of a header, as the specification has it.
type written struct {
	second   bool
	version  uint16
	size     int64
	sequence uint64
	stamp    string
	json     string
	damage   int // a byte that is changed afterwards; 0: none
}

func whole() written {
	return written{version: 2, size: 16 << 10, sequence: 3, stamp: stampUsed, json: `{"keyslots":{"0":{"type":"luks2"}},"segments":{"0":` + crypt + `},"config":{"json_size":"12288"}}`}
}

// bytes returns the copy, and where it belongs.
func (w written) bytes() ([]byte, int64) {
	b, at, magic := make([]byte, w.size), int64(0), firstMagic
	if w.second {
		at, magic = w.size, secondMagic
	}
	copy(b, magic)
	binary.BigEndian.PutUint16(b[6:], w.version)
	binary.BigEndian.PutUint64(b[8:], uint64(w.size))
	binary.BigEndian.PutUint64(b[16:], w.sequence)
	copy(b[72:], "sha256")
	copy(b[168:], someUUID)
	copy(b[208:], w.stamp)
	binary.BigEndian.PutUint64(b[256:], uint64(at))
	copy(b[binaryBytes:], w.json)
	sum := sha256.Sum256(b)
	copy(b[448:], sum[:])
	if w.damage > 0 {
		b[w.damage] ^= 1
	}
	return b, at
}

func disk(size int, copies ...written) []byte {
	b := make([]byte, size)
	for _, w := range copies {
		text, at := w.bytes()
		copy(b[min(at, int64(size)):], text)
	}
	return b
}

func TestHeader(t *testing.T) {
	with := func(change ...func(*written)) written {
		w := whole()
		for _, c := range change {
			c(&w)
		}
		return w
	}
	second := func(w *written) { w.second = true }
	large := func(w *written) { w.size = 1 << 20 }
	newer := func(w *written) { w.sequence++ }
	fresh := func(w *written) { w.stamp = stampNew }
	broken := func(w *written) { w.damage = 5000 }
	made := header{made: true, magic: true, uuid: someUUID, subsystem: stampUsed, sequence: 3, size: 16 << 10, offset: 16 << 20, sectorSize: 4096, keyslots: 1}
	stamped, later, wide := made, made, made
	wide.size = 1 << 20
	stamped.subsystem, later.sequence, later.subsystem = stampNew, 4, stampNew
	for name, row := range map[string]struct {
		copies   []written
		size     int
		thorough bool
		want     header // of which only made and magic count if it is not made
	}{
		"blank":                         {nil, 1 << 20, true, header{}},
		"small and blank":               {nil, 512, true, header{}},
		"whole":                         {[]written{with(), with(second)}, 1 << 20, false, made},
		"new":                           {[]written{with(fresh), with(second, fresh)}, 1 << 20, true, stamped},
		"first damaged":                 {[]written{with(broken), with(second)}, 1 << 20, false, made},
		"first gone":                    {[]written{with(second)}, 1 << 20, false, made},
		"first gone, second far":        {[]written{with(second, large)}, 4 << 20, true, wide},
		"first gone, second not sought": {[]written{with(second, large)}, 4 << 20, false, header{}},
		"second damaged":                {[]written{with(), with(second, broken)}, 1 << 20, true, made},
		"second is newer":               {[]written{with(), with(second, newer, fresh)}, 1 << 20, true, later},
		"first is newer":                {[]written{with(newer, fresh), with(second)}, 1 << 20, true, later},
		"both damaged":                  {[]written{with(broken), with(second, broken)}, 1 << 20, true, header{magic: true}},
		"checksum damaged":              {[]written{with(func(w *written) { w.damage = 460 })}, 1 << 20, true, header{magic: true}},
		"cut off":                       {[]written{with()}, 8 << 10, true, header{magic: true}},
		"no passphrase yet":             {[]written{with(func(w *written) { w.json = `{"keyslots":{},"segments":{"0":` + crypt + `}}` })}, 1 << 20, true, header{magic: true}},
		"no segment":                    {[]written{with(func(w *written) { w.json = `{"keyslots":{"0":{}},"segments":{}}` })}, 1 << 20, true, header{magic: true}},
		"LUKS1":                         {[]written{with(func(w *written) { w.version = 1 })}, 1 << 20, true, header{magic: true}},
		"a size that none has":          {[]written{with(func(w *written) { w.size = 12 << 10 })}, 1 << 20, true, header{magic: true}},
		"data within the header": {[]written{with(func(w *written) {
			w.json = `{"keyslots":{"0":{}},"segments":{"0":{"type":"crypt","offset":"4096","sector_size":512}}}`
		})}, 1 << 20, true, header{magic: true}},
	} {
		got, err := parseHeader(bytes.NewReader(disk(row.size, row.copies...)), row.thorough)
		if !row.want.made && !got.made {
			got = header{magic: got.magic}
		}
		if err != nil || got != row.want {
			t.Errorf("%s: %+v (%v), want %+v", name, got, err, row.want)
		}
	}
	busy := with(func(w *written) {
		w.json = `{"keyslots":{"0":{}},"segments":{"0":` + crypt + `,"1":` + crypt + `},"config":{"requirements":{"mandatory":["online-reencrypt-v2"]}}}`
	})
	_, err := parseHeader(bytes.NewReader(disk(1<<20, busy)), true)
	require.Class(t, err, state.FailedPrecondition, "online-reencrypt-v2")
	for _, strange := range []string{`{"keyslots":`, `{"keyslots":{},"keyslots":{}}`, "{\"keyslots\":\"\xff\"}"} { // cryptsetup takes most of them
		_, err := parseHeader(bytes.NewReader(disk(1<<20, with(newer, func(w *written) { w.json = strange }), with(second))), true)
		require.Class(t, err, state.FailedPrecondition, "is not understood")
	}
	for _, null := range []string{
		`{"keyslots":{"0":{"area":{"encryption":"aes-xts-plain64"}}},"segments":{"0":` + strings.Replace(crypt, "aes-xts-plain64", "cipher_null-ecb", 1) + `}}`,
		`{"keyslots":{"0":{"area":{"encryption":"aes-xts-plain64"}},"1":{"area":{"encryption":"cipher_null-ecb"}}},"segments":{"0":` + crypt + `}}`,
		`{"keyslots":{"0":{"area":{"encryption":"cipher_null-ecb","Encryption":"aes-xts-plain64"}}},"segments":{"0":` + crypt + `}}`, // cryptsetup reads the first
	} {
		_, err := parseHeader(bytes.NewReader(disk(1<<20, with(func(w *written) { w.json = null }))), true)
		require.Class(t, err, state.FailedPrecondition, "encrypts nothing")
	}
}

// broken is a device of which some byte cannot be read.
type brokenDevice struct {
	data []byte
	at   int64
}

func (b brokenDevice) ReadAt(p []byte, offset int64) (int, error) {
	if offset <= b.at && b.at < offset+int64(len(p)) {
		return 0, errors.New("input/output error")
	}
	return bytes.NewReader(b.data).ReadAt(p, offset)
}

// What cannot be read is not taken for an element without a header.
func TestUnreadableHeader(t *testing.T) {
	first, second := whole(), whole()
	first.damage, second.second = 5000, true
	for _, at := range []int64{0, 6000, 16 << 10, 20 << 10} {
		h, err := parseHeader(brokenDevice{disk(1<<20, first, second), at}, true)
		if err == nil || h.made {
			t.Errorf("byte %d is not readable: %+v, %v", at, h, err)
		}
	}
}

func FuzzHeader(f *testing.F) {
	w := whole()
	one, _ := w.bytes()
	w.second = true
	two, _ := w.bytes()
	f.Add(one)
	f.Add(append(make([]byte, len(one)), two...))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHeader(bytes.NewReader(b), true)
		if err != nil && errors.Is(err, io.EOF) || h.made && (h.offset < secondOffsets[0] || h.sectorSize < 512 || h.keyslots < 1) {
			t.Errorf("%+v, %v", h, err)
		}
	})
}

func TestRoom(t *testing.T) {
	for _, row := range []struct {
		h     header
		bytes int64
		want  int64
	}{
		{header{}, 80 << 20, 64 << 20},
		{header{}, 16 << 20, 0},
		{header{}, 4096, 0},
		{header{}, 80<<20 + 512, 64<<20 + 512},
		{header{made: true, offset: 32 << 20, sectorSize: 4096}, 80<<20 + 512, 48 << 20},
		{header{made: true, offset: 32 << 20, sectorSize: 512}, 80<<20 + 512, 48<<20 + 512},
	} {
		if got := row.h.room(row.bytes); got != row.want {
			t.Errorf("%+v on %d bytes has room for %d, not %d", row.h, row.bytes, got, row.want)
		}
	}
}

func TestWhatAsksForTheLayer(t *testing.T) {
	l := New()
	for value, valid := range map[string]bool{"luks2": true, "": false, "LUKS2": false, "luks": false, "none": false} {
		v := devices.Volume{ID: "v", Context: map[string]string{EncryptionKey: value}}
		if wanted := l.Wanted(v); wanted != valid {
			t.Errorf("%q asks for it: %t", value, wanted)
		}
		if err := l.Validate(v); (err == nil) != valid || !valid && state.ClassOf(err) != state.InvalidArgument {
			t.Errorf("%q: %v", value, err)
		}
	}
	if plain := (devices.Volume{ID: "v"}); l.Wanted(plain) || l.Validate(plain) != nil {
		t.Error("a volume that says nothing has the layer")
	}
}

// The name is another for each volume and driver, and stays.
func TestNameOfTheDevice(t *testing.T) {
	seen := map[string]string{}
	for _, driver := range []string{"csi-node.local", "csi-node.locala", ""} {
		l := New().In(devices.Environment{DriverName: driver}).(*Layer)
		for _, id := range []string{"v", "av", "", "../v", fmt.Sprintf("%0128d", 1)} {
			name, whose := l.device(devices.Volume{ID: id}), driver+" "+id
			if other, taken := seen[name]; taken || len(name) != 44 {
				t.Errorf("%s and %s have the name %s", whose, other, name)
			}
			seen[name] = whose
		}
	}
	if got := New().In(devices.Environment{DriverName: "csi-node.local"}).(*Layer).device(devices.Volume{ID: "v"}); seen[got] != "csi-node.local v" {
		t.Errorf("%s is the name of %q", got, seen[got])
	}
}
