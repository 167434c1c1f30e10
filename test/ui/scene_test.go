package ui

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/ui"
)

const gib = 1 << 30

// scene is a cluster that stands still, unless a test changes it.
type scene struct {
	mu    sync.Mutex
	nodes []report.NodeOf
	notes []string
	err   error
	asked []string // volumes that were explained
}

// change changes the scene; the next reading shows that.
func (s *scene) change(how func(*scene)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	nodes := slices.Clone(s.nodes) // what was read is not to change
	for i := range nodes {
		nodes[i].Volumes = slices.Clone(nodes[i].Volumes)
		for j := range nodes[i].Volumes {
			nodes[i].Volumes[j].Parts = slices.Clone(nodes[i].Volumes[j].Parts)
		}
	}
	s.nodes = nodes
	how(s)
}

func (s *scene) source() ui.Source {
	return ui.Source{
		Title: "kubectl csi-node",
		Every: 20 * time.Millisecond,
		Read: func(context.Context) (ui.Snapshot, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return ui.Snapshot{Cluster: report.Cluster{Nodes: s.nodes}, Notes: s.notes}, s.err
		},
		Explain: func(_ context.Context, n report.NodeOf, volume string) (report.Explanation, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.asked = append(s.asked, volume)
			return explain(n, volume)
		},
	}
}

func explain(n report.NodeOf, volume string) (report.Explanation, error) {
	at := slices.IndexFunc(n.Volumes, func(v report.Status) bool { return v.Volume == volume })
	if at < 0 {
		return report.Explanation{}, errors.New("nothing is known of it")
	}
	e := report.Explanation{Volume: volume, YouCan: []string{"Nothing is left to do."}}
	for _, p := range n.Volumes[at].Parts {
		e.Asked = append(e.Asked, "It was asked that "+p.Part+" is "+p.Asked+".")
		if p.Error != "" {
			e.Missing = append(e.Missing, "Stage: it should be "+p.Asked+", and is "+string(p.Is)+".")
			e.InTheWay = append(e.InTheWay, "Stage: "+p.Error+".")
			e.Next = []string{"Attach for stage, in 38s."}
			e.YouCan = []string{"Mend what is in the way; `csi-node volume retry " + volume + "` then tries at once."}
		}
	}
	return e, nil
}

// id is one as external-provisioner makes it.
func id(begin string) string { return "pvc-" + begin + "-7b0f-4f5e-8f2e-0a3c5d2a4a5e" }

// volume is one that is staged and published, for as long as that.
func volume(begin, claim, pod string, since time.Duration) report.Status {
	now, staged := time.Now(), "/var/lib/kubelet/plugins/kubernetes.io/csi/csi-node.local/"+begin+"/globalmount"
	v := report.Status{
		Volume: id(begin), Claim: claim, Device: "/dev/loop7 attached read-write 10737418240 bytes",
		Parts: []report.PartStatus{{Part: "stage", Path: staged, Asked: "staged at " + staged + " as ext4", Is: report.Settled, Since: now.Add(-since)}},
	}
	if pod != "" {
		target := "/var/lib/kubelet/pods/3f8a/volumes/kubernetes.io~csi/" + v.Volume + "/mount"
		v.Parts = append(v.Parts, report.PartStatus{Part: "target " + target, Path: target, Pod: pod, Asked: "published", Is: report.Settled, Since: now.Add(time.Second - since)})
	}
	return v
}

func pool(size, free, available float64) report.Place {
	return report.Place{Backend: "pool", Seen: time.Now(), Values: []report.Value{
		{Name: "size_bytes", Help: "Size of the pool's file system.", Value: size * gib},
		{Name: "free_bytes", Help: "What nobody has taken of the pool's file system.", Value: free * gib},
		{Name: "available_bytes", Help: "What new volumes and growth can be promised.", Value: available * gib},
		{Name: "promised_bytes", Help: "What volumes were promised and have not taken; more than is free if promises are broken.", Value: 21 * gib},
		{Name: "volumes", Help: "Volumes of the pool; the provisioning of one with damaged metadata is unknown.", Labels: map[string]string{"provisioning": "thick"}, Value: 4},
	}}
}

