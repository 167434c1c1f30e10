package mounts

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

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
			_, err = h.Look(ctx, bad)
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

func TestMountDevice(t *testing.T) {
	for fsType := range noRecovery {
		t.Run(fsType, func(t *testing.T) {
			bothTables(t, func(t *testing.T, h *Host, root string) {
				d, path := newDevice(t, root, fsType), filepath.Join(root, "not/there yet")
				flags := state.Flags{Set: state.NoExec | state.NoAtime, Clear: state.AtimeMask}
				must(t, h.MountDevice(t.Context(), d, path, fsType, flags, false))
				wantLook(t, h, path, on(state.Mount{Device: d.Number, FSType: fsType, Source: d.Path, Root: "/", Attributes: state.NoExec | state.NoAtime}))
				must(t, os.WriteFile(filepath.Join(path, "file"), []byte("data"), 0o600))
				wantClass(t, h.MountDevice(t.Context(), d, path, fsType, flags, false), state.FailedPrecondition, "mount point already")
				must(t, h.Unmount(t.Context(), path))
				st, err := os.Stat(filepath.Dir(path))
				must(t, err)
				mustBe(t, "mode of a directory made on the way", st.Mode().Perm(), 0o750)

				must(t, h.MountDevice(t.Context(), d, path, fsType, state.Flags{}, true))
				wantLook(t, h, path, on(state.Mount{Device: d.Number, FSType: fsType, Source: d.Path, Root: "/", Attributes: state.ReadOnly, SuperReadOnly: true}))
				data, err := os.ReadFile(filepath.Join(path, "file"))
				must(t, err)
				mustBe(t, "the file", string(data), "data")
			})
		})
	}
}

func TestMountDeviceReadOnlyMountOfAWritableSuperblock(t *testing.T) {
	h, root := newHost(t)
	d, path := newDevice(t, root, "ext4"), filepath.Join(root, "stage")
	must(t, h.MountDevice(t.Context(), d, path, "ext4", state.Flags{Set: state.ReadOnly}, false))
	m := wantMount(t, h, path, d.Number)
	if m.SuperReadOnly || m.Attributes != state.ReadOnly {
		t.Errorf("%+v", m)
	}
}

func TestMountOptions(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	ext4, xfs, btrfs := newDevice(t, root, "ext4"), newDevice(t, root, "xfs"), newDevice(t, root, "btrfs")
	for _, good := range []struct {
		device        state.Device
		fsType, flags string
	}{
		{ext4, "ext4", `data=journal,noauto_da_alloc,commit="7",stripe=4`},
		{ext4, "ext4", "sync,dirsync,lazytime,discard"},
		{xfs, "xfs", "nouuid,inode64,logbsize=64k"},
		{btrfs, "btrfs", "compress=zstd:3,autodefrag,noatime"},
	} {
		flags, err := state.ParseFlags([]string{good.flags})
		must(t, err)
		if err := h.MountDevice(ctx, good.device, path, good.fsType, flags, false); err != nil {
			t.Errorf("%s: %v", good.flags, err)
			continue
		}
		wantMount(t, h, path, good.device.Number)
		must(t, h.Unmount(ctx, path))
		must(t, h.Remove(ctx, path))
	}
	for _, bad := range []struct {
		device                state.Device
		fsType, flags, saying string
	}{
		{ext4, "ext4", "nonsense", "Unknown parameter 'nonsense'"},
		{ext4, "ext4", "nonsense=7", "Unknown parameter 'nonsense'"},
		{ext4, "ext4", "data=bogus", "data"},
		{ext4, "ext4", "commit=soon", "commit"},
		{ext4, "ext4", "discard=", "discard"},
		{ext4, "ext4", "commit", "commit"},
		{xfs, "xfs", "nonsense", "nonsense"},
		{xfs, "xfs", "logbsize=never", "logbsize"},
		{btrfs, "btrfs", "nonsense", "nonsense"},
		{btrfs, "btrfs", "compress=never", "compress"},
		{ext4, "ext4", "comm\xffit=" + strings.Repeat("9", 300), "comm"},
	} {
		flags, err := state.ParseFlags([]string{bad.flags})
		must(t, err)
		err = h.MountDevice(ctx, bad.device, path, bad.fsType, flags, false)
		wantClass(t, err, state.InvalidArgument, bad.saying, path, bad.device.Path, "the kernel refuses the mount option")
		wantFile(t, h, path, state.NoFile)
	}
}

