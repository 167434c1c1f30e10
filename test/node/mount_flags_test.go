package node

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// A stage that stands and that no record explains is a success only for whoever
// asks for the options that its file system is seen to have.
func TestMountFlagsAfterLostStore(t *testing.T) {
	t.Parallel()
	for fsType, rows := range map[string]map[string]struct { // by the flags that it is mounted with
		same, other string // flags of requests, separated by spaces
	}{
		"ext4": {
			"":                            {"defaults noatime data=ordered,commit=5 async barrier=1 rw", "sync dirsync lazytime data=journal data=writeback commit=17 noload nodelalloc barrier=0 errors=panic usrquota max_batch_time=3 journal_ioprio=2 noexec,commit=6"},
			"data=journal,commit=17,sync": {"sync,commit=17,data=journal noexec,sync,commit=3,commit=17,data=journal", "defaults sync sync,commit=17 data=journal,commit=17 sync,commit=18,data=journal"},
			"noload":                      {"noload norecovery", "defaults"},
			"discard":                     {"discard", "discard,commit=6"},
			"journal_ioprio=2":            {"defaults", "journal_ioprio=2"},
		},
		"xfs": {
			"":                             {"defaults inode64 noquota nodiscard logbsize=32k", "sync swalloc allocsize=64k wsync inode32"},
			"allocsize=65536,swalloc,sync": {"allocsize=65536,swalloc,sync sync,swalloc,allocsize=64k", "defaults swalloc,sync,allocsize=128k"},
		},
		"btrfs": {
			"":                        {"defaults commit=30 barrier datacow", "compress=zstd commit=17 nodatacow autodefrag sync nobarrier"},
			"compress=zstd,commit=17": {"compress=zstd,commit=17 compress=zstd:3,commit=17", "defaults compress=lzo,commit=17 compress=zstd"},
		},
	} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			p := harness.Start(t, harness.Options{})
			ctx := t.Context()
			for mounted, row := range rows {
				v := create(t, p, "volume", smallest(fsType), mountAs(fsType, multiWriter))
				ask := func(flags string) {
					v.Capability = mountAs(fsType, multiWriter)
					if flags != "" {
						v.Capability = mountAs(fsType, multiWriter, flags)
					}
				}
				pod := v.Target("pod")
				ask(mounted)
				must(t, v.Up(ctx, pod))
				lose := func() {
					p.Kill()
					loseStore(t, p)
					p.Start(harness.Options{})
				}
				lose()
				for flags := range strings.FieldsSeq(row.other) {
					ask(flags)
					mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, "the mount flag", "makes the difference")
					mustRefuse(t, v.Publish(ctx, v.Target("other")), codes.FailedPrecondition, "the mount flag", "makes the difference")
				}
				mustHaveNoRecord(t, p)
				for flags := range strings.FieldsSeq(row.same) {
					ask(flags)
					if err := v.Stage(ctx); err != nil {
						t.Errorf("mounted with %q, %q: %v", mounted, flags, err)
					}
					must(t, v.Publish(ctx, pod))
					lose()
				}
				first, _, _ := strings.Cut(row.same, " ")
				ask(first)
				must(t, v.Publish(ctx, pod)) // adopts the stage
				for flags := range strings.FieldsSeq(row.other) {
					ask(flags)
					mustRefuse(t, v.Stage(ctx), codes.AlreadyExists, "the mount flag", "makes the difference")
				}
				ask(first)
				must(t, v.Stage(ctx))
				p.Kill() // and with the store kept nothing is in question
				p.Start(harness.Options{})
				must(t, v.Up(ctx, pod))
				v.End(pod)
			}
		})
	}
}
