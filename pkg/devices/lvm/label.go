package lvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strconv"
	"strings"
)

// label is what a disk of LVM says of itself: which disk it is, and, if it has the
// metadata of its group, which group that is and which disks it has.
type label struct {
	uuid      string
	group     string // name; empty: the disk holds no metadata
	groupUUID string
	sequence  int64    // of the metadata: the highest is the latest
	members   []string // UUIDs of the group's disks
}

// The layout of a disk of LVM (lib/format_text/layout.h of lvm2).
const (
	labelSectors = 4 // one of the first sectors holds the label
	sectorBytes  = 512
	labelMagic   = "LABELONE"
	labelType    = "LVM2 001"
	uuidBytes    = 32
	areaMagic    = " LVM2 x[5A%r0N*>"
	areaHeader   = 512
	ignoredFlag  = 1
	mostMetadata = 64 << 20
	mostAreas    = 2 // pvcreate makes no more; a pod may list many on its disk
)

// readLabel reads the label of a disk; nil: it has none. It reads some KiB.
func readLabel(disk io.ReaderAt) (*label, error) {
	start := make([]byte, labelSectors*sectorBytes)
	switch _, err := disk.ReadAt(start, 0); {
	case errors.Is(err, io.EOF):
		return nil, nil // too small for a label
	case err != nil:
		return nil, err
	}
	for at := 0; at < len(start); at += sectorBytes {
		sector := start[at : at+sectorBytes]
		if string(sector[:8]) != labelMagic || string(sector[24:32]) != labelType {
			continue
		}
		header := int(binary.LittleEndian.Uint32(sector[20:]))
		if header < 32 || header+uuidBytes+8 > sectorBytes {
			return nil, errors.New("the label of LVM is damaged")
		}
		l := &label{uuid: string(sector[header : header+uuidBytes])}
		return l, l.readAreas(disk, sector[header+uuidBytes+8:])
	}
	return nil, nil
}

// readAreas reads the metadata in the areas that the header of a disk lists: the areas for
// data, a zero, the areas for metadata, a zero.
func (l *label) readAreas(disk io.ReaderAt, list []byte) error {
	metadata, read := false, 0
	for ; len(list) >= 16 && read < mostAreas; list = list[16:] {
		offset := int64(binary.LittleEndian.Uint64(list))
		switch {
		case offset == 0 && metadata:
			return nil
		case offset == 0:
			metadata = true
		case metadata:
			read++
			if err := l.readArea(disk, offset); err != nil {
				return err
			}
		}
	}
	return nil
}

// readArea reads the text in one area for metadata. One that holds none, or that is not to
// be used, is passed over.
func (l *label) readArea(disk io.ReaderAt, offset int64) error {
	header := make([]byte, areaHeader)
	if _, err := disk.ReadAt(header, offset); err != nil {
		return err
	}
	if string(header[4:20]) != areaMagic {
		return nil
	}
	size := int64(binary.LittleEndian.Uint64(header[32:]))
	at, length := int64(binary.LittleEndian.Uint64(header[40:])), int64(binary.LittleEndian.Uint64(header[48:]))
	flags := binary.LittleEndian.Uint32(header[60:])
	if at == 0 || length == 0 || flags&ignoredFlag != 0 {
		return nil
	}
	if at < areaHeader || at >= size || length < 0 || length > min(size, mostMetadata) {
		return errors.New("the metadata area of LVM is damaged")
	}
	text := make([]byte, length)
	first := min(length, size-at)
	_, err := disk.ReadAt(text[:first], offset+at)
	if err == nil && first < length { // it goes on at the start of the area
		_, err = disk.ReadAt(text[first:], offset+areaHeader)
	}
	if err != nil {
		return err
	}
	var other label
	other.parse(text)
	if other.sequence > l.sequence || l.group == "" {
		l.group, l.groupUUID, l.sequence, l.members = other.group, other.groupUUID, other.sequence, other.members
	}
	return nil
}

// parse reads the metadata of a group: sections in braces, one assignment a line.
func (l *label) parse(text []byte) {
	var path []string
	for line := range bytes.Lines(text) {
		line := strings.TrimSpace(string(line))
		if name, opens := strings.CutSuffix(line, "{"); opens {
			if path = append(path, strings.TrimSpace(name)); len(path) == 1 {
				l.group = path[0]
			}
			continue
		}
		if line == "}" {
			path = path[:max(len(path)-1, 0)]
			continue
		}
		key, value, _ := strings.Cut(line, " = ")
		switch {
		case len(path) == 1 && key == "id":
			l.groupUUID = bare(strings.Trim(value, `"`))
		case len(path) == 1 && key == "seqno":
			l.sequence, _ = strconv.ParseInt(value, 10, 64) // 0 is the oldest
		case len(path) == 3 && path[1] == "physical_volumes" && key == "id":
			l.members = append(l.members, bare(strings.Trim(value, `"`)))
		}
	}
}
