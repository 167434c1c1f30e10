package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/csi-node/csi-node/pkg/state"
)

// suffix ends the names of the current files of records.
const suffix = ".json"

// fileName returns the name of the file of a volume, whose id may be of any
// length and have any character.
func fileName(id string) string {
	sum := sha256.Sum256([]byte(id))
	return string(append(hex.AppendEncode(nil, sum[:]), suffix...))
}

// document is what a file holds, without the checksum.
type document struct {
	Boot string `json:"boot"` // the kernel's boot id
	*state.Volume
}

// options make the text of a record deterministic, and allow paths that are not UTF-8.
var options = json.JoinOptions(json.Deterministic(true), jsontext.AllowInvalidUTF8(true))

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal adds the CRC-32C of a JSON object, without its closing brace, as the object's last
// member, so that the result is JSON again.
func seal(object []byte) []byte {
	object = object[:len(object)-1]
	return append(object, sealOf(object)...)
}

func sealOf(text []byte) []byte {
	return fmt.Appendf(nil, `,"crc32c":"%08x"}`+"\n", crc32.Checksum(text, castagnoli))
}

// unseal checks a sealed object and returns it without its checksum. It overwrites raw.
func unseal(raw []byte) (object []byte, err error) {
	at := max(0, len(raw)-len(sealOf(nil)))
	text, sealed := raw[:at], raw[at:]
	if want := sealOf(text); !bytes.Equal(sealed, want) {
		return nil, fmt.Errorf("it ends with %q, and its checksum would be %q", sealed, want)
	}
	return append(text, '}'), nil
}

func encode(boot string, v *state.Volume) ([]byte, error) {
	return encodeIn(new(bytes.Buffer), boot, v)
}

// encodeIn is encode with a buffer, which the text may be in.
func encodeIn(object *bytes.Buffer, boot string, v *state.Volume) ([]byte, error) {
	if err := json.MarshalWrite(object, document{boot, v}, options); err != nil {
		return nil, err
	}
	return seal(object.Bytes()), nil
}

// decode reads a file.
func decode(raw []byte) (boot string, v *state.Volume, err error) {
	object, err := unseal(raw)
	if err != nil {
		return "", nil, err
	}
	return decodeObject(object)
}

func decodeObject(object []byte) (boot string, v *state.Volume, err error) {
	d := document{Volume: &state.Volume{}}
	if err := json.Unmarshal(object, &d, options); err != nil {
		return "", nil, err
	}
	if d.Volume == nil {
		return "", nil, errors.New("it is null, where a record has to be")
	}
	for path, t := range d.Targets {
		if t == nil || t.Path != path {
			return "", nil, fmt.Errorf("its target at %q does not name that path", path)
		}
	}
	if d.Targets == nil {
		d.Targets = map[string]*state.Target{}
	}
	return d.Boot, d.Volume, nil
}
