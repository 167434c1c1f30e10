package state

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// FuzzFlagWords gives flags separated by newlines, which no flag may hold.
func FuzzFlagWords(f *testing.F) {
	for _, flags := range []string{"", "ro\nrw", "noatime,nodiratime\nstrictatime", `context="a:b,c",nodev`, `a"b,c` + "\n" + `d"`, "bind", "x-a=,comment=b,rw=1", "\x00"} {
		f.Add(flags)
	}
	f.Fuzz(func(t *testing.T, text string) {
		given := strings.Split(text, "\n")
		got, err := ParseFlags(given)
		if err != nil {
			if ClassOf(err) != InvalidArgument || !reflect.DeepEqual(got, Flags{}) {
				t.Fatalf("%q: %+v, %s: %v", given, got, ClassOf(err), err)
			}
			return
		}
		if got.Set&got.Clear&^AtimeMask != 0 || (got.Set|got.Clear)&AtimeMask != 0 && got.Clear&AtimeMask != AtimeMask {
			t.Errorf("%q contradicts itself: %+v", given, got)
		}
		if !got.Met(got.Set) {
			t.Errorf("%q is not met by what it sets: %+v", given, got)
		}
		again, err := ParseFlags(append(words(got), got.Super...))
		if err != nil || !reflect.DeepEqual(again, got) {
			t.Errorf("%q is %+v, and its own words are %+v (%v)", given, got, again, err)
		}
		twice, err := ParseFlags(append(slices.Clone(given), given...))
		if err != nil || twice.Set != got.Set || twice.Clear != got.Clear || len(twice.Super) != 2*len(got.Super) {
			t.Errorf("%q said twice is %+v (%v), once %+v", given, twice, err, got)
		}
	})
}

// words says flags' attributes in the words of mount(8).
func words(f Flags) []string {
	var list []string
	for word, a := range attributeWords {
		if a.Set&^AtimeMask != 0 && f.Set&a.Set == a.Set || a.Set == 0 && a.Clear&AtimeMask == 0 && f.Clear&a.Clear == a.Clear {
			list = append(list, word)
		}
	}
	switch {
	case !f.atime():
	case f.Set&AtimeMask == 0:
		list = append(list, "relatime")
	default:
		list = append(list, (f.Set & AtimeMask).String())
	}
	return list
}

// FuzzEdits asks one thing of a record after the other, in whatever order, and
// sees that each answer is kept to.
func FuzzEdits(f *testing.F) {
	f.Add([]byte{0, 0, 12, 3, 0, 13, 5, 0, 1, 0})           // a life
	f.Add([]byte{0, 0, 3, 0, 9, 0, 12, 9, 6, 3, 7, 200})    // with refusals
	f.Add([]byte{0, 0, 10, 0, 0, 64, 4, 4, 11, 2, 1, 128})  // and growth
	f.Add([]byte{0, 0, 6, 64, 0, 16, 1, 0, 7, 0, 8, 16})    // and what gives way
	f.Add([]byte{1, 0, 14, 0, 5, 7, 14, 1, 0, 129, 3, 255}) // of nothing
	f.Fuzz(func(t *testing.T, program []byte) {
		v := &Volume{ID: "v", Targets: map[string]*Target{}}
		for len(program) >= 2 {
			v = edited(t, v, program[0], program[1])
			program = program[2:]
		}
		value, err := encodeRecord(v)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := decodeRecord("v", value); err != nil || !sameRecord(v, again) {
			t.Errorf("%+v is read back as %+v (%v)", v, again, err)
		}
	})
}

