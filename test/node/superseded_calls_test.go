package node

import (
	"context"
	"maps"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/harness"
)

// within makes a call with a deadline, and sees that it is answered well before.
func within(t *testing.T, d time.Duration, call func(context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	err := call(ctx)
	if deadline, _ := ctx.Deadline(); time.Until(deadline) <= 0 {
		t.Errorf("answered after the deadline of %s: %v", d, err)
	}
	return err
}

// A stage that contradicts one under way is Aborted while that one's caller
// waits, and then takes its place, whatever becomes of the plugin meanwhile: an
// administrator who corrects a PersistentVolume need not delete the pod.
func TestCorrectedStageSupersedesOneUnderWay(t *testing.T) {
	t.Parallel()
	for name, killed := range map[string]bool{"running": false, "killed": true} {
		t.Run(name, func(t *testing.T) {
			p := harness.New(t)
			w := wrapMkfs(t, p, byExec)
			p.Start(harness.Options{Env: w.env()})
			v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noexec"))
			first := make(chan error, 1)
			go func() { first <- within(t, 6*time.Second, v.Stage) }()
			w.awaitStart()
			v.Capability = mountAs("ext4", multiWriter, "noatime", "commit=7")
			mustRefuse(t, within(t, 3*time.Second, v.Stage), codes.Aborted, v.ID, "a caller waits")
			mustRefuse(t, <-first, codes.DeadlineExceeded, v.ID, "step format")
			mustRefuse(t, within(t, 3*time.Second, v.Stage), codes.DeadlineExceeded, v.ID, "step format", "running since")
			if killed {
				p.Kill()
				p.Start(harness.Options{Env: w.env()})
			}
			w.open()
			harness.Eventually(t, "the second stage stands, though nobody asks again", func() bool {
				part := p.Status().Volumes[0].Parts[0]
				return part.Is == report.Settled && strings.HasPrefix(part.Asked, "staged")
			})
			mustHaveFlags(t, v.Staging, "noatime -noexec", "commit=7")
			must(t, v.Stage(t.Context()))
			v.Capability = mountAs("ext4", multiWriter, "noexec")
			mustRefuse(t, v.Stage(t.Context()), codes.AlreadyExists, v.ID)
			v.End()
		})
	}
}

// Whatever is wrong with another publish of an inline volume, it is not final
// while the volume is being made: kubelet would leave it behind.
func TestInlineIsNotRefusedWhilePending(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	w := wrapMkfs(t, p, byExec)
	p.Start(harness.Options{Env: w.env()})
	v := newInline(t, p, "csi-inline", mountAs("ext4", multiWriter), map[string]string{"size": "32Mi"})
	first := make(chan error, 1)
	go func() {
		first <- within(t, 6*time.Second, func(ctx context.Context) error { return v.publishInline(ctx) })
	}()
	w.awaitStart()
	others := map[string]func(*csi.NodePublishVolumeRequest){
		"size": func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = maps.Clone(v.asking)
			r.VolumeContext["size"] = "64Mi"
		},
		"bad size": func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = maps.Clone(v.asking)
			r.VolumeContext["size"] = "large"
		},
		"type":     func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = mountAs("xfs", multiWriter) },
		"flag":     func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = mountAs("ext4", multiWriter, "commit=7") },
		"bad flag": func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = mountAs("ext4", multiWriter, "nonsense") },
		"block":    func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = blockAs(multiWriter) },
	}
	for name, other := range others {
		if err := v.publishInline(t.Context(), other); status.Code(err) != codes.Aborted {
			t.Errorf("another %s: %v", name, err)
		}
	}
	w.open()
	must(t, <-first)
	must(t, v.Unpublish(t.Context(), v.pod))
	v.gone()
}

