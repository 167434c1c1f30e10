package devicestest

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/state"
)

// ask returns a request for a volume of at least so many bytes, whose parameters
// are the default ones.
func (s *suite) ask(p devices.Provisioner, name string, bytes int64) devices.CreateRequest {
	s.Helper()
	parameters, err := p.CheckParameters(nil)
	s.ok(err)
	return devices.CreateRequest{Name: name, Parameters: parameters, Size: devices.SizeRange{Required: bytes, Smallest: 4096}, Use: devices.Use{FSType: "ext4"}}
}

func (s *suite) made(p devices.Provisioner, r devices.CreateRequest) devices.Provisioned {
	s.Helper()
	v, err := p.CreateVolume(s.ctx, r)
	s.ok(err)
	return v
}

// provision leads a volume through its life, but for what is done with its device.
func (s *suite) provision() {
	p := s.provisioner()
	r := s.ask(p, "provision", Size)
	r.Layers = map[string]string{"layer": "some"}
	v := s.made(p, r)
	if v.Context["layer"] != "some" {
		s.Errorf("the volume was asked for with a layer, and has the context %v", v.Context)
	}
	if v.ID == "" || v.Name != r.Name || v.Bytes < Size || v.Parameters != nil && !maps.Equal(v.Parameters, r.Parameters) || v.Use != r.Use && v.Use != (devices.Use{}) {
		s.Fatalf("made %+v, asked for %+v", v, r)
	}
	for _, size := range []devices.SizeRange{r.Size, {Required: 4 * Size, Smallest: 4096}, {Limit: 4096, Smallest: 4096}} {
		again := r
		again.Size = size
		if have, err := p.CreateVolume(s.ctx, again); err != nil || !same(have, v) {
			s.Errorf("a volume of that name, asked for with %+v: %+v (%v), made was %+v", size, have, err, v)
		}
	}
	s.b = s.Open(s.T)
	p = s.b.(devices.Provisioner)
	if have, err := p.GetVolume(s.ctx, of(v.ID)); err != nil || !same(have, v) {
		s.Errorf("after a restart: %+v (%v), made was %+v", have, err, v)
	}
	if o, is := s.b.(devices.Owner); is {
		for id, own := range map[string]bool{v.ID: true, "unknown": false} {
			if owns, err := o.Owns(s.ctx, id); err != nil || owns != own {
				s.Errorf("it owns the volume %s: %t (%v), and made is %s", id, owns, err, v.ID)
			}
		}
	}
	s.ok(s.b.Validate(s.askedMade(v)))
	if s.Mounted {
		s.place(s.askedMade(v))
	}
	if d, err := s.b.Find(s.ctx, of(v.ID)); err != nil || d.State != state.DeviceAbsent || d.Missing {
		s.Errorf("made: %+v (%v)", d, err)
	}
	if ids := s.ids(p); !slices.Contains(ids, v.ID) {
		s.Errorf("%s is not listed: %q", v.ID, ids)
	}
	for range 2 {
		s.ok(p.DeleteVolume(s.ctx, of(v.ID)))
	}
	_, err := p.GetVolume(s.ctx, of(v.ID))
	s.class(err, state.NotFound)
	if d, err := s.b.Find(s.ctx, of(v.ID)); err != nil || d.State != state.DeviceAbsent || !d.Missing {
		s.Errorf("after the deletion: %+v (%v)", d, err)
	}
	if ids := s.ids(p); slices.Contains(ids, v.ID) {
		s.Errorf("after the deletion %s is listed: %q", v.ID, ids)
	}
}

