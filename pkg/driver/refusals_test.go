package driver

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/require"
)

// called makes a call that is answered with the code, and a message of words.
func (r *refusals) called(req any, method string, code codes.Code, words string) {
	_, _ = r.note(context.Background(), req, &grpc.UnaryServerInfo{FullMethod: "/csi.v1.X/" + method}, func(context.Context, any) (any, error) {
		return nil, status.Error(code, words)
	})
}

func TestWhatIsARefusal(t *testing.T) {
	stage := &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/stage"}
	for title, test := range map[string]struct {
		req    any
		method string
		code   codes.Code
		want   string // "call path code"; empty: none
	}{
		"refused for good":    {stage, "NodeStageVolume", codes.InvalidArgument, "NodeStageVolume /stage InvalidArgument"},
		"no room":             {stage, "NodeStageVolume", codes.ResourceExhausted, "NodeStageVolume /stage ResourceExhausted"},
		"contradicts another": {stage, "NodeStageVolume", codes.Aborted, "NodeStageVolume /stage Aborted"},
		"goes on":             {stage, "NodeStageVolume", codes.DeadlineExceeded, ""},
		"is tried again":      {stage, "NodeStageVolume", codes.Unavailable, ""},
		"done":                {stage, "NodeStageVolume", codes.OK, ""},
		"a publish":           {&csi.NodePublishVolumeRequest{VolumeId: "v", StagingTargetPath: "/stage", TargetPath: "/pod"}, "NodePublishVolume", codes.NotFound, "NodePublishVolume /pod NotFound"},
		"a growth":            {&csi.NodeExpandVolumeRequest{VolumeId: "v", VolumePath: "/pod"}, "NodeExpandVolume", codes.OutOfRange, "NodeExpandVolume /pod OutOfRange"},
		"a creation":          {&csi.CreateVolumeRequest{Name: "v"}, "CreateVolume", codes.ResourceExhausted, "CreateVolume  ResourceExhausted"},
		"a question":          {&csi.NodeGetVolumeStatsRequest{VolumeId: "v"}, "NodeGetVolumeStats", codes.NotFound, ""},
		"a check":             {&csi.ValidateVolumeCapabilitiesRequest{VolumeId: "v"}, "ValidateVolumeCapabilities", codes.NotFound, ""},
		"no volume":           {&csi.NodeStageVolumeRequest{}, "NodeStageVolume", codes.InvalidArgument, ""},
	} {
		var r refusals
		r.called(test.req, test.method, test.code, "because")
		got := ""
		if one := r.of("v"); one != nil {
			got = one.Call + " " + one.Path + " " + one.Code
			if one.Error != "because" || one.Times != 1 {
				t.Errorf("%s: remembered is %+v", title, one)
			}
		}
		if got != test.want {
			t.Errorf("%s: remembered is %q, not %q", title, got, test.want)
		}
	}
}

func TestRefusalsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r refusals
		stage := &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/stage"}
		first := time.Now()
		for range 3 {
			r.called(stage, "NodeStageVolume", codes.InvalidArgument, "bad")
			time.Sleep(time.Minute)
		}
		if one := r.of("v"); one.Times != 3 || !one.Since.Equal(first) || !one.At.Equal(first.Add(2*time.Minute)) {
			t.Errorf("remembered is %+v", one)
		}
		r.called(stage, "NodeStageVolume", codes.InvalidArgument, strings.Repeat("x", 1<<20))
		if one := r.of("v"); one.Times != 1 || len(one.Error) > maxRefusalText+4 {
			t.Errorf("%d times, %d bytes", one.Times, len(one.Error))
		}
		time.Sleep(refusalAge + time.Second)
		if one := r.of("v"); one != nil || len(r.list()) != 0 {
			t.Errorf("after its time %+v is remembered", one)
		}
		for i := range 2 * maxRefusals {
			r.called(&csi.NodeStageVolumeRequest{VolumeId: fmt.Sprintf("v%03d", i)}, "NodeStageVolume", codes.NotFound, "no")
			time.Sleep(time.Millisecond)
		}
		r.called(&csi.NodeStageVolumeRequest{VolumeId: strings.Repeat("x", 1<<20)}, "NodeStageVolume", codes.NotFound, "no")
		if all := r.list(); len(all) != maxRefusals || all[0].Volume != fmt.Sprintf("v%03d", maxRefusals) {
			t.Errorf("remembered are %d, from %s on", len(all), all[0].Volume)
		}
	})
}

