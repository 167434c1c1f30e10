package report

import (
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
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
VOLUME  PART                          ASKED       IS       SINCE  NEXT TRY
pvc-1   target /pod                   published   failing  1m     in 1s
    busy (lost 2 times in a row, last 3s ago)
pvc-1   stage                         gone        settled  0s     now
    device /dev/loop3 attached read-write 4096 bytes; held by pid 7 (tar); step format for stage has been running for
    1.235s
v3      default/writer                published   settled  0s
v3      target /var/li…ods/uid/mount  published   settled  0s
v3      stage                         staged      settled  0s
v2      size                          4096 bytes  unseen   0s
    device unknown
`
		const down = "No plugin is running. This is what the store asks for and what is on the node; nothing is done about it until one is started.\n"
		for title, test := range map[string]struct {
			node Node
			want string
		}{
			"running": {Node{Running: true, Volumes: volumes}, table[1:]},
			"down":    {Node{Volumes: volumes}, down + table[1:]},
			"new":     {Node{Running: true, Registration: &Registration{Socket: "/reg/x.sock"}}, "kubelet has not asked at /reg/x.sock yet: is it running, and is this its plugins_registry?\nNo volume is asked of this node.\n"},
			"refused": {Node{Running: true, Registration: &Registration{Error: "no answer", Since: past}}, "The plugin is not registered with kubelet, as of 1s ago: no answer\nNo volume is asked of this node.\n"},
			"storage": {Node{Running: true, StorageProblems: []StorageProblem{{PoolUnusable, "the pool /p is away"}, {PoolFull, "vg0 is full\nvg1 is full"}}},
				"Storage: PoolUnusable: the pool /p is away\nStorage: PoolFull: vg0 is full; vg1 is full\nNo volume is asked of this node.\n"},
			"orphans":    {Node{Running: true, Orphans: 2}, "Volumes that are attached or mounted, and that no record explains: 2. `csi-node orphans` lists them.\nNo volume is asked of this node.\n"},
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

// A table for people is never wider than their window, whatever the names.
func TestTableFits(t *testing.T) {
	long := strings.Repeat("very-long-", 30)
	node := Node{
		Running: true,
		Volumes: []Status{{Volume: long, Device: long + " attached", Parts: []PartStatus{
			{Part: "target /" + long, Pod: long + "/" + long, Asked: "gone, then published read-only", Is: UnderWay, Since: time.Now().Add(-400 * time.Hour), NextTry: new(time.Time), Error: strings.Repeat("words of an error ", 50)},
		}}},
		Refusals: []Refusal{{Volume: "v", Call: "NodeStageVolume", Code: "InvalidArgument", Error: strings.Repeat("words of an error ", 50), Times: 1}},
	}
	// It is as wide as its terminal, but no wider than tableWidth.
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	require.NoError(t, err)
	defer terminal.Close()
	for columns, want := range map[uint16]int{200: tableWidth, 120: tableWidth, 100: 100, 80: 80, 0: tableWidth} {
		require.NoError(t, unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: 24}))
		width := widthFor(terminal)
		if width != want {
			t.Errorf("in a terminal of %d columns it has %d", columns, width)
		}
		for _, text := range []string{node.table(width), Cluster{Nodes: []NodeOf{{Name: long, Node: node}}}.table(width)} {
			widest := 0
			for line := range strings.Lines(text) {
				if strings.Count(strings.TrimSpace(line), " ") > 0 { // more than a long word
					widest = max(widest, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")))
				}
			}
			if widest > width || widest < width-12 {
				t.Errorf("%d columns and not %d:\n%s", widest, width, text)
			}
		}
	}
	if width := widthFor(new(strings.Builder)); width != tableWidth {
		t.Errorf("without a terminal it has %d columns", width)
	}
	var wide strings.Builder
	if err := node.PrintWide(&wide); err != nil || !strings.Contains(wide.String(), node.Volumes[0].Parts[0].Pod) || strings.Count(wide.String(), "\n") != 5 {
		t.Errorf("wide is (%v)\n%s", err, wide.String())
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 1500 * time.Millisecond: "1s", 59 * time.Second: "59s", time.Minute: "1m", 119 * time.Minute: "1h59m",
		2 * time.Hour: "2h", 11*time.Hour + time.Minute: "11h", 47 * time.Hour: "47h", 48 * time.Hour: "2d",
	} {
		if got := age(d); got != want {
			t.Errorf("%s is %s, not %s", d, got, want)
		}
	}
}

func TestPick(t *testing.T) {
	node := Node{
		Running: true,
		Volumes: []Status{
			{Volume: "a", Parts: []PartStatus{{Pod: "x/p", Is: Settled}, {Part: "stage", Is: Settled}}},
			{Volume: "b", Parts: []PartStatus{{Pod: "y/p", Is: Settled}, {Part: "stage", Is: Failing}}},
			{Volume: "c", Parts: []PartStatus{{Pod: "y/q", Is: Settled}}},
		},
		Refusals: []Refusal{{Volume: "c"}, {Volume: "d", Pod: "x/r", Claim: "x/e", Class: "fast"}},
	}
	for title, test := range map[string]struct {
		filter Filter
		want   string
	}{
		"all":         {Filter{}, "a b c, c d"},
		"volumes":     {Filter{Volumes: []string{"a", "d"}}, "a, d"},
		"pod":         {Filter{Pod: "p"}, "a b, "},
		"pod in full": {Filter{Pod: "y/p"}, "b, "},
		"no pod":      {Filter{Pod: "x/q"}, ", "},
		"namespace":   {Filter{Namespace: "y"}, "b c, c"},
		"refused pod": {Filter{Pod: "r"}, ", d"},
		"claim":       {Filter{Claim: "e"}, ", d"},
		"class":       {Filter{Class: "fast"}, ", d"},
		"other class": {Filter{Class: "slow", Claim: "e"}, ", "},
		"failing":     {Filter{Failing: true}, "b c, c d"},
		"both":        {Filter{Failing: true, Pod: "p"}, "b, "},
	} {
		var volumes, refused []string
		picked := node.Pick(test.filter)
		for _, v := range picked.Volumes {
			volumes = append(volumes, v.Volume)
		}
		for _, r := range picked.Refusals {
			refused = append(refused, r.Volume)
		}
		if got := strings.Join(volumes, " ") + ", " + strings.Join(refused, " "); got != test.want {
			t.Errorf("%s: picked are %s, not %s", title, got, test.want)
		}
	}
	// A table of none does not say that there are none.
	for _, print := range []func(Node, io.Writer) error{Node.Print, Node.PrintWide} {
		var text strings.Builder
		if err := print(node.Pick(Filter{Pod: "x/q"}).Pick(Filter{}), &text); err != nil || text.String() != "No volume matches; this node has 3 in all.\n" {
			t.Errorf("prints (%v)\n%s", err, text.String())
		}
	}
	if len(node.Volumes) != 3 || len(node.Refusals) != 2 {
		t.Error("picking changed the report")
	}
}
