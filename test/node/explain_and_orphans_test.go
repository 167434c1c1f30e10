package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/harness"
)

// loseStore takes the intents away under a plugin that is down.
func loseStore(t *testing.T, p *harness.Plugin) {
	t.Helper()
	must(t, os.RemoveAll(filepath.Join(p.StateDir, store.Directory)))
}

// The three tools tell the same with the plugin and without it, and change nothing.
func TestToolsWithoutThePlugin(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	must(t, v.Stage(t.Context()))
	pod, torn := v.Target("pod"), v.Target("torn")
	must(t, v.Publish(t.Context(), pod))
	must(t, v.Publish(t.Context(), torn))

	told := shell(t, p, "csi-node explain volume")
	for _, words := range []string{"NodeStageVolume asked", v.Staging, "formatted as ext4", "UUID", "NodePublishVolume asked", pod, "Nothing is left to do"} {
		if !strings.Contains(told.Stdout, words) {
			t.Errorf("explain does not say %q:\n%s%s", words, told.Stdout, told.Stderr)
		}
	}
	p.Kill()
	harness.Command(t, "umount", torn)
	before := snapshot(t, p)

	status := p.Status()
	if status.Running || len(status.Volumes) != 1 {
		t.Fatalf("status tells %+v", status)
	}
	for _, part := range status.Volumes[0].Parts {
		want := report.Settled
		if part.Part == "target "+torn {
			want = report.UnderWay
		}
		if part.Is != want {
			t.Errorf("%s is %s, not %s", part.Part, part.Is, want)
		}
	}
	told = shell(t, p, "csi-node explain volume")
	for _, words := range []string{"No plugin runs", "Missing:", torn, "nothing is mounted", "Bind for target " + torn} {
		if !strings.Contains(told.Stdout, words) {
			t.Errorf("explain does not say %q:\n%s%s", words, told.Stdout, told.Stderr)
		}
	}
	var orphans []reconciler.Orphan
	typed(t, p, "csi-node orphans", &orphans)
	if len(orphans) != 0 {
		t.Errorf("orphans: %+v", orphans)
	}
	refused(t, p, 1, "csi-node explain stranger", "no such volume")
	refused(t, p, 1, "csi-node orphans --clean", "start it")

	loseStore(t, p)
	typed(t, p, "csi-node orphans", &orphans)
	if len(orphans) != 1 || orphans[0].Volume != v.ID || len(orphans[0].Paths) != 2 || orphans[0].Kept == "" {
		t.Errorf("orphans without a store: %+v", orphans)
	}
	mustEqual(t, before, snapshot(t, p))
	p.Start(harness.Options{})
	v.End(pod, torn)
}

// What a lost store leaves stays for as long as any path uses it, and is taken
// down when nothing does: at the start, or, of a raw device, by a person.
func TestOrphansStayWhileInUse(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	used := create(t, p, "used", 32*mib, mountAs("ext4", multiWriter))
	idle := create(t, p, "idle", 32*mib, mountAs("ext4", multiWriter))
	raw := create(t, p, "raw", 32*mib, blockAs(multiWriter))
	bound := create(t, p, "bound", 32*mib, blockAs(multiWriter))
	open := create(t, p, "open", 32*mib, blockAs(multiWriter))
	for _, v := range []*volume{used, idle, raw, bound, open} {
		must(t, v.Stage(ctx))
	}
	usedPod, boundPod := used.Target("pod"), bound.Target("pod")
	must(t, used.Publish(ctx, usedPod))
	must(t, bound.PublishReadOnly(ctx, boundPod)) // with a view
	write(t, filepath.Join(usedPod, "file"), "kept")
	p.Kill()
	harness.Command(t, "umount", idle.Staging)
	holder, err := os.OpenFile(open.Devices()[0].Path, os.O_RDONLY|os.O_EXCL, 0)
	must(t, err)
	defer holder.Close()
	loseStore(t, p)
	address := harness.FreeAddress(t)
	p.Start(harness.Options{Flags: []string{"--http-endpoint", address}})
	harness.Eventually(t, "the idle device of a file system is gone", func() bool { return len(idle.Devices()) == 0 })
	harness.Eventually(t, "the others are counted", func() bool { return harness.Metrics(t, address)["csi_node_orphans"] == 4 })
	counted := func() (n int) {
		var node report.Node
		typed(t, p, "csi-node status", &node)
		return node.Orphans
	}
	if n := counted(); n != 4 {
		t.Errorf("status tells of %d orphans", n)
	}

	list := func(line string) map[string]reconciler.Orphan {
		var found []reconciler.Orphan
		typed(t, p, line, &found)
		byVolume := map[string]reconciler.Orphan{}
		for _, o := range found {
			byVolume[o.Volume] = o
		}
		return byVolume
	}
	for _, line := range []string{"csi-node orphans", "csi-node orphans --clean"} {
		found := list(line)
		if len(found) != 4 {
			t.Fatalf("%s: %+v", line, found)
		}
		for v, paths := range map[*volume]int{used: 2, bound: 1, open: 0} {
			if o := found[v.ID]; o.Cleaned || o.Kept == "" || len(o.Paths) != paths || len(v.Devices()) == 0 {
				t.Errorf("%s: %+v", line, o)
			}
		}
		if o := found[raw.ID]; o.Kept != "" || o.Cleaned != strings.Contains(line, "clean") {
			t.Errorf("%s: %+v", line, o)
		}
	}
	if device := raw.Devices(); len(device) > 0 {
		t.Errorf("%+v is left", device)
	}
	mustRead(t, filepath.Join(usedPod, "file"), "kept")

	must(t, used.Publish(ctx, usedPod)) // takes over
	must(t, holder.Close())
	must(t, used.Unpublish(ctx, usedPod))
	must(t, bound.Unpublish(ctx, boundPod))
	for _, v := range []*volume{used, idle, raw, bound, open} {
		must(t, v.Unstage(ctx))
		must(t, v.Delete(ctx))
	}
	mustHaveNoRecord(t, p)
	if n := counted(); n != 0 {
		t.Errorf("at the end status tells of %d orphans", n)
	}
	if found := list("csi-node orphans"); len(found) != 0 {
		t.Errorf("at the end: %+v", found)
	}
}
