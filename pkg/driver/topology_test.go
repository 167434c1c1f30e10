package driver

import (
	"strings"
	"testing"
)

func TestTopology(t *testing.T) {
	for id, want := range map[string]string{
		"node-1":                   "node-1",
		"ip-10-0-0-1.ec2.internal": "ip-10-0-0-1.ec2.internal",
		strings.Repeat("n", 63):    strings.Repeat("n", 63),
	} {
		if got := topologyValue(id); got != want {
			t.Errorf("%q is called %q", id, got)
		}
	}
	seen := map[string]string{}
	for _, id := range []string{strings.Repeat("n", 64), strings.Repeat("n", 256), "node-1.", "-node", "node 1", "node/1", "node\n", "ñ"} {
		got := topologyValue(id)
		if len(got) > maxSegment || !segmentValue.MatchString(got) || got != topologyValue(id) || seen[got] != "" {
			t.Errorf("%q is called %q, as %q is", id, got, seen[got])
		}
		seen[got] = id
	}
	for name, want := range map[string]string{
		"csi-node.local":        "topology.csi-node.local/node",
		strings.Repeat("d", 54): "topology." + strings.Repeat("d", 54) + "/node",
		strings.Repeat("d", 63): strings.Repeat("d", 63) + "/node",
	} {
		if got := topologyKey(name); got != want {
			t.Errorf("the key of %s is %s", name, got)
		}
	}
}
