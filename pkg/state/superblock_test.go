package state

import (
	"strings"
	"testing"
)

func TestShown(t *testing.T) {
	const (
		ext4  = "rw,bsddf,nogrpid,nodiscard,delalloc,barrier,errors=continue,commit=5,data=ordered" // as /proc/fs/ext4 has it
		xfs   = "rw,nouuid,inode64,logbufs=8,logbsize=32k,noquota"
		btrfs = "rw,space_cache=v2,subvolid=5,subvol=/"
	)
	for _, test := range []struct{ fsType, shown, flags, want string }{
		{"ext4", ext4, "", ""},
		{"ext4", ext4, "noatime,noexec,defaults", ""},
		{"ext4", ext4, "commit=5 data=ordered,barrier=1 delalloc nodiscard async nolazytime", ""},
		{"ext4", "rw", "commit=5 data=ordered,barrier=1 delalloc nodiscard", ""}, // without /proc
		{"ext4", ext4, "commit=9,commit=5", ""},
		{"ext4", ext4, "sync", "sync"},
		{"ext4", ext4, "commit=5,commit=9", "commit"},
		{"ext4", "rw", "commit=9", "commit"},
		{"ext4", "rw,commit=9", "commit=5", "commit"},
		{"ext4", ext4, "data=journal", "data"},
		{"ext4", "rw,data=journal", "data=ordered", "data"},
		{"ext4", ext4, "noload", "noload"},
		{"ext4", "rw,norecovery", "noload", ""},
		{"ext4", "rw,norecovery", "", "norecovery"},
		{"ext4", ext4, "barrier=0", "barrier"},
		{"ext4", ext4, "journal_ioprio=3", "journal_ioprio"},
		{"ext4", "sync," + ext4, "sync", ""},
		{"ext4", "sync," + ext4, "sync,async", "async"},
		{"ext4", ext4, "sync,async", ""},
		{"ext4", "sync," + ext4, "", "sync"},
		{"ext4", "lazytime," + ext4, "nolazytime", "nolazytime"},
		{"ext4", ext4 + ",discard,nodiscard", "discard", ""}, // on a device that takes none
		{"ext4", "rw,commit=9", "", "commit"},
		{"ext4", `rw,context="a:b,c"`, `context="a:b,c"`, ""},
		{"ext4", `rw,context="a:b,c"`, `context="a:b"`, "context"},
		{"xfs", xfs, "inode64,logbsize=32768,logbufs=8,nodiscard", ""},
		{"xfs", xfs + ",allocsize=64k", "allocsize=65536", ""},
		{"xfs", xfs, "allocsize=64k", "allocsize"},
		{"xfs", xfs + ",discard", "nodiscard", "nodiscard"},
		{"xfs", xfs + ",usrquota", "uquota", ""},
		{"btrfs", btrfs, "commit=30,barrier,datacow,compress=no", ""},
		{"btrfs", btrfs, "compress=zstd", "compress"},
		{"btrfs", btrfs + ",compress=zstd:3", "compress=zstd", ""},
		{"btrfs", btrfs + ",compress=zstd:3", "compress=no", "compress"},
		{"btrfs", btrfs + ",commit=17", "", "commit"},
		{"btrfs", btrfs + ",nodatasum,nodatacow", "nodatacow", ""},
	} {
		if got := mustParse(t, strings.Fields(test.flags)...).Shown(test.fsType, test.shown); got != test.want {
			t.Errorf("%s mounted with %s, asked %q: %q makes the difference, want %q", test.fsType, test.shown, test.flags, got, test.want)
		}
	}
}
