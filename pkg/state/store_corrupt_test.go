package state

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// quiet is for tests whose damage would be logged at length.
var quiet = ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(false)))

// history is a store's file and every version of every record that was in it.
type history struct {
	file     []byte
	versions map[string]bool // as encoded
	latest   map[string]*Volume
}

// grownStore returns a store with branch, overflow and freelist pages.
func grownStore(t testing.TB) history {
	t.Helper()
	path := storePath(t)
	s := openStore(t, path, testBoot)
	h := history{versions: map[string]bool{}, latest: map[string]*Volume{}}
	edit := func(id string, edit func(*Volume) error) {
		v := mustEdit(t, s, id, edit)
		h.versions[encoded(t, v)] = true
		h.latest[id] = v
	}
	for i := range 40 {
		id := fmt.Sprintf("volume-%02d", i)
		edit(id, staged("/stage/"+strings.Repeat("x", i*10)))
		edit(id, published("/pod/"+id))
	}
	for i := range 30 {
		edit("volume-07", published(fmt.Sprintf("/pod/%d/%s", i, strings.Repeat("y", 200)))) // overflows
	}
	for i := range 10 {
		id := fmt.Sprintf("volume-%02d", 10+i)
		edit(id, emptied)
		delete(h.latest, id)
	}
	closeStore(t, s)
	var err error
	if h.file, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	return h
}

func encoded(t testing.TB, v *Volume) string {
	t.Helper()
	value, err := encodeRecord(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(value)
}

// reopen opens a damaged copy of the store, and fails unless each record in it
// is as it once was, and the store works. It reports what became of it.
func (h history) reopen(t *testing.T, file []byte) (setAside bool, records int) {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "csi-node-state-") // a tmpfs: there are many of them
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	}()
	path := filepath.Join(dir, "intents.db")
	ctx := klog.NewContext(t.Context(), quiet)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(ctx, path, testBoot)
	if err != nil {
		t.Fatal(err)
	}
	list := s.List()
	for _, v := range list {
		if !h.versions[encoded(t, v)] {
			t.Errorf("there is a record that never was: %+v", v)
		}
	}
	if aside := s.SetAside(); aside != "" {
		setAside = true
		if kept, err := os.ReadFile(aside); err != nil || !bytes.Equal(kept, file) {
			t.Errorf("what was set aside is not what was there: %v", err)
		}
		if len(list) != 0 {
			t.Errorf("a store begun anew has records: %v", list)
		}
	}
	for i := range 3 {
		mustEdit(t, s, "volume-00", func(v *Volume) error { v.Stage = &Stage{Path: fmt.Sprint(i)}; return nil })
	}
	closeStore(t, s)
	checkWithBolt(t, path)
	return setAside, len(list)
}