// A label in quotes reaches the kernel without them, commas and all. Where no
// policy is loaded SELinux takes no labels: then the kernel says so of the
// option, and of no other.
func TestMountLabelInQuotes(t *testing.T) {
	for value, want := range map[string]string{
		`"system_u:object_r:t:s0:c1,c2"`: "system_u:object_r:t:s0:c1,c2", `plain`: "plain", `""`: "", `"`: `"`, `"open`: `"open`, `a"b"`: `a"b"`,
	} {
		mustBe(t, value, unquote(value), want)
	}
	h, root := newHost(t)
	flags, err := state.ParseFlags([]string{`context="system_u:object_r:container_file_t:s0:c1,c2",noatime`})
	must(t, err)
	if len(flags.Super) != 1 {
		t.Fatalf("%q", flags.Super)
	}
	d, path := newDevice(t, root, "ext4"), filepath.Join(root, "stage")
	if err := h.MountDevice(t.Context(), d, path, "ext4", flags, false); err != nil {
		wantClass(t, err, state.InvalidArgument, `"context"`)
		return
	}
	mustBe(t, "attributes", wantMount(t, h, path, d.Number).Attributes, state.NoAtime)
}

func TestMountDeviceFailures(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d, other := newDevice(t, root, "ext4"), newDevice(t, root, "ext4")
	blank := newDevice(t, root, "")
	mixed := d
	mixed.Path = other.Path
	for name, c := range map[string]struct {
		device state.Device
		fsType string
		class  state.Class
		saying string
	}{
		"another file system":  {d, "xfs", state.Unavailable, "XFS (" + filepath.Base(d.Path) + "): Invalid superblock magic number"},
		"a blank device":       {blank, "ext4", state.Unavailable, "EXT4-fs (" + filepath.Base(blank.Path) + "): VFS: Can't find ext4 filesystem"},
		"no such file system":  {d, "nofs", state.FailedPrecondition, "nofs"},
		"another device there": {mixed, "ext4", state.Unavailable, other.Number.String()},
		"no node":              {state.Device{Path: root + "/none", Number: d.Number}, "ext4", state.Unavailable, d.Number.String()},
		"a file as a node":     {state.Device{Path: "/proc/version", Number: d.Number}, "ext4", state.Unavailable, "no block device"},
	} {
		t.Run(name, func(t *testing.T) {
			wantClass(t, h.MountDevice(ctx, c.device, path, c.fsType, state.Flags{}, false), c.class, c.saying, path)
			wantFile(t, h, path, state.NoFile)
		})
	}
	t.Run("a file at the path", func(t *testing.T) {
		must(t, os.WriteFile(path, nil, 0o600))
		wantClass(t, h.MountDevice(ctx, d, path, "ext4", state.Flags{}, false), state.FailedPrecondition, "is a file, not a directory")
		wantFile(t, h, path, state.RegularFile)
	})
	// Nothing that failed keeps the device.
	for _, d := range []state.Device{d, other, blank} {
		wantFree(t, d)
	}
}

// wantFree fails the test if anything holds the device.
func wantFree(t *testing.T, d state.Device) {
	t.Helper()
	if err := claim(d); err != nil {
		t.Errorf("%s is held: %v", d.Path, err)
	}
}

func claim(d state.Device) error {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// Existing mounts on what is there, and makes nothing.
func TestExisting(t *testing.T) {
	h, root := newHost(t)
	d := newDevice(t, root, "ext4")
	e, ctx := h.Existing(), t.Context()
	stage, target, file := root+"/stage", root+"/target", root+"/file"
	for range 2 {
		for _, err := range []error{
			e.MountDevice(ctx, d, root+"/no/stage", "ext4", state.Flags{}, false),
			e.MountDevice(ctx, d, stage, "ext4", state.Flags{}, false),
			e.BindDevice(ctx, d, file),
		} {
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("mounted on nothing: %v", err)
			}
		}
	}
	must(t, os.Mkdir(stage, 0o750))
	must(t, e.MountDevice(ctx, d, stage, "ext4", state.Flags{}, false))
	if err := e.BindMount(ctx, stage, d.Number, target, state.Flags{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("bound on nothing: %v", err)
	}
	if left, err := os.ReadDir(root); err != nil || len(left) != 1 {
		t.Errorf("%v beside the stage (%v)", left, err)
	}
	must(t, os.Mkdir(target, 0o750))
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, e.BindMount(ctx, stage, d.Number, target, state.Flags{}))
	must(t, e.BindDevice(ctx, d, file))
}

