package nodeserver

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// asking is what a stage and a publish request have in common, and the intent that it
// becomes.
type asking struct {
	ask             *csi.VolumeCapability
	volume, publish map[string]string
	want            state.Capability
	readOnly        bool
	context         map[string]string
}

func askings() map[string]asking {
	all := map[string]asking{
		"mount": {ask: mount(writer, "ext4"), want: asExt4},
		"block": {ask: block(writer), want: asBlock},
		"flags stay as given": {
			ask:  mount(writer, "ext4", "noatime", "discard,nosuid"),
			want: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"noatime", "discard,nosuid"}},
		},
		"flag ro": {
			ask: mount(writer, "ext4", "ro"), readOnly: true,
			want: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"ro"}},
		},
		"flags ro, then rw": {
			ask:  mount(writer, "ext4", "ro", "rw"),
			want: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"ro", "rw"}},
		},
		"contexts": {
			ask: mount(writer, "ext4"), want: asExt4,
			volume:  map[string]string{"a": "1", state.EphemeralKey: "false", state.TokensKey: "s3cret"},
			publish: map[string]string{"a": "2"},
			context: map[string]string{"a": "1", state.EphemeralKey: "false", "publish:a": "2"},
		},
		"a publish context alone": {ask: mount(writer, "ext4"), want: asExt4, publish: map[string]string{"a": "2"}, context: map[string]string{"publish:a": "2"}},
		"tokens alone":            {ask: mount(writer, "ext4"), want: asExt4, volume: map[string]string{state.TokensKey: "s3cret"}},
		"an empty context":        {ask: mount(writer, "ext4"), want: asExt4, volume: map[string]string{}},
	}
	for number, name := range csi.VolumeCapability_AccessMode_Mode_name {
		if number == 0 {
			continue
		}
		reading := name == "SINGLE_NODE_READER_ONLY" || name == "MULTI_NODE_READER_ONLY"
		all["mode "+name] = asking{ask: mount(mode(number), "ext4"), want: state.Capability{Access: state.MountAccess, Mode: name, FSType: "ext4"}, readOnly: reading}
		all["block mode "+name] = asking{ask: block(mode(number)), want: state.Capability{Access: state.BlockAccess, Mode: name}, readOnly: reading}
	}
	return all
}

// wantIntent takes the intent out of a part after checking that it was just asked for.
func wantIntent(t *testing.T, v *state.Volume, part state.Part, revision uint64) {
	t.Helper()
	intent := v.Intent(part)
	if intent == nil {
		t.Fatalf("nothing is asked of the %s", part)
	}
	if intent.Revision != revision || time.Since(intent.Since) > time.Hour || intent.Accepted || intent.Gone {
		t.Errorf("the intent is %+v", *intent)
	}
	*intent = state.Intent{}
}

func noSecrets(t *testing.T, v *state.Volume) {
	t.Helper()
	if text, err := json.Marshal(v); err != nil || strings.Contains(string(text), "s3cret") {
		t.Errorf("the record keeps a secret: %s (%v)", text, err)
	}
}

func TestStageBecomesAnIntent(t *testing.T) {
	for title, test := range askings() {
		t.Run(title, func(t *testing.T) {
			s, f := newServer()
			r := stageRequest(func(r *csi.NodeStageVolumeRequest) {
				r.VolumeCapability, r.VolumeContext, r.PublishContext = test.ask, maps.Clone(test.volume), test.publish
				r.Secrets = map[string]string{"key": "s3cret"}
			})
			for range 2 { // the second call changes nothing
				if _, err := s.NodeStageVolume(t.Context(), r); err != nil {
					t.Fatal(err)
				}
			}
			f.wantAsked(t, state.StagePart(), state.StagePart())
			if !maps.Equal(r.VolumeContext, test.volume) {
				t.Errorf("the request's context is %v now", r.VolumeContext)
			}
			v := f.records[id]
			wantIntent(t, v, state.StagePart(), 1)
			noSecrets(t, v)
			want := &state.Stage{Path: staging, Capability: test.want, ReadOnly: test.readOnly, Context: test.context}
			if !reflect.DeepEqual(v.Stage, want) || len(v.Targets) > 0 || v.Size != nil || v.Backend != "usual" || f.secrets[id]["key"] != "s3cret" {
				t.Errorf("asked for %+v, not %+v", v.Stage, want)
			}
		})
	}
}

func TestPublishBecomesAnIntent(t *testing.T) {
	for title, test := range askings() {
		for _, readOnly := range []bool{false, true} {
			t.Run(title, func(t *testing.T) {
				s, f := newServer()
				c := test.want
				c.Flags = []string{"discard"}
				f.staged(c)
				r := publishRequest(func(r *csi.NodePublishVolumeRequest) {
					r.VolumeCapability, r.VolumeContext, r.PublishContext, r.Readonly = test.ask, maps.Clone(test.volume), test.publish, readOnly
					r.Secrets = map[string]string{"key": "s3cret"}
				})
				for range 2 {
					if _, err := s.NodePublishVolume(t.Context(), r); err != nil {
						t.Fatal(err)
					}
				}
				f.wantAsked(t, state.TargetPart(target), state.TargetPart(target))
				if !maps.Equal(r.VolumeContext, test.volume) {
					t.Errorf("the request's context is %v now", r.VolumeContext)
				}
				v := f.records[id]
				wantIntent(t, v, state.TargetPart(target), 6)
				noSecrets(t, v)
				want := &state.Target{Path: target, Capability: test.want, ReadOnly: test.readOnly || readOnly, Context: test.context}
				if !reflect.DeepEqual(v.Targets[target], want) || v.Stage.Revision != 3 || f.secrets[id]["key"] != "s3cret" {
					t.Errorf("asked for %+v, not %+v", v.Targets[target], want)
				}
			})
		}
	}
}

