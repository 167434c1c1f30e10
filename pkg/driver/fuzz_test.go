package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/csi-node/csi-node/pkg/controllerserver"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/nodeserver"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/require"
)

// rpc is a method of the three services.
type rpc struct {
	name    string // full, such as /csi.v1.Node/NodeStageVolume
	request protoreflect.MessageType
}

// base is the method's name without its service.
func (r rpc) base() string { return filepath.Base(r.name) }

// rpcs returns all methods of the spec, in order.
func rpcs(t testing.TB) []rpc {
	t.Helper()
	var all []rpc
	for _, name := range []protoreflect.FullName{"csi.v1.Identity", "csi.v1.Controller", "csi.v1.Node"} {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
		require.NoError(t, err)
		methods := d.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			m := methods.Get(i)
			request, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
			require.NoError(t, err)
			all = append(all, rpc{fmt.Sprintf("/%s/%s", name, m.Name()), request})
		}
	}
	return all
}

// answers lists, for each RPC that is served, the codes beside OK that the CSI
// spec v1.13 has for it and that a node on which every step works may give.
// The others are Unimplemented.
var answers = map[string][]codes.Code{
	"GetPluginInfo": {}, "GetPluginCapabilities": {}, "Probe": {},
	"ControllerGetCapabilities":  {},
	"CreateVolume":               {codes.InvalidArgument, codes.AlreadyExists, codes.OutOfRange, codes.ResourceExhausted},
	"DeleteVolume":               {codes.InvalidArgument, codes.FailedPrecondition},
	"ValidateVolumeCapabilities": {codes.InvalidArgument, codes.NotFound},
	"GetCapacity":                {codes.InvalidArgument},
	"ListVolumes":                {codes.InvalidArgument, codes.Aborted},
	"ControllerGetVolume":        {codes.InvalidArgument, codes.NotFound},
	"NodeGetInfo":                {}, "NodeGetCapabilities": {}, "NodeGetStorageHealth": {},
	"NodeStageVolume":     {codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition},
	"NodeUnstageVolume":   {codes.InvalidArgument, codes.FailedPrecondition},
	"NodePublishVolume":   {codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition},
	"NodeUnpublishVolume": {codes.InvalidArgument, codes.FailedPrecondition}, // something else is there
	"NodeGetVolumeStats":  {codes.InvalidArgument, codes.NotFound},
	"NodeGetVolumeHealth": {codes.InvalidArgument, codes.NotFound},
	"NodeExpandVolume":    {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.OutOfRange},
}

// required lists the fields that the spec marks REQUIRED, but for the staging
// path of a publish: without one the volume is not staged.
var required = map[string][]protoreflect.Name{
	"CreateVolume":               {"name", "volume_capabilities"},
	"DeleteVolume":               {"volume_id"},
	"ValidateVolumeCapabilities": {"volume_id", "volume_capabilities"},
	"ControllerGetVolume":        {"volume_id"},
	"NodeStageVolume":            {"volume_id", "staging_target_path", "volume_capability"},
	"NodeUnstageVolume":          {"volume_id", "staging_target_path"},
	"NodePublishVolume":          {"volume_id", "target_path", "volume_capability"},
	"NodeUnpublishVolume":        {"volume_id", "target_path"},
	"NodeGetVolumeStats":         {"volume_id", "volume_path"},
	"NodeGetVolumeHealth":        {"volume_id"},
	"NodeExpandVolume":           {"volume_id", "volume_path"},
}

// lacks returns a required field that is missing in the request, or "".
func lacks(r rpc, req proto.Message) string {
	m := req.ProtoReflect()
	for _, name := range required[r.base()] {
		if !m.Has(m.Descriptor().Fields().ByName(name)) {
			return string(name)
		}
	}
	for _, c := range capabilities(req) {
		switch {
		case c == nil: // not given, and optional
		case c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN:
			return "access_mode"
		case c.GetAccessType() == nil:
			return "access_type"
		}
	}
	return ""
}