// edited makes the edit number op with an argument on a copy of the record.
func edited(t *testing.T, before *Volume, op, arg byte) *Volume {
	t.Helper()
	v, now := deepCopy(before), time.Unix(int64(before.Revision), 0).UTC()
	v.Revision++
	path := fmt.Sprintf("/p/%d", arg%4)
	c := Capability{Access: MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"}
	if arg&64 != 0 {
		c = Capability{Access: BlockAccess, Mode: c.Mode}
	}
	if arg&32 != 0 {
		c.Mode = "SINGLE_NODE_SINGLE_WRITER"
	}
	if arg&16 != 0 && c.FSType != "" {
		c.Flags = []string{"noatime", "discard"}
	}
	if op&8 != 0 {
		c.FSType = ""
	}
	part := []Part{StagePart(), SizePart(), TargetPart(path)}[arg/4%3]
	ask := func(v *Volume) error {
		switch op % 8 {
		case 0:
			return v.AskStage(&Stage{Path: path, Capability: c, ReadOnly: arg&8 != 0, Adopted: arg&128 != 0}, now)
		case 1:
			return v.AskUnstage(path, now)
		case 2, 3:
			staging := "/p/0"
			if v.Stage != nil && arg&4 == 0 {
				staging = v.Stage.Path
			}
			return v.AskPublish(&Target{Path: path + "/t", Capability: c, ReadOnly: arg&8 != 0}, staging, now)
		case 4:
			return v.AskUnpublish(path+"/t", now)
		case 5:
			if arg&128 != 0 {
				if err := v.Presume("/p/0", c, nil, now); err != nil {
					return err
				}
			}
			return v.AskSize(int64(arg)<<20, 0, now)
		}
		return nil
	}
	switch op % 8 {
	case 6:
		if intent := v.Intent(part); arg&64 != 0 && intent != nil && !intent.Gone {
			intent.Begun = true
		} else {
			v.Accept(part)
		}
	case 7:
		accepted := before.Intent(part) != nil && before.Intent(part).Accepted
		if arg&128 == 0 {
			v.Drop(part)
		} else if v.Withdraw(part, now); accepted && !reflect.DeepEqual(v.Intent(part), before.Intent(part)) {
			t.Fatalf("%s was accepted and is withdrawn: %+v", part, before)
		}
	default:
		err := ask(v)
		if err != nil {
			if ClassOf(err) == Unavailable {
				t.Fatalf("a refusal without a class: %v", err)
			}
			v.Revision = before.Revision
			if !reflect.DeepEqual(v, before) {
				t.Fatalf("%v: refused, and the record is\n%+v, was\n%+v", err, v, before)
			}
			return before
		}
		once := deepCopy(v)
		v.Revision++
		if err := ask(v); err != nil && err != ErrNothingThere {
			t.Fatalf("asked again: %v of %+v", err, once)
		}
		v.Revision--
		if !reflect.DeepEqual(v, once) {
			t.Fatalf("asked again it becomes\n%s, was\n%s", text(v), text(once))
		}
	}
	return v
}

func text(v *Volume) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// FuzzMeta lets meta pages with right checksums say what the fuzzer wants, of
// pages that it may have damaged.
func FuzzMeta(f *testing.F) {
	h := grownStore(f)
	f.Add(uint64(3), uint64(2), uint64(len(h.file)/os.Getpagesize()), uint32(os.Getpagesize()), uint32(0), []byte{})
	f.Add(uint64(0), uint64(0), uint64(2), uint32(512), uint32(16), []byte{1})
	f.Add(uint64(1)<<63, ^uint64(0), ^uint64(0), uint32(1<<16), uint32(5000), []byte{0xff})
	f.Fuzz(func(t *testing.T, root, freelist, pages uint64, pageSize, at uint32, with []byte) {
		file := bytes.Clone(h.file)
		copy(file[int(at)%len(file):], with)
		for _, start := range []int{0, os.Getpagesize()} {
			b := file[start+pageHeader:][:metaSize]
			order.PutUint32(b[8:], pageSize)
			order.PutUint64(b[16:], root)
			order.PutUint64(b[32:], freelist)
			order.PutUint64(b[40:], pages)
			sum := fnv.New64a()
			sum.Write(b[:metaSummed])
			order.PutUint64(b[metaSummed:], sum.Sum64())
		}
		h.reopen(t, file)
	})
}
