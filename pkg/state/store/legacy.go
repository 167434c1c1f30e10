package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// legacyPath returns the path of the store of versions before this one: a bbolt
// file, whose lock they hold. This version holds it, too, so that never two
// reconcile side by side, and leaves it empty. That is a new store to an older
// version, which then begins with what it finds mounted, and writes the file with
// the first thing that it does: whatever was edited in it is later than the directory.
func legacyPath(stateDir string) string { return filepath.Join(stateDir, "intents.db") }

// takeIn writes the records of an older version in place of its own, and leaves
// intents.db empty: until then its records count.
func (s *Store) takeIn(ctx context.Context, own, c *contents, damage error) error {
	log, path := klog.FromContext(ctx), legacyPath(filepath.Dir(s.path))
	for id := range c.records {
		s.unwritten[id] = true
	}
	if err := s.rewrite(); err != nil { // there may be room without the file
		log.Error(err, "Records of an older version cannot be written beside it", "store", s.path)
		if err := s.legacy.Truncate(0); err != nil {
			return err
		}
		_ = s.rewrite() // or later; memory has them
	}
	for id := range own.records {
		if c.records[id] == nil {
			if err := s.dir.remove(fileName(id)); err != nil {
				return err
			}
		}
	}
	if damage == nil && len(c.bad) == 0 {
		log.Info("Records of an older version are taken in", "file", path, "records", len(c.records))
		return s.legacy.Truncate(0)
	}
	aside, err := setAside(path)
	if err != nil {
		return err
	}
	s.setAside = append(s.setAside, aside)
	log.Info("The store of an older version was set aside", "file", aside)
	if err := s.legacy.Close(); err != nil {
		return err
	}
	s.legacy, _, err = opener{deadHolder}.lockLegacy(ctx, path, unix.LOCK_EX)
	return err
}

// readLegacy reads intents.db; the contents are nil if nothing was ever edited in
// it, and, with the damage, if it is no sound store. A record that cannot be read
// is bad, by its id.
func readLegacy(f io.ReaderAt, bootID string) (c *contents, damage, err error) {
	raw, err := io.ReadAll(io.NewSectionReader(f, 0, math.MaxInt64))
	if err != nil || len(raw) == 0 {
		return nil, nil, err
	}
	buckets, sequence, damage := readBolt(raw)
	if damage != nil || len(buckets) == 0 {
		return nil, damage, nil
	}
	boot, damage := unsealLegacy(buckets["meta"]["boot"])
	if damage != nil {
		return nil, fmt.Errorf("its boot id: %w", damage), nil
	}
	if sequence > math.MaxInt64 {
		return nil, fmt.Errorf("its revision %d cannot be", sequence), nil
	}
	c = newContents()
	c.revision = sequence
	for id, value := range buckets["records"] {
		text, err := unsealLegacy(value)
		var v *state.Volume
		if err == nil {
			_, v, err = decodeObject(text)
		}
		if err == nil && v.ID != id {
			err = fmt.Errorf("it is the record of %q", v.ID)
		}
		if err != nil {
			c.bad[id] = err
			continue
		}
		c.revision = max(c.revision, v.Revision)
		if string(boot) == bootID {
			c.records[id] = v
		}
	}
	if c.revision == 0 && buckets["records"] != nil && len(c.bad) == 0 { // an older version began, and did nothing
		return nil, nil, nil
	}
	return c, nil, nil
}

func sealLegacy(text []byte) []byte {
	return append(fmt.Appendf(nil, "%08x ", crc32.Checksum(text, castagnoli)), text...)
}

func unsealLegacy(value []byte) ([]byte, error) {
	_, text, _ := bytes.Cut(value, []byte(" "))
	if !bytes.Equal(sealLegacy(text), value) {
		return nil, errors.New("its checksum does not match")
	}
	return text, nil
}