func TestBindMount(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, stage, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
		d := mounted(t, h, stage)
		must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{Set: state.ReadOnly | state.NoAtime, Clear: state.AtimeMask}))
		mustBe(t, "attributes", wantMount(t, h, target, d.Number).Attributes, state.ReadOnly|state.NoAtime)
		mustBe(t, "attributes of the stage", wantMount(t, h, stage, d.Number).Attributes, 0)
		if err := os.WriteFile(filepath.Join(target, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing through a read-only bind: %v", err)
		}
		must(t, os.WriteFile(filepath.Join(stage, "file"), nil, 0o600))

		wantClass(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{}), state.FailedPrecondition, "binding twice stacks two mounts")
		wantMount(t, h, target, d.Number)

		// A bind of a bind, with an attribute taken away.
		again := filepath.Join(root, "again")
		must(t, h.BindMount(ctx, target, d.Number, again, state.Flags{Clear: state.ReadOnly}))
		mustBe(t, "attributes", wantMount(t, h, again, d.Number).Attributes, state.NoAtime)

		for _, path := range []string{again, target} {
			must(t, h.Unmount(ctx, path))
			must(t, h.Remove(ctx, path))
			wantFile(t, h, path, state.NoFile)
		}
	})
}

func TestBindMountRefusals(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, stage := t.Context(), filepath.Join(root, "stage")
		d := mounted(t, h, stage)
		must(t, os.Mkdir(filepath.Join(stage, "sub"), 0o750))
		must(t, os.Mkdir(filepath.Join(root, "part"), 0o750))
		must(t, unix.Mount(filepath.Join(stage, "sub"), filepath.Join(root, "part"), "", unix.MS_BIND, ""))
		mountTmpfs(t, "foreign", filepath.Join(root, "foreign"), 0)
		for source, word := range map[string]string{
			"none": "does not exist", "none/none": "no such file", "stage/sub": "no mount point", "part": "/sub", "foreign": "foreign", "": "",
		} {
			if source == "" { // the right source of another device
				wantClass(t, h.BindMount(ctx, stage, state.DeviceNumber{Major: 7, Minor: 1 << 19}, filepath.Join(root, "target"), state.Flags{}),
					state.FailedPrecondition, "is not mounted with the volume's device")
				continue
			}
			wantClass(t, h.BindMount(ctx, filepath.Join(root, source), d.Number, filepath.Join(root, "target"), state.Flags{}),
				state.FailedPrecondition, "is not mounted with the volume's device", word)
		}
		wantFile(t, h, filepath.Join(root, "target"), state.NoFile)
		wantClass(t, h.BindMount(ctx, stage, d.Number, filepath.Join(root, "no/target"), state.Flags{}), state.FailedPrecondition, "above the target is missing", "no")
		wantFile(t, h, filepath.Join(root, "no"), state.NoFile)
		file := filepath.Join(root, "file")
		must(t, os.WriteFile(file, nil, 0o600))
		wantClass(t, h.BindMount(ctx, stage, d.Number, file, state.Flags{}), state.FailedPrecondition, "is a file, not a directory")
		wantFile(t, h, file, state.RegularFile)
		wantClass(t, h.BindDevice(ctx, d, stage), state.FailedPrecondition, "mount point already")
		wantClass(t, h.BindMount(ctx, stage, d.Number, filepath.Join(root, "target"), state.Flags{Set: 1 << 40}), state.Unavailable)
		wantFile(t, h, filepath.Join(root, "target"), state.NoFile)
		must(t, h.Unmount(ctx, filepath.Join(root, "part")))
		must(t, h.Unmount(ctx, stage)) // no refusal left a descriptor on it
	})
}

// A failure after the target was made takes it away again, but never what was
// there before.
func TestAttachTakesBackWhatItMade(t *testing.T) {
	h, root := newHost(t)
	for _, kind := range []state.FileType{state.Directory, state.RegularFile} {
		path := filepath.Join(root, fmt.Sprint(kind))
		p, err := h.open(path)
		must(t, err)
		if err := p.attach(p.dir, kind, create); err == nil { // that is no detached mount
			t.Fatal("no error")
		}
		wantFile(t, h, path, state.NoFile)
		_, err = p.make(kind)
		must(t, err)
		if err := p.attach(p.dir, kind, create); err == nil {
			t.Fatal("no error")
		}
		wantFile(t, h, path, kind)
		p.close()
	}
}

