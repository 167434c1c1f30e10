package report

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestPrintStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // a clock that stands
		now := time.Now()
		next := now.Add(1500 * time.Millisecond)
		past := now.Add(-time.Second)
		volumes := []Status{
			{
				Volume: "pvc-1", Device: "/dev/loop3 attached read-write 4096 bytes", Holder: "pid 7 (tar)",
				Parts: []PartStatus{
					{Part: "target /pod", Asked: "published", Is: Failing, Since: now.Add(-90 * time.Second), Error: "busy", NextTry: &next, Losses: 2, Lost: now.Add(-3 * time.Second)},
					{Part: "stage", Asked: "gone", Is: Settled, Since: now, NextTry: &past},
				},
				Step: &StepStatus{Step: "format for stage", Age: 1234567 * time.Microsecond},
			},
			{Volume: "v3", Device: "absent", Parts: []PartStatus{
				{Part: "target /var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/v3/mount", Pod: "default/writer", Asked: "published", Is: Settled, Since: now},
				{Part: "target /var/lib/kubelet/pods/uid/mount", Asked: "published", Is: Settled, Since: now},
				{Part: "stage", Path: "/var/lib/x/globalmount", Asked: "staged at /var/lib/x/globalmount as mount xfs", Is: Settled, Since: now},
			}},
			{Volume: "v2", Device: "unknown", Parts: []PartStatus{{Part: "size", Asked: "4096 bytes", Is: Unseen, Since: now}}},
		}
		const table = `
VOLUME  PART                                    ASKED                IS       SINCE      NEXT TRY  DETAIL
pvc-1                                                                failing                       device /dev/loop3 attached read-write 4096 bytes; held by pid 7 (tar); step format for stage has been running for 1.235s
        target /pod                             published            failing  1m30s ago  in 1.5s   busy (lost 2 times in a row, last 3s ago)
        stage                                   gone                 settled  0s ago     in 0s     
v3                                                                   settled                       device absent
        target of pod default/writer            published            settled  0s ago               
        target /var/lib/kubelet/pods/uid/mount  published            settled  0s ago               
        stage                                   staged as mount xfs  settled  0s ago               
v2                                                                   unseen                        device unknown
        size                                    4096 bytes           unseen   0s ago               
`
		const down = "No plugin is running. This is what the store asks for and what is on the node; nothing is done about it until one is started.\n"
		for title, test := range map[string]struct {
			node Node
			want string
		}{
			"running":    {Node{Running: true, Volumes: volumes}, table[1:]},
			"down":       {Node{Volumes: volumes}, down + table[1:]},
			"new":        {Node{Running: true, Registration: &Registration{Socket: "/reg/x.sock"}}, "kubelet has not asked at /reg/x.sock yet: is it running, and is this its plugins_registry?\nNo volume is asked of this node.\n"},
			"refused":    {Node{Running: true, Registration: &Registration{Error: "no answer", Since: past}}, "The plugin is not registered with kubelet, as of 1s ago: no answer\nNo volume is asked of this node.\n"},
			"registered": {Node{Running: true, Registration: &Registration{Registered: true, Since: past}}, "Registered with kubelet 1s ago.\nNo volume is asked of this node.\n"},
			"idle":       {Node{Running: true}, "No volume is asked of this node.\n"},
			"a refusal": {Node{Running: true, Refusals: []Refusal{{Volume: "v", Call: "NodeStageVolume", Code: "InvalidArgument", Error: "bad flag", Since: past, At: past, Times: 1}}},
				"No volume is asked of this node.\n\nCalls that were refused, the last one of each volume:\n  volume v: NodeStageVolume was refused 1s ago with InvalidArgument: bad flag\n"},
			"nothing": {Node{}, down + "No volume is asked of this node.\n"},
		} {
			var got strings.Builder
			if err := test.node.Print(&got); err != nil || got.String() != test.want {
				t.Errorf("%s: prints (%v)\n%s\nnot\n%s", title, err, got.String(), test.want)
			}
		}
	})
}

func TestUnsettled(t *testing.T) {
	node := Node{Volumes: []Status{{Volume: "v", Parts: []PartStatus{
		{Part: "stage", Is: Failing, Error: "busy"}, {Part: "size", Is: Waiting}, {Part: "target /t", Is: Settled},
	}}}}
	if got := strings.Join(node.Unsettled(), "; "); got != "stage is failing: busy; size is waiting" {
		t.Error(got)
	}
}
