//go:build vm

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// active returns the logical volumes of a group that have a device, hidden ones too.
func active(t *testing.T, group string) (devices []string) {
	t.Helper()
	out, err := exec.Command("dmsetup", "ls").Output()
	must(t, err)
	for line := range strings.Lines(string(out)) {
		if name, _, _ := strings.Cut(line, "\t"); strings.HasPrefix(name, group+"-") {
			devices = append(devices, name)
		}
	}
	return devices
}

// storageHealth returns what NodeGetStorageHealth says.
func storageHealth(t *testing.T, p *harness.Plugin) string {
	t.Helper()
	resp, err := p.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	var words []string
	for _, h := range resp.GetBackendHealth() {
		words = append(words, fmt.Sprintf("%s %s: %s", h.GetStatus(), h.GetReason(), h.GetMessage()))
	}
	return strings.Join(words, "\n")
}

// awaitHealth waits until NodeGetStorageHealth says all of the words; without words,
// until it finds nothing. What it knows of a group may be some seconds old.
func awaitHealth(t *testing.T, p *harness.Plugin, words ...string) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("the health of the storage is %q", words), func() bool {
		told := storageHealth(t, p)
		for _, word := range words {
			if !strings.Contains(told, word) {
				return false
			}
		}
		return len(words) > 0 || told == ""
	})
}

// A volume group whose disk does not answer holds up itself alone. Its calls end in time,
// also after a restart, and are done when the disk answers again; nothing is left of them.
func TestHungVolumeGroup(t *testing.T) {
	const limit = 10 * time.Second // of each call
	disk := newFailingDisk(t, "silent", 132*mib)
	volumeGroupOf(t, "hung", disk.node)
	volumeGroup(t, "answers", 100*mib)
	p, o := disks(t, harness.Options{Flags: []string{"--lvm-groups", "hung,answers"}})
	p.Start(o)
	ctx := t.Context()
	ext4 := mountAs("ext4", multiWriter)
	used, next, gone := logical(t, p, "hung", "used", 16*mib, ext4), logical(t, p, "hung", "next", 16*mib, ext4), logical(t, p, "hung", "gone", 4*mib, ext4)
	leaving := logical(t, p, "hung", "leaving", 16*mib, ext4)
	must(t, leaving.Stage(ctx))
	made := harness.NewVolume(t, p, "made", ext4)
	create := func(ctx context.Context) error {
		answer, err := p.Controller.CreateVolume(ctx, made.CreateRequest(8*mib, map[string]string{"backend": "lvm", "volumeGroup": "hung"}))
		if err == nil {
			made.ID, made.Context = answer.GetVolume().GetVolumeId(), answer.GetVolume().GetVolumeContext()
		}
		return err
	}
	pod, pod2 := used.Target("pod"), used.Target("pod-2")
	must(t, used.Up(ctx, pod))
	write(t, filepath.Join(pod, "file"), "kept")
	require.NoError(t, exec.Command("sync", "--file-system", pod).Run())
	diskNode, _ := newDisk(t, 32*mib)

	disk.dmsetup("", "suspend", "--noflush", "--nolockfs", disk.name)
	answers := sync.OnceFunc(func() { disk.dmsetup("", "resume", disk.name) })
	t.Cleanup(answers)
	must(t, used.Publish(ctx, pod2)) // which needs no lvm
	must(t, used.Unpublish(ctx, pod2))
	calls := map[string]func(context.Context) error{
		"stage": next.Stage, "create": create, "delete": gone.Delete,
		"grow": func(ctx context.Context) error { _, err := used.ExpandAt(ctx, pod, 32*mib); return err },
	}
	others := func(round string) {
		t.Helper()
		for _, v := range []*volume{
			logical(t, p, "answers", "lvm-"+round, 16*mib, ext4), createAs(t, p, "pool-"+round, 16*mib, ext4, "thick"), onDisk(p, t, "disk", diskNode, "ext4"),
		} {
			start, pod := time.Now(), v.Target("pod")
			must(t, v.Up(ctx, pod))
			if v.ID != "disk" {
				_, err := v.ExpandAt(ctx, pod, 32*mib)
				must(t, err)
			}
			must(t, v.Down(ctx, pod))
			if v.ID != "disk" {
				must(t, v.Delete(ctx))
			}
			t.Logf("beside a group that hangs, %s took %s", v.ID, time.Since(start))
		}
	}
	for _, round := range []string{"before", "after-restart"} {
		if round == "after-restart" { // whose thread waits in the kernel from then on
			calls["unstage"] = leaving.Unstage
		}
		var asked sync.WaitGroup
		for name, call := range calls {
			asked.Go(func() {
				limited, end := context.WithTimeout(ctx, limit)
				defer end()
				if err := call(limited); harness.Final(err) || limited.Err() != nil {
					t.Errorf("%s: %s in a group that hangs: %v (%v)", round, name, err, limited.Err())
				} else {
					t.Logf("%s: %s: %v", round, name, err)
				}
			})
		}
		others(round)
		asked.Wait()
		harness.Eventually(t, "the health of the storage tells of the group", func() bool { // what is known of it may be some seconds old
			limited, end := context.WithTimeout(ctx, limit)
			defer end()
			health, err := p.Node.NodeGetStorageHealth(limited, &csi.NodeGetStorageHealthRequest{})
			return err == nil && len(health.GetBackendHealth()) > 0 && strings.Contains(health.GetBackendHealth()[0].GetMessage(), "not answer")
		})
		if round == "before" {
			p.Kill()
			p.Start(o)
		}
	}
	if t.Failed() {
		return
	}
	answers()

	for name, call := range calls {
		if err := harness.Insist(ctx, call); err != nil {
			t.Errorf("when the disk answers: %s: %v", name, err)
		}
	}
	mustRead(t, filepath.Join(pod, "file"), "kept")
	if total := used.Total(pod); total < 24*mib {
		t.Errorf("grown to %d bytes", total)
	}
	must(t, made.Stage(ctx))
	must(t, used.Unpublish(ctx, pod))
	for _, v := range []*volume{made, next, used, leaving} {
		must(t, v.Unstage(ctx))
		must(t, v.Delete(ctx))
	}
	mustHaveNoRecord(t, p)
	if left := append(active(t, "hung"), active(t, "answers")...); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if left := lvmOf(t, disk.node)("lvs", "--noheadings", "--options", "lv_name", "hung"); left != "" {
		t.Errorf("left in the group: %s", left)
	}
	mustBeFree(t, diskNode)
}

