package node

import (
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// flagsAt returns the options of the top mount at a path and of its superblock.
func flagsAt(t *testing.T, path string) (mount, super []string) {
	t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	must(t, err)
	if len(infos) != 1 {
		t.Fatalf("%d mounts at %s", len(infos), path)
	}
	return strings.Split(infos[0].Options, ","), strings.Split(infos[0].VFSOptions, ",")
}

// mustHaveFlags fails unless a mount has all of the words that begin with no
// "-" and none of the others.
func mustHaveFlags(t *testing.T, path, mount, super string) {
	t.Helper()
	m, s := flagsAt(t, path)
	for what, have := range map[string][]string{mount: m, super: s} {
		for word := range strings.FieldsSeq(what) {
			name, absent := strings.CutPrefix(word, "-")
			if slices.Contains(have, name) == absent {
				t.Errorf("%s has %q, want %s", path, have, what)
			}
		}
	}
}

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

// A publish may set and clear what is a bind's own, and nothing of the superblock.
func TestMountFlagsOfAPublish(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noexec", "noatime,lazytime", "commit=9"))
	ctx, pod := t.Context(), v.Target("pod")
	must(t, v.Stage(ctx))
	for flags, want := range map[string]string{
		"":                          "noexec noatime -ro",
		"commit=9 lazytime":         "noexec noatime",
		"commit=7,commit=9":         "noexec noatime",
		"exec":                      "-noexec noatime",
		"ro":                        "ro noexec noatime",
		"ro rw":                     "rw",
		"rw":                        "rw noexec",
		"nosuid,nodev nodiratime":   "nosuid nodev nodiratime noexec noatime",
		"nosymfollow relatime":      "nosymfollow relatime -noatime",
		"strictatime":               "-relatime -noatime noexec",
		"noexec,exec dev,suid":      "-noexec -nodev -nosuid",
		"defaults,nofail,x-a=b,,ro": "ro",
	} {
		v.Capability = mountAs("ext4", multiWriter, strings.Fields(flags)...)
		must(t, v.Publish(ctx, pod))
		must(t, v.Publish(ctx, pod))
		mustHaveFlags(t, pod, want, "rw lazytime commit=9")
		mustHaveFlags(t, v.Staging, "rw noexec noatime -nodev", "rw")
		must(t, v.Unpublish(ctx, pod))
	}
	before := snapshot(t, p)
	for _, flags := range []string{"discard", "commit=7", "commit=9,commit=7", "nolazytime", "sync", "data=journal", "ro=1", "bind", "remount", "context=x"} {
		v.Capability = mountAs("ext4", multiWriter, flags)
		name, _, _ := strings.Cut(flags, "=")
		mustRefuse(t, v.Publish(ctx, pod), codes.InvalidArgument, name, v.ID)
		mustEqual(t, before, snapshot(t, p))
	}
	v.End()
}
