package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestStats(t *testing.T) {
	mounted := func(m ...state.Mount) func(*fakeNode) {
		return func(f *fakeNode) { f.mounts[target] = state.Mountpoint{File: state.Directory, Mounts: m} }
	}
	ours := state.Mount{Device: device, Root: "/", FSType: "ext4"}
	filesystem := []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: 10, Used: 7, Available: 2},
		{Unit: csi.VolumeUsage_INODES, Total: 6, Used: 1, Available: 5},
	}
	bytes := []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: gib}}
	blockStage := func(change func(*state.Stage)) func(*fakeNode) {
		return func(f *fakeNode) {
			s := f.staged(asBlock).Stage
			s.Path = target
			change(s)
		}
	}
	for title, test := range map[string]struct {
		node  func(*fakeNode)
		path  string // target if empty
		want  []*csi.VolumeUsage
		class state.Class
		words string
	}{
		"file system":       {node: mounted(ours), want: filesystem},
		"ours over another": {node: mounted(ours, state.Mount{Device: other, Root: "/"}), want: filesystem},
		"a source": {node: func(f *fakeNode) {
			f.source = &state.Source{FSType: "nfs4", Source: "server:/export"}
			mounted(state.Mount{FSType: "nfs4", Source: "server:/export", Root: "/"})(f)
		}, want: filesystem},
		"another source": {node: func(f *fakeNode) {
			f.source = &state.Source{FSType: "nfs4", Source: "server:/export"}
			mounted(state.Mount{FSType: "nfs4", Source: "server:/other", Root: "/"})(f)
		}, class: state.NotFound, words: "not mounted"},
		"block":                {node: mounted(state.Mount{Device: device, Node: true, Root: "/loop1"}), want: bytes},
		"read-only block":      {node: mounted(state.Mount{Device: view, Node: true, Root: "/loop2"}), want: bytes},
		"staged block":         {node: blockStage(func(*state.Stage) {}), want: bytes},
		"block not staged yet": {node: blockStage(func(s *state.Stage) { s.Accepted = false }), class: state.NotFound, words: "nothing is mounted"},
		"staged, not mounted":  {node: blockStage(func(s *state.Stage) { s.Capability = asExt4 }), class: state.NotFound, words: "nothing is mounted"},
		"staged elsewhere":     {node: blockStage(func(s *state.Stage) { s.Path = staging }), class: state.NotFound, words: "nothing is mounted"},
		"nothing mounted":      {node: mounted(), class: state.NotFound, words: target + ": nothing is mounted"},
		"another device":       {node: mounted(state.Mount{Device: other, Root: "/"}), class: state.NotFound, words: "not mounted"},
		"another block device": {node: mounted(state.Mount{Device: other, Node: true}), class: state.NotFound, words: "not mounted"},
		"another over ours":    {node: mounted(state.Mount{Device: other, Root: "/"}, ours), class: state.NotFound, words: "not mounted"},
		"a part of it":         {node: mounted(state.Mount{Device: device, Root: "/sub"}), class: state.NotFound, words: "not mounted"},
		"unknown volume":       {node: func(f *fakeNode) { clear(f.devices); mounted(ours)(f) }, class: state.NotFound, words: "not mounted"},
		"facts are unread": {node: func(f *fakeNode) {
			d := f.devices[id]
			d.Err = errors.New("unread")
			f.devices[id], f.blind = d, d.Err
			mounted(ours)(f)
		}, want: filesystem},
		"relative":            {node: mounted(ours), path: "kubelet/x", class: state.NotFound, words: "relative"},
		"path cannot be seen": {node: func(f *fakeNode) { f.mounts[target] = state.Mountpoint{Err: state.Errorf(state.Unavailable, "stale")} }, class: state.Unavailable, words: "stale"},
		"blind":               {node: func(f *fakeNode) { f.blind = state.Errorf(state.DeadlineExceeded, "hangs") }, class: state.DeadlineExceeded, words: "hangs"},
	} {
		t.Run(title, func(t *testing.T) {
			s, f := newServer()
			test.node(f)
			path := test.path
			if path == "" {
				path = target
			}
			resp, err := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
			f.wantAsked(t)
			if test.words != "" {
				check(t, err, test.class, test.words)
				return
			}
			if want := (&csi.NodeGetVolumeStatsResponse{Usage: test.want}); err != nil || !proto.Equal(resp, want) {
				t.Errorf("answers %v (%v), not %v", resp, err, want)
			}
		})
	}
}

