package node

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

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