// provisionAttached: what is made is attached and grown, is deleted only once it is detached,
// and leaves nothing to the next volume of its name.
func (s *suite) provisionAttached() {
	p := s.provisioner()
	r := s.ask(p, "provision-attached", Size)
	v := s.made(p, r)
	d := s.attachedMade(v)
	if d.Size < v.Bytes || d.Formatted != "" {
		s.Errorf("its device is %+v", d)
	}
	if can[devices.Grower](s.b) {
		s.ok(s.grower().Grow(s.ctx, s.askedMade(v), v.Bytes+Size))
		if have, err := p.GetVolume(s.ctx, of(v.ID)); err != nil || have.Bytes < v.Bytes+Size {
			s.Errorf("grown to %d bytes: %+v (%v)", v.Bytes+Size, have, err)
		}
	}
	s.Write(s.T, d, 0, bytes.Repeat([]byte("old"), Size/3))
	s.class(p.DeleteVolume(s.ctx, of(v.ID)), state.FailedPrecondition)
	if d := s.want(v.ID, state.DeviceAttached); d.Missing {
		s.Errorf("after a refused deletion: %+v", d)
	}
	s.ok(s.b.Detach(s.ctx, s.askedMade(v)))
	s.ok(p.DeleteVolume(s.ctx, of(v.ID)))

	v = s.made(p, r) // as if that name had never been
	again := s.attachedMade(v)
	if again.Identity != "" && again.Identity == d.Identity {
		s.Errorf("the new volume has the identity of the deleted one, %q: no two volumes ever have the same", d.Identity)
	}
	s.holds(v.ID, again, 0, make([]byte, Size), isEmpty)
	s.ok(s.b.Detach(s.ctx, of(v.ID)))
	s.ok(p.DeleteVolume(s.ctx, of(v.ID)))
}

// provisionEnded: a call whose context has ended changes nothing.
func (s *suite) provisionEnded() {
	p, ended := s.provisioner(), s.endedCtx()
	v := s.made(p, s.ask(p, "ended", Size))
	before := s.ids(p)
	_, err := p.CreateVolume(ended, s.ask(p, "ended-other", Size))
	s.class(err, state.Canceled)
	s.class(p.DeleteVolume(ended, of(v.ID)), state.Canceled)
	if after := s.ids(p); !slices.Equal(after, before) {
		s.Errorf("calls whose context had ended leave %q, there were %q", after, before)
	}
	if have, err := p.GetVolume(s.ctx, of(v.ID)); err != nil || !same(have, v) {
		s.Errorf("after calls whose context had ended: %+v (%v), made was %+v", have, err, v)
	}
	s.ok(p.DeleteVolume(s.ctx, of(v.ID)))
}

// provisionSizes makes volumes whose size is limited.
func (s *suite) provisionSizes() {
	p := s.provisioner()
	r := s.ask(p, "limited", 0)
	r.Size.Limit = devices.DefaultBytes / 16
	if v, err := p.CreateVolume(s.ctx, r); err != nil {
		s.class(err, state.OutOfRange)
	} else if v.Bytes <= 0 || v.Bytes > r.Size.Limit {
		s.Errorf("%d bytes, the limit is %d", v.Bytes, r.Size.Limit)
	}
	r = s.ask(p, "a byte too many", Size+1)
	r.Size.Limit = Size + 2
	if v, err := p.CreateVolume(s.ctx, r); err != nil {
		s.class(err, state.OutOfRange)
	} else if v.Bytes < r.Size.Required || v.Bytes > r.Size.Limit {
		s.Errorf("%d bytes, asked for were %d to %d", v.Bytes, r.Size.Required, r.Size.Limit)
	}
	before := s.ids(p)
	_, err := p.CreateVolume(s.ctx, s.ask(p, "huge", devices.LargestBytes))
	if class := state.ClassOf(err); class != state.OutOfRange && class != state.ResourceExhausted {
		s.Errorf("a volume of %d bytes: %v", int64(devices.LargestBytes), err)
	}
	if after := s.ids(p); !slices.Equal(after, before) {
		s.Errorf("a refused creation leaves %q, there were %q", after, before)
	}
}

func (s *suite) ids(p devices.Provisioner) []string {
	s.Helper()
	ids, err := p.ListVolumes(s.ctx)
	s.ok(err)
	slices.Sort(ids)
	return ids
}