// checkWithBolt fails unless bbolt's own check finds the file sound, but for
// pages without any use.
func checkWithBolt(t *testing.T, path string) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	err = db.View(func(tx *bolt.Tx) error {
		for err := range tx.Check() {
			if !strings.Contains(err.Error(), "unreachable unfreed") {
				t.Error(err)
			}
		}
		return nil
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestSoundStoreIsKept(t *testing.T) {
	h := grownStore(t)
	if aside, records := h.reopen(t, h.file); aside || records != len(h.latest) {
		t.Errorf("set aside: %v, %d of %d records", aside, records, len(h.latest))
	}
}

// The walk must find nothing wrong with what bbolt writes, whatever is written.
func TestSoundPagesPass(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	s := openStore(t, path, testBoot)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	random := rand.New(rand.NewPCG(5, 6))
	for i := range 1500 {
		id := fmt.Sprintf("%d", random.IntN(300)*7919)
		edit := emptied
		if random.IntN(3) > 0 {
			edit = func(v *Volume) error {
				v.Stage = &Stage{Path: "/" + id + strings.Repeat("x", random.IntN(1<<random.IntN(14)))}
				return nil
			}
		}
		if i > 1300 {
			edit = emptied // down to few
		}
		mustEdit(t, s, id, edit)
		info, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		if err := checkPages(f, info.Size()); err != nil {
			t.Fatalf("after %d edits: %v", i+1, err)
		}
	}
}

func TestTruncatedStoreIsSetAside(t *testing.T) {
	h := grownStore(t)
	page := os.Getpagesize()
	cuts := []int{1, 15, 16, 79, 80}
	for n := 512; n < len(h.file); n += 512 {
		cuts = append(cuts, n)
		if n%page == 0 {
			cuts = append(cuts, n-1, n+1)
		}
	}
	whole := 0
	for _, n := range append(cuts, len(h.file)-1) {
		aside, records := h.reopen(t, h.file[:n])
		if !aside {
			whole++ // the cut was beyond the last page in use
		}
		if !aside && records != len(h.latest) {
			t.Errorf("cut at %d: kept with %d of %d records", n, records, len(h.latest))
		}
	}
	if whole == len(cuts)+1 {
		t.Error("no cut was noticed")
	}
	if aside, records := h.reopen(t, nil); aside || records != 0 {
		t.Errorf("an empty file: set aside %v, %d records", aside, records)
	}
}

func TestFlippedBytes(t *testing.T) {
	h := grownStore(t)
	random := rand.New(rand.NewPCG(1, 2))
	asides, less := 0, 0
	for i := range 600 {
		file := bytes.Clone(h.file)
		var where []int
		for range 1 + random.IntN(3) {
			at := random.IntN(len(file))
			if i%2 == 0 { // headers and elements are where it hurts
				at = at/os.Getpagesize()*os.Getpagesize() + random.IntN(256)
			}
			file[at] ^= byte(1 + random.IntN(255))
			where = append(where, at)
		}
		aside, records := h.reopen(t, file)
		if aside {
			asides++
		} else if records < len(h.latest) {
			less++
		}
		if t.Failed() {
			t.Fatalf("with flips at %d", where)
		}
	}
	t.Logf("of 600 damaged stores %d were set aside, %d lost records", asides, less)
	if asides == 0 || less == 0 {
		t.Error("the flips hit nothing")
	}
}

// Zeros and garbage in whole pages are what a dying disk leaves.
func TestGarbagePages(t *testing.T) {
	h := grownStore(t)
	random := rand.New(rand.NewPCG(3, 4))
	page := os.Getpagesize()
	for n := 0; n+page <= len(h.file); n += page {
		for _, kind := range []string{"zeros", "ones", "noise", "another page"} {
			file := bytes.Clone(h.file)
			for i := range page {
				switch kind {
				case "zeros":
					file[n+i] = 0
				case "ones":
					file[n+i] = 0xff
				case "noise":
					file[n+i] = byte(random.Uint32())
				case "another page":
					file[n+i] = h.file[(n+page+i)%len(file)]
				}
			}
			if h.reopen(t, file); t.Failed() {
				t.Fatalf("%s in page %d", kind, n/page)
			}
		}
	}
}

func TestOneBadRecordIsPutAside(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "good", staged("/stage/good"))
	was := mustEdit(t, s, "wrong-id", staged("/stage/wrong-id"))
	mustEdit(t, s, "flipped", staged("/stage/flipped"))
	bad := map[string]string{"flipped": "", "wrong-id": "", "null-target": `{"id":"null-target","targets":{"/pod":null}}`, "no-json": "{"}
	if err := s.db.Update(func(tx *bolt.Tx) error {
		records := tx.Bucket(recordsBucket)
		bad["flipped"] = strings.Replace(string(records.Get([]byte("flipped"))), "/stage", "/stagf", 1)
		bad["wrong-id"] = string(records.Get([]byte("good")))
		for _, id := range []string{"null-target", "no-json"} {
			bad[id] = string(seal([]byte(bad[id])))
		}
		for id, value := range bad {
			if err := records.Put([]byte(id), []byte(value)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	for range 2 {
		s = openStore(t, path, testBoot)
		if list := s.List(); len(list) != 1 || list[0].ID != "good" || s.SetAside() != "" {
			t.Fatalf("records %v, set aside %q", list, s.SetAside())
		}
		closeStore(t, s)
	}
	s = openStore(t, path, testBoot)
	if err := s.db.View(func(tx *bolt.Tx) error {
		for id, value := range bad {
			if got := tx.Bucket(badBucket).Get([]byte(id)); string(got) != value {
				t.Errorf("record %s is kept as %q, was %q", id, got, value)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if v := mustEdit(t, s, "wrong-id", staged("/stage/wrong-id")); v.Revision <= was.Revision {
		t.Errorf("revision %d is not later than %d", v.Revision, was.Revision)
	}
}

func TestStoreOfANewerVersion(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	if err := s.db.Update(func(tx *bolt.Tx) error {
		text := `{"id":"v","revision":7,"future":[1],"stage":{"revision":7,"since":"2026-01-01T00:00:00Z","path":"/stage","future":{"a":1},` +
			`"capability":{"access":"mount","mode":"SINGLE_NODE_WRITER","fsType":"ext4","future":true}}}`
		if _, err := tx.CreateBucket([]byte("future")); err != nil {
			return err
		}
		return errors.Join(tx.Bucket(recordsBucket).Put([]byte("v"), seal([]byte(text))),
			tx.Bucket(metaBucket).Put(versionKey, seal([]byte("2"))), tx.Bucket(metaBucket).Put([]byte("future"), []byte("x")))
	}); err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	if v := s.Get("v"); v == nil || v.Stage.Path != "/stage" || v.Targets == nil {
		t.Fatalf("the record is read as %+v", v)
	}
	if v := mustEdit(t, s, "w", staged("/other")); v.Revision <= 7 {
		t.Errorf("revision %d is not later than that of a record", v.Revision)
	}
}

func TestBucketsThatAreNoStore(t *testing.T) {
	for name, edit := range map[string]func(tx *bolt.Tx) error{
		"no records": func(tx *bolt.Tx) error { return tx.DeleteBucket(recordsBucket) },
		"no meta":    func(tx *bolt.Tx) error { return tx.DeleteBucket(metaBucket) },
		"no boot id": func(tx *bolt.Tx) error { return tx.Bucket(metaBucket).Delete(bootKey) },
		"bucket in records": func(tx *bolt.Tx) error {
			_, err := tx.Bucket(recordsBucket).CreateBucket([]byte("v"))
			return err
		},
		"impossible revision": func(tx *bolt.Tx) error { return tx.Bucket(recordsBucket).SetSequence(1 << 63) },
	} {
		t.Run(name, func(t *testing.T) {
			path := storePath(t)
			s := openStore(t, path, testBoot)
			if err := s.db.Update(edit); err != nil {
				t.Fatal(err)
			}
			closeStore(t, s)
			if s = openStore(t, path, testBoot); s.SetAside() == "" {
				t.Error("it was not set aside")
			}
			mustEdit(t, s, "v", staged("/stage"))
		})
	}
}

func TestGuarded(t *testing.T) {
	if err := guarded(func() error { panic("page 7 is odd") }); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "page 7") {
		t.Errorf("a panic became %v", err)
	}
	if err := guarded(func() error { return nil }); err != nil {
		t.Error(err)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"id":"v","revision":1,"stage":{"path":"/stage"},"targets":{"/pod":{"path":"/pod"}},"size":{"bytes":1}}`))
	f.Add([]byte(`{"id":"v","targets":{"/pod":null}}`))
	f.Add([]byte(`{"id":"v","stage":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if _, err := decodeRecord("v", text); err == nil {
			t.Error("text without its checksum was read")
		}
		v, err := decodeRecord("v", seal(text))
		if err != nil {
			return
		}
		value, err := encodeRecord(v)
		if err != nil {
			t.Fatalf("%+v was read and cannot be written: %v", v, err)
		}
		if again, err := decodeRecord("v", value); err != nil || !sameRecord(v, again) {
			t.Errorf("%+v was read back as %+v (%v)", v, again, err)
		}
	})
}

// FuzzPages damages a store where the fuzzer wants it.
func FuzzPages(f *testing.F) {
	h := grownStore(f)
	f.Add(uint32(0), []byte{1, 2, 3})
	f.Add(uint32(os.Getpagesize()*3+24), []byte("0")) // a first key that differs from its branch's
	f.Add(uint32(os.Getpagesize()*3), []byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, at uint32, with []byte) {
		file := bytes.Clone(h.file)
		copy(file[int(at)%len(file):], with)
		h.reopen(t, file)
	})
}
