package state

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumBytes is the length of the checksum and the space before a sealed text.
const sumBytes = 9

func seal(text []byte) []byte {
	return append(fmt.Appendf(nil, "%08x ", crc32.Checksum(text, castagnoli)), text...)
}

func unseal(value []byte) ([]byte, error) {
	if len(value) < sumBytes {
		return nil, fmt.Errorf("%d bytes are too few for a checksum", len(value))
	}
	text := value[sumBytes:]
	if want := fmt.Sprintf("%08x ", crc32.Checksum(text, castagnoli)); string(value[:sumBytes]) != want {
		return nil, fmt.Errorf("checksum %q does not match the contents, whose is %q", value[:sumBytes], want)
	}
	return text, nil
}

func encodeRecord(v *Volume) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return seal(text), nil
}

// decodeRecord reads the record of the volume id. Fields that it does not know
// are left out: a newer version may have written them.
func decodeRecord(id string, value []byte) (*Volume, error) {
	text, err := unseal(value)
	if err != nil {
		return nil, err
	}
	var v Volume
	if err := json.Unmarshal(text, &v); err != nil {
		return nil, err
	}
	if v.ID != id {
		return nil, fmt.Errorf("it is the record of %q", v.ID)
	}
	for path, t := range v.Targets {
		if t == nil || t.Path != path {
			return nil, fmt.Errorf("its target at %q does not name that path", path)
		}
	}
	return deepCopy(&v), nil
}
