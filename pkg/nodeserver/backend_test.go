package nodeserver

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

const diskID = "disk/1"

func onDisk(context map[string]string) stageChange {
	return func(r *csi.NodeStageVolumeRequest) { r.VolumeId, r.VolumeContext = diskID, context }
}

// The volume context names the backend, which says what is wrong with a volume.
func TestBackendOfARequest(t *testing.T) {
	s, f := emptyServer()
	refused(t, f, stage(t, s, onDisk(map[string]string{"backend": "disk"})), state.InvalidArgument, "path is missing")
	refused(t, f, stage(t, s, onDisk(nil)), state.InvalidArgument, "slash")
	refused(t, f, stage(t, s, onDisk(map[string]string{"backend": "lvm"})), state.InvalidArgument, `"lvm" is no backend of this plugin, which has disk, inline, usual`)
	refused(t, f, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeContext = map[string]string{"backend": "lvm"} }), state.InvalidArgument, "lvm")
	context := map[string]string{"backend": "disk", "path": "/dev/sdz"}
	if err := stage(t, s, onDisk(context)); err != nil || f.records[diskID].Backend != "disk" {
		t.Fatalf("staged with the backend %q (%v)", f.records[diskID].Backend, err)
	}
	_, err := s.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: diskID, StagingTargetPath: staging})
	if err != nil || f.records[diskID].Backend != "disk" {
		t.Errorf("after the unstage the backend is %q (%v)", f.records[diskID].Backend, err)
	}
	s, _ = emptyServer() // the record is lost, or was ended by an unstage before this one
	if _, err := s.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: diskID, StagingTargetPath: staging}); err != nil {
		t.Errorf("an unstage by the id alone: %v", err)
	}
	if _, err := s.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: diskID, TargetPath: target}); err != nil {
		t.Errorf("an unpublish by the id alone: %v", err)
	}
	_, err = s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: diskID, VolumePath: target})
	check(t, err, state.NotFound, "")
	s, f = emptyServer()
	f.err = state.Errorf(state.DeadlineExceeded, "hangs")
	check(t, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeId, r.VolumeContext = diskID, context }), state.DeadlineExceeded, "")
	if v := f.records[diskID]; v.Backend != "disk" || v.Stage.Context["path"] != "/dev/sdz" {
		t.Errorf("a publish without a record makes %+v with %+v", v, v.Stage)
	}
}

// An inline volume is checked by the backend that makes it, whichever the default is.
func TestInlineVolumeOfAnotherBackend(t *testing.T) {
	s, f := emptyServer()
	s.Backends = devices.NewSet("disk", map[string]devices.Backend{"disk": fakeDisk{}, "inline": fakeBackend{}})
	ephemeral := func(r *csi.NodePublishVolumeRequest) {
		r.VolumeContext, r.StagingTargetPath = map[string]string{state.EphemeralKey: "true"}, ""
	}
	if err := publish(t, s, ephemeral); err != nil || f.records[id].Backend != "inline" {
		t.Errorf("an inline publish makes %+v (%v)", f.records[id], err)
	}
}

// A record of a backend that this plugin lacks is not an error of the caller.
func TestRequestsOfARecordWhoseBackendIsLacking(t *testing.T) {
	s, f := newServer()
	lacking := func() {
		f.staged(asExt4).Backend = "lvm"
		f.records[id].Stage.Context = map[string]string{"backend": "lvm"}
	}
	lacking()
	f.err = state.Errorf(state.Unavailable, "nothing is known of it")
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeContext = map[string]string{"backend": "lvm"} }), state.Unavailable, "nothing is known")
	for _, r := range volumeIDs(t) {
		if !strings.HasPrefix(r.method, "NodeGet") && r.method != "NodeStageVolume" {
			lacking()
			check(t, r.call(s, id), state.Unavailable, "nothing is known")
		}
	}
}

// An inline volume, which anybody who may create a pod can ask for, chooses no backend.
func TestInlineVolumeChoosesNoBackend(t *testing.T) {
	s, f := emptyServer()
	for _, name := range []string{"disk", "usual", ""} {
		refused(t, f, publish(t, s, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext, r.StagingTargetPath = map[string]string{state.EphemeralKey: "true", state.PodUIDKey: "uid", "backend": name}, ""
		}), state.InvalidArgument, "backend")
	}
}

// Keys of the publish context that are no identity may differ in each request.
func TestPublishContextThatIsNoIdentity(t *testing.T) {
	s, f := newServer()
	with := func(lun, portal string) error {
		return stage(t, s, func(r *csi.NodeStageVolumeRequest) {
			onDisk(map[string]string{"backend": "disk", "path": "/dev/sdz"})(r)
			r.PublishContext = map[string]string{"lun": lun, "portal": portal}
		})
	}
	require.NoError(t, with("1", "a"))
	f.records[diskID].Accept(state.StagePart(), true)
	require.NoError(t, with("1", "b"))
	if _, publish := state.SplitContext(f.records[diskID].Stage.Context); publish["portal"] != "b" {
		t.Errorf("kept is %v", publish)
	}
	check(t, with("2", "b"), state.AlreadyExists, "context")
}

// Secrets are kept only for a request whose intent was accepted into the record.
func TestSecretsAreRemembered(t *testing.T) {
	key := map[string]string{"key": "s3cret"}
	s, f := newServer()
	f.staged(asExt4)
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability, r.Secrets = mount(writer, "xfs"), key }), state.AlreadyExists, "")
	if len(f.secrets) > 0 {
		t.Error("the secrets of a refused request are kept")
	}
	for name, call := range map[string]func() error{
		"stage":   func() error { return stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.Secrets = key }) },
		"publish": func() error { return publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.Secrets = key }) },
		"inline": func() error {
			return publish(t, s, func(r *csi.NodePublishVolumeRequest) {
				r.VolumeContext, r.StagingTargetPath, r.Secrets = map[string]string{state.EphemeralKey: "true", state.PodUIDKey: "uid"}, "", key
			})
		},
		"expand": func() error { return expand(t, s, func(r *csi.NodeExpandVolumeRequest) { r.Secrets = key }) },
	} {
		clear(f.secrets)
		if f.staged(asExt4); name == "inline" {
			delete(f.records, id)
		}
		if err := call(); err != nil || f.secrets[id]["key"] != "s3cret" {
			t.Errorf("%s: remembered are %v (%v)", name, f.secrets, err)
		}
		noSecrets(t, f.records[id])
	}
}
