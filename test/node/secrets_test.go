package node

import (
	"bytes"
	"context"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	collectorapi "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	traceapi "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/csi-node/csi-node/test/harness"
)

// Secrets, the tokens of pods and the values of mount flags are not written to
// the store, the pool or the log, and no error or trace tells them.
func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	const secret = "s3cret-of-the-test"
	collector := startCollector(t)
	p := harness.Start(t, harness.Options{Flags: []string{"--v", "10", "--tracing-endpoint", collector.endpoint}})
	ctx := t.Context()
	secrets := map[string]string{"password": secret, secret: "key"}
	tokens := map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": `{"":{"token":"` + secret + `"}}`}
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	pod := v.Target("pod")
	told := func(err error) {
		t.Helper()
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("an error tells it: %v", err)
		}
	}
	_, err := p.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "second", Secrets: secrets, VolumeCapabilities: []*csi.VolumeCapability{v.Capability}, Parameters: map[string]string{"x": "y"}})
	told(err)
	stage, publish := v.StageRequest(), v.PublishRequest(pod)
	stage.Secrets, publish.Secrets = secrets, secrets
	stage.VolumeContext, publish.VolumeContext = tokens, tokens
	good := stage.VolumeCapability
	for _, flags := range []string{"nonsense=" + secret, "bind=" + secret, "commit=" + secret + ",data=journal"} {
		stage.VolumeCapability = mountAs("ext4", multiWriter, flags)
		_, err := p.Node.NodeStageVolume(ctx, stage)
		told(err)
		if err == nil {
			t.Errorf("%s was taken", flags)
		}
	}
	stage.VolumeCapability = good
	_, err = p.Node.NodeStageVolume(ctx, stage)
	must(t, err)
	_, err = p.Node.NodePublishVolume(ctx, publish)
	must(t, err)
	_, err = p.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: pod, Secrets: secrets, CapacityRange: &csi.CapacityRange{LimitBytes: 1}})
	told(err)
	publish.Readonly = true
	_, err = p.Node.NodePublishVolume(ctx, publish)
	told(err)
	publish.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/serviceAccount.tokens": secret}
	_, err = p.Node.NodePublishVolume(ctx, publish)
	told(err)

	for _, root := range []string{p.StateDir, p.PoolDir} {
		must(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() || path == v.Data() {
				return err
			}
			text, err := os.ReadFile(path)
			if bytes.Contains(text, []byte(secret)) {
				t.Errorf("%s holds it", path)
			}
			return err
		}))
	}
	if strings.Contains(p.Log.String(), secret) {
		t.Error("the log holds it")
	}
	p.Restart(harness.Options{})
	if traces := collector.text(); strings.Contains(traces, secret) || !strings.Contains(traces, "NodePublishVolume") {
		t.Error("the traces hold it, or are none")
	}
	v.End(pod)
}

// collector keeps the spans that a plugin sends it.
type collector struct {
	collectorapi.UnimplementedTraceServiceServer
	endpoint string

	mu  sync.Mutex
	all []*traceapi.ResourceSpans
}

// Export implements collectorapi.TraceServiceServer.
func (c *collector) Export(_ context.Context, req *collectorapi.ExportTraceServiceRequest) (*collectorapi.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, req.GetResourceSpans()...)
	return &collectorapi.ExportTraceServiceResponse{}, nil
}

// startCollector serves a collector until the test ends.
func startCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{endpoint: "unix://" + filepath.Join(t.TempDir(), "otel.sock")}
	listener, err := net.Listen("unix", strings.TrimPrefix(c.endpoint, "unix://"))
	must(t, err)
	server := grpc.NewServer()
	collectorapi.RegisterTraceServiceServer(server, c)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		must(t, <-served)
	})
	return c
}

// text is all that the collector was sent.
func (c *collector) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	for _, r := range c.all {
		b.WriteString(r.String())
	}
	return b.String()
}