// A mount option that only the mount refuses is corrected by staging with another.
func TestCorrectedMountOption(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=before:mount=fail"}})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noexec"))
	mustRefuse(t, v.Stage(t.Context()), codes.Unavailable, "fault before mount")
	v.Capability = mountAs("ext4", multiWriter, "noatime")
	mustRefuse(t, v.Stage(t.Context()), codes.Unavailable, "fault before mount")
	p.Restart(harness.Options{})
	must(t, v.Stage(t.Context()))
	mustHaveFlags(t, v.Staging, "noatime -noexec", "")
	v.End()
}

// A driver whose podInfoOnMount is switched on or off publishes again what a pod
// is running with.
func TestPodInfoOnMountMayChange(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	pod := v.Target("pod")
	must(t, v.Stage(t.Context()))
	told := map[string]string{
		"csi.storage.k8s.io/pod.name": "web-0", "csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.uid": "pod",
		"csi.storage.k8s.io/serviceAccount.name": "default", "csi.storage.k8s.io/ephemeral": "false",
	}
	for _, context := range []map[string]string{told, nil, told} {
		req := v.PublishRequest(pod)
		req.VolumeContext = context
		_, err := v.Node.NodePublishVolume(t.Context(), req)
		must(t, err)
		if got, want := p.Status().Volumes[0].Parts[0].Pod, context["csi.storage.k8s.io/pod.namespace"] != ""; (got == "shop/web-0") != want {
			t.Errorf("the status names the pod %q", got)
		}
	}
	req := v.PublishRequest(pod)
	req.VolumeContext = map[string]string{"other": "1"}
	_, err := v.Node.NodePublishVolume(t.Context(), req)
	mustRefuse(t, err, codes.AlreadyExists, v.ID)
	v.End(pod)
}

// While the volume's place in the pool does not answer, calls are answered in
// time, with what is waited for; what they ask for is written, and done when the
// place is back.
func TestCallsAreAnsweredWhileThePoolHangs(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	fresh, grown := create(t, p, "fresh", 32*mib, mountAs("ext4", multiWriter)), create(t, p, "grown", 32*mib, blockAs(multiWriter))
	fresh.Capability = mountAs("", multiWriter)
	must(t, grown.Stage(t.Context()))
	revive := []func(){hang(t, filepath.Dir(fresh.Data())), hang(t, filepath.Dir(grown.Data()))}
	pod := fresh.Target("pod")
	for name, call := range map[string]func(context.Context) error{
		"stage":   fresh.Stage,
		"publish": func(ctx context.Context) error { return fresh.Publish(ctx, pod) },
		"expand": func(ctx context.Context) error {
			_, err := grown.Expand(ctx, 64*mib)
			return err
		},
	} {
		err := within(t, 4*time.Second, call)
		mustRefuse(t, err, codes.DeadlineExceeded)
		if !silent.MatchString(err.Error()) { // as the caller's own clock says nothing
			t.Errorf("%s: %v", name, err)
		}
	}
	asked := map[string]bool{}
	for _, v := range p.Status().Volumes {
		for _, part := range v.Parts {
			asked[v.Volume+" "+part.Part] = true
		}
	}
	if !asked[fresh.ID+" stage"] || !asked[grown.ID+" size"] {
		t.Errorf("asked is %v", asked)
	}
	for _, revive := range revive {
		revive()
	}
	harness.Eventually(t, "the stage and the growth are done", func() bool {
		settled := 0
		for _, v := range p.Status().Volumes {
			for _, part := range v.Parts {
				if part.Is == report.Settled && (v.Volume == fresh.ID && part.Part == "stage" || v.Volume == grown.ID && part.Part == "size") {
					settled++
				}
			}
		}
		return settled == 2
	})
	must(t, fresh.Up(t.Context(), pod))
	if bytes, err := grown.Expand(t.Context(), 64*mib); err != nil || bytes != 64*mib {
		t.Errorf("the volume has %d bytes (%v)", bytes, err)
	}
	must(t, grown.Unstage(t.Context()))
	must(t, grown.Delete(t.Context()))
	fresh.End(pod)
}