// A thin pool that is full beneath a writer keeps what was synced, is told of, and takes no
// more volumes; the writer goes on when the pool is larger.
func TestThinPoolThatFillsBeneathAWriter(t *testing.T) {
	const timeout, record, records = "/sys/module/dm_thin_pool/parameters/no_space_timeout", mib, 80
	_, lvm := volumeGroup(t, "filling", 260*mib)
	lvm("lvcreate", "--yes", "--type", "thin-pool", "--size", "64M", "--poolmetadatasize", "4M", "--chunksize", "64k", "--name", "tank", "filling")
	// Else writes fail after a minute, which an emulated machine may need to get here.
	before, err := os.ReadFile(timeout)
	must(t, err)
	must(t, os.WriteFile(timeout, []byte("600"), 0))
	t.Cleanup(func() { must(t, os.WriteFile(timeout, before, 0)) })
	p := harness.Start(t, harness.Options{Flags: []string{"--lvm-groups", "filling"}})
	ctx, ext4 := t.Context(), mountAs("ext4", multiWriter)
	class := []string{"thinPool=tank", "overcommit=2"}
	v := logical(t, p, "filling", "v", 96*mib, ext4, class...)
	pod := v.Target("pod")
	must(t, v.Up(ctx, pod))

	contents := func(i int64) []byte { return bytes.Repeat([]byte(fmt.Sprintf("%07d\n", i)), record/8) }
	var synced atomic.Int64
	ended := make(chan error, 1)
	go func() {
		f, err := os.Create(filepath.Join(pod, "journal"))
		for i := int64(0); err == nil && i < records; i++ {
			if _, err = f.Write(contents(i)); err == nil {
				err = f.Sync()
			}
			if err == nil {
				synced.Add(1)
			}
		}
		ended <- errors.Join(err, f.Close())
	}()
	larger := sync.OnceFunc(func() { lvm("lvextend", "--size", "192M", "filling/tank") })
	t.Cleanup(larger) // else the writer never ends
	harness.Eventually(t, "the pool is full", func() bool {
		out, err := exec.Command("dmsetup", "status", "filling-tank-tpool").Output()
		must(t, err)
		return strings.Contains(string(out), "out_of_data_space")
	})
	awaitHealth(t, p, "filling/tank", "100% full", "lvextend")
	more := harness.NewVolume(t, p, "more", ext4)
	_, err = p.Controller.CreateVolume(ctx, more.CreateRequest(4*mib, map[string]string{"backend": "lvm", "volumeGroup": "filling", "thinPool": "tank", "overcommit": "2"}))
	mustRefuse(t, err, codes.ResourceExhausted, "filling/tank", "full")
	_, err = v.ExpandAt(ctx, pod, 100*mib)
	mustRefuse(t, err, codes.ResourceExhausted, "filling/tank", "full")
	if told := shell(t, p, "csi-node status"); !strings.Contains(told.Stdout, "filling/tank") {
		t.Errorf("status does not tell of it:\n%s%s", told.Stdout, told.Stderr)
	}
	if n := synced.Load(); n == 0 || n >= records {
		t.Errorf("in a pool that is full, %d of %d records were synced", n, records)
	}

	larger()
	if err := <-ended; err != nil || synced.Load() != records {
		t.Errorf("in a pool that is larger, %d of %d records were synced: %v", synced.Load(), records, err)
	}
	awaitHealth(t, p)
	_, err = v.ExpandAt(ctx, pod, 128*mib)
	must(t, err)
	must(t, v.Down(ctx, pod))
	must(t, v.Up(ctx, pod))
	got, err := os.ReadFile(filepath.Join(pod, "journal"))
	must(t, err)
	for i := range int64(records) {
		if at := i * record; int64(len(got)) < at+record || !bytes.Equal(got[at:at+record], contents(i)) {
			t.Fatalf("lost: record %d, which was synced", i)
		}
	}
	must(t, v.Down(ctx, pod))
	must(t, v.Delete(ctx))
}

