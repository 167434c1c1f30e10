package mounts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestNew(t *testing.T) {
	_, err := New("relative")
	wantClass(t, err, state.InvalidArgument, "relative")
	_, err = New(filepath.Join(t.TempDir(), "missing"))
	wantClass(t, err, state.Unavailable, "missing")
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	_, err = New(file)
	wantClass(t, err, state.Unavailable, file)
	h, err := New("/")
	must(t, err)
	must(t, h.Check("/proc"))
	must(t, h.Check("/no/such/path"))
	wantClass(t, h.Check("/"), state.InvalidArgument)
}

func TestCheck(t *testing.T) {
	h, root := newHost(t)
	must(t, os.MkdirAll(filepath.Join(root, "dir/sub"), 0o750))
	must(t, os.WriteFile(filepath.Join(root, "file"), nil, 0o600))
	must(t, os.Symlink("dir", filepath.Join(root, "link")))
	must(t, os.Symlink("nowhere", filepath.Join(root, "dir/dangling")))
	mountTmpfs(t, "t", filepath.Join(root, "mount"), 0)
	for _, good := range []string{"dir", "dir/sub", "file", "file/x", "none", "none/x", "mount", "mount/x", "..."} {
		must(t, h.Check(root+"/"+good))
	}
	for bad, word := range map[string]string{
		"relative":                            "not absolute",
		"":                                    "not absolute",
		root + "/dir/":                        "clean",
		root + "//dir":                        "clean",
		root + "/dir/../dir":                  "clean",
		root + "/./dir":                       "clean",
		root + "/a\x00b":                      "NUL",
		root + "/" + strings.Repeat("x", 256): "NAME_MAX",
		root:                                  "not below",
		root + "x":                            "not below",
		filepath.Dir(root):                    "not below",
		root + "/link":                        root + "/link is a symbolic link",
		root + "/link/sub":                    root + "/link is a symbolic link",
		root + "/dir/dangling":                root + "/dir/dangling is a symbolic link",
		root + "/dir/dangling/x/y":            root + "/dir/dangling is a symbolic link",
	} {
		wantClass(t, h.Check(bad), state.InvalidArgument, word)
		// Nothing gets by because it asks another method.
		ctx, d := t.Context(), state.Device{Path: "/dev/loop0"}
		wantClass(t, h.MountDevice(ctx, d, bad, "ext4", state.Flags{}, false), state.InvalidArgument)
		if bad != root+"/link" && bad != root+"/dir/dangling" {
			wantClass(t, h.BindDevice(ctx, d, bad), state.InvalidArgument)
			wantClass(t, h.BindMount(ctx, bad, d.Number, root+"/dir", state.Flags{}), state.InvalidArgument)
			wantClass(t, h.BindMount(ctx, root+"/mount", d.Number, bad, state.Flags{}), state.InvalidArgument)
			wantClass(t, h.SetAttributes(ctx, bad, state.Flags{Set: state.ReadOnly}), state.InvalidArgument)
			wantClass(t, h.Unmount(ctx, bad), state.InvalidArgument)
			wantClass(t, h.Remove(ctx, bad), state.InvalidArgument)
			wantClass(t, h.Renew(ctx, bad), state.InvalidArgument)
			_, _, err := h.Usage(ctx, bad)
			wantClass(t, err, state.InvalidArgument)
			_, err = h.Look(ctx, bad, hang.NoLimit)
			wantClass(t, err, state.InvalidArgument)
		}
	}
}

func TestLinkAtTheEnd(t *testing.T) {
	h, root := newHost(t)
	ctx, stage, link := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "link")
	d := mounted(t, h, stage)
	must(t, os.Symlink("stage", link))
	wantClass(t, h.BindMount(ctx, link, d.Number, filepath.Join(root, "target"), state.Flags{}), state.InvalidArgument, "symbolic link")
	wantClass(t, h.BindMount(ctx, stage, d.Number, link, state.Flags{}), state.InvalidArgument, "symbolic link")
	wantClass(t, h.BindDevice(ctx, d, link), state.InvalidArgument, "symbolic link")
	wantClass(t, h.Unmount(ctx, link), state.Unavailable, "not a mount point")
	wantClass(t, h.SetAttributes(ctx, link, state.Flags{Set: state.ReadOnly}), state.Unavailable, "not a mount point")
	wantClass(t, h.Remove(ctx, link), state.FailedPrecondition)
	wantClass(t, h.Renew(ctx, link), state.FailedPrecondition)
	_, _, err := h.Usage(ctx, link)
	wantClass(t, err, state.InvalidArgument, "symbolic link")
	mustBe(t, "attributes of the stage", wantMount(t, h, stage, d.Number).Attributes, 0)
	wantFile(t, h, filepath.Join(root, "target"), state.NoFile)
}
