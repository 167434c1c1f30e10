package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"os"
)

// bbolt maps its file into memory and believes every length and page number in
// it: a damaged file makes it run in circles, allocate without bound or die of
// a fault that no recover catches (Check, too, and in a goroutine of its own).
// So the pages are walked here first, by bounded reads. The format is that of
// bbolt's file version 2, in the byte order of the machine:
//
//	page     id u64, flags u16, count u16, overflow u32, elements; overflow+1 pages long
//	meta     magic, version, page size, flags u32; root page, sequence, freelist
//	         page, number of pages, transaction, FNV-1a of all before u64
//	branch   elements of pos u32, key size u32, page u64; pos counts from the element
//	leaf     elements of flags u32, pos u32, key size u32, value size u32
//	bucket   a leaf's value, if its flag is 1: root page, sequence u64, and if the
//	         root page is 0, a leaf page inline
//	freelist page numbers u64; if count is 0xffff, the first is their number
const (
	boltMagic    = 0xED0CDAED
	boltVersion  = 2
	branchFlag   = 0x01
	leafFlag     = 0x02
	freelistFlag = 0x10
	bucketFlag   = 0x01

	pageHeader    = 16
	elementSize   = 16
	bucketHeader  = 16
	metaSize      = 64
	metaSummed    = 56
	smallestPage  = 512
	largestPage   = 1 << 16
	countOverflow = 0xffff
)

var order = binary.NativeEndian

// pages walks the pages of a bbolt file.
type pages struct {
	f    io.ReaderAt
	size uint64 // of a page
	seen []bool // by page number: it has a use already
}

// meta is what a meta page says.
type meta struct {
	pageSize, root, freelist, pages, transaction uint64
}

// checkPages returns ErrCorrupt unless bbolt can safely open the file: every
// page that can be reached is in the file, has one use only, and keeps its
// elements within itself and in order. Pages without any use are harmless.
func checkPages(f io.ReaderAt, fileSize int64) error {
	m, err := readMeta(f, fileSize)
	if err != nil {
		return err
	}
	if m.pages < 2 || m.pages > uint64(fileSize)/m.pageSize {
		return fmt.Errorf("%w: it has %d bytes and should have %d pages of %d bytes: it was truncated", ErrCorrupt, fileSize, m.pages, m.pageSize)
	}
	p := &pages{f: f, size: m.pageSize, seen: make([]bool, m.pages)}
	p.seen[0], p.seen[1] = true, true
	if err := p.freelist(m.freelist); err != nil {
		return err
	}
	return p.tree(m.root, nil, nil)
}

// readMeta returns the meta page that bbolt would use: of the valid ones the
// one with the latest transaction.
func readMeta(f io.ReaderAt, fileSize int64) (*meta, error) {
	first, err := metaAt(f, fileSize, 0)
	if err != nil {
		return nil, err
	}
	at := int64(os.Getpagesize())
	if first != nil {
		at = int64(first.pageSize)
	}
	second, err := metaAt(f, fileSize, at)
	switch {
	case err != nil:
		return nil, err
	case first == nil && second == nil:
		return nil, fmt.Errorf("%w: neither meta page is valid", ErrCorrupt)
	case first == nil, second != nil && second.transaction > first.transaction:
		return second, nil
	}
	return first, nil
}

// metaAt returns nil when there is no valid meta page at the offset.
func metaAt(f io.ReaderAt, fileSize, at int64) (*meta, error) {
	if at+pageHeader+metaSize > fileSize {
		return nil, nil
	}
	b := make([]byte, metaSize)
	if _, err := f.ReadAt(b, at+pageHeader); err != nil {
		return nil, err
	}
	sum := fnv.New64a()
	sum.Write(b[:metaSummed])
	m := &meta{
		pageSize:    uint64(order.Uint32(b[8:])),
		root:        order.Uint64(b[16:]),
		freelist:    order.Uint64(b[32:]),
		pages:       order.Uint64(b[40:]),
		transaction: order.Uint64(b[48:]),
	}
	valid := order.Uint32(b) == boltMagic && order.Uint32(b[4:]) == boltVersion && order.Uint64(b[metaSummed:]) == sum.Sum64() &&
		m.pageSize >= smallestPage && m.pageSize <= largestPage && m.pageSize&(m.pageSize-1) == 0
	if !valid {
		return nil, nil
	}
	return m, nil
}

// use notes that a page has a use.
func (p *pages) use(id uint64) error {
	if id >= uint64(len(p.seen)) {
		return fmt.Errorf("%w: page %d is beyond the end", ErrCorrupt, id)
	}
	if p.seen[id] {
		return fmt.Errorf("%w: page %d is used twice", ErrCorrupt, id)
	}
	p.seen[id] = true
	return nil
}