// provisionNames: names are what a CO makes of them, and no two share a volume.
func (s *suite) provisionNames() {
	p := s.provisioner()
	names := []string{"pvc-1", "PVC-1", "pvc-1 ", "../pvc-1", "a/b", "a\tb", "Übung", strings.Repeat("n", 127) + "1", strings.Repeat("n", 127) + "2"}
	byID := map[string]string{}
	for _, name := range names {
		v := s.made(p, s.ask(p, name, Size))
		if other, taken := byID[v.ID]; taken || v.Name != name || len(v.ID) > 128 {
			s.Errorf("%q has the id %q and the name %q; that of %q", name, v.ID, v.Name, other)
		}
		s.ok(s.b.Validate(devices.Volume{ID: v.ID, Context: v.Context}))
		byID[v.ID] = name
	}
	listed := s.ids(p)
	for id, name := range byID {
		if !slices.Contains(listed, id) {
			s.Errorf("%q, the id of %q, is not listed: %q", id, name, listed)
		}
	}
	for _, id := range []string{"unknown", "../etc", "a/b", "a\x00b", strings.Repeat("x", 1000)} {
		_, err := p.GetVolume(s.ctx, of(id))
		if class := state.ClassOf(err); class != state.NotFound && class != state.InvalidArgument || err == nil {
			s.Errorf("id %.20q: %v", id, err)
		}
		if err := p.DeleteVolume(s.ctx, of(id)); err != nil {
			s.class(err, state.InvalidArgument)
		}
	}
	s.ok(p.DeleteVolume(s.ctx, of("unknown")))
}

func (s *suite) provisionConcurrent() {
	p := s.provisioner()
	before, made := s.ids(p), make([]devices.Provisioned, 8)
	var group sync.WaitGroup
	for i := range made {
		group.Go(func() {
			var err error
			if made[i], err = p.CreateVolume(s.ctx, s.ask(p, "concurrent", Size)); err != nil {
				s.Error(err)
			}
		})
	}
	group.Wait()
	for _, v := range made[1:] {
		if !same(v, made[0]) {
			s.Errorf("%+v beside %+v", v, made[0])
		}
	}
	if after := s.ids(p); len(after) != len(before)+1 || !slices.Contains(after, made[0].ID) {
		s.Errorf("there are %q, and were %q", after, before)
	}
}

func (s *suite) provisionParameters() {
	p := s.provisioner()
	for _, bad := range []map[string]string{{"": ""}, {"no such parameter": "x"}, {strings.Repeat("p", 4096): strings.Repeat("x", 4096)}} {
		_, err := p.CheckParameters(bad)
		s.class(err, state.InvalidArgument)
		if len(err.Error()) > 4096 {
			s.Errorf("an error of %d bytes", len(err.Error()))
		}
	}
	completed, err := p.CheckParameters(nil)
	s.ok(err)
	if again, err := p.CheckParameters(completed); err != nil || !maps.Equal(again, completed) {
		s.Errorf("completed parameters %v become %v (%v)", completed, again, err)
	}
}

// capacityTries is how often the room is looked at: others of the machine may take and
// give back some at the same time. deletionTime is how long that of a deleted volume has
// to be there again.
const (
	capacityTries = 5
	deletionTime  = 5 * time.Second
)

func (s *suite) capacity() {
	p := s.provisioner()
	r := s.ask(p, "capacity", 16*Size)
	for try := 1; ; try++ {
		before, err := p.GetCapacity(s.ctx, r.Parameters)
		s.ok(err)
		if before.Available < r.Size.Required || before.Smallest > r.Size.Required || before.Largest != 0 && before.Largest < r.Size.Required {
			s.Fatalf("there is no room for the test: %+v", before)
		}
		v := s.made(p, r)
		after, err := p.GetCapacity(s.ctx, r.Parameters)
		s.ok(err)
		s.ok(p.DeleteVolume(s.ctx, of(v.ID)))
		taken := after.Available <= before.Available-v.Bytes/2
		var deleted devices.Capacity
		given := poll.Until(s.ctx, deletionTime/20, deletionTime, func() bool {
			deleted, err = p.GetCapacity(s.ctx, r.Parameters)
			s.ok(err)
			return deleted.Available >= after.Available+v.Bytes/2
		})
		switch {
		case taken && given:
			return
		case try < capacityTries:
		case taken:
			s.Fatalf("the room of a deleted volume of %d bytes is not there again: %+v before the deletion, %+v after", v.Bytes, after, deleted)
		default:
			s.Fatalf("a volume of %d bytes takes none of the room: %+v before, %+v after", v.Bytes, before, after)
		}
	}
}

