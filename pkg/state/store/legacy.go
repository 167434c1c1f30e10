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

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// lockName is of the file whose lock is that of the store. It was the store of the
// first versions, a bbolt file, whose lock they hold, so that never two
// reconcile side by side. This version leaves it empty. That is a new store to such a
// version, which then begins with what it finds mounted, and writes the file with
// the first thing that it does: whatever was edited in it is later than the directory.
const lockName = "intents.db"

func (s *Store) lockPath() string { return filepath.Join(filepath.Dir(s.path), lockName) }

// importLegacy writes the records of an older version over those of the directory.
// Until the caller has emptied intents.db, that is what a restart reads.
func (s *Store) importLegacy(ctx context.Context, c *contents) error {
	log, path := klog.FromContext(ctx), s.lockPath()
	if aside := asideName(path); len(c.bad) > 0 {
		if err := os.WriteFile(aside, c.raw, 0o600); err != nil {
			log.Error(errors.Join(err, os.Remove(aside)), "The damaged store of an older version is not kept", "file", path)
		}
	}
	if s.dir.putAll(c.records, false) != nil { // without intents.db, which is in memory by now, there may be room
		if err := s.lock.Truncate(0); err != nil {
			return err
		}
		if err := s.dir.putAll(c.records, false); err != nil {
			log.Error(err, "Records of an older version are in memory alone until they are edited", "store", s.path)
		}
	}
	log.Info("Records of an older version are taken in", "file", path, "records", len(c.records))
	return nil
}

// readLegacy reads intents.db; the contents are nil if nothing was ever edited in
// it. If it is no sound store, they are empty, and it is bad itself, by its name.
// A record that cannot be read is bad, by its id.
func readLegacy(f io.ReaderAt, bootID string) (c *contents, err error) {
	raw, err := io.ReadAll(io.NewSectionReader(f, 0, math.MaxInt64))
	if err != nil || len(raw) == 0 {
		return nil, err
	}
	c = newContents()
	c.raw = raw
	buckets, sequence, damage := readBolt(raw)
	var boot []byte
	if damage == nil && len(buckets) > 0 { // it is made without any
		boot, damage = unsealLegacy(buckets["meta"]["boot"])
	}
	if damage == nil && sequence > math.MaxInt64 {
		damage = fmt.Errorf("its revision %d cannot be", sequence)
	}
	if damage != nil {
		c.bad[lockName] = damage
		return c, nil
	}
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
	if c.revision == 0 && len(c.bad) == 0 { // an older version began, and did nothing
		return nil, nil
	}
	return c, nil
}

func unsealLegacy(value []byte) ([]byte, error) {
	sum, text, _ := bytes.Cut(value, []byte(" "))
	if want := fmt.Sprintf("%08x", crc32.Checksum(text, castagnoli)); string(sum) != want {
		return nil, fmt.Errorf("its checksum is %q, and would be %q", sum, want)
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

// readBolt reads the buckets of a file, and the highest sequence of any. bbolt
// believes every number in it, and dies of one that is damaged; here it is an error.
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
