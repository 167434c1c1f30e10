package vm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"syscall"
)

// The disk of a power cut holds a file system, or a volume group, and, behind it, the notes: what
// the guest was about to do and what was acknowledged, each note in a sector of
// its own, written past all caches. So the notes are entries of the disk's log,
// in their place between the other writes: whatever instant one cuts at, the
// disk itself says what it had promised by then.
const (
	FilesystemBytes = 1 << 30
	DiskBytes       = FilesystemBytes + maxNotes*noteBytes

	maxNotes  = 1024
	noteBytes = 512
)

// The lives of a node, which differ in the storage that it has.
const (
	Pool  = "pool"
	Group = "group"
)

// GroupStart is where a volume group begins on the disk.
const GroupStart = 1 << 20

// Encrypted is the name of a volume that has a layer beneath its file system.
const Encrypted = "encrypted"

// Note is one line of the notes.
type Note struct {
	Do     string `json:"do"`             // what: create, stage, write, grow, unstage, delete
	Volume string `json:"volume"`         // its name
	Done   bool   `json:"done,omitempty"` // acknowledged; before that it is only begun
	Bytes  int64  `json:"bytes,omitempty"`
	File   string `json:"file,omitempty"`
}

func (n Note) String() string {
	moment := "begin"
	if n.Done {
		moment = "end"
	}
	return fmt.Sprintf("the %s of %s %s%s", moment, n.Do, n.Volume, n.File)
}

// Notebook takes notes on a disk.
type Notebook struct {
	disk *os.File
	page []byte // aligned as O_DIRECT wants it
	next int64
}

// OpenNotebook opens the notebook of a disk without notes. The file system on
// the disk may be mounted.
func OpenNotebook(disk string) (*Notebook, error) {
	f, err := os.OpenFile(disk, os.O_RDWR|syscall.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	page, err := syscall.Mmap(-1, 0, pageBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	return &Notebook{disk: f, page: page}, err
}

// Write takes a note.
func (b *Notebook) Write(n Note) error {
	text, err := json.Marshal(n)
	if err != nil {
		return err
	}
	sector := b.page[:noteBytes]
	clear(sector[copy(sector, text):])
	if len(text) > noteBytes || b.next == maxNotes {
		return fmt.Errorf("no room for note %d: %s", b.next, text)
	}
	_, err = b.disk.WriteAt(sector, FilesystemBytes+b.next*noteBytes)
	b.next++
	return err
}

// ReadNotes returns the notes on a disk.
func ReadNotes(disk string) ([]Note, error) {
	f, err := os.Open(disk)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read from
	var notes []Note
	sector := make([]byte, noteBytes)
	for i := int64(0); i < maxNotes; i++ {
		if _, err := f.ReadAt(sector, FilesystemBytes+i*noteBytes); err != nil {
			return nil, err
		}
		if sector[0] == 0 {
			break
		}
		n, err := parseNote(sector)
		if err != nil {
			return nil, err
		}
		notes = append(notes, n)
	}
	return notes, nil
}

func parseNote(sector []byte) (Note, error) {
	var n Note
	err := json.Unmarshal(bytes.TrimRight(sector, "\x00"), &n)
	return n, err
}

// NoteIn returns the note that an entry of a log wrote; ok is false for other
// entries.
func (l *WriteLog) NoteIn(e Entry) (n Note, ok bool, err error) {
	if e.Bytes == 0 || e.Discard || e.Offset < FilesystemBytes {
		return Note{}, false, nil
	}
	sector, err := l.Data(e)
	if err == nil {
		n, err = parseNote(sector)
	}
	return n, err == nil, err
}

// What the guest says on the console.
const (
	Lived  = "the node has lived"
	Erased = "erased and formatted anew:" // what a format that was cut had left
)
