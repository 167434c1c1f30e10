package vm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// WriteLog is the log of a disk: what the guest wrote and when it asked the
// disk to flush. It is in the format of Linux' dm-log-writes
// (Documentation/admin-guide/device-mapper/log-writes.rst). QEMU writes each entry
// when it is completed, and none that is durable by itself: its disk offers no FUA,
// and Linux flushes after such writes instead. Linux writes them before the flush that
// covers them.
type WriteLog struct {
	Entries []Entry
	file    *os.File
}

// Entry is a write, a discard, or a flush.
type Entry struct {
	Offset, Bytes int64  // on the disk
	Flush         bool   // what was written before is durable from here on
	Durable       bool   // it is durable by itself (FUA)
	Mark          string // what `dmsetup message … mark` has noted here; then it is no write
	Discard       bool

	data int64 // offset of the bytes in the log
}

const (
	logMagic    = 0x6a736677736872
	logHeader   = 512 // bytes that the log's own header takes, and that of each entry at least
	flagFlush   = 1 << 0
	flagFUA     = 1 << 1
	flagDiscard = 1 << 2
	flagMark    = 1 << 3
	entryHeader = 32 // bytes; a mark follows
)

// OpenLog reads a log up to its last flush.
func OpenLog(path string) (*WriteLog, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	l := &WriteLog{file: file}
	if err := l.read(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), file.Close())
	}
	return l, nil
}

// Close closes the log.
func (l *WriteLog) Close() error { return l.file.Close() }

func (l *WriteLog) read() error {
	var header struct {
		Magic, Version, Entries uint64
		SectorBytes             uint32
	}
	if err := binary.Read(io.NewSectionReader(l.file, 0, logHeader), binary.LittleEndian, &header); err != nil {
		return err
	}
	if header.Magic != logMagic || header.SectorBytes != logHeader {
		return fmt.Errorf("this is no log of writes with sectors of %d bytes: %+v", logHeader, header)
	}
	at := int64(logHeader)
	for range header.Entries {
		var entry struct{ Sector, Sectors, Flags, DataBytes uint64 }
		if err := binary.Read(io.NewSectionReader(l.file, at, logHeader), binary.LittleEndian, &entry); err != nil {
			return fmt.Errorf("entry %d: %w", len(l.Entries), err)
		}
		e := Entry{
			Offset:  int64(entry.Sector) * logHeader,
			Bytes:   int64(entry.Sectors) * logHeader,
			Flush:   entry.Flags&flagFlush != 0,
			Durable: entry.Flags&flagFUA != 0,
			Discard: entry.Flags&flagDiscard != 0,
			data:    at + logHeader,
		}
		if entry.Flags&flagMark != 0 {
			text := make([]byte, min(entry.DataBytes, logHeader-entryHeader))
			if _, err := l.file.ReadAt(text, at+entryHeader); err != nil {
				return fmt.Errorf("entry %d: %w", len(l.Entries), err)
			}
			e.Mark = string(bytes.TrimRight(text, "\x00"))
		}
		l.Entries = append(l.Entries, e)
		if at += logHeader; !e.Discard {
			at += e.Bytes
		}
	}
	return nil
}

// Data returns the bytes that an entry wrote, nil for a flush or discard.
func (l *WriteLog) Data(e Entry) ([]byte, error) {
	if e.Bytes == 0 || e.Discard {
		return nil, nil
	}
	data := make([]byte, e.Bytes)
	_, err := l.file.ReadAt(data, e.data)
	return data, err
}

// pageBytes is how much a disk writes at once or not at all.
const pageBytes = 4096

// Replay writes to disk what a disk with a volatile cache holds when its power
// is cut after the first n entries: all that a flush covers, and of the later
// writes, page by page, what keep says of the page at an offset. Notes are always kept.
func (l *WriteLog) Replay(disk *os.File, n int, keep func(offset int64) bool) error {
	covered := -1 // up to which entry
	for i, e := range l.Entries[:n] {
		if e.Flush {
			covered = i
		}
	}
	for i, e := range l.Entries[:n] {
		data, err := l.Data(e)
		if err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		if e.Discard { // it may do nothing, and here it does
			continue
		}
		for at := 0; at < len(data); at += pageBytes {
			offset := e.Offset + int64(at)
			if i > covered && !e.Durable && offset < FilesystemBytes && !keep(offset) {
				continue
			}
			if _, err := disk.WriteAt(data[at:min(at+pageBytes, len(data))], offset); err != nil {
				return err
			}
		}
	}
	return nil
}
