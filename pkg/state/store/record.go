package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"

	"github.com/csi-node/csi-node/pkg/state"
)

// suffix is of the names of records; other files in the directory are none.
const suffix = ".json"

// fileName returns the name of the file of a volume, whose id may be of any
// length and have any character.
func fileName(id string) string { return fmt.Sprintf("%x%s", sha256.Sum256([]byte(id)), suffix) }

// document is what a file holds, but for the checksum.
type document struct {
	Boot string `json:"boot"` // the kernel's boot id
	*state.Volume
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal puts the CRC-32C of a JSON object, without its last brace, behind it as
// its last member, so that the whole is JSON.
func seal(object []byte) []byte {
	object = object[:len(object)-1]
	return append(object, sealOf(object)...)
}

func sealOf(text []byte) []byte {
	return fmt.Appendf(nil, `,"crc32c":"%08x"}`+"\n", crc32.Checksum(text, castagnoli))
}

// unseal turns what it is given into the object.
func unseal(raw []byte) (object []byte, err error) {
	text, sealed := raw, raw[:0]
	if n := len(sealOf(nil)); len(raw) >= n {
		text, sealed = raw[:len(raw)-n], raw[len(raw)-n:]
	}
	if want := sealOf(text); !bytes.Equal(sealed, want) {
		return nil, fmt.Errorf("it ends with %q, and its checksum would be %q", sealed, want)
	}
	return append(text, '}'), nil
}

func encode(boot string, v *state.Volume) ([]byte, error) {
	object, err := json.Marshal(document{boot, v})
	if err != nil {
		return nil, err
	}
	if isUnknown := func(p part) bool { return *p.unknown != nil }; slices.ContainsFunc(partsOf(v, nil), isUnknown) {
		all, err := members(object)
		if err != nil {
			return nil, err
		}
		for _, p := range partsOf(v, all) {
			add(p.object, *p.unknown)
		}
		if object, err = json.Marshal(all); err != nil {
			return nil, err
		}
	}
	return seal(object), nil
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
	strict := json.NewDecoder(bytes.NewReader(object))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&d); err != nil || strict.InputOffset() != int64(len(object)) {
		d = document{Volume: &state.Volume{}}
		if err := json.Unmarshal(object, &d); err != nil {
			return "", nil, err
		}
		if err := keepUnknown(d, object); err != nil {
			return "", nil, err
		}
	}
	for path, t := range d.Targets {
		if t == nil || t.Path != path {
			return "", nil, fmt.Errorf("its target at %q does not name that path", path)
		}
	}
	return d.Boot, d.Stored(), nil
}

// part is a part of a record that has unknown fields of its own, with its JSON
// object.
type part struct {
	unknown *state.Unknown
	object  map[string]any
	parts   []string // fields of the object that are parts, or hold them
}

// partsOf returns the parts of a record, always in the same order.
func partsOf(v *state.Volume, record map[string]any) []part {
	in := func(object map[string]any, field string) map[string]any {
		inner, _ := object[field].(map[string]any)
		return inner
	}
	all := []part{{&v.Unknown, record, []string{"stage", "targets", "size", "crc32c"}}}
	for s, object := v.Stage, in(record, "stage"); s != nil; s, object = s.Next, in(object, "next") {
		all = append(all, part{&s.Unknown, object, []string{"next"}})
	}
	for _, path := range v.TargetPaths() {
		for t, object := v.Targets[path], in(in(record, "targets"), path); t != nil; t, object = t.Next, in(object, "next") {
			all = append(all, part{&t.Unknown, object, []string{"next"}})
		}
	}
	if v.Size != nil {
		all = append(all, part{&v.Size.Unknown, in(record, "size"), nil})
	}
	return all
}

// keepUnknown notes the fields of the object that are not read.
func keepUnknown(d document, object []byte) error {
	raw, err := members(object)
	if err != nil {
		return err
	}
	known, err := json.Marshal(d)
	if err != nil {
		return err
	}
	read, err := members(known)
	if err != nil {
		return err
	}
	has := partsOf(d.Volume, read)
	for i, p := range partsOf(d.Volume, raw) {
		unknown := beyond(p.object, has[i].object)
		maps.DeleteFunc(unknown, func(field string, _ any) bool { return slices.Contains(p.parts, field) })
		if len(unknown) > 0 {
			*p.unknown = unknown
		}
	}
	return nil
}

// beyond returns what of an object another one has not, in objects within it, too.
func beyond(object, other map[string]any) map[string]any {
	more := map[string]any{}
	for field, value := range object {
		has, is := other[field]
		inner, isObject := value.(map[string]any)
		if hasInner, both := has.(map[string]any); isObject && both {
			if inner = beyond(inner, hasInner); len(inner) > 0 {
				more[field] = inner
			}
		} else if !is {
			more[field] = value
		}
	}
	return more
}

// add gives an object fields that it has not.
func add(object, fields map[string]any) {
	if object == nil { // its path is no UTF-8
		return
	}
	for field, value := range fields {
		has, is := object[field]
		if inner, isObject := has.(map[string]any); isObject {
			more, _ := value.(map[string]any)
			add(inner, more)
		} else if !is {
			object[field] = value
		}
	}
}

// members reads a JSON object; numbers stay as they are written.
func members(object []byte) (all map[string]any, err error) {
	decoder := json.NewDecoder(bytes.NewReader(object))
	decoder.UseNumber()
	return all, decoder.Decode(&all)
}
