package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func TestVolumeHealth(t *testing.T) {
	const target2 = target + "2"
	foreign := state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{Device: other, Root: "/", Source: "/dev/sdz1"}}}
	healthy := state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{Device: device, Root: "/", FSType: "ext4"}}}
	published := func(f *fakeNode, v *state.Volume) {
		f.mounts[staging], f.mounts[target], f.mounts[target2] = healthy, healthy, healthy
		v.Targets = map[string]*state.Target{target: {Path: target, Capability: asExt4}, target2: {Path: target2, Capability: asExt4}}
	}
	for title, test := range map[string]struct {
		node func(*fakeNode)
		have func(*state.Actual)
		want []string // "STATUS reason: words of the message", each message checked for its words
	}{
		"nothing asked": {node: func(*fakeNode) {}},
		"healthy":       {node: func(f *fakeNode) { published(f, f.staged(asExt4)) }},
		"stage": {
			node: func(f *fakeNode) { f.staged(asExt4); f.mounts[staging] = foreign },
			want: []string{"INACCESSIBLE StageUnusable: /dev/sdz1"},
		},
		"device lost": {
			node: func(f *fakeNode) { f.staged(asExt4); clear(f.devices) },
			want: []string{"INACCESSIBLE StageUnusable: no such volume"},
		},
		"one target": {
			node: func(f *fakeNode) { published(f, f.staged(asExt4)); f.mounts[target] = foreign },
			want: []string{"DEGRADED TargetUnusable: " + target},
		},
		"two targets are one entry": {
			node: func(f *fakeNode) {
				published(f, f.staged(asExt4))
				f.mounts[target], f.mounts[target2] = foreign, foreign
			},
			want: []string{"DEGRADED TargetUnusable: " + target + ":|; |" + target2 + ":"},
		},
		"size": {
			node: func(f *fakeNode) {
				published(f, f.staged(asExt4))
				f.records[id].Size = &state.Size{Bytes: gib}
			},
			have: func(a *state.Actual) {
				a.Contents = state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", Growable: true}
			},
			want: []string{"DEGRADED SizeNotReached: CAP_SYS_RESOURCE"},
		},
		"file system lost": {
			node: func(f *fakeNode) { f.staged(asExt4) },
			have: func(a *state.Actual) { a.Device.Formatted, a.Contents.Kind = "ext4", state.ContentsBlank },
			want: []string{"DATA_LOSS FilesystemLost: formatted as ext4", "INACCESSIBLE StageUnusable: not formatted again"},
		},
		"a new volume": {
			node: func(f *fakeNode) { f.staged(asExt4) },
			have: func(a *state.Actual) { a.Contents.Kind = state.ContentsBlank },
		},
		"truncated": {
			node: func(*fakeNode) {},
			have: func(a *state.Actual) { a.Device.State, a.Device.Size = state.DeviceAbsent, mib },
			want: []string{fmt.Sprintf("DATA_LOSS BackingTruncated: %d bytes of %d", mib, gib)},
		},
		"stage and target": {
			node: func(f *fakeNode) {
				published(f, f.staged(asBlock))
				clear(f.devices)
				f.records[id].Targets[target].Gone = true
				f.mounts[target] = state.Mountpoint{Err: errors.New("stale handle")}
			},
			want: []string{"INACCESSIBLE StageUnusable: no such volume", "DEGRADED TargetUnusable: stale handle"},
		},
	} {
		t.Run(title, func(t *testing.T) {
			s, f := newServer()
			test.node(f)
			s.Reconciler = seeing{f, test.have}
			resp, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
			require.NoError(t, err)
			f.wantAsked(t)
			if resp.GetVolumeHealth().GetVolumeId() != id {
				t.Errorf("answers for the volume %q", resp.GetVolumeHealth().GetVolumeId())
			}
			entries := resp.GetVolumeHealth().GetHealthStatuses()
			if len(entries) != len(test.want) {
				t.Fatalf("answers %v, not %q", entries, test.want)
			}
			for i, e := range entries {
				head, words, _ := strings.Cut(test.want[i], ": ")
				if got := e.GetStatus().String() + " " + e.GetReason(); got != head || !inOrder(e.GetMessage(), strings.Split(words, "|")) {
					t.Errorf("answers %s: %s, not %s", got, e.GetMessage(), test.want[i])
				}
			}
		})
	}
}

// A look may find nothing wrong while each attempt to continue fails.
func TestVolumeHealthTellsFailures(t *testing.T) {
	s, f := newServer()
	f.staged(asExt4)
	f.mounts[staging] = state.Mountpoint{File: state.Directory, Empty: true}
	s.Reconciler = seeing{f, func(a *state.Actual) { a.Contents = state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4"} }}
	f.failures = map[state.Part]error{state.StagePart(): errors.New("mkfs fails")}
	resp, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	require.NoError(t, err)
	entries := resp.GetVolumeHealth().GetHealthStatuses()
	if len(entries) != 1 || entries[0].GetReason() != "StageUnusable" || !strings.Contains(entries[0].GetMessage(), "mkfs fails") {
		t.Errorf("answers %v", entries)
	}
}

// seeing changes what is observed.
type seeing struct {
	*fakeNode
	change func(*state.Actual)
}

func (s seeing) Observe(ctx context.Context, want *state.Volume) (state.Actual, error) {
	have, err := s.fakeNode.Observe(ctx, want)
	if s.change != nil {
		s.change(&have)
	}
	return have, err
}

func inOrder(text string, words []string) bool {
	return !slices.ContainsFunc(words, func(word string) bool {
		_, rest, found := strings.Cut(text, word)
		text = rest
		return !found
	})
}

func TestVolumeHealthOfUnknownVolumes(t *testing.T) {
	s, f := emptyServer()
	_, err := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	check(t, err, state.NotFound, "no such volume")
	f.blind = state.Errorf(state.DeadlineExceeded, "hangs")
	_, err = s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
	check(t, err, state.DeadlineExceeded, "hangs")
}

func TestStorageHealth(t *testing.T) {
	for title, test := range map[string]struct {
		found []report.Finding
		want  string // "STATUS reason message"
	}{
		"healthy": {},
		"missing": {[]report.Finding{{Kind: report.Inaccessible, Reason: "PoolUnusable", Message: "no disk"}}, "STORAGE_UNREACHABLE PoolUnusable no disk"},
		"full":    {[]report.Finding{{Kind: report.Degraded, Reason: "PoolFull", Message: "no room"}}, "STORAGE_DEGRADED PoolFull no room"},
	} {
		t.Run(title, func(t *testing.T) {
			s, _ := newServer()
			s.Storage = func(context.Context) []report.Finding { return test.found }
			resp, err := s.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
			require.NoError(t, err)
			got := ""
			for _, h := range resp.GetBackendHealth() {
				got += h.GetStatus().String() + " " + h.GetReason() + " " + h.GetMessage()
			}
			if got != test.want {
				t.Errorf("answers %q, not %q", got, test.want)
			}
		})
	}
}