// The format of bbolt's file version 2, in the byte order of the machine:
//
//	page     id u64, flags u16, count u16, overflow u32, elements; overflow+1 pages long
//	meta     magic, version, page size, flags u32; root page, sequence, freelist
//	         page, number of pages, transaction, FNV-1a of all before u64
//	branch   elements of pos u32, key size u32, page u64; pos counts from the element
//	leaf     elements of flags u32, pos u32, key size u32, value size u32
//	bucket   a leaf's value, if its flag is 1: root page, sequence u64, and if the
//	         root page is 0, a leaf page inline
const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2
	branchFlag  = 0x01
	leafFlag    = 0x02
	boltHeader  = 16 // bytes of a page's header, of an element, and of a bucket's header
	metaBytes   = 64
)

var order = binary.NativeEndian

// bolt is a bbolt file that is being read.
type bolt struct {
	raw      []byte
	pageSize uint64
	seen     map[uint64]bool // pages; none is read twice, so that no damage makes it run in circles
}

// readBolt reads the buckets of a file, and the highest sequence of any. bbolt believes every number in it, and
// dies of one that is damaged; here it is an error.
func readBolt(raw []byte) (buckets map[string]map[string][]byte, sequence uint64, err error) {
	defer func() {
		if damage := recover(); damage != nil { // an index out of range, mostly
			err = fmt.Errorf("reading the pages: %v", damage)
		}
	}()
	var meta []byte // the later one of those that are whole
	for _, at := range []int{0, os.Getpagesize()} {
		if len(raw) < at+boltHeader+metaBytes {
			continue
		}
		m := raw[at+boltHeader:][:metaBytes]
		sum := fnv.New64a()
		sum.Write(m[:56])
		if order.Uint64(m[56:]) == sum.Sum64() && order.Uint32(m) == boltMagic && order.Uint32(m[4:]) == boltVersion &&
			(meta == nil || order.Uint64(m[48:]) > order.Uint64(meta[48:])) {
			meta = m
		}
	}
	if meta == nil {
		return nil, 0, errors.New("neither meta page is valid")
	}
	b := &bolt{raw: raw, pageSize: uint64(order.Uint32(meta[8:])), seen: map[uint64]bool{}}
	if have, pages := uint64(len(raw)), order.Uint64(meta[40:]); have/b.pageSize < pages {
		return nil, 0, fmt.Errorf("it has %d bytes and should have %d pages of %d bytes: it was truncated", have, pages, b.pageSize)
	}
	buckets = map[string]map[string][]byte{}
	b.tree(order.Uint64(meta[16:]), func(name, bucket []byte) {
		in := map[string][]byte{}
		each := func(key, value []byte) { in[string(key)] = value }
		if root := order.Uint64(bucket); root != 0 {
			b.tree(root, each)
		} else {
			b.elements(bucket[boltHeader:], each)
		}
		buckets[string(name)], sequence = in, max(sequence, order.Uint64(bucket[8:]))
	})
	return buckets, sequence, nil
}

func (b *bolt) tree(id uint64, each func(key, value []byte)) {
	page := b.raw[id*b.pageSize:]
	if b.seen[id] || order.Uint64(page) != id {
		panic(fmt.Sprintf("page %d is used twice, or is another one", id))
	}
	b.seen[id] = true
	b.elements(page[:(1+uint64(order.Uint32(page[12:])))*b.pageSize], each)
}

func (b *bolt) elements(page []byte, each func(key, value []byte)) {
	for i := range int(order.Uint16(page[10:])) {
		e := page[boltHeader*(1+i):]
		switch order.Uint16(page[8:]) {
		case branchFlag:
			b.tree(order.Uint64(e[8:]), each)
		case leafFlag:
			key := e[order.Uint32(e[4:]):]
			value := key[order.Uint32(e[8:]):]
			each(key[:order.Uint32(e[8:])], value[:order.Uint32(e[12:])])
		default:
			panic("a page is neither branch nor leaf")
		}
	}
}
