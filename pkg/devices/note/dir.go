package note

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/state"
)

// Dir is a directory of notes: JSON files with a checksum, one for each key, that survive
// reboots and power cuts. The directory is made with the first note. Notes with different
// keys may be written concurrently, those with the same key may not.
//
//	<dir>/<hash of the key>.json  {"key": …, "note": …, "seal": "sha256 of key and note"}
type Dir string

// suffix ends the name of a note's file.
const suffix = ".json"

type sealed struct {
	Key  string          `json:"key"`
	Note json.RawMessage `json:"note"`
	Seal string          `json:"seal"`
}

func (s sealed) sum() (string, error) {
	var compact bytes.Buffer
	if err := json.Compact(&compact, s.Note); err != nil {
		return "", err
	}
	sum := sha256.Sum256(append([]byte(s.Key+"\x00"), compact.Bytes()...))
	return hex.EncodeToString(sum[:]), nil
}

// Path returns where the note with a key is.
func (d Dir) Path(key string) string {
	sum := sha256.Sum256([]byte(key))
	return filepath.Join(string(d), hex.EncodeToString(sum[:16])+suffix)
}

// Read reads the note with a key into a struct, and reports whether there is one.
// Internal: it is damaged; the error names the file and says what to do.
func (d Dir) Read(key string, into any) (bool, error) {
	s, err := read(d.Path(key))
	if err != nil || s == nil {
		return false, err
	}
	if s.Key != key {
		return false, damaged(d.Path(key), fmt.Errorf("it is the note of %q, not of %q", s.Key, key))
	}
	if err := json.Unmarshal(s.Note, into); err != nil {
		return false, damaged(d.Path(key), err)
	}
	return true, nil
}

// read returns nil when there is no file.
func read(path string) (*sealed, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s := &sealed{}
	if err := json.Unmarshal(raw, s); err != nil {
		return nil, damaged(path, err)
	}
	switch sum, err := s.sum(); {
	case err != nil:
		return nil, damaged(path, err)
	case sum != s.Seal:
		return nil, damaged(path, errors.New("its seal does not fit: somebody has edited it, or the disk has lost some of it"))
	}
	return s, nil
}

func damaged(path string, why error) error {
	return state.Errorf(state.Internal, "the note %s is damaged, so what became of the volume before is not known (%w): restore it from a backup; or see for yourself what is on the device, and remove the note", path, why)
}

// Write replaces the note with a key, or makes it. After a power cut the note is either the
// old one or the new one; once Write has returned, it is the new one.
func (d Dir) Write(key string, note any) error {
	if err := d.write(key, note); err != nil {
		return err
	}
	return durable.SyncDir(string(d))
}

// write is Write without making the name of a new note durable.
func (d Dir) write(key string, note any) error {
	raw, err := json.Marshal(note)
	if err != nil {
		return err
	}
	s := sealed{Key: key, Note: raw}
	if s.Seal, err = s.sum(); err != nil {
		return err
	}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := d.make(); err != nil {
		return err
	}
	return durable.Replace(d.Path(key), append(text, '\n'))
}

// make makes the directory, durably.
func (d Dir) make() error {
	if _, err := os.Stat(string(d)); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return err
	}
	return errors.Join(durable.SyncDir(filepath.Dir(string(d))), durable.SyncDir(filepath.Dir(filepath.Dir(string(d)))))
}

// Remove removes the note with a key, durably; there may be none.
func (d Dir) Remove(key string) error {
	if err := os.Remove(d.Path(key)); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	return durable.SyncDir(string(d))
}

// Each calls f with the key of each note that is whole, and a function that reads
// the note into a struct. Damaged notes are errors, and do not keep Each from the others.
func (d Dir) Each(f func(key string, read func(into any) error) error) error {
	entries, err := os.ReadDir(string(d))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, entry := range entries {
		if !strings.HasSuffix(entry.Name(), suffix) {
			continue
		}
		path := filepath.Join(string(d), entry.Name())
		s, readErr := read(path)
		switch {
		case readErr != nil, s == nil:
		case d.Path(s.Key) != path:
			readErr = damaged(path, fmt.Errorf("it is a copy of the note of %q", s.Key))
		default:
			readErr = f(s.Key, func(into any) error { return json.Unmarshal(s.Note, into) })
		}
		err = errors.Join(err, readErr)
	}
	return err
}
