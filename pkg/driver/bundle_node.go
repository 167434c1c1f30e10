package driver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/report"
)

// ours tells which mounts and devices of the node are the plugin's.
type ours struct {
	driver string
	dirs   []string // of the plugin, the pool's among them
	paths  []string // where volumes are staged or published
}

// oursOf returns what is the plugin's, by a report and the settings that the plugin left.
func oursOf(stateDir string, node report.Node) ours {
	u := ours{driver: node.Driver, dirs: []string{stateDir}}
	if s, err := readSettings(stateDir); err == nil {
		u.driver = s.DriverName
		u.dirs = append(u.dirs, s.LibDir)
		for _, value := range s.Flags {
			if filepath.IsAbs(value) {
				u.dirs = append(u.dirs, value)
			}
		}
	}
	for _, v := range node.Volumes {
		for _, p := range v.Parts {
			if p.Path != "" {
				u.paths = append(u.paths, p.Path)
			}
		}
	}
	return u
}

// mount reports whether a mount is the plugin's: it is at a path of a volume, or
// below the directories of the driver in kubelet's, or it holds a directory of the
// plugin.
func (u ours) mount(point string) bool {
	return slices.Contains(u.paths, point) ||
		u.driver != "" && strings.Contains(point+"/", "/"+u.driver+"/") || u.driver != "" && strings.Contains(point, "/"+u.driver+"-ephemeral/") ||
		point != "/" && slices.ContainsFunc(u.dirs, func(dir string) bool { return dir == point || strings.HasPrefix(dir, point+"/") })
}

// backing reports whether a loop device's backing is the plugin's, or another loop
// device, of which it may be a view.
func (u ours) backing(path string) bool {
	return strings.HasPrefix(path, "/dev/loop") || strings.HasPrefix(path, "/loop") ||
		slices.ContainsFunc(u.dirs, func(dir string) bool { return strings.HasPrefix(path, dir+"/") })
}

// readMounts writes the lines of the mount table that are ours, without the values of
// options, which may be secret.
func readMounts(u ours, out io.Writer) (err error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	others := 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 {
			continue
		}
		if !u.mount(fields[4]) {
			others++
			continue
		}
		fields[5] = withoutValues(fields[5])
		fields[len(fields)-1] = withoutValues(fields[len(fields)-1])
		fmt.Fprintln(out, strings.Join(fields, " "))
	}
	fmt.Fprintf(out, "%d other mounts are left out.\n", others)
	return lines.Err()
}

// plainOptions are mount options whose values tell nothing of anybody.
var plainOptions = []string{
	"errors", "data", "commit", "stripe", "size", "nr_inodes", "inodes", "mode", "barrier", "logbufs", "logbsize", "sunit", "swidth", "subvolid", "space_cache",
	"discard", "compress", "nr_blocks",
}

// withoutValues leaves out the values of mount options except the plain ones.
func withoutValues(options string) string {
	all := strings.Split(options, ",")
	for i, option := range all {
		if name, _, valued := strings.Cut(option, "="); valued && !slices.Contains(plainOptions, name) {
			all[i] = name + "=…"
		}
	}
	return strings.Join(all, ",")
}

// readDevices writes what sysfs tells of loop devices. It asks no device, because one
// may hang.
func readDevices(u ours, out io.Writer) error {
	dirs, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return err
	}
	others := 0
	for _, dir := range dirs {
		block := filepath.Dir(dir)
		backing := sysfs(dir, "backing_file")
		if backing == "" {
			continue // it was detached meanwhile
		}
		if !u.backing(backing) {
			others++
			continue
		}
		fmt.Fprintf(out, "%s dev=%s sectors=%s ro=%s diskseq=%s offset=%s sizelimit=%s autoclear=%s dio=%s block=%s discard=%s backing=%s\n", filepath.Base(block), sysfs(block, "dev"), sysfs(block, "size"), sysfs(block, "ro"),
			sysfs(block, "diskseq"), sysfs(dir, "offset"), sysfs(dir, "sizelimit"), sysfs(dir, "autoclear"), sysfs(dir, "dio"), sysfs(block, "queue/logical_block_size"), sysfs(block, "queue/discard_max_bytes"), backing)
	}
	fmt.Fprintf(out, "%d loop devices of others are left out.\n", others)
	return nil
}

func sysfs(dir, file string) string {
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// toolTime bounds the question for the version of one tool.
const toolTime = 3 * time.Second

// readKernel writes facts about the kernel and the tools.
func readKernel(ctx context.Context, out io.Writer) error {
	var name unix.Utsname
	err := unix.Uname(&name)
	fmt.Fprintf(out, "kernel: %s %s %s\n", unix.ByteSliceToString(name.Release[:]), unix.ByteSliceToString(name.Version[:]), unix.ByteSliceToString(name.Machine[:]))
	for _, file := range []string{
		"/proc/sys/kernel/random/boot_id", "/sys/module/loop/parameters/max_loop", "/proc/sys/fs/mount-max", "/proc/sys/fs/file-nr", "/sys/kernel/security/lsm", "/sys/fs/selinux/enforce",
		"/proc/sys/user/max_user_namespaces", "/sys/fs/cgroup/memory.max", "/proc/pressure/io", "/proc/loadavg",
	} {
		if text, err := os.ReadFile(file); err == nil {
			fmt.Fprintf(out, "%s: %s\n", file, strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "; "))
		}
	}
	for _, row := range []struct{ file, prefix string }{{"/proc/self/status", "Cap"}, {"/proc/self/limits", "Max open files"}, {"/etc/os-release", "PRETTY_NAME"}, {"/proc/meminfo", "Mem"}} {
		text, err := os.ReadFile(row.file)
		for line := range strings.Lines(string(text)) {
			if err == nil && strings.HasPrefix(line, row.prefix) {
				fmt.Fprintf(out, "%s: %s\n", row.file, strings.TrimSpace(line))
			}
		}
	}
	if text, err := os.ReadFile("/proc/filesystems"); err == nil {
		fmt.Fprintf(out, "file systems: %s\n", strings.Join(strings.Fields(strings.ReplaceAll(string(text), "nodev", "")), " "))
	}
	for _, tool := range [][]string{{"mkfs.ext4", "-V"}, {"mkfs.xfs", "-V"}, {"mkfs.btrfs", "-V"}, {"resize2fs"}, {"lvm", "version"}, {"cryptsetup", "--version"}} {
		fmt.Fprintf(out, "%s: %s\n", tool[0], versionOf(ctx, tool))
	}
	return err
}

// versionOf returns what a tool says of its version.
func versionOf(ctx context.Context, tool []string) string {
	path, err := exec.LookPath(tool[0])
	if err != nil {
		return "not there"
	}
	ctx, cancel := context.WithTimeout(ctx, toolTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, tool[1:]...)
	cmd.WaitDelay = toolTime
	text, _ := cmd.CombinedOutput() // resize2fs without arguments fails, and tells it
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" {
			return short(line, 200)
		}
	}
	return "it does not tell"
}
