package state

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"
)

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
		again := &Volume{}
		if err := json.Unmarshal([]byte(text(v)), again); err != nil || text(again) != text(v) {
			t.Errorf("%+v is read back as %+v (%v)", v, again, err)
		}
	})
}

// edited makes the edit number op with an argument on a copy of the record.
func edited(t *testing.T, before *Volume, op, arg byte) *Volume {
	t.Helper()
	v, now := before.Clone(), time.Unix(int64(before.Revision), 0).UTC()
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
			if arg&4 != 0 {
				return v.AskUnmount(path, now)
			}
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
			v.Accept(part, arg&32 == 0)
		}
	case 7:
		told := before.Intent(part) != nil && before.Intent(part).Confirmed()
		if arg&128 == 0 {
			v.Drop(part)
		} else if v.Withdraw(part, now); told && !reflect.DeepEqual(v.Intent(part), before.Intent(part)) {
			t.Fatalf("%s was told to hold, and is withdrawn: %+v", part, before)
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
		once := v.Clone()
		v.Revision++
		if err := ask(v); err != nil && err != ErrNothingThere && err != ErrStagedElsewhere {
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
