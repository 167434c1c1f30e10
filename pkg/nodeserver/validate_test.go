package nodeserver

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// rpc calls an RPC with one field of a good request replaced.
type rpc struct {
	method string
	field  protoreflect.Name
	call   func(s *Server, value string) error
}

// rpcs returns one for each of the fields in each good request that has it.
func rpcs(t *testing.T, fields ...protoreflect.Name) (all []rpc) {
	for _, good := range []proto.Message{
		stageRequest(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging},
		publishRequest(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target}, expandRequest(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target}, &csi.NodeGetVolumeHealthRequest{VolumeId: id},
	} {
		message := good.ProtoReflect().Descriptor()
		method := strings.TrimSuffix(string(message.Name()), "Request")
		for _, name := range fields {
			field := message.Fields().ByName(name)
			if field == nil || !good.ProtoReflect().Has(field) {
				continue
			}
			all = append(all, rpc{method, name, func(s *Server, value string) error {
				req := proto.Clone(good)
				req.ProtoReflect().Set(field, protoreflect.ValueOfString(value))
				out := reflect.ValueOf(s).MethodByName(method).Call([]reflect.Value{reflect.ValueOf(t.Context()), reflect.ValueOf(req)})
				err, _ := out[1].Interface().(error)
				return err
			}})
		}
	}
	return all
}

func volumeIDs(t *testing.T) []rpc { return rpcs(t, "volume_id") }

func paths(t *testing.T) []rpc {
	return rpcs(t, "staging_target_path", "target_path", "volume_path")
}

func capables(t *testing.T) map[string]func(*Server, *csi.VolumeCapability) error {
	return map[string]func(*Server, *csi.VolumeCapability) error{
		"stage": func(s *Server, c *csi.VolumeCapability) error {
			return stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = c })
		},
		"publish": func(s *Server, c *csi.VolumeCapability) error {
			return publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = c })
		},
		"expand": func(s *Server, c *csi.VolumeCapability) error {
			return expand(t, s, func(r *csi.NodeExpandVolumeRequest) { r.VolumeCapability = c })
		},
	}
}

func stage(t *testing.T, s *Server, changes ...stageChange) error {
	_, err := s.NodeStageVolume(t.Context(), stageRequest(changes...))
	return err
}

func publish(t *testing.T, s *Server, changes ...publishChange) error {
	_, err := s.NodePublishVolume(t.Context(), publishRequest(changes...))
	return err
}

func expand(t *testing.T, s *Server, changes ...expandChange) error {
	_, err := s.NodeExpandVolume(t.Context(), expandRequest(changes...))
	return err
}

// emptyServer knows no volume: errors in a request come before the error that there is
// no such volume.
func emptyServer() (*Server, *fakeNode) {
	s, f := newServer()
	clear(f.devices)
	return s, f
}

func refused(t *testing.T, f *fakeNode, err error, class state.Class, words string) {
	t.Helper()
	check(t, err, class, words)
	f.wantAsked(t)
	if len(f.records) > 0 || f.looks.Load() > 0 || len(f.secrets) > 0 {
		t.Errorf("a refused request left %v after %d looks", f.records, f.looks.Load())
	}
}

func TestBadVolumeIDs(t *testing.T) {
	for _, r := range volumeIDs(t) {
		for value, words := range map[string]string{"": "volume_id is missing", "../v": "slash"} {
			t.Run(r.method+" "+value, func(t *testing.T) {
				s, f := emptyServer()
				refused(t, f, r.call(s, value), state.InvalidArgument, words)
			})
		}
	}
}

func TestBadPaths(t *testing.T) {
	outside := map[string]bool{"outside": true, "itself": true, "beside": true} // of the kubelet directory
	for _, r := range paths(t) {
		for title, value := range map[string]string{
			"missing":  "",
			"relative": "kubelet/x",
			"dots":     "/kubelet/../etc",
			"slash":    "/kubelet/x/",
			"slashes":  "/kubelet//x",
			"NUL":      "/kubelet/x\x00y",
			"outside":  "/etc/x",
			"itself":   "/kubelet",
			"beside":   "/kubelet-2/x",
		} {
			t.Run(r.method+" "+string(r.field)+" "+title, func(t *testing.T) {
				s, f := emptyServer()
				class := state.InvalidArgument
				switch {
				case title == "missing" && r.method == "NodePublishVolume" && r.field == "staging_target_path":
					class = state.FailedPrecondition
				case title == "relative" && r.field == "volume_path":
					class = state.NotFound // csi-sanity asks for that
				case outside[title] && r.method == "NodeExpandVolume":
					f.staged(asExt4)
					check(t, r.call(s, value), state.NotFound, "") // any path of no relation
					return
				case outside[title] && r.method == "NodeGetVolumeStats":
					class = state.NotFound
				}
				refused(t, f, r.call(s, value), class, "")
			})
		}
	}
}