// logText is a log in memory. Its methods may be called concurrently.
type logText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logText) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// take returns what was written since it was last called.
func (l *logText) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

// scene is the plugin's own server on a socket, with a store of its own, over a
// fakeNode. It begins with a volume that is published, one that is published as
// a block device, and one that is idle.
type scene struct {
	dir     string
	kubelet string
	log     *logText
	node    *fakeNode
	store   *store.Store
	conn    *grpc.ClientConn
	close   func() error // of what open has opened

	// The beginning.
	before      string
	storeBefore string // a copy of the state directory
	nodeBefore  *fakeNode
}

// newScene logs into log, which must be the global logger of the process.
func newScene(log *logText) (*scene, error) {
	s := &scene{dir: sceneDir(rand.Uint32()), log: log} // not named after the test, see testConfig
	s.kubelet = filepath.Join(s.dir, "kubelet")
	if err := errors.Join(os.Mkdir(s.dir, 0o700), os.Mkdir(s.kubelet, 0o750)); err != nil {
		return nil, err
	}
	host, err := mounts.New(s.kubelet)
	if err != nil {
		return nil, err
	}
	s.node = newFakeNode(host)
	if err := s.open(); err != nil {
		return nil, err
	}
	if err := s.furnish(); err != nil {
		return nil, err
	}
	s.before, s.nodeBefore = s.what(), s.node.clone()
	s.storeBefore = filepath.Join(s.dir, "before")
	return s, os.CopyFS(s.storeBefore, os.DirFS(s.stateDir()))
}

// sceneDir names the directory of a scene. All names are of one length, so that
// raw requests that hold one can be given that of another scene.
func sceneDir(number uint32) string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("csi-fuzz-%010d", number))
}

func (s *scene) open() (err error) {
	if s.store, err = store.Open(context.Background(), s.stateDir(), "boot"); err != nil {
		return err
	}
	volumes := pool.Provisioner{Volumes: s.node, Delete: s.node.Delete}
	inline := &reconciler.Inline{Inliner: volumes, Backend: "pool", StagingDir: filepath.Join(s.kubelet, "ephemeral"), Spell: s.node.Spell}
	r := reconciler.New(reconciler.Config{Store: s.store, Kernel: reconciler.Kernel{
		Inline: inline, Devices: fakeBackend{s.node}, Views: s.node, Filesystems: fakeFilesystems{s.node}, Mounts: s.node, Existing: s.node, Directories: s.node,
	}})
	const key = "topology.fuzz.test/node"
	backends := devices.NewSet("pool", map[string]devices.Backend{"pool": fakeProvisioner{fakeBackend{s.node}, volumes}})
	controller := controllerserver.New(controllerserver.Config{NodeID: "node-1", Topology: map[string]string{key: "node-1"}, Filesystems: s.node, Backends: backends, Intents: s.store})
	server := newServer(newMetrics("v1"), &refusals{}, nil, testOptions(), services{identity: &identity{name: "fuzz.test", version: "v1", lacks: func() error { return nil }}, controller: controller,
		node: nodeserver.New(nodeserver.Config{NodeID: "node-1", Topology: map[string]string{key: "node-1"}, Filesystems: s.node, Backends: backends,
			Reconciler: r, Records: s.store, Paths: s.node, Inline: inline, Storage: func(context.Context) []report.Finding { return nil }})})
	listener, err := net.Listen("unix", filepath.Join(s.dir, "csi.sock"))
	if err != nil {
		return err
	}
	working, stop := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { r.Run(working) })
	group.Go(func() { _ = server.Serve(listener) }) // ends with nil once it is stopped
	s.conn, err = grpc.NewClient("unix://"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	s.close = func() error {
		stop()
		server.Stop()
		group.Wait()
		return errors.Join(s.conn.Close(), s.store.Close())
	}
	return err
}