// A refusal names the pod of a publish, and the claim of a creation, if the caller told them.
func TestRefusalNamesWhoWaits(t *testing.T) {
	var r refusals
	r.called(&csi.NodePublishVolumeRequest{VolumeId: "v", VolumeContext: map[string]string{"csi.storage.k8s.io/pod.namespace": "default", "csi.storage.k8s.io/pod.name": "writer"}}, "NodePublishVolume", codes.InvalidArgument, "bad")
	r.called(&csi.CreateVolumeRequest{Name: "w", Parameters: map[string]string{"csi.storage.k8s.io/pvc/namespace": "default", "csi.storage.k8s.io/pvc/name": "data"}}, "CreateVolume", codes.InvalidArgument, "bad")
	r.called(&csi.NodePublishVolumeRequest{VolumeId: "x"}, "NodePublishVolume", codes.InvalidArgument, "bad")
	r.called(&csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: "x"}, "CreateSnapshot", codes.InvalidArgument, "bad") // of a driver's builder
	r.called(&csi.CreateVolumeGroupSnapshotRequest{Name: "group"}, "CreateVolumeGroupSnapshot", codes.InvalidArgument, "bad")
	if all := r.list(); len(all) != 3 || all[0].Pod != "default/writer" || all[0].Claim != "" || all[1].Claim != "default/data" || all[1].Pod != "" || all[2].Pod+all[2].Claim != "" || all[2].Volume != "x" || all[2].Call != "CreateSnapshot" {
		t.Errorf("remembered are %+v", all)
	}
}

// The call that succeeds at last ends the memory of its refusal, and so does the deletion of the volume; no other does.
func TestRefusalEnds(t *testing.T) {
	var r refusals
	publish := &csi.NodePublishVolumeRequest{VolumeId: "v", TargetPath: "/pod"}
	r.called(publish, "NodePublishVolume", codes.FailedPrecondition, "busy")
	r.called(&csi.NodePublishVolumeRequest{VolumeId: "v", TargetPath: "/other"}, "NodePublishVolume", codes.OK, "")
	r.called(&csi.NodeUnpublishVolumeRequest{VolumeId: "v", TargetPath: "/pod"}, "NodeUnpublishVolume", codes.OK, "")
	if r.of("v") == nil {
		t.Error("another call ended it")
	}
	r.called(publish, "NodePublishVolume", codes.OK, "")
	if one := r.of("v"); one != nil {
		t.Errorf("after its success %+v is remembered", one)
	}
	r.called(publish, "NodePublishVolume", codes.FailedPrecondition, "busy")
	r.called(&csi.DeleteVolumeRequest{VolumeId: "v"}, "DeleteVolume", codes.FailedPrecondition, "in use")
	if r.of("v") == nil {
		t.Error("a deletion that is refused ends it")
	}
	r.called(&csi.DeleteVolumeRequest{VolumeId: "v"}, "DeleteVolume", codes.OK, "")
	if one := r.of("v"); one != nil {
		t.Errorf("of a volume that is deleted %+v is remembered", one)
	}
}

// A call that was refused is told by status and explain, though nothing is asked.
func TestRefusalIsTold(t *testing.T) {
	c := testConfig(t)
	conn, _ := serving(t, c)
	createVolume(t, c, csi.NewControllerClient(conn), "vol")
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: []string{"nonsense=1"}}},
	}
	for _, id := range []string{"vol", "stranger", "no/volume", "..", "/"} { // no volume of the pool has the last three
		_, err := csi.NewNodeClient(conn).NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: c.KubeletDir + "/" + id, VolumeCapability: capability})
		if err == nil {
			t.Fatalf("volume %s is staged with a mount flag that is none", id)
		}
		told, err := readExplanation(t.Context(), c.StateDir, id, Options{})
		require.NoError(t, err)
		if len(told.Refused) != 1 || !strings.Contains(told.Refused[0], "NodeStageVolume was refused") {
			t.Errorf("of %s is told %+v", id, told)
		}
	}
	node, err := ReadReport(t.Context(), c.StateDir, Options{})
	if err != nil || len(node.Volumes) != 0 || len(node.Refusals) != 5 || node.Refusals[3].Volume != "stranger" || node.Refusals[3].Call != "NodeStageVolume" {
		t.Errorf("the status tells %+v (%v)", node, err)
	}
	for _, id := range []string{"unheard-of", "un/heard"} {
		if _, err := readExplanation(t.Context(), c.StateDir, id, Options{}); err == nil {
			t.Errorf("volume %s, of which nothing is known, is explained", id)
		}
	}
}