func TestBadCapabilities(t *testing.T) {
	group := mount(writer, "ext4")
	group.GetMount().VolumeMountGroup = "1000"
	for title, test := range map[string]struct {
		capability *csi.VolumeCapability
		words      string
	}{
		"missing":        {nil, "volume_capability is missing"},
		"no mode":        {&csi.VolumeCapability{AccessType: mount(writer, "").AccessType}, "access_mode"},
		"mode UNKNOWN":   {mount(csi.VolumeCapability_AccessMode_UNKNOWN, ""), "access_mode"},
		"mode 99":        {mount(99, ""), "access_mode"},
		"no access type": {&csi.VolumeCapability{AccessMode: mount(writer, "").AccessMode}, "access_type"},
		"fs type":        {mount(writer, "vfat"), `"vfat" is not one that this node can make (ext4, xfs)`},
		"mount group":    {group, "volume_mount_group"},
		"flag bind":      {mount(writer, "ext4", "noatime", "bind"), `"bind"`},
		"flag newline":   {mount(writer, "ext4", "a\nb"), "control character"},
	} {
		for name, call := range capables(t) {
			if name == "expand" && test.capability == nil {
				continue // optional there
			}
			t.Run(name+" "+title, func(t *testing.T) {
				s, f := emptyServer()
				refused(t, f, call(s, test.capability), state.InvalidArgument, test.words)
			})
		}
	}
}

// fakeShares are mounted from a server, except that nothing is known of a volume without its
// context.
type fakeShares struct{ fakeBackend }

func (fakeShares) Source(_ context.Context, v devices.Volume) (state.Source, bool, error) {
	if len(v.Context) == 0 {
		return state.Source{}, false, state.Errorf(state.InvalidArgument, "which server is not known")
	}
	return state.Source{FSType: "nfs4"}, true, nil
}

// The type of a file system that is mounted from a source is compared by the worker.
func TestTypeOfMountSource(t *testing.T) {
	server := map[string]string{"server": "a"}
	nfs := mount(writer, "nfs4")
	for title, call := range map[string]func(*Server) error{
		"stage": func(s *Server) error {
			return stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability, r.VolumeContext = nfs, server })
		},
		"publish": func(s *Server) error {
			return publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability, r.VolumeContext = nfs, server })
		},
		"expand": func(s *Server) error {
			return expand(t, s, func(r *csi.NodeExpandVolumeRequest) { r.VolumeCapability = nfs })
		},
	} {
		s, f := newServer()
		s.Backends = devices.NewSet("shares", map[string]devices.Backend{"shares": fakeShares{}})
		f.staged(state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "nfs4"}).Stage.Context = server
		if err := call(s); err != nil {
			t.Errorf("%s: %v", title, err)
		}
		if len(f.asked) != 1 {
			t.Errorf("%s: asked for %v", title, f.asked)
		}
	}
	s, f := newServer()
	s.Backends = devices.NewSet("shares", map[string]devices.Backend{"shares": fakeShares{}})
	refused(t, f, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nfs }), state.InvalidArgument, "which server is not known")
}

func TestBadContexts(t *testing.T) {
	volume := map[string]string{state.EphemeralKey: "yes"}
	s, f := emptyServer()
	refused(t, f, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeContext = volume }), state.InvalidArgument, `"yes"`)
	// An inline ephemeral publish has no staging path; that is not what is wrong with it.
	for _, path := range []string{staging, ""} {
		refused(t, f, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeContext, r.StagingTargetPath = volume, path }), state.InvalidArgument, `"yes"`)
	}
}