func group() report.Place {
	vg := map[string]string{"group": "vg-fast"}
	return report.Place{Backend: "lvm", Seen: time.Now(), Values: []report.Value{
		{Name: "size_bytes", Help: "Size of the volume group.", Labels: vg, Value: 930 * gib},
		{Name: "free_bytes", Help: "What no logical volume has of the volume group.", Labels: vg, Value: 412 * gib},
	}}
}

// shop is a small cluster on which some things are wrong.
func shop() *scene {
	now := time.Now()
	failing := volume("9c41e7d2", "shop/search-index", "", 4*time.Minute)
	next := now.Add(38 * time.Second)
	failing.Device = "absent"
	failing.Parts[0].Is, failing.Parts[0].NextTry = report.Failing, &next
	failing.Parts[0].Error = "the file holds an xfs file system, and ext4 was asked for: it is not formatted over. To destroy what is on it: `csi-node volume clear-device`"
	busy := volume("d80b5512", "media/uploads", "", 40*time.Second)
	busy.Parts[0].Is = report.UnderWay
	busy.Step = &report.StepStatus{Step: "Format for stage", Age: 12 * time.Second, Progress: "31 of 200Gi proved blank"}
	waiting := volume("d80b5512", "media/uploads", "media/encoder-0", 40*time.Second).Parts[1]
	waiting.Is = report.Waiting
	busy.Parts = append(busy.Parts, waiting)
	lost := volume("77aa01f3", "shop/orders-db", "shop/postgres-0", 9*24*time.Hour)
	lost.Parts[1].Losses, lost.Parts[1].Lost = 1, now.Add(-26*time.Minute)
	inline := volume("x", "", "ci/runner-5x8kq", 7*time.Minute)
	inline.Volume = "csi-24b04e39f135ae411dbbbfb4838ee7c94c7aaa4a80b4989372237c6bb47f63dd"
	registered := &report.Registration{Registered: true, Since: now.Add(-9*24*time.Hour - 4*time.Hour)}
	node := func(name string, n report.Node) report.NodeOf {
		n.Running, n.Driver, n.Version, n.Registration = true, "csi-node.local", "v1.4.0", registered
		return report.NodeOf{Name: name, Pod: "csi-node/csi-node-" + name[len(name)-1:] + "7xq2", Node: n}
	}
	return &scene{nodes: []report.NodeOf{
		node("worker-1", report.Node{
			Volumes: []report.Status{lost, failing, volume("5be20a9c", "shop/cache", "shop/redis-0", 9*24*time.Hour), volume("1f6e3300", "monitoring/prometheus", "monitoring/prometheus-0", 31*time.Hour)},
			Storage: []report.Place{pool(500, 212, 187), {Backend: "lvm", Seen: now}}, // of a node without volume groups
		}),
		node("worker-2", report.Node{
			Volumes: []report.Status{busy, inline, volume("e3c8d6b4", "shop/queue", "shop/nats-0", 2*24*time.Hour)},
			Storage: []report.Place{pool(500, 41, 16), group()},
			Refusals: []report.Refusal{{ // seconds ago, for as long as a test may take to look
				Volume: id("0d94b7aa"), Call: "NodeStageVolume", Code: "InvalidArgument", Since: now.Add(-6 * time.Minute), At: now.Add(-5 * time.Second), Times: 4,
				Error: "volume " + id("0d94b7aa") + ": mount option \"noatim\": ext4 does not know it",
			}},
		}),
		{Name: "worker-3", Pod: "csi-node/csi-node-pd92k", Error: "kubectl exec: error dialing backend: dial tcp 10.0.0.13:10250: connect: no route to host"},
	}}
}
