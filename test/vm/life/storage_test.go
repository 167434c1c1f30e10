//go:build vm

package life

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/vm"
)

// storage is where a node has its volumes.
type storage interface {
	// id is that of the volume with a name.
	id(name string) string
	// facts are what is known of a volume; os.ErrNotExist: there is none.
	facts(t *testing.T, name string) (facts, error)
	// left are the things that are no volume, and devices that nobody asks for.
	left(t *testing.T) []string
	// volumes are the names of all.
	volumes(t *testing.T) []string
}

// facts are those of a volume that outlive a power cut.
type facts struct {
	bytes      int64
	formatted  string
	formatting bool
}

// directory is a pool of files.
type directory struct {
	*harness.Plugin
}

// openPool mounts a disk with a pool.
func openPool(t *testing.T, p *harness.Plugin, device string, _ bool) (storage, harness.Options) {
	t.Helper()
	disk := filepath.Join(p.Dir, "disk")
	must(t, os.Mkdir(disk, 0o755))
	must(t, unix.Mount(device, disk, "ext4", 0, ""))
	closed(t, p, func() { must(t, machine.Unmount(disk)) })
	p.PoolDir = filepath.Join(disk, "pool")
	return directory{p}, harness.Options{}
}

// closed has something done when the test has ended, and the plugin with it. If the test
// failed a disk is in use, and the harness takes it down.
func closed(t *testing.T, p *harness.Plugin, end func()) {
	t.Cleanup(func() {
		if !t.Failed() {
			p.Terminate()
			end()
		}
	})
}

func (d directory) id(name string) string { return name }

func (d directory) facts(_ *testing.T, name string) (facts, error) {
	var v pool.Volume
	raw, err := os.ReadFile(filepath.Join(d.PoolDir, "volumes", name, "volume.json"))
	if err == nil {
		err = json.Unmarshal(raw, &v)
	}
	return facts{v.Bytes, v.Formatted, v.Formatting}, err
}

func (d directory) left(t *testing.T) (all []string) {
	t.Helper()
	for _, dir := range []string{"tmp", "trash"} {
		all = append(all, d.names(t, dir)...)
	}
	for _, l := range d.Loops() {
		all = append(all, l.Path)
	}
	return all
}

func (d directory) volumes(t *testing.T) []string {
	t.Helper()
	return d.names(t, "volumes")
}

func (d directory) names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(d.PoolDir, dir))
	must(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// group is a volume group.
type group struct {
	config string // lvm's, which has it see one disk alone
	uuid   string
}

const (
	groupName = "cut"
	thinPool  = "thin"
)

// openGroup makes a volume group on a disk, or finds it there. All the disks of a guest have
// the same one: it begins behind the first bytes, so that none is found but that of the
// device which is made here.
func openGroup(t *testing.T, p *harness.Plugin, device string, blank bool) (storage, harness.Options) {
	t.Helper()
	must(t, os.Setenv("DM_DISABLE_UDEV", "1")) // as the guest has none
	name := "disk-" + filepath.Base(device)
	run(t, "dmsetup", "create", name, "--table", fmt.Sprintf("0 %d linear %s %d", (vm.FilesystemBytes-vm.GroupStart)/512, device, vm.GroupStart/512))
	node := "/dev/dm-" + strings.TrimSpace(run(t, "dmsetup", "info", "--columns", "--noheadings", "--options", "minor", name))
	g := group{config: `activation{udev_sync=0 udev_rules=0 monitoring=0} devices{use_devicesfile=0 obtain_device_list_from_udev=0 global_filter=["a|^` + node + `$|","r|.*|"]}`}
	if blank {
		g.lvm(t, "vgcreate", "--yes", groupName, node)
		g.lvm(t, "lvcreate", "--yes", "--type", "thin-pool", "--size", "200m", "--poolmetadatasize", "4m", "--name", thinPool, groupName)
		g.lvm(t, "vgchange", "--activate", "n", groupName)
		run(t, "sync", device)
	}
	g.uuid = strings.ReplaceAll(g.lvm(t, "vgs", "--noheadings", "--options", "vg_uuid", groupName), "-", "")
	closed(t, p, func() {
		g.lvm(t, "vgchange", "--activate", "n", groupName)
		run(t, "dmsetup", "remove", "--retry", name)
	})
	return g, harness.Options{Flags: []string{"--lvm-groups", groupName}}
}

func (g group) lvm(t *testing.T, args ...string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "lvm", append([]string{args[0], "--config", g.config}, args[1:]...)...))
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	var complaints strings.Builder
	cmd := exec.Command(name, args...)
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, complaints.String())
	}
	return string(out)
}

func (g group) id(name string) string { return "lvm-" + g.uuid + "-" + name }

// logical are the logical volumes of the group, with their sizes and tags.
func (g group) logical(t *testing.T) (all []struct {
	Name string `json:"lv_name"`
	Size int64  `json:"lv_size,string"`
	Tags string `json:"lv_tags"`
}) {
	t.Helper()
	var told struct {
		Report []struct {
			LV json.RawMessage `json:"lv"`
		} `json:"report"`
	}
	must(t, json.Unmarshal([]byte(g.lvm(t, "lvs", "--reportformat", "json", "--units", "b", "--nosuffix", "--options", "lv_name,lv_size,lv_tags", groupName)), &told))
	must(t, json.Unmarshal(told.Report[0].LV, &all))
	return all
}

func (g group) facts(t *testing.T, name string) (f facts, err error) {
	t.Helper()
	err = os.ErrNotExist
	for _, v := range g.logical(t) {
		if v.Name != name {
			continue
		}
		f, err = facts{bytes: v.Size}, nil
		for _, tag := range strings.Split(v.Tags, ",") {
			f.formatting = f.formatting || tag == "csi-node.formatting"
			if formatted, is := strings.CutPrefix(tag, "csi-node.formatted="); is {
				f.formatted = formatted
			}
		}
	}
	return f, err
}

func (g group) left(t *testing.T) (all []string) {
	t.Helper()
	for _, v := range g.logical(t) {
		if v.Name != thinPool && !strings.Contains(v.Tags, "csi-node.name=") {
			all = append(all, v.Name)
		}
	}
	for line := range strings.Lines(run(t, "dmsetup", "ls")) {
		if name, _, _ := strings.Cut(line, "\t"); strings.HasPrefix(name, groupName+"-") && !strings.HasPrefix(name, groupName+"-"+thinPool) {
			all = append(all, name)
		}
	}
	return all
}

func (g group) volumes(t *testing.T) (all []string) {
	t.Helper()
	for _, v := range g.logical(t) {
		if v.Name != thinPool {
			all = append(all, v.Name)
		}
	}
	return all
}