// The error of the reconciler is the answer, if its class is one that the call may have.
func TestFailuresPass(t *testing.T) {
	for class := state.Unavailable; class <= state.Internal; class++ {
		for _, r := range volumeIDs(t) {
			if strings.HasPrefix(r.method, "NodeGet") {
				continue // asks for nothing
			}
			s, f := newServer()
			f.staged(asExt4)
			f.err = state.Errorf(class, "the step failed")
			want := class
			if r.method == "NodeExpandVolume" && class == state.AlreadyExists {
				want = state.FailedPrecondition
			}
			check(t, r.call(s, id), want, "the step failed")
		}
	}
}

// Nor about one that was refused, and is not undone yet.
func TestWrongRequestWhileAnotherIsUndone(t *testing.T) {
	s, f := newServer()
	f.err = state.Errorf(state.Unavailable, "taking back what was begun fails")
	check(t, stage(t, s), state.Unavailable, "")
	v := f.records[id]
	v.Stage.Begun = true
	v.Withdraw(state.StagePart(), time.Now())
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = mount(writer, "ext4", "move") }), state.Aborted, "move")
}

// An invalid request says nothing about an earlier one that is pending.
func TestWrongRequestWhileAnotherIsPending(t *testing.T) {
	s, f := newServer()
	f.err = state.Errorf(state.DeadlineExceeded, "the work goes on")
	nonsense := mount(writer, "ext4", "move")
	bind := mount(writer, "ext4", "bind")
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nonsense }), state.InvalidArgument, "move")
	check(t, stage(t, s), state.DeadlineExceeded, "")
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nonsense }), state.Aborted, "move")
	check(t, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = bind }), state.InvalidArgument, "bind")
	check(t, publish(t, s), state.DeadlineExceeded, "")
	check(t, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = bind }), state.Aborted, "bind")
	for _, staging := range []string{"", "not/absolute"} {
		check(t, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = staging }), state.Aborted, "staging_target_path")
	}
	f.records[id].Accept(state.StagePart(), false)
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nonsense }), state.Aborted, "move")
	f.records[id].Accept(state.StagePart(), true)
	f.records[id].Accept(state.TargetPart(target), true)
	check(t, stage(t, s, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nonsense }), state.InvalidArgument, "move")
	check(t, publish(t, s, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = bind }), state.InvalidArgument, "bind")
}

// Volumes that every node can reach have no topology segment of this node.
func TestTopology(t *testing.T) {
	zone := func(context.Context) (map[string]string, error) { return map[string]string{"zone": "z"}, nil }
	for title, test := range map[string]struct {
		own  map[string]string
		more func(context.Context) (map[string]string, error)
		want map[string]string
	}{
		"local":        {map[string]string{"node": "n"}, nil, map[string]string{"node": "n"}},
		"reached":      {nil, nil, nil},
		"local, zoned": {map[string]string{"node": "n"}, zone, map[string]string{"node": "n", "zone": "z"}},
		"zoned":        {nil, zone, map[string]string{"zone": "z"}},
	} {
		s := New(Config{NodeID: "node-1", Topology: test.own, MoreTopology: test.more})
		info, err := s.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		if got := info.GetAccessibleTopology().GetSegments(); err != nil || !maps.Equal(got, test.want) || (info.GetAccessibleTopology() == nil) != (test.want == nil) {
			t.Errorf("%s: %v (%v)", title, info, err)
		}
	}
	lost := New(Config{MoreTopology: func(context.Context) (map[string]string, error) { return nil, errors.New("no zone") }})
	_, err := lost.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	require.Words(t, err, "no zone")
}

func TestNodeGetInfoAndCapabilities(t *testing.T) {
	s, _ := newServer()
	info, err := s.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != "node-1" || info.GetMaxVolumesPerNode() != 7 {
		t.Errorf("answers %v (%v)", info, err)
	}
	const always = "STAGE_UNSTAGE_VOLUME GET_VOLUME_STATS SINGLE_NODE_MULTI_WRITER GET_VOLUME_HEALTH"
	mustOffer(t, s, always+" EXPAND_VOLUME GET_STORAGE_HEALTH")
	s.Expands, s.Storage = false, nil
	mustOffer(t, s, always)
	_, err = s.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	check(t, err, state.Unimplemented, "no backend of this plugin can check its storage")
}

func mustOffer(t *testing.T, s *Server, want string) {
	t.Helper()
	resp, err := s.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	require.NoError(t, err)
	var got []string
	for _, c := range resp.GetCapabilities() {
		got = append(got, c.GetRpc().GetType().String())
	}
	if strings.Join(got, " ") != want {
		t.Errorf("capabilities %v, not %s", got, want)
	}
}
