package nodeserver

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
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
		"file system":          {node: mounted(ours), want: filesystem},
		"ours over another":    {node: mounted(ours, state.Mount{Device: other, Root: "/"}), want: filesystem},
		"block":                {node: mounted(state.Mount{Device: device, Node: true, Root: "/loop1"}), want: bytes},
		"read-only block":      {node: mounted(state.Mount{Device: view, Node: true, Root: "/loop2"}), want: bytes},
		"staged block":         {node: blockStage(func(*state.Stage) {}), want: bytes},
		"block not staged yet": {node: blockStage(func(s *state.Stage) { s.Accepted = false }), class: state.NotFound, words: "not mounted"},
		"staged, not mounted":  {node: blockStage(func(s *state.Stage) { s.Capability = asExt4 }), class: state.NotFound, words: "not mounted"},
		"staged elsewhere":     {node: blockStage(func(s *state.Stage) { s.Path = staging }), class: state.NotFound, words: "not mounted"},
		"nothing mounted":      {node: mounted(), class: state.NotFound, words: "not mounted at " + target},
		"another device":       {node: mounted(state.Mount{Device: other, Root: "/"}), class: state.NotFound, words: "not mounted"},
		"another block device": {node: mounted(state.Mount{Device: other, Node: true}), class: state.NotFound, words: "not mounted"},
		"another over ours":    {node: mounted(state.Mount{Device: other, Root: "/"}, ours), class: state.NotFound, words: "not mounted"},
		"a part of it":         {node: mounted(state.Mount{Device: device, Root: "/sub"}), class: state.NotFound, words: "not mounted"},
		"unknown volume":       {node: func(f *fakeNode) { clear(f.devices); mounted(ours)(f) }, class: state.NotFound, words: "not mounted"},
		"relative":             {node: mounted(ours), path: "kubelet/x", class: state.NotFound, words: "relative"},
		"path cannot be seen":  {node: func(f *fakeNode) { f.mounts[target] = state.Mountpoint{Err: state.Errorf(state.Unavailable, "stale")} }, class: state.Unavailable, words: "stale"},
		"blind":                {node: func(f *fakeNode) { f.blind = state.Errorf(state.DeadlineExceeded, "hangs") }, class: state.DeadlineExceeded, words: "hangs"},
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
	s.Paths = fakePaths{func(context.Context, string) (state.Usage, error) { return state.Usage{}, broken }}
	_, err := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	check(t, err, state.Unavailable, target)
	if !errors.Is(err, broken) {
		t.Errorf("the cause is lost: %v", err)
	}
}

// Callers of a file system that hangs get their answer in time, and no more than one look is ever stuck in it.
func TestStatsOfAHungFileSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, f := newServer()
		f.mounts[target] = state.Mountpoint{Mounts: []state.Mount{{Device: device, Root: "/"}}}
		var looks atomic.Int64
		revive := make(chan struct{})
		s.Paths = fakePaths{func(ctx context.Context, _ string) (state.Usage, error) {
			looks.Add(1)
			<-revive
			return state.Usage{Bytes: state.Amount{Total: 3}}, ctx.Err()
		}}
		stats := func(wait time.Duration) (*csi.NodeGetVolumeStatsResponse, time.Duration, error) {
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			start := time.Now()
			resp, err := s.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
			return resp, time.Since(start), err
		}
		for _, wait := range []time.Duration{time.Second, time.Minute} {
			_, took, err := stats(wait)
			check(t, err, state.DeadlineExceeded, target)
			if want := min(wait, statsTimeout); took != want {
				t.Errorf("answers after %s, not after %s", took, want)
			}
		}
		late := make(chan error)
		go func() {
			resp, _, err := stats(time.Hour)
			if err == nil && resp.GetUsage()[0].GetTotal() != 3 {
				err = errors.New("it has another size")
			}
			late <- err
		}()
		synctest.Wait()
		if n := looks.Load(); n != 1 {
			t.Errorf("%d looks are stuck", n)
		}
		close(revive)
		if err := <-late; err != nil {
			t.Errorf("the file system came back, and the caller is told %v", err)
		}
		if _, _, err := stats(time.Second); err != nil || looks.Load() != 2 {
			t.Errorf("the next call looked %d times in all (%v)", looks.Load(), err)
		}
	})
}
