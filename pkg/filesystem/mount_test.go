package filesystem

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestExplainMount(t *testing.T) {
	for name, c := range map[string]struct {
		fsType   string
		cause    error
		said     string
		asked    []string
		readOnly bool
		class    state.Class
		words    string // "" for no explanation
	}{
		"a full disk":              {"ext4", unix.ENOSPC, "", nil, true, 0, ""},
		"a damaged btrfs":          {"btrfs", unix.EIO, "open_ctree failed: -5", nil, true, 0, ""},
		"a btrfs with a log":       {"btrfs", unix.EIO, "log replay required on RO media", nil, true, state.FailedPrecondition, `"rescue=nologreplay"`},
		"with the flag":            {"xfs", unix.EROFS, "", []string{"norecovery"}, true, 0, ""},
		"a type without a log":     {"vfat", unix.EROFS, "", nil, true, 0, ""},
		"a flag for writing":       {"btrfs", unix.EINVAL, "words", []string{"compress", "rescue=all"}, false, state.InvalidArgument, `"rescue=all" for a mount that may write: invalid argument (words)`},
		"another flag":             {"ext4", unix.EINVAL, "", []string{"data=x"}, false, 0, ""},
		"a copy on an old kernel":  {"btrfs", unix.EEXIST, "duplicate device", nil, false, state.Unavailable, "(duplicate device)"},
		"a writer's device locked": {"ext4", unix.EROFS, "", nil, false, 0, ""},
	} {
		err := ExplainMount(c.fsType, c.cause, c.said, c.asked, c.readOnly)
		if c.words == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		wantClass(t, err, c.class, c.words)
	}
}