func TestStatsOfABrokenFileSystem(t *testing.T) {
	s, f := newServer()
	f.mounts[target] = state.Mountpoint{Mounts: []state.Mount{{Device: device, Root: "/"}}}
	broken := errors.New("input/output error")
	s.Paths = fakePaths{f, func(context.Context, string) (state.Usage, error) { return state.Usage{}, broken }}
	_, err := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	check(t, err, state.Unavailable, target)
	if !errors.Is(err, broken) {
		t.Errorf("the cause is lost: %v", err)
	}
	f.mounts[target].Mounts[0].Corrupt = true // as an ext4 that answers statfs(2) all the same
	s.Paths = fakePaths{f, func(context.Context, string) (state.Usage, error) { return state.Usage{}, nil }}
	_, err = s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	check(t, err, state.Unavailable, "broken")
	if !slices.Equal(f.changed, []string{target, target}) {
		t.Errorf("%q are looked at, want the path after each call", f.changed)
	}
	f.mounts[target].Mounts[0].Corrupt = false
	_, err = s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	if err != nil || len(f.changed) != 2 {
		t.Errorf("one that works: %v, %q are looked at", err, f.changed)
	}
}

// patient is a server whose file systems hang for as long as a test wants.
type patient struct {
	*Server
	*fakeNode
	hang  chan struct{} // nil: they answer
	looks atomic.Int64
	total int64 // bytes that a look finds
}

// newPatient has the volume id, and another of the name "other", both staged at
// staging and published at target, or at paths with "2" at the end.
func newPatient() *patient {
	p := &patient{total: 10}
	p.Server, p.fakeNode = newServer()
	p.staged(asExt4).Targets = map[string]*state.Target{target: {Path: target, Capability: asExt4}}
	p.records["other"] = &state.Volume{ID: "other", Stage: &state.Stage{Path: staging + "2"}, Targets: map[string]*state.Target{target + "2": {Path: target + "2"}}}
	p.devices["other"] = state.Device{State: state.DeviceAttached, Number: other}
	for _, path := range []string{staging, target} {
		p.mounts[path] = state.Mountpoint{Mounts: []state.Mount{{Device: device, Root: "/", FSType: "ext4"}}}
		p.mounts[path+"2"] = state.Mountpoint{Mounts: []state.Mount{{Device: other, Root: "/"}}}
	}
	p.Paths = fakePaths{p.fakeNode, func(_ context.Context, path string) (state.Usage, error) {
		p.looks.Add(1)
		total := p.total
		if p.hang != nil && !strings.HasSuffix(path, "2") {
			<-p.hang
		}
		return state.Usage{Bytes: state.Amount{Total: total}}, nil
	}}
	return p
}

// stats asks with a deadline, and returns the bytes that are answered, the age in
// the header, and how long the answer took.
func (p *patient) stats(t *testing.T, id, path string, wait time.Duration) (total int64, age string, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	stream := &headers{}
	start := time.Now()
	resp, err := p.NodeGetVolumeStats(grpc.NewContextWithServerTransportStream(ctx, stream), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	if err == nil {
		total = resp.GetUsage()[0].GetTotal()
	}
	return total, strings.Join(stream.md.Get(statsAgeHeader), " "), time.Since(start), err
}

// headers is a stream that keeps the headers that are set.
type headers struct{ md metadata.MD }

func (*headers) Method() string                   { return "" }
func (h *headers) SetHeader(md metadata.MD) error { h.md = metadata.Join(h.md, md); return nil }
func (*headers) SendHeader(metadata.MD) error     { return nil }
func (*headers) SetTrailer(metadata.MD) error     { return nil }

// The error for a file system that hangs and was never seen says since when it
// hangs, also later: each new text would be an event of its own. It comes in time. At most one look hangs in it, at any of its paths.
func TestStatsOfAHungFileSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		p.hang = make(chan struct{})
		for _, row := range []struct {
			path       string
			wait, took time.Duration
		}{
			{target, time.Second, 900 * time.Millisecond},
			{target, time.Minute, 1100 * time.Millisecond}, // the same look, begun 900 ms ago
			{target, time.Minute, 0},
			{staging, time.Minute, 0},
		} {
			_, _, took, err := p.stats(t, id, row.path, row.wait)
			check(t, err, state.DeadlineExceeded, row.path)
			if took != row.took || !strings.Contains(err.Error(), "since 2000-01-01T00:00:00Z") {
				t.Errorf("after %s, not %s: %v", took, row.took, err)
			}
		}
		if total, age, took, err := p.stats(t, "other", target+"2", time.Minute); total != 10 || age != "" || took != 0 || err != nil {
			t.Errorf("another volume: %d bytes of age %q after %s (%v)", total, age, took, err)
		}
		if n := p.looks.Load(); n != 2 {
			t.Errorf("%d looks, not one a volume", n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := p.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
		if class := state.ClassOf(err); class != state.Canceled && class != state.DeadlineExceeded {
			t.Errorf("a cancelled call: %v", err)
		}

		close(p.hang)
		synctest.Wait()
		if total, age, _, err := p.stats(t, id, target, time.Second); total != 10 || age != "" || err != nil {
			t.Errorf("the file system came back, and the caller is told %d bytes of age %q (%v)", total, age, err)
		}
	})
}

