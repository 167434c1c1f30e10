package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
)

// volume is one volume of the node.
type volume struct {
	*harness.Volume
	fsType       string // "": a raw block device
	provisioning string
	bytes        int64
	targets      []string // of the pods 0, 1 and so on; the last one is read-only
}

// newVolume names the paths of a volume, and makes the directories that kubelet
// would make; the volume itself is yet to be created.
func newVolume(t testing.TB, p *harness.Plugin, id, fsType, provisioning string, bytes int64, pods int) *volume {
	t.Helper()
	v := &volume{Volume: harness.NewVolume(t, p, id, harness.Shared(fsType, "noatime")), fsType: fsType, provisioning: provisioning, bytes: bytes}
	must(t, os.MkdirAll(v.Staging, 0o750))
	for pod := range pods {
		v.targets = append(v.targets, v.Target(fmt.Sprint(id, "-pod-", pod)))
	}
	return v
}

// readOnly reports whether a target is the one for reading.
func (v *volume) readOnly(target string) bool { return target == v.targets[len(v.targets)-1] }

func (v *volume) create(ctx context.Context) error { return v.Create(ctx, v.bytes, v.provisioning) }

func (v *volume) publish(ctx context.Context, target string) error {
	if v.readOnly(target) {
		return v.PublishReadOnly(ctx, target)
	}
	return v.Publish(ctx, target)
}

// facts is what lives with a volume's data.
type facts struct {
	Created    string
	Bytes      int64
	Formatting bool
	Formatted  string
}

// facts reads what the pool knows of the volume; nil when there is none.
func (v *volume) facts() *facts {
	v.T.Helper()
	raw, err := os.ReadFile(filepath.Join(v.PoolDir, "volumes", v.ID, "volume.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var f facts
	if err := errors.Join(err, json.Unmarshal(raw, &f)); err != nil {
		v.T.Error(err)
		return nil
	}
	return &f
}

// number is that of the volume's device, as mountinfo writes it; "" without one.
func (v *volume) number() string {
	v.T.Helper()
	devices := v.Devices()
	if len(devices) == 0 {
		return ""
	}
	return numberOf(v.T, devices[0].Path)
}

// isAt reports whether the volume's file system is what is met at a path.
func (v *volume) isAt(path string) bool {
	v.T.Helper()
	var st unix.Stat_t
	must(v.T, unix.Stat(path, &st))
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)) == v.number()
}

// numberOf is that of a device node, as mountinfo writes it.
func numberOf(t testing.TB, path string) string {
	t.Helper()
	n := rdev(t, path)
	return fmt.Sprintf("%d:%d", unix.Major(n), unix.Minor(n))
}

// mountTable is the mounts of a plugin by their mount points.
type mountTable map[string][]*mountinfo.Info

func mountsOf(t testing.TB, p *harness.Plugin) mountTable {
	t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(p.Dir))
	must(t, err)
	mounts := mountTable{}
	for _, info := range infos {
		mounts[info.Mountpoint] = append(mounts[info.Mountpoint], info)
	}
	return mounts
}

// wrong says what is not as it must be at a path of the volume; "" if all is.
func (v *volume) wrong(mounts mountTable, path string, mounted bool) string {
	v.T.Helper()
	at := mounts[path]
	switch {
	case !mounted && len(at) > 0, mounted && len(at) != 1:
		return fmt.Sprintf("%d mounts at %s, where it is mounted: %t", len(at), path, mounted)
	case !mounted || v.fsType == "":
		return ""
	case fmt.Sprintf("%d:%d", at[0].Major, at[0].Minor) != v.number() || at[0].Root != "/":
		return fmt.Sprintf("at %s is %+v, and its device is %s", path, at[0], v.number())
	}
	readOnly := slices.Contains(strings.Split(at[0].Options, ","), "ro")
	if readOnly != (path != v.Staging && v.readOnly(path)) || slices.Contains(strings.Split(at[0].VFSOptions, ","), "ro") {
		return fmt.Sprintf("at %s it is mounted with %s and %s", path, at[0].Options, at[0].VFSOptions)
	}
	return ""
}

// up creates and stages the volume and publishes it at all its targets.
func (v *volume) up() {
	v.T.Helper()
	must(v.T, v.create(v.T.Context()))
	v.ask()
}

// ask asks for the stage and all targets.
func (v *volume) ask() {
	v.T.Helper()
	ctx := v.T.Context()
	must(v.T, v.Stage(ctx))
	for _, target := range v.targets {
		must(v.T, v.publish(ctx, target))
	}
}

// down takes the volume down and sees that nothing is left of it.
func (v *volume) down() {
	v.T.Helper()
	v.EndInTime(v.targets...)
}

// rdev is the number of the device node at a path.
func rdev(t testing.TB, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Fatalf("%s is no block device", path)
	}
	return st.Rdev
}
