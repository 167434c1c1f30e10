package report

import (
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/require"
)

func TestPrintCluster(t *testing.T) {
	now := time.Now()
	c := Cluster{Nodes: []NodeOf{
		{Name: "a-node-with-a-long-name.example", Pod: "csi-node/x", Node: Node{Running: true, Volumes: []Status{
			{Volume: "v1", Parts: []PartStatus{{Part: "stage", Asked: "staged at /x", Is: Settled, Since: now}}},
			{Volume: "v2", Device: "absent", Parts: []PartStatus{{Part: "stage", Asked: "staged at /x", Is: Failing, Since: now, Error: "boom"}}},
		}, Refusals: []Refusal{{Volume: "v3", Call: "NodeStageVolume", Code: "InvalidArgument", Error: "bad", At: now, Times: 1}}}},
		{Name: "b", Error: "it does not answer"},
		{Name: "c", Node: Node{Running: true, Registration: &Registration{Socket: "/s"}}},
	}}
	var text strings.Builder
	require.NoError(t, c.Print(&text))
	const want = `NODE              VOLUME  PART   IS       SINCE  NEXT TRY
a-node-w…example  v1      stage  settled  0s
a-node-w…example  v2      stage  failing  0s
    boom
    device absent

Calls that were refused, the last one of each volume:
  node a-node-with-a-long-name.example: volume v3: NodeStageVolume was refused 0s ago with InvalidArgument: bad
Node b could not be asked: it does not answer
Node c: kubelet has not asked at /s yet: is it running, and is this its plugins_registry?
`
	if text.String() != want {
		t.Errorf("prints\n%s\nnot\n%s", text.String(), want)
	}
	if err := c.Err(); err == nil || err.Error() != "node b: it does not answer" {
		t.Errorf("the error is %v", err)
	}
	for want, c := range map[string]Cluster{
		"No volume matches; the nodes that answered have 2 in all.\nNode b could not": c.Pick(Filter{Volumes: []string{"v4"}}),
		"No volume is known.\nNode b could not":                                       {Nodes: c.Nodes[1:2]},
		"No volume is asked of these nodes.\n":                                        {Nodes: []NodeOf{{Node: Node{Running: true}}, {Node: Node{Running: true}}}},
		"No volume is asked of this node.\n":                                          {Nodes: []NodeOf{{Node: Node{Running: true}}}},
		"No volume is asked of this node.\nNode a: Volumes that are attached or mounted, and that no record explains: 3. `kubectl csi-node orphans` lists": {Nodes: []NodeOf{{Name: "a", Node: Node{Running: true, Orphans: 3}}}},
	} {
		text.Reset()
		if err := c.Print(&text); err != nil || !strings.HasPrefix(text.String(), want) {
			t.Errorf("prints (%v)\n%s\nnot\n%s", err, text.String(), want)
		}
	}
	text.Reset()
	if err := c.Pick(Filter{Volumes: []string{"v2"}}).PrintWide(&text); err != nil || strings.Contains(text.String(), "v1") || !strings.Contains(text.String(), "Node c (pod ):") || len(c.Nodes[0].Volumes) != 2 {
		t.Errorf("wide is (%v)\n%s", err, text.String())
	}
}