// While a writer tries all the time, no file ever reaches the volume through a
// read-only bind, from its first instant on.
func TestReadOnlyBindIsNeverWritable(t *testing.T) {
	h, root := newHost(t)
	ctx, stage, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
	d := mounted(t, h, stage)
	beneath := 0
	for range 100 {
		must(t, os.Mkdir(target, 0o750))
		refused, started, done := make(chan struct{}), make(chan struct{}), make(chan int)
		go func() {
			count := 0
			for {
				err := os.WriteFile(filepath.Join(target, fmt.Sprint(count)), nil, 0o600)
				if count++; count == 2 {
					close(started)
				}
				if errors.Is(err, unix.EROFS) {
					close(refused)
					break
				}
			}
			done <- count - 1
		}()
		<-started
		must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{Set: state.ReadOnly}))
		<-refused
		beneath += <-done
		files, err := os.ReadDir(stage)
		must(t, err)
		if len(files) != 1 || files[0].Name() != "lost+found" {
			t.Fatalf("a write got through: %v", files)
		}
		must(t, h.Unmount(ctx, target))
		must(t, os.RemoveAll(target))
	}
	if beneath == 0 {
		t.Error("the writer never wrote, so it proved nothing")
	}
}

func TestBindDevice(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, target := t.Context(), filepath.Join(root, "target")
		d, other := newDevice(t, root, ""), newDevice(t, root, "")
		must(t, h.BindDevice(ctx, d, target))
		wantLook(t, h, target, onFile(state.BlockDevice, node(t, d)))
		wantMount(t, h, target, d.Number)
		wantClass(t, h.BindDevice(ctx, d, target), state.FailedPrecondition, "binding twice")
		f, err := os.OpenFile(target, os.O_RDWR, 0)
		must(t, err)
		_, err = f.WriteAt([]byte("data"), 4096)
		must(t, err)
		wantClass(t, h.Unmount(ctx, target), state.Unavailable, "in use by", fmt.Sprintf("pid %d ", os.Getpid()))
		must(t, f.Close())
		must(t, h.Unmount(ctx, target))
		wantLook(t, h, target, state.Mountpoint{File: state.RegularFile, Empty: true})
		must(t, h.Remove(ctx, target))

		d.Path = other.Path
		wantClass(t, h.BindDevice(ctx, d, target), state.Unavailable, other.Number.String())
		d.Path = "/proc/version"
		wantClass(t, h.BindDevice(ctx, d, target), state.Unavailable, "is a file")
		d.Path = filepath.Join(root, "none")
		wantClass(t, h.BindDevice(ctx, d, target), state.Unavailable, "no such file")
		wantClass(t, h.BindDevice(ctx, other, filepath.Join(root, "no/target")), state.FailedPrecondition, "above the target is missing")
		wantFile(t, h, target, state.NoFile)
		must(t, os.Mkdir(target, 0o750))
		wantClass(t, h.BindDevice(ctx, other, target), state.FailedPrecondition, "is a directory, not a file")
		wantFile(t, h, target, state.Directory)
	})
}

// What somebody mounts at a target stays there, though all is shared.
func TestBindsShareNothingWithTheirSource(t *testing.T) {
	h, root := newHost(t)
	mountTmpfs(t, "shared", root, 0)
	must(t, unix.Mount("", root, "", unix.MS_SHARED, ""))
	ctx, stage, target, file := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target"), filepath.Join(root, "node")
	d := mounted(t, h, stage)
	must(t, os.Mkdir(filepath.Join(stage, "sub"), 0o750))
	must(t, h.BindMount(ctx, stage, d.Number, target, state.Flags{}))
	mountTmpfs(t, "nested", filepath.Join(target, "sub"), 0)
	wantFile(t, h, filepath.Join(stage, "sub"), state.Directory)

	// A directory with a node stands in for /dev.
	dev := filepath.Join(root, "dev")
	mountTmpfs(t, "dev", dev, 0)
	fake := state.Device{Path: filepath.Join(dev, "loop"), Number: d.Number}
	must(t, unix.Mknod(fake.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(d.Number.Major, d.Number.Minor))))
	must(t, h.BindDevice(ctx, fake, file))
	must(t, unix.Mount("/dev/null", file, "", unix.MS_BIND, ""))
	wantFile(t, h, fake.Path, state.BlockDevice)
	must(t, h.Unmount(ctx, file))
	wantMount(t, h, file, d.Number)
}