func TestRemovals(t *testing.T) {
	s, f := newServer()
	unstage := func() error {
		_, err := s.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		return err
	}
	unpublish := func() error {
		_, err := s.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		return err
	}
	f.staged(asExt4)
	require.NoError(t, publish(t, s))
	check(t, unstage(), state.FailedPrecondition, target)
	f.asked = nil
	for range 2 {
		if err := unpublish(); err != nil || !f.records[id].Targets[target].Gone || f.records[id].Stage.Gone {
			t.Fatalf("the record is %+v (%v)", f.records[id], err)
		}
	}
	for range 2 {
		if err := unstage(); err != nil || !f.records[id].Stage.Gone {
			t.Fatalf("the record is %+v (%v)", f.records[id], err)
		}
	}
	f.wantAsked(t, state.TargetPart(target), state.TargetPart(target), state.StagePart(), state.StagePart())

	s, f = emptyServer()
	if err := unstage(); err != nil {
		t.Errorf("unstaging an unknown volume: %v", err)
	}
	if err := unpublish(); err != nil {
		t.Errorf("unpublishing an unknown volume: %v", err)
	}
	f.wantAsked(t, state.StagePart(), state.TargetPart(target))
}

// A publish or an expansion that meets no record presumes the stage that its request names,
// and is joined; whether that stands is for the worker to find out, see TestAdopt there.
func TestRequestsWithoutARecordPresumeAStage(t *testing.T) {
	expanding := func(change expandChange) func(*Server) error {
		return func(s *Server) error {
			return expand(t, s, func(r *csi.NodeExpandVolumeRequest) {
				r.VolumePath, r.StagingTargetPath, r.VolumeCapability = target, staging, mount(writer, "ext4")
				change(r)
			})
		}
	}
	nowhere := state.Stage{}
	for title, test := range map[string]struct {
		call func(*Server) error
		want state.Stage
	}{
		"publish":                  {func(s *Server) error { return publish(t, s) }, state.Stage{Path: staging, Capability: asExt4}},
		"expand":                   {expanding(func(*csi.NodeExpandVolumeRequest) {}), state.Stage{Path: staging, Capability: asExt4}},
		"expand, no staging path":  {expanding(func(r *csi.NodeExpandVolumeRequest) { r.StagingTargetPath = "" }), nowhere},
		"expand, no capability":    {expanding(func(r *csi.NodeExpandVolumeRequest) { r.VolumeCapability = nil }), nowhere},
		"expand, staged elsewhere": {expanding(func(r *csi.NodeExpandVolumeRequest) { r.StagingTargetPath = "/etc" }), nowhere},
	} {
		t.Run(title, func(t *testing.T) {
			s, f := newServer()
			f.err = state.Errorf(state.DeadlineExceeded, "hangs")
			for range 2 {
				check(t, test.call(s), state.DeadlineExceeded, "hangs")
			}
			if got := f.records[id].Stage; !got.Provisional || got.Path != test.want.Path || !got.Capability.Equal(test.want.Capability) || f.looks.Load() > 0 {
				t.Errorf("presumed is %+v after %d looks", got, f.looks.Load())
			}
		})
	}
}

// An inline volume is one edit: it asks for the stage together with the publish, or
// for the end of both. The backend is not asked.
func TestEphemeral(t *testing.T) {
	volume := map[string]string{state.EphemeralKey: "true", state.PodUIDKey: "uid", "csi.storage.k8s.io/pod.name": "web", state.TokensKey: "s3cret", "size": "1Gi"}
	inline := func(r *csi.NodePublishVolumeRequest) { r.VolumeContext, r.StagingTargetPath = volume, "" }
	s, f := emptyServer()
	require.NoError(t, publish(t, s, inline))
	f.wantAsked(t, state.TargetPart(target))
	record := f.records[id]
	if stage := record.Stage; record.Backend != "inline" || stage.Path != "/kubelet/plugins/ephemeral/"+id || stage.Provisional || stage.Context != nil || record.Targets[target] == nil ||
		!reflect.DeepEqual(stage.Inline, &state.Inline{PodUID: "uid", Target: target, Attributes: map[string]string{"size": "1Gi"}}) {
		t.Errorf("the record is %+v with %+v of %+v", record, stage, stage.Inline)
	}
	noSecrets(t, record)
	unpublish := func(path string) {
		t.Helper()
		if _, err := s.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: path}); err != nil {
			t.Fatal(err)
		}
	}
	unpublish("/kubelet/pods/elsewhere/mount")
	if record = f.records[id]; record.Stage.Gone || record.Targets[target].Gone {
		t.Errorf("an unpublish elsewhere left %+v", record)
	}
	record.Stage.Inline.Made = true
	unpublish(target)
	if record = f.records[id]; !record.Stage.Gone || !record.Stage.Inline.Ended || !record.Targets[target].Gone || record.Stage.Provisional {
		t.Errorf("an unpublish left %+v with %+v", record, record.Stage)
	}
	s.Inline = nil
	unpublish(target)

	s, f = emptyServer()
	refused(t, f, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeContext = volume }), state.InvalidArgument, "without being staged")
	refused(t, f, publish(t, s, func(r *csi.NodePublishVolumeRequest) { inline(r); r.VolumeCapability = block(writer) }), state.InvalidArgument, "must have a file system")
	s.Inline = nil
	refused(t, f, publish(t, s, inline), state.InvalidArgument, "use a PersistentVolumeClaim")
}