// read reads a page and those that it overflows into.
func (p *pages) read(id uint64) ([]byte, error) {
	if err := p.use(id); err != nil {
		return nil, err
	}
	header := make([]byte, pageHeader)
	if _, err := p.f.ReadAt(header, int64(id*p.size)); err != nil {
		return nil, err
	}
	if got := order.Uint64(header); got != id {
		return nil, fmt.Errorf("%w: page %d says that it is page %d", ErrCorrupt, id, got)
	}
	overflow := uint64(order.Uint32(header[12:]))
	for i := range overflow {
		if err := p.use(id + 1 + i); err != nil {
			return nil, err
		}
	}
	b := make([]byte, (1+overflow)*p.size)
	_, err := p.f.ReadAt(b, int64(id*p.size))
	return b, err
}

func (p *pages) freelist(id uint64) error {
	b, err := p.read(id)
	if err != nil {
		return err
	}
	if flags(b) != freelistFlag {
		return fmt.Errorf("%w: page %d is no freelist", ErrCorrupt, id)
	}
	ids, n := b[pageHeader:], uint64(count(b))
	if n == countOverflow {
		ids, n = ids[8:], order.Uint64(ids)
	}
	if n > uint64(len(ids))/8 {
		return fmt.Errorf("%w: freelist page %d says that it has %d entries", ErrCorrupt, id, n)
	}
	for i := range n {
		if err := p.use(order.Uint64(ids[8*i:])); err != nil {
			return err
		}
	}
	return nil
}

// tree walks the tree under a page. Its first key must be low, under which its
// branch has it (bbolt's own check lets it be greater, but then its next write
// leaves two references to the page), and all must be less than high; nil is no
// demand.
func (p *pages) tree(id uint64, low, high []byte) error {
	b, err := p.read(id)
	if err != nil {
		return err
	}
	elements, err := elements(b, low, high)
	if err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	switch {
	case len(elements) == 0 && (flags(b) == branchFlag || low != nil):
		return fmt.Errorf("%w: page %d has no elements", ErrCorrupt, id)
	case flags(b) == leafFlag:
		return p.buckets(elements)
	}
	for i, e := range elements {
		next := high
		if i+1 < len(elements) {
			next = elements[i+1].key
		}
		if err := p.tree(e.page, e.key, next); err != nil {
			return err
		}
	}
	return nil
}

// buckets walks the trees of the buckets among a leaf's elements.
func (p *pages) buckets(leaf []element) error {
	for _, e := range leaf {
		if !e.bucket {
			continue
		}
		if len(e.value) < bucketHeader {
			return fmt.Errorf("%w: bucket %q has no header", ErrCorrupt, e.key)
		}
		if root := order.Uint64(e.value); root != 0 {
			if err := p.tree(root, nil, nil); err != nil {
				return fmt.Errorf("bucket %q: %w", e.key, err)
			}
			continue
		}
		inline := e.value[bucketHeader:]
		if len(inline) < pageHeader || flags(inline) != leafFlag {
			return fmt.Errorf("%w: bucket %q has no page", ErrCorrupt, e.key)
		}
		inner, err := elements(inline, nil, nil)
		if err != nil {
			return fmt.Errorf("bucket %q: %w", e.key, err)
		}
		for _, e := range inner {
			if e.bucket {
				return fmt.Errorf("%w: bucket %q is inside an inline bucket", ErrCorrupt, e.key)
			}
		}
	}
	return nil
}

// element is one of a branch (page) or of a leaf (bucket, value).
type element struct {
	key, value []byte
	page       uint64
	bucket     bool
}

// elements returns the elements of a branch or leaf page.
func elements(b, low, high []byte) ([]element, error) {
	kind := flags(b)
	if kind != branchFlag && kind != leafFlag {
		return nil, fmt.Errorf("%w: it is neither branch nor leaf", ErrCorrupt)
	}
	if pageHeader+count(b)*elementSize > len(b) {
		return nil, fmt.Errorf("%w: it says that it has %d elements", ErrCorrupt, count(b))
	}
	list := make([]element, count(b))
	for i := range list {
		start := pageHeader + i*elementSize
		h, e := b[start:start+elementSize], &list[i]
		pos, keySize, valueSize := uint64(order.Uint32(h)), uint64(order.Uint32(h[4:])), uint64(0)
		if kind == branchFlag {
			e.page = order.Uint64(h[8:])
		} else {
			e.bucket = order.Uint32(h)&bucketFlag != 0
			pos, keySize, valueSize = uint64(order.Uint32(h[4:])), uint64(order.Uint32(h[8:])), uint64(order.Uint32(h[12:]))
		}
		key := uint64(start) + pos
		value := key + keySize
		if keySize == 0 || value+valueSize > uint64(len(b)) {
			return nil, fmt.Errorf("%w: element %d has no key or reaches beyond the page", ErrCorrupt, i)
		}
		e.key, e.value = b[key:value], b[value:value+valueSize]
		ordered := high == nil || bytes.Compare(e.key, high) < 0
		if i > 0 {
			ordered = ordered && bytes.Compare(e.key, list[i-1].key) > 0
		} else if low != nil {
			ordered = ordered && bytes.Equal(e.key, low)
		}
		if !ordered {
			return nil, fmt.Errorf("%w: element %d is out of order", ErrCorrupt, i)
		}
	}
	return list, nil
}

func flags(page []byte) uint16 { return order.Uint16(page[8:]) }

func count(page []byte) int { return int(order.Uint16(page[10:])) }