// inline leads an inline ephemeral volume through its life.
func (s *suite) inline() {
	in := s.b.(devices.Inliner)
	r := devices.InlineRequest{ID: "csi-" + strings.Repeat("0a", 32), Attributes: s.InlineAttributes, Owner: devices.InlineOwner{PodUID: "uid", Target: "/pods/uid/volumes/v/mount"},
		Filesystem: func(int64) (string, int64) { return "ext4", Size }}
	for _, bad := range []string{"", "no such attribute", "device", "path", devices.BackendKey} {
		ask := r
		ask.Attributes = map[string]string{bad: "/dev/sda"} // those that name what is not a pod's are among them
		_, err := in.MakeInline(s.ctx, ask)
		s.class(err, state.InvalidArgument)
	}
	_, err := in.MakeInline(s.endedCtx(), r)
	s.class(err, state.Canceled)
	_, err = in.InlineOwner(s.ctx, r.ID)
	s.class(err, state.NotFound)
	s.inlines(in)

	for range 2 {
		v, err := in.MakeInline(s.ctx, r)
		s.ok(err)
		if v.FSType != "ext4" || v.Used {
			s.Errorf("made %+v", v)
		}
		s.b = s.Open(s.T)
		in = s.b.(devices.Inliner)
	}
	claim := s.Create(s.T, "claim")
	if owner, err := in.InlineOwner(s.ctx, claim); owner != nil || err != nil {
		s.Errorf("the volume of a claim is of %+v (%v)", owner, err)
	}
	if owner, err := in.InlineOwner(s.ctx, r.ID); err != nil || owner == nil || *owner != r.Owner {
		s.Errorf("the volume is of %+v (%v)", owner, err)
	}
	s.inlines(in, r.ID)
	for _, other := range []devices.InlineOwner{{PodUID: "another", Target: r.Owner.Target}, {PodUID: r.Owner.PodUID, Target: "/another"}} {
		ask := r
		ask.Owner = other
		_, err := in.MakeInline(s.ctx, ask)
		s.class(err, state.AlreadyExists)
	}
	taken := r
	taken.ID = claim
	_, err = in.MakeInline(s.ctx, taken)
	s.class(err, state.AlreadyExists)
	if p, is := s.b.(devices.Provisioner); is {
		if v, err := p.CreateVolume(s.ctx, s.ask(p, r.ID, Size)); err == nil && v.ID == r.ID && v.Name == r.ID {
			s.Errorf("a pod's volume answers for a claim's: %+v", v)
		}
	}

	s.attached(r.ID, false)
	s.class(in.DeleteVolume(s.ctx, of(r.ID)), state.FailedPrecondition)
	if f, is := s.b.(devices.Formatter); is {
		s.ok(f.BeginFormat(s.ctx, of(r.ID)))
		s.ok(f.EndFormat(s.ctx, of(r.ID), "ext4"))
		if v, err := in.MakeInline(s.ctx, r); err != nil || !v.Used {
			s.Errorf("once it was formatted: %+v (%v)", v, err)
		}
	}
	s.ok(s.b.Detach(s.ctx, of(r.ID)))
	s.class(in.DeleteVolume(s.endedCtx(), of(r.ID)), state.Canceled)
	s.inlines(in, r.ID)
	for range 2 {
		s.ok(in.DeleteVolume(s.ctx, of(r.ID)))
	}
	_, err = in.InlineOwner(s.ctx, r.ID)
	s.class(err, state.NotFound)
	s.inlines(in)
}

func (s *suite) inlines(in devices.Inliner, want ...string) {
	s.Helper()
	if ids, err := in.ListInline(s.ctx); err != nil || !slices.Equal(ids, want) {
		s.Errorf("inline volumes are %q (%v), not %q", ids, err, want)
	}
}

func same(a, b devices.Provisioned) bool {
	return a.ID == b.ID && a.Name == b.Name && a.Bytes == b.Bytes && a.Use == b.Use && maps.Equal(a.Parameters, b.Parameters) && maps.Equal(a.Context, b.Context)
}
