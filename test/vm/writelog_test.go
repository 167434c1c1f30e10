package vm

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

// logFile writes a log as QEMU does: entries with an offset on the disk and
// data, or a flush.
func logFile(t *testing.T, entries ...[]byte) string {
	t.Helper()
	var log bytes.Buffer
	sector := func(values ...uint64) {
		s := make([]byte, logHeader)
		for i, v := range values {
			binary.LittleEndian.PutUint64(s[8*i:], v)
		}
		log.Write(s)
	}
	sector(logMagic, 1, uint64(len(entries)), logHeader)
	for _, e := range entries {
		log.Write(e)
	}
	path := filepath.Join(t.TempDir(), "log")
	require.NoError(t, os.WriteFile(path, log.Bytes(), 0o600))
	return path
}

func entry(offset, bytes int64, flags uint64, data []byte) []byte {
	e := make([]byte, logHeader, logHeader+len(data))
	for i, v := range []uint64{uint64(offset / logHeader), uint64(bytes / logHeader), flags} {
		binary.LittleEndian.PutUint64(e[8*i:], v)
	}
	return append(e, data...)
}

func page(b byte) []byte { return bytes.Repeat([]byte{b}, pageBytes) }

func flush() []byte                        { return entry(0, 0, flagFlush, nil) }
func written(at int64, data []byte) []byte { return entry(at*pageBytes, int64(len(data)), 0, data) }

// What dm-log-writes adds: a write that is durable by itself, and a mark.
func TestMarksAndDurableWrites(t *testing.T) {
	mark := entry(0, 0, flagMark, nil)
	binary.LittleEndian.PutUint64(mark[24:], uint64(copy(mark[entryHeader:], "grown"))) // the length of its text
	log, err := OpenLog(logFile(t, written(0, page('a')), entry(pageBytes, pageBytes, flagFUA, page('b')), mark, written(2, page('c'))))
	require.NoError(t, err)
	defer func() { _ = log.Close() }()
	if len(log.Entries) != 4 || log.Entries[2].Mark != "grown" || log.Entries[1].Mark != "" || !log.Entries[1].Durable || log.Entries[3].Durable {
		t.Errorf("%+v", log.Entries)
	}
	disk, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	require.NoError(t, err)
	require.NoError(t, log.Replay(disk, 4, func(int64) bool { return false }))
	require.NoError(t, disk.Close())
	got, err := os.ReadFile(disk.Name())
	if want := append(make([]byte, pageBytes), page('b')...); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the disk holds %d bytes (%v)", len(got), err)
	}
}

// A cut keeps what a flush covers, the notes, and what it is told to.
func TestReplay(t *testing.T) {
	note := append([]byte(`{"do":"write","volume":"v"}`), make([]byte, noteBytes)...)[:noteBytes]
	log, err := OpenLog(logFile(t,
		written(0, page('a')),
		flush(),
		written(1, append(page('b'), page('c')...)),
		entry(0, 4*pageBytes, flagDiscard, nil),
		entry(FilesystemBytes, noteBytes, 0, note),
		flush(),
		written(0, page('d')),
		flush(),
	))
	require.NoError(t, err)
	defer func() { _ = log.Close() }()
	always, second := func(int64) bool { return true }, func() func(int64) bool {
		n := 0
		return func(int64) bool { n++; return n%2 == 0 }
	}()
	for _, test := range []struct {
		name    string
		entries int
		keep    func(int64) bool
		want    string // the pages
		notes   int
	}{
		{"nothing yet", 0, always, "...", 0},
		{"not flushed, lost", 1, func(int64) bool { return false }, "...", 0},
		{"not flushed, kept", 1, always, "a..", 0},
		{"flushed", 2, func(int64) bool { return false }, "a..", 0},
		{"half of a write", 3, second, "a.c", 0},
		{"a note", 5, func(int64) bool { return false }, "a..", 1},
		{"flushed with the note", 6, func(int64) bool { return false }, "abc", 1},
		{"an old page", 7, func(int64) bool { return false }, "abc", 1},
		{"all", 8, func(int64) bool { return false }, "dbc", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			disk, err := os.Create(filepath.Join(t.TempDir(), "disk"))
			require.NoError(t, err)
			defer func() { _ = disk.Close() }()
			require.NoError(t, disk.Truncate(DiskBytes))
			require.NoError(t, log.Replay(disk, test.entries, test.keep))
			got := ""
			for i := range int64(3) {
				b := make([]byte, pageBytes)
				if _, err := disk.ReadAt(b, i*pageBytes); err != nil {
					t.Fatal(err)
				}
				switch {
				case bytes.Equal(b, make([]byte, pageBytes)):
					got += "."
				case bytes.Equal(b, page(b[0])):
					got += string(b[0])
				default:
					got += "?"
				}
			}
			notes, err := ReadNotes(disk.Name())
			if got != test.want || len(notes) != test.notes || err != nil {
				t.Errorf("the disk holds %q and notes %v (%v), want %q and %d notes", got, notes, err, test.want, test.notes)
			}
		})
	}
	for i, e := range log.Entries {
		note, is, err := log.NoteIn(e)
		if err != nil || is != (i == 4) || is && note.Do != "write" {
			t.Errorf("entry %d: note %+v, %v, %v", i, note, is, err)
		}
	}
}

func TestPromises(t *testing.T) {
	life := []Note{
		{Do: "create", Volume: "v", Bytes: 1},
		{Do: "create", Volume: "v", Bytes: 1, Done: true},
		{Do: "stage", Volume: "v"},
		{Do: "stage", Volume: "v", Done: true},
		{Do: "create", Volume: "other", Bytes: 9, Done: true},
		{Do: "write", Volume: "v", File: "a"},
		{Do: "write", Volume: "v", File: "a", Done: true},
		{Do: "grow", Volume: "v", Bytes: 2},
		{Do: "grow", Volume: "v", Bytes: 2, Done: true},
		{Do: "delete", Volume: "v"},
		{Do: "delete", Volume: "v", Done: true},
	}
	whole := Promises{CreateBegun: true, Created: true, Staged: true, DeleteBegun: true, Deleted: true, Files: []string{"a"}, Bytes: 2}
	for n, want := range map[int]Promises{
		0:  {},
		1:  {CreateBegun: true},
		3:  {CreateBegun: true, Created: true, Bytes: 1},
		6:  {CreateBegun: true, Created: true, Bytes: 1, Staged: true},
		8:  {CreateBegun: true, Created: true, Bytes: 1, Staged: true, Files: []string{"a"}},
		11: whole,
	} {
		if got := PromisesOf(life[:n], "v"); !reflect.DeepEqual(got, want) {
			t.Errorf("after %d notes: %+v, want %+v", n, got, want)
		}
	}
}