// reset restores the beginning, if anything has changed.
func (s *scene) reset() error {
	if s.what() == s.before {
		return nil
	}
	if err := s.close(); err != nil {
		return err
	}
	s.node = s.nodeBefore.clone()
	if err := errors.Join(os.RemoveAll(s.stateDir()), os.CopyFS(s.stateDir(), os.DirFS(s.storeBefore))); err != nil {
		return err
	}
	return s.open()
}

func (s *scene) stateDir() string { return filepath.Join(s.dir, "state") }

func (s *scene) furnish() error {
	for _, name := range []string{"mount", "block", "idle"} {
		req := s.good("CreateVolume").(*csi.CreateVolumeRequest)
		req.Name = "vol-" + name
		if err := s.invoke("/csi.v1.Controller/CreateVolume", req); err != nil {
			return err
		}
		if name == "idle" {
			continue
		}
		stage, publish := s.good("NodeStageVolume").(*csi.NodeStageVolumeRequest), s.good("NodePublishVolume").(*csi.NodePublishVolumeRequest)
		if name == "block" {
			stage.VolumeCapability = &csi.VolumeCapability{AccessMode: stage.VolumeCapability.AccessMode, AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
		}
		stage.VolumeId, publish.VolumeId = req.Name, req.Name
		stage.StagingTargetPath, publish.StagingTargetPath, publish.TargetPath = s.path("stage-"+name), s.path("stage-"+name), s.path("target-"+name)
		publish.VolumeCapability = stage.VolumeCapability
		if err := s.invoke("/csi.v1.Node/NodeStageVolume", stage); err != nil {
			return err
		}
		if err := s.invoke("/csi.v1.Node/NodePublishVolume", publish); err != nil {
			return err
		}
	}
	return nil
}

func (s *scene) path(name string) string { return filepath.Join(s.kubelet, name) }

func (s *scene) invoke(method string, req proto.Message) error {
	raw, err := proto.Marshal(req)
	if err != nil {
		return err
	}
	return s.send(method, raw)
}

// patience bounds a call. Nothing here takes long, and go test -fuzz silently kills a
// process that works on one input for ten seconds.
const patience = 9 * time.Second

// send sends a request as it is.
func (s *scene) send(method string, raw []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var reply []byte
	return s.conn.Invoke(ctx, method, raw, &reply, grpc.ForceCodec(asItIs{}), grpc.WaitForReady(true))
}

// asItIs is a codec whose messages are bytes.
type asItIs struct{}

func (asItIs) Name() string                  { return "proto" }
func (asItIs) Marshal(v any) ([]byte, error) { return v.([]byte), nil }
func (asItIs) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(b)
	return nil
}

// what prints all that a refused request must not change.
func (s *scene) what() string {
	records := s.store.List()
	for _, v := range records {
		v.Revision = 0 // not every one is used
	}
	text, err := json.MarshalIndent(records, "", " ")
	if err != nil {
		return err.Error()
	}
	return string(text) + "\n" + s.node.what()
}

const (
	secretly = "a-secret-"
	secret   = secretly + "that-nobody-may-see"
	tokens   = "csi.storage.k8s.io/serviceAccount.tokens"
)

