package main

import (
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestPrintStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // a clock that stands
		now := time.Now()
		next := now.Add(1500 * time.Millisecond)
		past := now.Add(-time.Second)
		volumes := []reconciler.Status{
			{
				Volume: "pvc-1", Device: "/dev/loop3 attached read-write 4096 bytes",
				Parts: []reconciler.PartStatus{
					{Part: "target /pod", Asked: "published", Is: reconciler.Failing, Since: now.Add(-90 * time.Second), Error: "busy", NextTry: &next},
					{Part: "stage", Asked: "gone", Is: reconciler.Settled, Since: now, NextTry: &past},
				},
				Step: &reconciler.StepStatus{Step: "format for stage", Age: 1234567 * time.Microsecond},
			},
			{Volume: "v2", Device: "unknown", Parts: []reconciler.PartStatus{{Part: "size", Asked: "4096 bytes", Is: reconciler.Unseen, Since: now}}},
		}
		const table = `
VOLUME  PART         ASKED       IS       SINCE      NEXT TRY  DETAIL
pvc-1                            failing                       device /dev/loop3 attached read-write 4096 bytes; step format for stage has been running for 1.235s
        target /pod  published   failing  1m30s ago  in 1.5s   busy
        stage        gone        settled  0s ago     in 0s     
v2                               unseen                        device unknown
        size         4096 bytes  unseen   0s ago               
`
		const down = "No plugin is running. This is what the store says is asked; what is on the node is not known.\n"
		for title, test := range map[string]struct {
			report driver.Report
			want   string
		}{
			"running": {driver.Report{Running: true, Volumes: volumes}, table[1:]},
			"down":    {driver.Report{Volumes: volumes}, down + table[1:]},
			"idle":    {driver.Report{Running: true}, "No volume is asked of this node.\n"},
			"nothing": {driver.Report{}, down + "No volume is asked of this node.\n"},
		} {
			var got strings.Builder
			if err := printStatus(&got, test.report); err != nil || got.String() != test.want {
				t.Errorf("%s: prints (%v)\n%s\nnot\n%s", title, err, got.String(), test.want)
			}
		}
	})
}

func TestStatusOfAStore(t *testing.T) {
	dir := t.TempDir()
	boot, err := state.BootID()
	if err != nil {
		t.Fatal(err)
	}
	store, err := state.Open(t.Context(), filepath.Join(dir, driver.StoreFile), boot)
	if err != nil {
		t.Fatal(err)
	}
	_, err = store.Edit("pvc-1", func(v *state.Volume) error { return v.AskUnpublish("/pod", time.Now()) })
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	for output, words := range map[string][]string{
		"table": {"No plugin is running", "pvc-1", "target /pod", "gone", "unseen"},
		"json":  {`"running": false`, `"volume": "pvc-1"`, `"part": "target /pod"`, `"asked": "gone"`, `"is": "unseen"`},
	} {
		out, err := run(t, "status", "--state-dir", dir, "--output", output)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("%s: no %s in\n%s", output, w, out)
			}
		}
	}
}