// The last known usage is returned with its age, as long as the volume is to be at the
// path, and no longer.
func TestLastKnownStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		want := func(path string, total int64, wantAge string) {
			t.Helper()
			defer synctest.Wait() // a look that hangs has read all that it wants by then
			if got, age, took, err := p.stats(t, id, path, time.Minute); got != total || age != wantAge || took > answerTimeout || err != nil {
				t.Errorf("%d bytes of age %q after %s (%v), want %d of age %q", got, age, took, err, total, wantAge)
			}
		}
		wantNone := func(path string) {
			t.Helper()
			defer synctest.Wait()
			_, _, _, err := p.stats(t, id, path, time.Minute)
			check(t, err, state.DeadlineExceeded, path)
		}
		want(target, 10, "")
		p.hang, p.total = make(chan struct{}), 20
		time.Sleep(time.Minute)
		want(target, 10, "62") // it waits for two seconds
		want(staging, 10, "62")
		wantNone(target + "3") // not there

		p.records[id].Targets[target].Gone = true
		wantNone(target)
		p.records[id].Targets[target].Gone = false

		close(p.hang)
		synctest.Wait()
		p.hang, p.total = make(chan struct{}), 30
		want(target, 20, "2") // what the look saw that came back late
		delete(p.records[id].Targets, target)
		unstage := func() {
			t.Helper()
			if _, err := p.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
				t.Fatal(err)
			}
		}
		unstage()
		if _, kept := p.queries.seen(id); kept {
			t.Error("an unstaged volume is remembered")
		}
		close(p.hang)
		synctest.Wait()
		if _, kept := p.queries.seen(id); kept || len(p.queries.stale) > 0 {
			t.Error("a look that came back after the unstage is remembered")
		}
	})
}

// Looks at one volume run one after the other, also at several paths, and callers
// share them.
func TestStatsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		p.hang = make(chan struct{})
		var callers sync.WaitGroup
		for _, path := range []string{target, target, staging, staging, target} {
			callers.Go(func() {
				if total, age, _, err := p.stats(t, id, path, time.Minute); total != 10 || age != "" || err != nil {
					t.Errorf("%d bytes of age %q (%v)", total, age, err)
				}
			})
		}
		synctest.Wait()
		if n := p.looks.Load(); n != 1 {
			t.Errorf("%d looks run at a time", n)
		}
		close(p.hang)
		callers.Wait()
		if n := p.looks.Load(); n < 2 || n > 5 {
			t.Errorf("%d looks at two paths", n)
		}
	})
}

// A caller that waited for another's look has less time left for its own.
func TestStatsAfterAnothersLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		first := make(chan struct{})
		p.hang = first
		var callers sync.WaitGroup
		for _, path := range []string{target, staging} {
			callers.Go(func() {
				if _, _, took, _ := p.stats(t, id, path, time.Minute); took > answerTimeout {
					t.Errorf("%s: answered after %s", path, took)
				}
			})
			synctest.Wait()
		}
		time.Sleep(answerTimeout - answerTimeout/10)
		p.hang = make(chan struct{})
		close(first)
		callers.Wait()
		close(p.hang)
	})
}

// What a look sees is kept even if its caller could not wait.
func TestLookOutlivesItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, answers := newPatient(), make(chan struct{})
		p.Paths = fakePaths{p.fakeNode, func(ctx context.Context, _ string) (state.Usage, error) {
			select {
			case <-answers:
				return state.Usage{Bytes: state.Amount{Total: 10}}, nil
			case <-ctx.Done():
				return state.Usage{}, ctx.Err()
			}
		}}
		_, _, _, err := p.stats(t, id, target, time.Second)
		check(t, err, state.DeadlineExceeded, target)
		time.Sleep(time.Minute)
		close(answers)
		synctest.Wait()
		if s, kept := p.queries.seen(id); !kept || s.usage[0].GetTotal() != 10 {
			t.Errorf("kept %t: %v", kept, s.usage)
		}
	})
}