func TestSetAttributes(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, path := t.Context(), filepath.Join(root, "stage")
		d := mounted(t, h, path)
		for _, step := range []struct {
			flags string
			want  state.Attributes
		}{
			{"ro,noatime", state.ReadOnly | state.NoAtime},
			{"nosuid,nodev,noexec", state.ReadOnly | state.NoAtime | state.NoSuid | state.NoDev | state.NoExec},
			{"strictatime,dev", state.ReadOnly | state.StrictAtime | state.NoSuid | state.NoExec},
			{"", state.ReadOnly | state.StrictAtime | state.NoSuid | state.NoExec},
			{"rw,relatime,suid,exec,nodiratime,nosymfollow", state.NoDirAtime | state.NoSymFollow},
		} {
			flags, err := state.ParseFlags([]string{step.flags})
			must(t, err)
			must(t, h.SetAttributes(ctx, path, flags))
			m := wantMount(t, h, path, d.Number)
			mustBe(t, step.flags, m.Attributes, step.want)
			mustBe(t, "met", flags.Met(m.Attributes), true)
		}
		f, err := os.Create(filepath.Join(path, "file"))
		must(t, err)
		wantClass(t, h.SetAttributes(ctx, path, state.Flags{Set: state.ReadOnly}), state.Unavailable, "in use by", fmt.Sprintf("pid %d ", os.Getpid()))
		must(t, f.Close())
		must(t, h.SetAttributes(ctx, path, state.Flags{Set: state.ReadOnly}))
		must(t, os.Mkdir(filepath.Join(root, "plain"), 0o750))
		wantClass(t, h.SetAttributes(ctx, filepath.Join(root, "plain"), state.Flags{Set: state.ReadOnly}), state.Unavailable, "not a mount point")
	})
}

func TestRemove(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "x")
	must(t, h.Remove(ctx, path))
	must(t, h.Remove(ctx, filepath.Join(path, "y")))
	must(t, os.Mkdir(path, 0o750))
	must(t, h.Remove(ctx, path))
	wantFile(t, h, path, state.NoFile)
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, h.Remove(ctx, filepath.Join(path, "y")))
	must(t, h.Remove(ctx, path))
	wantFile(t, h, path, state.NoFile)

	keep := func(kind state.FileType, word string) {
		t.Helper()
		wantClass(t, h.Remove(ctx, path), state.FailedPrecondition, path, word, "not removed")
		m, err := h.Look(ctx, path)
		must(t, err)
		mustBe(t, "what stayed", m.File, kind)
	}
	must(t, os.WriteFile(path, []byte("data"), 0o600))
	keep(state.RegularFile, "holds 4 bytes")
	must(t, os.Remove(path))
	must(t, os.MkdirAll(filepath.Join(path, "y"), 0o750))
	keep(state.Directory, "not empty")
	must(t, os.Remove(filepath.Join(path, "y")))
	mountTmpfs(t, "t", path, 0)
	keep(state.Directory, "mount point")
	must(t, h.Unmount(ctx, path))
	must(t, os.Remove(path))
	must(t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0))))
	keep(state.BlockDevice, "block device")
	must(t, os.Remove(path))
	must(t, unix.Mkfifo(path, 0o600))
	keep(state.OtherFile, "special file")
}

func TestUsage(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d := mounted(t, h, path)
	m, before, err := h.Usage(ctx, path)
	must(t, err)
	if !m.Is(d.Number) || m.FSType != "ext4" || m.Node {
		t.Errorf("the mount is %+v", m)
	}
	for what, a := range map[string]state.Amount{"bytes": before.Bytes, "inodes": before.Inodes} {
		if a.Total <= 0 || a.Total > d.Size || a.Used <= 0 || a.Available <= 0 || a.Used+a.Available > a.Total {
			t.Errorf("%s: %+v", what, a)
		}
	}
	f, err := os.Create(filepath.Join(path, "file"))
	must(t, err)
	_, err = f.Write(make([]byte, 1<<20))
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	_, after, err := h.Usage(ctx, path)
	must(t, err)
	mustBe(t, "inodes", after.Inodes.Used, before.Inodes.Used+1)
	if grown := after.Bytes.Used - before.Bytes.Used; grown < 1<<20 || grown > 1<<20+64<<10 {
		t.Errorf("a file of 1 MiB took %d bytes", grown)
	}
	_, _, err = h.Usage(ctx, filepath.Join(root, "none"))
	wantClass(t, err, state.NotFound)
	_, _, err = h.Usage(ctx, filepath.Join(root, "none/none"))
	wantClass(t, err, state.NotFound)
	_, _, err = h.Usage(ctx, root)
	wantClass(t, err, state.InvalidArgument)
	must(t, h.Unmount(ctx, path)) // no descriptor stayed
	_, _, err = h.Usage(ctx, path)
	wantClass(t, err, state.NotFound, "nothing is mounted")
	must(t, os.Remove(path))
	must(t, h.BindDevice(ctx, d, path))
	if m, usage, err := h.Usage(ctx, path); err != nil || !m.Node || !m.Is(d.Number) || usage != (state.Usage{}) {
		t.Errorf("of a device node: %+v, %+v, %v", m, usage, err)
	}
}