// good returns a request that is answered OK, with secrets where it may have them.
func (s *scene) good(method string) proto.Message {
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: []string{"noatime"}}},
	}
	secrets, volume := map[string]string{"key": secret}, map[string]string{"attribute": "value", tokens: secret}
	size := &csi.CapacityRange{RequiredBytes: 1 << 20}
	switch method {
	case "CreateVolume":
		return &csi.CreateVolumeRequest{Name: "vol-new", CapacityRange: size, VolumeCapabilities: []*csi.VolumeCapability{capability}, Secrets: secrets,
			Parameters: map[string]string{"provisioning": "thick", "csi.storage.k8s.io/pvc/name": "claim"}}
	case "DeleteVolume":
		return &csi.DeleteVolumeRequest{VolumeId: "vol-idle", Secrets: secrets}
	case "ValidateVolumeCapabilities":
		return &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "vol-mount", VolumeCapabilities: []*csi.VolumeCapability{capability}, Secrets: secrets}
	case "GetCapacity":
		return &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{capability}}
	case "NodeStageVolume":
		return &csi.NodeStageVolumeRequest{VolumeId: "vol-idle", StagingTargetPath: s.path("stage-idle"), VolumeCapability: capability, Secrets: secrets, VolumeContext: volume}
	case "NodeUnstageVolume":
		return &csi.NodeUnstageVolumeRequest{VolumeId: "vol-idle", StagingTargetPath: s.path("stage-idle")}
	case "NodePublishVolume":
		return &csi.NodePublishVolumeRequest{VolumeId: "vol-mount", StagingTargetPath: s.path("stage-mount"), TargetPath: s.path("target-new"),
			VolumeCapability: capability, Secrets: secrets, VolumeContext: volume}
	case "NodeUnpublishVolume":
		return &csi.NodeUnpublishVolumeRequest{VolumeId: "vol-mount", TargetPath: s.path("target-mount")}
	case "NodeGetVolumeStats":
		return &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-mount", VolumePath: s.path("target-mount"), StagingTargetPath: s.path("stage-mount")}
	case "NodeGetVolumeHealth":
		return &csi.NodeGetVolumeHealthRequest{VolumeId: "vol-mount"}
	case "NodeExpandVolume":
		return &csi.NodeExpandVolumeRequest{VolumeId: "vol-mount", VolumePath: s.path("target-mount"), StagingTargetPath: s.path("stage-mount"),
			VolumeCapability: capability, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 20}, Secrets: secrets}
	}
	return nil
}

// choices are the bytes that a structured request is made by; behind their end
// there are zeros.
type choices []byte

func (c *choices) next(n int) int {
	if len(*c) == 0 {
		return 0
	}
	b := (*c)[0]
	*c = (*c)[1:]
	return int(b) % n
}

var long, wide = strings.Repeat("long", 1<<16), strings.Repeat("\U0010ffff", 1<<12)

// values of strings that matter somewhere.
func (s *scene) values() []string {
	return []string{
		"", "vol-mount", "vol-block", "vol-idle", "vol-none", "../vol-mount", "vol mount\n", strings.Repeat("v", 129), long,
		s.path("stage-mount"), s.path("stage-block"), s.path("stage-idle"), s.path("target-mount"), s.path("target-block"), s.path("target-new"),
		s.kubelet, s.kubelet + "/../x", s.path("a//b"), s.path("a/"), s.path("x\x00y"), s.path(strings.Repeat("n", 256)), s.path(strings.Repeat("d/", 3000) + "d"), "/etc", "relative", "/",
		"ext4", "xfs", "vfat", "ro", "rw,noatime", "discard", "refused", "bind", "a=\"b,c", "\x01\u202e\ufffd", "%s%n%!d(x)", "<&>\u2028",
		tokens, "csi.storage.k8s.io/ephemeral", "csi.storage.k8s.io/pod.name", "provisioning", "topology.fuzz.test/node", "true", "false", "thin", "thick", "node-1", wide,
	}
}

var numbers = []int64{0, 1, -1, 1 << 20, 2 << 20, 1<<20 + 1, 4095, 1 << 40, 1<<40 + 1, 1<<62 + 1, math.MaxInt64, math.MinInt64}