// The health of a volume that hangs is inaccessible, and says since when.
func TestHealthOfAHungVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		p.hang = make(chan struct{})
		_, _, _, err := p.stats(t, id, target, time.Minute)
		check(t, err, state.DeadlineExceeded, "since 2000-01-01T00:00:00Z")
		time.Sleep(time.Minute)
		health := func(id string) []*csi.VolumeHealth_VolumeHealthEntry {
			t.Helper()
			start := time.Now()
			resp, err := p.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
			if err != nil || time.Since(start) > answerTimeout {
				t.Errorf("after %s: %v", time.Since(start), err)
			}
			return resp.GetVolumeHealth().GetHealthStatuses()
		}
		e := health(id)
		if len(e) != 1 || e[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE || e[0].GetReason() != "DoesNotAnswer" || !strings.Contains(e[0].GetMessage(), "since 2000-01-01T00:00:00Z") {
			t.Errorf("its health is %v", e)
		}
		if e := health("other"); len(e) != 0 {
			t.Errorf("another volume's health is %v", e)
		}
		close(p.hang)
		synctest.Wait()
		if e := health(id); len(e) != 0 {
			t.Errorf("once it answers again its health is %v", e)
		}

		// The look of the health itself may hang, too.
		hang := make(chan struct{})
		p.Reconciler = hangs{p.fakeNode, hang}
		for range 2 {
			if e := health(id); len(e) != 1 || e[0].GetReason() != "DoesNotAnswer" {
				t.Errorf("its health is %v", e)
			}
		}
		_, err = p.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "unknown"})
		check(t, err, state.DeadlineExceeded, "unknown")
		close(hang)
		synctest.Wait()
		if len(p.queries.stale) > 0 {
			t.Error("looks that have come back are still held for running")
		}
	})
}

// A call that has little time for its look says nothing of a volume that is only slower.
func TestHealthWithoutTimeForALook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		slow := make(chan struct{})
		p.Reconciler = hangs{p.fakeNode, slow}
		ctx, cancel := context.WithTimeout(t.Context(), answerTimeout/2)
		defer cancel()
		_, err := p.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		check(t, err, state.DeadlineExceeded, "not answered")
		close(slow)
		synctest.Wait()

		// Another's look takes most of its time.
		p.Reconciler, p.hang = p.fakeNode, make(chan struct{})
		var stats sync.WaitGroup
		stats.Go(func() { _, _, _, _ = p.stats(t, id, target, time.Minute) }) // its answer does not matter
		synctest.Wait()
		slow = make(chan struct{})
		p.Reconciler = hangs{p.fakeNode, slow}
		time.AfterFunc(answerTimeout-answerTimeout/10, func() { close(p.hang) })
		_, err = p.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		check(t, err, state.DeadlineExceeded, "not answered")
		close(slow)
		stats.Wait()
	})
}

// hangs does not return from a look until it is closed.
type hangs struct {
	*fakeNode
	until chan struct{}
}

func (h hangs) Observe(context.Context, *state.Volume) (state.Actual, error) {
	<-h.until
	return state.Actual{}, nil
}

// ending ends a volume with its unpublish, so that no record is left.
type ending struct{ *fakeNode }

func (e ending) Ensure(_ context.Context, id string, _ state.Part, _ func(*state.Volume) error) error {
	delete(e.records, id)
	return nil
}

// The usage of volumes is not kept for ever: an inline volume ends with its unpublish,
// or with its pod, of which there is no call.
func TestStatsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPatient()
		p.Reconciler = ending{p.fakeNode}
		for i := range 1000 {
			inline := fmt.Sprint("csi-", i)
			p.devices[inline] = p.devices[id]
			if _, _, _, err := p.stats(t, inline, target, time.Minute); err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 {
				if _, err := p.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: inline, TargetPath: target}); err != nil {
					t.Fatal(err)
				}
				if _, kept := p.queries.seen(inline); kept {
					t.Fatal("an inline volume that was unpublished is remembered")
				}
			}
			if n := len(p.queries.last); n > 2*keptUsages {
				t.Fatalf("after %d volumes, %d are remembered", i, n)
			}
		}
		if _, _, _, err := p.stats(t, id, target, time.Minute); err != nil {
			t.Fatal(err)
		}
		for i := range 200 {
			if _, _, _, err := p.stats(t, fmt.Sprint("csi-", i), target, time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		if _, kept := p.queries.seen(id); !kept {
			t.Error("what was seen of a volume that stands is forgotten")
		}
	})
}
