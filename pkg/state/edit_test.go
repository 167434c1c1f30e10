package state

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

var editTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func aStage(changes ...func(*Stage)) *Stage {
	s := &Stage{Path: "/stage", Capability: Capability{Access: MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"discard"}}}
	for _, change := range changes {
		change(s)
	}
	return s
}

func aTarget(path string, changes ...func(*Target)) *Target {
	t := &Target{Path: path, Capability: Capability{Access: MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"}}
	for _, change := range changes {
		change(t)
	}
	return t
}

func gone(i *Intent) { *i = Intent{Gone: true, Revision: 3} }

// record returns a volume at revision 10 that is staged since revision 1, with changes.
func record(changes ...func(*Volume)) *Volume {
	v := &Volume{ID: "v", Revision: 10, Stage: aStage(func(s *Stage) { s.Intent = Intent{Revision: 1} }), Targets: map[string]*Target{}}
	for _, change := range changes {
		change(v)
	}
	return v
}

func with(path string, changes ...func(*Target)) func(*Volume) {
	return func(v *Volume) {
		v.Targets[path] = aTarget(path, changes...)
		v.Targets[path].Revision = 2
	}
}

func acceptedStage(v *Volume) { v.Stage.Accepted = true }

func unconfirmedStage(v *Volume) { v.Stage.Accepted, v.Stage.Unconfirmed = true, true }

func acceptedTarget(t *Target) { t.Accepted = true }

func unconfirmedTarget(t *Target) { t.Accepted, t.Unconfirmed = true, true }

func goneTarget(t *Target) { gone(&t.Intent) }

func single(t *Target) { t.Capability.Mode = "SINGLE_NODE_SINGLE_WRITER" }

// asks is a table of edits: what each makes of a record.
type asks map[string]struct {
	have  *Volume
	edit  func(*Volume) error
	class Class // of the refusal, if words are given
	words string
	part  Part // that has the edit's revision afterwards; none: the record is unchanged
}

func (table asks) run(t *testing.T) {
	for name, test := range table {
		t.Run(name, func(t *testing.T) {
			v, before := test.have.Clone(), test.have.Clone()
			err := test.edit(v)
			switch {
			case test.words != "":
				if err == nil || ClassOf(err) != test.class || !strings.Contains(err.Error(), test.words) {
					t.Errorf("the error is %v, not %s with %q", err, test.class, test.words)
				}
			case err != nil:
				t.Fatal(err)
			}
			if test.part == (Part{}) {
				if !reflect.DeepEqual(v, before) {
					t.Errorf("the record became %+v", v)
				}
				return
			}
			if i := v.Intent(test.part); i == nil || i.Revision != 10 || !i.Since.Equal(editTime) || i.Accepted {
				t.Errorf("the intent is %+v", i)
			}
		})
	}
}

func TestAskStage(t *testing.T) {
	ask := func(changes ...func(*Stage)) func(*Volume) error {
		return func(v *Volume) error { return v.AskStage(aStage(changes...), editTime) }
	}
	elsewhere := func(s *Stage) { s.Path = "/elsewhere" }
	xfs := func(s *Stage) { s.Capability.FSType = "xfs" }
	adopted := func(v *Volume) {
		v.Stage.Adopted, v.Stage.Accepted, v.Stage.Capability.Flags, v.Stage.Found = true, true, nil, "rw,discard"
	}
	asks{
		"first":             {have: &Volume{ID: "v", Revision: 10}, edit: ask(), part: StagePart()},
		"again":             {have: record(), edit: ask()},
		"fs type left open": {have: record(), edit: ask(func(s *Stage) { s.Capability.FSType = "" })},
		"elsewhere":         {have: record(acceptedStage), edit: ask(elsewhere), class: AlreadyExists, words: "/stage"},
		"other fs type":     {have: record(acceptedStage), edit: ask(xfs), class: AlreadyExists, words: "xfs"},
		"other flags":       {have: record(acceptedStage), edit: ask(noatime), class: AlreadyExists, words: "with other mount flags"},
		"read-only":         {have: record(acceptedStage), edit: ask(func(s *Stage) { s.ReadOnly = true }), class: AlreadyExists, words: "with another read-only setting"},
		"other context, fs type left open": {have: record(acceptedStage), edit: ask(func(s *Stage) {
			s.Capability.FSType, s.Context = "", map[string]string{"key": "value"}
		}), class: AlreadyExists, words: "with another volume_context or publish_context"},
		"unconfirmed, again": {have: record(unconfirmedStage), edit: ask()},
		"unconfirmed, other": {have: record(unconfirmedStage, with("/a", unconfirmedTarget)), edit: ask(xfs), part: StagePart()},
		"target confirmed":   {have: record(unconfirmedStage, with("/a", acceptedTarget)), edit: ask(xfs), class: AlreadyExists, words: "xfs"},
		"while going":        {have: record(func(v *Volume) { gone(&v.Stage.Intent) }), edit: ask(), part: StagePart()},
		"other, while going": {have: record(func(v *Volume) { gone(&v.Stage.Intent) }), edit: ask(xfs), class: Aborted, words: "unstaged"},
		// An adopted stage is a guess only where the kernel does not tell.
		"adopted, for reading":   {have: record(adopted), edit: ask(func(s *Stage) { s.ReadOnly = true }), class: AlreadyExists, words: "/stage"},
		"adopted, elsewhere":     {have: record(adopted), edit: ask(elsewhere), class: AlreadyExists, words: "/stage"},
		"adopted, other fs type": {have: record(adopted), edit: ask(xfs), class: AlreadyExists, words: "xfs"},
	}.run(t)

	unconfirmed := record(unconfirmedStage, with("/a", unconfirmedTarget))
	if err := ask(xfs)(unconfirmed); err != nil || !unconfirmed.Stage.Withdrawn || unconfirmed.Stage.Next == nil || !unconfirmed.Targets["/a"].Withdrawn {
		t.Errorf("what stands and is to give way became %+v (%v), and is to be taken down first", unconfirmed, err)
	}
	going := record(func(v *Volume) { gone(&v.Stage.Intent) })
	if err := going.AskStage(aStage(), editTime); err != nil || !going.Stage.Begun {
		t.Errorf("a stage over one that is still there is %+v (%v): a refusal would forget that one", going.Stage, err)
	}

	v := record(func(v *Volume) {
		v.Stage.Adopted, v.Stage.Accepted, v.Stage.Capability.Flags, v.Stage.Capability.Mode, v.Stage.UUID = true, true, nil, "", "its"
	})
	if err := v.Clone().AskStage(aStage(), editTime); ClassOf(err) != AlreadyExists || !strings.Contains(err.Error(), "discard") {
		t.Errorf("flags that an adopted stage is not seen to have: %v", err)
	}
	v.Stage.Found = "rw,discard"
	if err := v.AskStage(aStage(), editTime); err != nil || v.Stage.Adopted || !v.Stage.Accepted || v.Stage.Revision != 1 || len(v.Stage.Capability.Flags) != 1 || v.Stage.UUID != "its" {
		t.Errorf("an adopted stage became %+v (%v)", v.Stage, err)
	}
	gone(&v.Stage.Intent)
	if err := v.AskStage(aStage(), editTime); err != nil || v.Stage.UUID != "" {
		t.Errorf("a new stage is %+v (%v)", v.Stage, err)
	}
}

func TestAskUnstage(t *testing.T) {
	ask := func(path string) func(*Volume) error {
		return func(v *Volume) error { return v.AskUnstage(path, editTime) }
	}
	asks{
		"staged":       {have: record(), edit: ask("/stage"), part: StagePart()},
		"elsewhere":    {have: record(), edit: ask("/elsewhere"), class: NotFound, words: ErrStagedElsewhere.Error()},
		"unknown":      {have: &Volume{ID: "v", Revision: 10}, edit: ask("/stage"), part: StagePart()},
		"again":        {have: record(func(v *Volume) { gone(&v.Stage.Intent) }), edit: ask("/stage")},
		"published":    {have: record(with("/b"), with("/a")), edit: ask("/stage"), class: FailedPrecondition, words: "/a, /b"},
		"unpublishing": {have: record(with("/a", goneTarget)), edit: ask("/stage"), part: StagePart()},
	}.run(t)

	// Of a stage elsewhere only the mount at the path ends, if it is none of what is asked for.
	unmount := func(path string) func(*Volume) error {
		return func(v *Volume) error { return v.AskUnmount(path, editTime) }
	}
	asks{
		"mounted there, too": {have: record(), edit: unmount("/elsewhere"), part: TargetPart("/elsewhere")},
		"again":              {have: record(with("/a", goneTarget)), edit: unmount("/a")},
		"staged by now":      {have: record(), edit: unmount("/stage"), class: Aborted, words: "ask again"},
		"unstaged by now":    {have: &Volume{ID: "v", Revision: 10}, edit: unmount("/stage"), class: Aborted, words: "ask again"},
		"published":          {have: record(with("/a")), edit: unmount("/a"), class: NotFound, words: ErrNothingThere.Error()},
		"in a pod":           {have: record(with("/a")), edit: unmount("/a/b"), class: NotFound, words: ErrNothingThere.Error()},
	}.run(t)

	v := record(acceptedStage, func(v *Volume) { v.Size, v.Stage.Begun = &Size{Bytes: 1}, true })
	tombstone := Intent{Gone: true, Revision: 10, Since: editTime}
	if err := v.AskUnstage("/stage", editTime); err != nil || v.Size != nil || v.Stage.Intent != tombstone || v.Stage.Path != "/stage" {
		t.Errorf("an unstaged volume is %+v (%v)", v, err)
	}
	v.Stage.Withdrawn = true
	if err := v.AskUnstage("/stage", editTime); err != nil || v.Stage.Withdrawn {
		t.Errorf("a withdrawn stage that the CO asks away is %+v (%v)", v.Stage, err)
	}
}

func TestAskPublish(t *testing.T) {
	ask := func(target *Target) func(*Volume) error {
		return func(v *Volume) error { return v.AskPublish(target, "/stage", editTime) }
	}
	flags := func(f string) func(*Target) { return func(t *Target) { t.Capability.Flags = []string{f} } }
	stagedReadOnly := func(v *Volume) { v.Stage.ReadOnly = true }
	block := func(t *Target) { t.Capability.Access, t.Capability.FSType = BlockAccess, "" }
	asks{
		"first":                  {have: record(), edit: ask(aTarget("/a")), part: TargetPart("/a")},
		"again":                  {have: record(with("/a")), edit: ask(aTarget("/a"))},
		"again, unstaged":        {have: record(with("/a"), func(v *Volume) { v.Stage = nil }), edit: ask(aTarget("/a")), part: StagePart()},
		"again, otherwise":       {have: record(with("/a", acceptedTarget)), edit: ask(aTarget("/a", reading)), class: AlreadyExists, words: "/a"},
		"unconfirmed, otherwise": {have: record(with("/a", unconfirmedTarget)), edit: ask(aTarget("/a", reading)), part: TargetPart("/a")},
		"second":                 {have: record(with("/a")), edit: ask(aTarget("/b")), part: TargetPart("/b")},
		"unstaged":               {have: &Volume{ID: "v", Revision: 10}, edit: ask(aTarget("/a")), part: TargetPart("/a")},
		"unstaging":              {have: record(func(v *Volume) { gone(&v.Stage.Intent) }), edit: ask(aTarget("/a")), class: Aborted, words: "unstaged"},
		"staged elsewhere":       {have: record(func(v *Volume) { v.Stage.Path = "/x" }), edit: ask(aTarget("/a")), class: FailedPrecondition, words: "/x"},
		"staged as block":        {have: record(), edit: ask(aTarget("/a", block)), class: FailedPrecondition, words: "block"},
		"while going":            {have: record(with("/a", goneTarget)), edit: ask(aTarget("/a")), part: TargetPart("/a")},
		"other, going":           {have: record(with("/a", goneTarget)), edit: ask(aTarget("/a", reading)), class: Aborted, words: "unpublished"},
		"staged flag":            {have: record(), edit: ask(aTarget("/a", flags("ro,discard"))), part: TargetPart("/a")},
		"new flag":               {have: record(), edit: ask(aTarget("/a", flags("data=journal"))), class: InvalidArgument, words: "data"},
		"bad flag":               {have: record(), edit: ask(aTarget("/a", flags("bind"))), class: InvalidArgument, words: "bind"},
		"at the stage":           {have: record(), edit: ask(aTarget("/stage")), class: InvalidArgument, words: "/stage"},
		"in the stage":           {have: record(), edit: ask(aTarget("/stage/a")), class: InvalidArgument, words: "/stage/a"},
		"beside the stage":       {have: record(), edit: ask(aTarget("/stage2")), part: TargetPart("/stage2")},
		"in a target":            {have: record(with("/a")), edit: ask(aTarget("/a/b")), class: InvalidArgument, words: "/a/b"},
		"over a target":          {have: record(with("/a/b")), edit: ask(aTarget("/a")), class: InvalidArgument, words: "/a/b"},
		"beside a target":        {have: record(with("/a")), edit: ask(aTarget("/ab")), part: TargetPart("/ab")},
		"in what is going":       {have: record(with("/a", goneTarget)), edit: ask(aTarget("/a/b")), class: Aborted, words: "unpublished"},
		"read-only stage":        {have: record(stagedReadOnly), edit: ask(aTarget("/a")), class: FailedPrecondition, words: "staged read-only"},
		"read-only both":         {have: record(stagedReadOnly), edit: ask(aTarget("/a", reading)), part: TargetPart("/a")},
		"single, first":          {have: record(), edit: ask(aTarget("/a", single)), part: TargetPart("/a")},
		"single, second":         {have: record(with("/a", single)), edit: ask(aTarget("/b", single)), class: FailedPrecondition, words: "at /a, and access mode SINGLE_NODE_SINGLE_WRITER allows one"},
		"single after multi":     {have: record(with("/a")), edit: ask(aTarget("/b", single)), class: FailedPrecondition, words: "at /a, and access mode SINGLE_NODE_SINGLE_WRITER allows one"},
		"multi after single":     {have: record(with("/a", single)), edit: ask(aTarget("/b")), class: FailedPrecondition, words: "at /a, and access mode SINGLE_NODE_SINGLE_WRITER allows one"},
		"single, while going":    {have: record(with("/a", single, goneTarget)), edit: ask(aTarget("/b", single)), class: Aborted, words: "/a"},
		"multi, while it goes":   {have: record(with("/a", single, goneTarget)), edit: ask(aTarget("/b")), class: Aborted, words: "from /a, and access mode SINGLE_NODE_SINGLE_WRITER allows one"},
	}.run(t)

	// The table of second publishes (CSI spec v1.13, NodePublishVolume).
	for mode, class := range map[string]Class{
		"SINGLE_NODE_SINGLE_WRITER": FailedPrecondition, "SINGLE_NODE_WRITER": FailedPrecondition, "SINGLE_NODE_READER_ONLY": FailedPrecondition,
		"SINGLE_NODE_MULTI_WRITER": 0, "MULTI_NODE_READER_ONLY": 0, "MULTI_NODE_SINGLE_WRITER": 0, "MULTI_NODE_MULTI_WRITER": 0,
	} {
		as := func(t *Target) { t.Capability.Mode = mode }
		if err := ask(aTarget("/b", as))(record(with("/a", as))); (err == nil) != (class == 0) || err != nil && ClassOf(err) != class {
			t.Errorf("a second publish as %s: %v", mode, err)
		}
	}

	// The pod may have been started with the number of the device.
	number := DeviceNumber{Major: 7, Minor: 3}
	v := record(with("/a", goneTarget, func(t *Target) { t.Device = number }))
	if err := ask(aTarget("/a"))(v); err != nil || v.Targets["/a"].Device != number {
		t.Errorf("a target that was asked for again while it went is %+v (%v)", v.Targets["/a"], err)
	}
}

func TestAskUnpublish(t *testing.T) {
	ask := func(v *Volume) error { return v.AskUnpublish("/a", editTime) }
	asks{
		"published": {have: record(with("/a")), edit: ask, part: TargetPart("/a")},
		"unknown":   {have: &Volume{ID: "v", Revision: 10}, edit: ask, part: TargetPart("/a")},
		"the stage": {have: record(func(v *Volume) { v.Stage.Path = "/a" }), edit: ask, class: NotFound, words: ErrNothingThere.Error()},
		"in a pod":  {have: record(with("/x")), edit: func(v *Volume) error { return v.AskUnpublish("/x/a", editTime) }, class: NotFound, words: ErrNothingThere.Error()},
		"in stage":  {have: record(), edit: func(v *Volume) error { return v.AskUnpublish("/stage/a", editTime) }, class: NotFound, words: ErrNothingThere.Error()},
		"again":     {have: record(with("/a", goneTarget)), edit: ask},
		"withdrawn": {have: record(with("/a", goneTarget, func(t *Target) { t.Withdrawn = true })), edit: ask, part: TargetPart("/a")},
	}.run(t)
}

func TestAskSize(t *testing.T) {
	ask := func(v *Volume) error { return v.AskSize(100, 0, editTime) }
	size := func(bytes int64) func(*Volume) { return func(v *Volume) { v.Size = &Size{Bytes: bytes} } }
	acceptedSize := func(v *Volume) { v.Size.Accepted = true }
	asks{
		"first":                        {have: record(), edit: ask, part: SizePart()},
		"again":                        {have: record(size(100)), edit: ask},
		"smaller":                      {have: record(size(200), acceptedSize), edit: ask},
		"larger":                       {have: record(size(50)), edit: ask, part: SizePart()},
		"smaller than what never came": {have: record(size(200)), edit: ask, part: SizePart()},
		"unstaged":                     {have: &Volume{ID: "v"}, edit: ask, class: FailedPrecondition, words: "not staged"},
		"unstaging":                    {have: record(func(v *Volume) { gone(&v.Stage.Intent) }), edit: ask, class: Aborted, words: "unstaged"},
	}.run(t)
}

// A refused growth returns to the last size that was accepted, however many
// were asked since.
func TestWithdrawSize(t *testing.T) {
	v := record()
	ask := func(bytes int64) {
		v.Revision++
		if err := v.AskSize(bytes, 0, editTime); err != nil {
			t.Fatal(err)
		}
	}
	ask(100)
	v.Accept(SizePart(), true)
	v.Withdraw(SizePart(), editTime)
	if v.Size.Bytes != 100 {
		t.Errorf("an accepted size was withdrawn: %+v", v.Size)
	}
	ask(300)
	if ask(200); v.Size.Bytes != 200 || v.Size.Before != 100 || v.Size.Accepted {
		t.Errorf("a second growth is %+v", v.Size)
	}
	v.Withdraw(SizePart(), editTime)
	if v.Size.Bytes != 100 || !v.Size.Accepted || v.Size.Revision != v.Revision {
		t.Errorf("withdrawn to %+v", v.Size)
	}
	ask(300)
	ask(50)
	if v.Size.Bytes != 100 || !v.Size.Accepted {
		t.Errorf("less than what was accepted, in place of what was not, is %+v", v.Size)
	}
	v.Size = nil
	ask(50)
	v.Withdraw(SizePart(), editTime)
	if v.Size != nil {
		t.Errorf("a first size was withdrawn to %+v", v.Size)
	}
}

// A withdrawn stage leaves work behind only if work was begun.
func TestWithdrawStage(t *testing.T) {
	for _, begun := range []bool{false, true} {
		v := record(func(v *Volume) { v.Stage.Begun = begun })
		v.Withdraw(StagePart(), editTime)
		if left := v.Stage != nil; left != begun || left && !(v.Stage.Gone && v.Stage.Withdrawn) {
			t.Errorf("a stage became %+v; it was begun: %t", v.Stage, begun)
		}
	}
}

func TestWithdrawAcceptDrop(t *testing.T) {
	v := record(with("/a", func(t *Target) { t.Begun = true }), with("/b"))
	v.Withdraw(TargetPart("/b"), editTime)
	if v.Targets["/b"] != nil {
		t.Errorf("a withdrawn target for which nothing was done is %+v", v.Targets["/b"])
	}
	v.Drop(TargetPart("/a")) // stands: not dropped
	v.Withdraw(TargetPart("/a"), editTime)
	if i := v.Targets["/a"].Intent; !i.Gone || !i.Withdrawn || i.Revision != 10 {
		t.Errorf("a withdrawn target is %+v", i)
	}
	v.Accept(StagePart(), true)
	v.Withdraw(StagePart(), editTime)
	if v.Stage.Gone {
		t.Error("an accepted stage was withdrawn")
	}
	v.Drop(TargetPart("/a"))
	v.Drop(TargetPart("/a"))
	if len(v.Targets) != 0 {
		t.Errorf("a dropped target is there: %v", v.Targets)
	}
	gone(&v.Stage.Intent)
	v.Drop(StagePart())
	v.Accept(StagePart(), true)
	v.Withdraw(StagePart(), editTime)
	if !v.Empty() {
		t.Errorf("the volume is %+v", v)
	}
}

// The record remembers the backend of the stage that is the volume's.
func TestBackendIsRemembered(t *testing.T) {
	on := func(name string) func(*Stage) {
		return func(s *Stage) { s.Backend, s.Context = name, map[string]string{"backend": name} }
	}
	v := lost(t, func(v *Volume) error { return v.AskStage(aStage(on("disk")), editTime) })
	if v.Backend != "disk" || v.Stage.Backend != "" {
		t.Fatalf("the backend is %q, of the stage %q", v.Backend, v.Stage.Backend)
	}
	v.Stage.Begun = true
	if err := v.AskStage(aStage(on("pool")), editTime); err != nil || v.Backend != "disk" {
		t.Errorf("while what was begun is undone the backend is %q (%v)", v.Backend, err)
	}
	if v.Drop(StagePart()); v.Backend != "pool" || v.Stage.Backend != "" {
		t.Errorf("then it is %q", v.Backend)
	}
	v = record(acceptedStage) // of a version that had one backend
	if err := v.AskStage(aStage(func(s *Stage) { s.Backend = "pool" }), editTime); err != nil || v.Backend != "" {
		t.Errorf("a repeated request made the backend %q (%v)", v.Backend, err)
	}
}

// A publish that takes the place of its own end is undone when it is refused.
func TestRefusedRepublishIsUndone(t *testing.T) {
	v := record(with("/a", goneTarget))
	if err := v.AskPublish(aTarget("/a"), "/stage", editTime); err != nil || v.Targets["/a"].Gone {
		t.Fatalf("the target is %+v (%v)", v.Targets["/a"], err)
	}
	if v.Withdraw(TargetPart("/a"), editTime); v.Targets["/a"] == nil || !v.Targets["/a"].Gone {
		t.Errorf("withdrawn it is %+v", v.Targets["/a"])
	}
}

// A publish that leaves the fs type open takes that of the stage; while that is
// not chosen yet, one that names a type is for later.
func TestFSTypeOfThePublish(t *testing.T) {
	open := func(t *Target) { t.Capability.FSType = "" }
	v := record()
	if err := v.AskPublish(aTarget("/a", open), "/stage", editTime); err != nil || v.Targets["/a"].Capability.FSType != "ext4" {
		t.Errorf("published is %+v (%v)", v.Targets["/a"], err)
	}
	v = record(func(v *Volume) { v.Stage.Capability.FSType = "" })
	if err := v.AskPublish(aTarget("/a"), "/stage", editTime); ClassOf(err) != Aborted {
		t.Errorf("a publish as ext4 of what is not chosen: %v", err)
	}
	if err := v.AskPublish(aTarget("/a", open), "/stage", editTime); err != nil {
		t.Fatal(err)
	}
	v.Choose("xfs")
	if v.Stage.Capability.FSType != "xfs" || v.Targets["/a"].Capability.FSType != "xfs" {
		t.Errorf("chosen: %+v, %+v", v.Stage, v.Targets["/a"])
	}
}

// An end of which only the path is known gives way to one at another path: either is
// the end of the stage wherever it is.
func TestUnstageOfAStageWithoutRecord(t *testing.T) {
	v := &Volume{ID: "v"}
	for _, path := range []string{"/named/first", "/named/next"} {
		v.Revision++
		if err := v.AskUnstage(path, time.Unix(int64(v.Revision), 0)); err != nil {
			t.Fatal(err)
		}
		if v.Stage == nil || !v.Stage.Gone || v.Stage.Path != path || v.Stage.Revision != v.Revision {
			t.Errorf("asked to end the stage at %s: %+v", path, v.Stage)
		}
	}
	v.Stage.CallerWaits = true // who would be told what the other path is like
	if err := v.AskUnstage("/named/first", editTime); ClassOf(err) != Aborted || !strings.Contains(err.Error(), "/named/next") || v.Stage.Path != "/named/next" {
		t.Errorf("%v, %+v", err, v.Stage)
	}
	if err := v.AskUnstage("/named/next", editTime); err != nil {
		t.Error(err)
	}
}