// change makes one change somewhere in a message.
func (s *scene) change(m protoreflect.Message, c *choices) {
	fields := m.Descriptor().Fields()
	if fields.Len() == 0 {
		c.next(1)
		return
	}
	field := fields.Get(c.next(fields.Len()))
	switch {
	case field.IsMap() && c.next(4) == 0, field.IsList() && c.next(4) == 0:
		m.Clear(field)
	case field.IsMap():
		if field.MapValue().Kind() == protoreflect.StringKind {
			m.Mutable(field).Map().Set(s.value(field.MapKey(), c).MapKey(), s.value(field.MapValue(), c))
		}
	case field.IsList():
		list := m.Mutable(field).List()
		switch {
		case field.Message() == nil:
			list.Append(s.value(field, c))
		case list.Len() == 0 || c.next(3) == 0:
			s.change(list.AppendMutable().Message(), c)
		default:
			s.change(list.Get(c.next(list.Len())).Message(), c)
		}
	case field.Message() != nil:
		if c.next(4) == 0 {
			m.Clear(field)
		} else {
			s.change(m.Mutable(field).Message(), c)
		}
	default:
		m.Set(field, s.value(field, c))
	}
}

func (s *scene) value(field protoreflect.FieldDescriptor, c *choices) protoreflect.Value {
	switch field.Kind() {
	case protoreflect.StringKind:
		values := s.values()
		return protoreflect.ValueOfString(values[c.next(len(values))])
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(c.next(2) == 1)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(c.next(12) - 1))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(numbers[c.next(len(numbers))])
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(numbers[c.next(len(numbers))]))
	}
	return field.Default()
}

// setScene returns a scene that lasts as long as the fuzz target; it takes the
// process's logger.
func setScene(f *testing.F) *scene {
	f.Helper()
	log := &logText{}
	klog.SetLoggerWithOptions(textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(5), textlogger.Output(log))), klog.ContextualLogger(true))
	s, err := newScene(log)
	require.NoError(f, err)
	f.Cleanup(func() {
		if err := errors.Join(s.close(), os.RemoveAll(s.dir)); err != nil {
			f.Error(err)
		}
		klog.ClearLogger()
	})
	return s
}

// FuzzRawRequest sends bytes to each RPC. The scene's directory stands in them
// as sceneDir(0).
func FuzzRawRequest(f *testing.F) {
	s, all := setScene(f), rpcs(f)
	for i, r := range all {
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), []byte{0xff})
		if good := s.good(r.base()); good != nil {
			raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(good)
			require.NoError(f, err)
			f.Add(uint8(i), bytes.ReplaceAll(raw, []byte(s.dir), []byte(sceneDir(0))))
		}
	}
	f.Fuzz(func(t *testing.T, method uint8, raw []byte) {
		s.try(t, all[int(method)%len(all)], bytes.ReplaceAll(raw, []byte(sceneDir(0)), []byte(s.dir)))
	})
}

