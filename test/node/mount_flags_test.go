package node

import (
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
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

// Flags of the superblock and of the mount are as asked, and again after the
// mounts were lost while the plugin was not there.
func TestMountFlagsOfAStage(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		fsType, flags string // separated by spaces
		mount, super  string
	}{
		{"ext4", "noexec,data=journal lazytime sync", "noexec -nosuid relatime", "data=journal lazytime sync"},
		{"ext4", "commit=11,commit=7 nodev nodiratime", "nodev nodiratime", "commit=7"},
		{"xfs", "swalloc strictatime,nosymfollow dirsync", "nosymfollow -relatime -noatime", "swalloc dirsync"},
		{"xfs", "nosuid,suid noatime,atime", "relatime -nosuid", "-sync"},
	} {
		t.Run(row.fsType+" "+row.flags, func(t *testing.T) {
			t.Parallel()
			p := harness.Start(t, harness.Options{})
			v := create(t, p, "volume", smallest(row.fsType), mountAs(row.fsType, multiWriter, strings.Fields(row.flags)...))
			ctx, pod := t.Context(), v.Target("pod")
			must(t, v.Up(ctx, pod))
			mustHaveFlags(t, v.Staging, row.mount, row.super)
			mustHaveFlags(t, pod, row.mount, row.super)

			p.Kill()
			must(t, unix.Unmount(pod, unix.UMOUNT_NOFOLLOW))
			must(t, unix.Unmount(v.Staging, unix.UMOUNT_NOFOLLOW))
			p.Start(harness.Options{})
			must(t, v.Publish(ctx, pod))
			mustHaveFlags(t, v.Staging, row.mount, row.super)
			mustHaveFlags(t, pod, row.mount, row.super)
			v.End(pod)
		})
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

// Whoever reads may be published from a writable stage, but nobody writes
// through one that reads.
func TestReadOnlyMountFlags(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	ctx, pod := t.Context(), v.Target("pod")
	must(t, v.Stage(ctx)) // formats it
	must(t, v.Unstage(ctx))
	v.Capability = mountAs("ext4", multiWriter, "ro")
	must(t, v.Stage(ctx))
	mustHaveFlags(t, v.Staging, "ro", "ro")
	for _, flags := range []string{"", "rw", "ro,rw"} {
		v.Capability = mountAs("ext4", multiWriter, flags)
		mustRefuse(t, v.Publish(ctx, pod), codes.FailedPrecondition, "read-only")
		mustBeGone(t, pod)
		must(t, v.PublishReadOnly(ctx, pod)) // readonly says it, whatever the flags
		mustHaveFlags(t, pod, "ro", "ro")
		must(t, v.Unpublish(ctx, pod))
	}
	v.Capability = mountAs("ext4", multiWriter, "rw,ro")
	must(t, v.Publish(ctx, pod))
	mustHaveFlags(t, pod, "ro", "ro")
	v.End(pod)
}

// Flags in another order, or written in another way, are the same request;
// flags of another meaning are another one.
func TestRepeatsWithTheSameFlagsWrittenOtherwise(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noatime", "nodev", "discard", "commit=5"))
	ctx, pod := t.Context(), v.Target("pod")
	must(t, v.Up(ctx, pod))
	before := snapshot(t, p)
	for flags, code := range map[string]codes.Code{
		"commit=5 discard nodev noatime":                    codes.OK,
		"noatime,nodev discard,commit=5":                    codes.OK,
		"noatime noatime nodev discard commit=5 commit=5":   codes.OK,
		"relatime noatime nodev nodiscard,discard commit=5": codes.OK,
		"commit=9 commit=5 discard nodev noatime defaults":  codes.OK,
		"noatime,relatime nodev discard commit=5":           codes.AlreadyExists,
		"noatime nodev discard,nodiscard commit=5":          codes.AlreadyExists,
		"noatime nodev discard commit=5,commit=9":           codes.AlreadyExists,
		"noatime nodev discard":                             codes.AlreadyExists,
		"noatime nodev discard commit=5 sync":               codes.AlreadyExists,
	} {
		v.Capability = mountAs("ext4", multiWriter, strings.Fields(flags)...)
		mustRefuse(t, v.Stage(ctx), code)
		mustRefuse(t, v.Publish(ctx, pod), code)
		mustEqual(t, before, snapshot(t, p))
	}
	v.End(pod)
	v = create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "ro", "rw"))
	must(t, v.Stage(ctx))
	v.Capability = mountAs("ext4", multiWriter, "rw", "ro")
	mustRefuse(t, v.Stage(ctx), codes.AlreadyExists)
	v.End()
}