// A volume group loses one of its disks, and then all: what is not there is told, taken
// down and never formatted; what is there goes on; all is used again when the disks are back.
func TestVolumeGroupLosesDisks(t *testing.T) {
	const bytesOf = 68 * mib
	a, b := newFailingDisk(t, "half-a", bytesOf), newFailingDisk(t, "half-b", bytesOf)
	lvm := volumeGroupOf(t, "torn", a.node, b.node)
	whole := sync.OnceFunc(func() { a.become(a.whole()); b.become(b.whole()) })
	p := harness.Start(t, harness.Options{Flags: []string{"--lvm-groups", "torn"}})
	t.Cleanup(whole)
	ctx, ext4 := t.Context(), mountAs("ext4", multiWriter)
	one, two := logical(t, p, "torn", "one", 64*mib, ext4), logical(t, p, "torn", "two", 16*mib, ext4) // the first fills a disk
	lost, kept, disk, other := one, two, a, b
	if strings.Contains(lvm("lvs", "--noheadings", "--options", "devices", "torn/one"), b.node) {
		disk, other = b, a
	}
	if strings.Contains(lvm("lvs", "--noheadings", "--options", "devices", "torn/two"), disk.node) {
		t.Fatal("both volumes are on one disk: there is nothing to test")
	}
	for _, v := range []*volume{lost, kept} {
		must(t, v.Up(ctx, v.Target("pod")))
		write(t, filepath.Join(v.Target("pod"), "file"), v.ID)
		require.NoError(t, exec.Command("sync", "--file-system", v.Staging).Run())
	}
	before := map[*failingDisk]string{}

	gone := func(d *failingDisk) { // the last sectors are there, so that what is below remains its own
		t.Helper()
		d.become(d.unreadable(0, bytesOf-4<<10))
	}
	gone(disk)
	before[disk] = digest.Of(t, disk.file)
	awaitHealth(t, p, "torn", "lacks 1 of its disks")
	if err := os.WriteFile(filepath.Join(lost.Target("pod"), "more"), bytes.Repeat([]byte("x"), mib), 0o600); err == nil {
		err = exec.Command("sync", "--file-system", lost.Staging).Run()
		if err == nil {
			t.Error("a write to a disk that is lost was synced")
		}
	}
	must(t, lost.Down(ctx, lost.Target("pod")))
	mustBeBare(t, p, lost.Staging)
	err := lost.Stage(ctx)
	if harness.Final(err) || !strings.Contains(err.Error(), "torn") {
		t.Errorf("staged without its disk: %v", err)
	}
	told := shell(t, p, "csi-node explain "+lost.ID)
	if !strings.Contains(told.Stdout, "torn/one: 64Mi, formatted as ext4") || !strings.Contains(told.Stdout, "missing PV") {
		t.Errorf("explain, of a volume whose disk is lost, says\n%s%s", told.Stdout, told.Stderr)
	}
	write(t, filepath.Join(kept.Target("pod"), "file"), "goes on")
	require.NoError(t, exec.Command("sync", "--file-system", kept.Staging).Run())
	must(t, kept.Down(ctx, kept.Target("pod")))
	must(t, kept.Up(ctx, kept.Target("pod"))) // with half a group
	mustRead(t, filepath.Join(kept.Target("pod"), "file"), "goes on")
	_, err = kept.Expand(ctx, 32*mib)
	mustRefuse(t, err, codes.ResourceExhausted, "torn", "lacks 1")
	must(t, kept.Down(ctx, kept.Target("pod")))

	gone(other)
	before[other] = digest.Of(t, other.file)
	awaitHealth(t, p, "no such volume group", lost.ID)
	for _, v := range []*volume{lost, kept} {
		soon, end := context.WithTimeout(ctx, 15*time.Second) // it waits for the group as long as the caller does
		err := v.Stage(soon)
		end()
		if harness.Final(err) || !strings.Contains(err.Error(), "disks") {
			t.Errorf("staged without its group: %v", err)
		}
	}
	told = shell(t, p, "csi-node explain "+kept.ID)
	if !strings.Contains(told.Stdout, "whether it was ever formatted, is not known now") || !strings.Contains(told.Stdout, "there is no such volume group on this node") {
		t.Errorf("explain, of a volume whose group is gone, says\n%s%s", told.Stdout, told.Stderr)
	}
	must(t, kept.Unstage(ctx))
	mustHoldAsBefore(t, disk.file, before[disk])
	mustHoldAsBefore(t, other.file, before[other])

	whole()
	harness.Eventually(t, "the volume that is asked for is staged when its disk is back", func() bool { return lost.Unsettled() == "" })
	for _, v := range []*volume{lost, kept} {
		must(t, v.Up(ctx, v.Target("pod")))
	}
	mustRead(t, filepath.Join(lost.Target("pod"), "file"), lost.ID)
	mustRead(t, filepath.Join(kept.Target("pod"), "file"), "goes on")
	awaitHealth(t, p)
	for _, v := range []*volume{lost, kept} {
		must(t, v.Down(ctx, v.Target("pod")))
		must(t, v.Delete(ctx))
	}
	mustHaveNoRecord(t, p)
	if left := active(t, "torn"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// manifests returns what `csi-node volume manifest` prints, by the names of the logical volumes.
func manifests(t *testing.T, p *harness.Plugin) map[string]corev1.PersistentVolume {
	t.Helper()
	var list corev1.PersistentVolumeList
	typed(t, p, "csi-node volume manifest --storage-class moved --secret-ref ns/passphrases", &list)
	all := map[string]corev1.PersistentVolume{}
	for _, pv := range list.Items {
		all[pv.Spec.CSI.VolumeHandle[strings.LastIndex(pv.Spec.CSI.VolumeHandle, "-")+1:]] = pv
	}
	return all
}

// A volume group is carried to another node: the plugin there prints PersistentVolumes for
// its volumes, and they have their data. A group of the same name that is not theirs is
// left alone.
func TestVolumeGroupMovesToAnotherNode(t *testing.T) {
	node, file := newDisk(t, 132*mib)
	lvmOf(t, node)("vgcreate", "--yes", "moving", node)
	p := harness.New(t)
	o := harness.Options{Flags: []string{"--lvm-groups", "moving"}}
	p.Start(o)
	ctx := t.Context()
	class := map[string][]string{"plain": nil, "secret": {luks.EncryptionKey + "=" + luks.LUKS2}, "raw": nil}
	secrets := map[string]string{luks.PassphraseKey: "of the cluster"}
	path := func(v *volume, name string) string {
		if name == "raw" {
			return v.Target("pod")
		}
		return filepath.Join(v.Target("pod"), "file")
	}
	var plain *volume
	for name, parameters := range class {
		c := mountAs("ext4", multiWriter)
		if name == "raw" {
			c = blockAs(multiWriter)
		}
		v := logical(t, p, "moving", name, 16*mib, c, parameters...)
		v.Secrets = secrets
		must(t, v.Up(ctx, v.Target("pod")))
		write(t, path(v, name), "of "+name)
		must(t, v.Down(ctx, v.Target("pod")))
		if name == "plain" {
			plain = v
		}
	}
	p.Terminate()
	machine.LosetupDetach(t, node)

	other, otherFile := newDisk(t, 68*mib)
	lvm := volumeGroupOf(t, "moving", other)
	lvm("lvcreate", "--yes", "--activate", "n", "--zero", "n", "--size", "16M", "--name", "plain", "moving")
	before := digest.Of(t, otherFile)
	p.Start(o)
	mustRefuse(t, plain.Stage(ctx), codes.Unavailable, plain.ID, "moving", "another one", "Nothing is done to it") // until its own is there
	must(t, plain.Unstage(ctx))
	mustRefuse(t, plain.Delete(ctx), codes.Unavailable, plain.ID, "moving", "disks") // its own is elsewhere
	mustHoldAsBefore(t, otherFile, before)
	p.Terminate()
	lvm("vgrename", "moving", "stays")
	t.Cleanup(func() { lvm("vgrename", "stays", "moving") })

	node = machine.Losetup(t, file)
	t.Cleanup(func() { lvmOf(t, node)("vgremove", "--force", "--force", "--yes", "moving") })
	q := harness.New(t)
	q.Start(harness.Options{Flags: []string{"--lvm-groups", "moving", "--node-id", "node-2"}})
	all := manifests(t, q)
	if len(all) != len(class) {
		t.Errorf("there are the volumes %v", slices.Sorted(maps.Keys(all)))
	}
	info, err := q.Node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(t, err)
	for name := range class {
		pv := all[name]
		source, spec := pv.Spec.CSI, pv.Spec
		if spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain || spec.Capacity.Storage().Value() < 16*mib || spec.NodeAffinity == nil || spec.StorageClassName != "moved" ||
			(source.NodeStageSecretRef != nil) != (name == "secret") {
			t.Errorf("%s: %+v", name, pv)
		} else {
			term := spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0]
			if info.GetAccessibleTopology().GetSegments()[term.Key] != "node-2" || !slices.Equal(term.Values, []string{"node-2"}) {
				t.Errorf("%s: it is on %+v", name, term)
			}
		}
		c := mountAs(source.FSType, multiWriter)
		if *spec.VolumeMode == corev1.PersistentVolumeBlock {
			c = blockAs(multiWriter)
		}
		v := harness.NewVolume(t, q, source.VolumeHandle, c)
		v.Context, v.Secrets = source.VolumeAttributes, secrets
		must(t, v.Up(ctx, v.Target("pod")))
		got, err := os.ReadFile(path(v, name))
		if err != nil || !strings.HasPrefix(string(got), "of "+name) {
			t.Errorf("%s holds %.20q (%v)", name, got, err)
		}
		must(t, v.Down(ctx, v.Target("pod")))
		must(t, v.Delete(ctx))
	}
	mustHaveNoRecord(t, q)
}