// FuzzRequest sends requests that are good but for what the bytes change: each
// change is a field, down to a value, and a value that matters.
func FuzzRequest(f *testing.F) {
	s, all := setScene(f), rpcs(f)
	for i, r := range all {
		if s.good(r.base()) == nil {
			continue
		}
		f.Add(uint8(i), []byte{})
		fields := r.request.Descriptor().Fields().Len()
		for field := range fields {
			for value := range len(s.values()) {
				if (field*7+value+i)%11 == 0 { // not all: they are many
					f.Add(uint8(i), []byte{byte(field), byte(value), byte(value), byte(value)})
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, method uint8, edits []byte) {
		r := all[int(method)%len(all)]
		req := s.good(r.base())
		if req == nil {
			req = r.request.New().Interface()
		}
		for c := choices(edits); len(c) > 0; {
			s.change(req.ProtoReflect(), &c)
		}
		raw, err := proto.Marshal(req)
		if err != nil {
			return // a string that is not UTF-8
		}
		s.try(t, r, raw)
	})
}

// try sends a request, and checks the answer and its effects against the rules.
func (s *scene) try(t *testing.T, r rpc, raw []byte) {
	t.Helper()
	const most = 4 << 20 // bytes that gRPC takes
	require.NoError(t, s.reset())
	s.log.take()
	err := s.send(r.name, raw)
	code, message, log := status.Code(err), status.Convert(err).Message(), s.log.take()

	req := r.request.New().Interface()
	if malformed := proto.Unmarshal(raw, req); malformed != nil {
		if code != codes.Internal { // grpc's own
			t.Errorf("%s of what is no request: %v", r.base(), err)
		}
		return
	}
	if len(raw) > most {
		return
	}
	allowed, served := answers[r.base()]
	switch field := lacks(r, req); {
	case !served && code != codes.Unimplemented:
		t.Errorf("%s is not served, and answers %v", r.base(), err)
	case served && code != codes.OK && !slices.Contains(allowed, code):
		t.Errorf("%s answers %s: %.1000v", r.base(), code, err)
	case served && field != "" && code != codes.InvalidArgument:
		t.Errorf("%s without %s answers %.1000v", r.base(), field, err)
	case code != codes.OK && message == "":
		t.Errorf("%s answers %s without a word", r.base(), code)
	case len(message) > maxMessage+3:
		t.Errorf("%s answers with %d bytes: %.1000s…", r.base(), len(message), message)
	case len(status.Convert(err).Details()) > 0:
		t.Errorf("%s answers with details: %v", r.base(), err)
	}
	after := s.what()
	if code != codes.OK && after != s.before {
		t.Errorf("%s answers %v, and leaves\n%s\nwhere there was\n%s", r.base(), err, after, s.before)
	}
	if code == codes.OK {
		s.checkPaths(t, r, req)
	}
	stored := ""
	if after != s.before {
		files, err := filepath.Glob(filepath.Join(s.stateDir(), store.Directory, "*.json"))
		require.NoError(t, err)
		for _, file := range files {
			b, err := os.ReadFile(file)
			require.NoError(t, err)
			stored += string(b)
		}
	}
	for _, value := range secretsOf(req) {
		for place, text := range map[string]string{"answer": message, "log": log, "store": stored, "record": after} {
			if strings.Contains(text, value) {
				t.Errorf("%s: the secret %q is in the %s:\n%.3000s", r.base(), value, place, text)
			}
		}
	}
	if t.Failed() {
		t.Logf("the request is %.5000s", prototext.Format(req))
	}
}

// checkPaths fails if a request that acts was granted at a path where it must not.
func (s *scene) checkPaths(t *testing.T, r rpc, req proto.Message) {
	t.Helper()
	var paths []string
	switch req := req.(type) {
	case *csi.NodeStageVolumeRequest:
		paths = []string{req.GetStagingTargetPath()}
	case *csi.NodeUnstageVolumeRequest:
		paths = []string{req.GetStagingTargetPath()}
	case *csi.NodePublishVolumeRequest:
		paths = []string{req.GetStagingTargetPath(), req.GetTargetPath()}
	case *csi.NodeUnpublishVolumeRequest:
		paths = []string{req.GetTargetPath()}
	}
	for _, path := range paths {
		if !strings.HasPrefix(path, s.kubelet+"/") || filepath.Clean(path) != path || strings.Contains(path, "\x00") {
			t.Errorf("%s at %q is granted", r.base(), path)
		}
	}
}

// secretsOf returns the values that are secret in the request, can be told from
// other text, and stand nowhere else in it.
func secretsOf(req proto.Message) []string {
	bare := proto.Clone(req)
	m := bare.ProtoReflect()
	var values []string
	if field := m.Descriptor().Fields().ByName("secrets"); field != nil {
		m.Get(field).Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
			values = append(values, v.String())
			return true
		})
		m.Clear(field)
	}
	if c, ok := bare.(interface{ GetVolumeContext() map[string]string }); ok {
		values = append(values, c.GetVolumeContext()[tokens])
		delete(c.GetVolumeContext(), tokens)
	}
	rest, err := proto.Marshal(bare)
	return slices.DeleteFunc(values, func(v string) bool {
		return !strings.HasPrefix(v, secretly) || err != nil || bytes.Contains(rest, []byte(v))
	})
}