// Whenever the kernel finds out that a flag is wrong: it is the caller's mistake,
// in the kernel's words, told at once, and nothing stays.
func TestRefusedMountFlags(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, row := range []struct{ fsType, flags, words string }{
		{"ext4", "nonsense", "Unknown parameter 'nonsense'"},
		{"ext4", "noatime,commit=s3cret", "Bad value for 'commit'"},
		{"ext4", "discard=1", "Unexpected value for 'discard'"},
		{"ext4", "journal_async_commit", "data=ordered"},
		{"ext4", "dax", "DAX"},
		{"ext4", "prjquota", "prjquota"},
		{"ext4", "logdev=/s3cret", "one device"},
		{"ext4", strings.Repeat("o", 5000), "ooo"},
		{"xfs", "nonsense=s3cret", "Unknown parameter 'nonsense'"},
		{"xfs", "logbufs=99", "logbufs"},
		{"xfs", "sunit=7,swidth=3", "swidth"},
		{"xfs", "norecovery", "read-only"},
	} {
		t.Run(row.fsType+" "+row.flags[:min(len(row.flags), 30)], func(t *testing.T) {
			v := create(t, p, "volume", smallest(row.fsType), mountAs(row.fsType, multiWriter))
			must(t, v.Stage(t.Context())) // formats it
			must(t, v.Unstage(t.Context()))
			v.Capability = mountAs(row.fsType, multiWriter, row.flags)
			mustRefuse(t, v.Stage(t.Context()), codes.InvalidArgument, row.words, v.ID)
			mustHaveNoRecord(t, p)
			if mounts, loops := p.Mounts(), p.Loops(); len(mounts)+len(loops) > 0 {
				t.Errorf("left after the refusal: %q, %+v", mounts, loops)
			}
			v.Capability = mountAs(row.fsType, multiWriter)
			must(t, v.Stage(t.Context()))
			v.End()
		})
	}
	if text := p.Log.String(); strings.Contains(text, "s3cret") {
		t.Error("the log tells the value of a flag")
	}
}

// A new volume is not formatted for flags that no such file system takes.
func TestRefusedMountFlagsFormatNothing(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	for _, fsType := range fsTypes {
		v := create(t, p, fsType, smallest(fsType), mountAs(fsType, multiWriter, "nonsense"))
		mustRefuse(t, v.Stage(t.Context()), codes.InvalidArgument, "nonsense")
		mustHaveNoRecord(t, p)
		must(t, v.Delete(t.Context()))
	}
	v := create(t, p, "volume", smallest("xfs"), mountAs("xfs", multiWriter, "nonsense"))
	mustRefuse(t, v.Stage(t.Context()), codes.InvalidArgument, "nonsense")
	v.Capability = mountAs("ext4", multiWriter) // it is blank yet
	must(t, v.Stage(t.Context()))
	v.End()
}

// A new volume whose flags are refused only with its file system is formatted
// and then not mounted; with better flags it is.
func TestRefusedMountFlagsOfABlankVolume(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "journal_async_commit"))
	mustRefuse(t, v.Stage(t.Context()), codes.InvalidArgument, "journal_async_commit")
	mustHaveNoRecord(t, p)
	v.Capability = mountAs("ext4", multiWriter, "journal_async_commit,data=journal")
	must(t, v.Stage(t.Context()))
	mustHaveFlags(t, v.Staging, "rw", "journal_async_commit data=journal")
	v.End()
}
