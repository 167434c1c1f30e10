package mounts

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// oddNames are names that tables escape, shells split and eyes miss.
var oddNames = []string{
	"with space", "new\nline", "tab\there", "#hash", `back\slash`, `\040`, `"quoted"`, "'", "ümläut-名", "\xff\xfe",
	strings.Repeat("n", 255), "...", "-o", "a (deleted)",
}

// lookCases build something at a path and tell what Look must say of it.
var lookCases = map[string]func(t *testing.T, root, path string) state.Mountpoint{
	"nothing": func(*testing.T, string, string) state.Mountpoint { return state.Mountpoint{File: state.NoFile} },
	"an empty directory": func(t *testing.T, _, path string) state.Mountpoint {
		must(t, os.Mkdir(path, 0o750))
		return state.Mountpoint{File: state.Directory, Empty: true}
	},
	"a directory with a file": func(t *testing.T, _, path string) state.Mountpoint {
		must(t, os.Mkdir(path, 0o750))
		must(t, os.WriteFile(filepath.Join(path, strings.Repeat("x", 255)), nil, 0o600))
		return state.Mountpoint{File: state.Directory}
	},
	"an empty file": func(t *testing.T, _, path string) state.Mountpoint {
		must(t, os.WriteFile(path, nil, 0o600))
		return state.Mountpoint{File: state.RegularFile, Empty: true}
	},
	"a file with a byte": func(t *testing.T, _, path string) state.Mountpoint {
		must(t, os.WriteFile(path, []byte{0}, 0o600))
		return state.Mountpoint{File: state.RegularFile}
	},
	"a symbolic link": func(t *testing.T, root, path string) state.Mountpoint {
		must(t, os.Symlink(root, path))
		return state.Mountpoint{File: state.OtherFile}
	},
	"a pipe": func(t *testing.T, _, path string) state.Mountpoint {
		must(t, unix.Mkfifo(path, 0o600))
		return state.Mountpoint{File: state.OtherFile}
	},
	"a tmpfs": func(t *testing.T, _, path string) state.Mountpoint {
		mountTmpfs(t, "odd source #\\ ", path, unix.MS_RELATIME)
		return on(tmpfs(t, path, "odd source #\\ ", 0))
	},
	"every attribute": func(t *testing.T, _, path string) state.Mountpoint {
		mountTmpfs(t, "t", path, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOATIME|unix.MS_NODIRATIME|unix.MS_NOSYMFOLLOW)
		return on(tmpfs(t, path, "t", state.NoSuid|state.NoDev|state.NoExec|state.NoAtime|state.NoDirAtime|state.NoSymFollow))
	},
	"strictatime": func(t *testing.T, _, path string) state.Mountpoint {
		mountTmpfs(t, "t", path, unix.MS_STRICTATIME)
		return on(tmpfs(t, path, "t", state.StrictAtime))
	},
	"a read-only superblock": func(t *testing.T, _, path string) state.Mountpoint {
		mountTmpfs(t, "t", path, unix.MS_RDONLY)
		m := tmpfs(t, path, "t", state.ReadOnly)
		m.SuperReadOnly = true
		return on(m)
	},
	"a bind of a directory": func(t *testing.T, root, path string) state.Mountpoint {
		m := bindOf(t, root, path, 0)
		return on(m)
	},
	"a read-only bind": func(t *testing.T, root, path string) state.Mountpoint {
		m := bindOf(t, root, path, unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY)
		m.Attributes = state.ReadOnly
		return on(m)
	},
	"a stack": func(t *testing.T, root, path string) state.Mountpoint {
		mountTmpfs(t, "lowest", path, 0)
		lowest := tmpfs(t, path, "lowest", 0)
		bind := bindOf(t, root, path, 0)
		mountTmpfs(t, "top", path, unix.MS_NOEXEC)
		return on(tmpfs(t, path, "top", state.NoExec), bind, lowest)
	},
	"a mount on a mount's directory is no stack": func(t *testing.T, _, path string) state.Mountpoint {
		outer := filepath.Dir(path)
		mountTmpfs(t, "outer", outer, 0)
		mountTmpfs(t, "inner", path, 0)
		return on(tmpfs(t, path, "inner", 0))
	},
	"seen in spite of an older hidden one": func(t *testing.T, _, path string) state.Mountpoint {
		mountTmpfs(t, "hidden", path, 0)
		mountTmpfs(t, "above", filepath.Dir(path), 0)
		mountTmpfs(t, "seen", path, 0)
		return on(tmpfs(t, path, "seen", 0))
	},
	"ext4": func(t *testing.T, root, path string) state.Mountpoint {
		d := newDevice(t, root, "ext4")
		must(t, os.Mkdir(path, 0o750))
		must(t, unix.Mount(d.Path, path, "ext4", 0, ""))
		return on(state.Mount{Device: d.Number, FSType: "ext4", Source: d.Path, Root: "/"})
	},
	"device nodes": func(t *testing.T, root, path string) state.Mountpoint {
		low, top := newDevice(t, root, ""), newDevice(t, root, "")
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, unix.Mount(low.Path, path, "", unix.MS_BIND, ""))
		must(t, unix.Mount("", path, "", unix.MS_PRIVATE, "")) // else the next one covers the node in /dev, too
		must(t, unix.Mount(top.Path, path, "", unix.MS_BIND, ""))
		m := onFile(state.BlockDevice, node(t, top), node(t, low))
		return m
	},
	"a bound file": func(t *testing.T, root, path string) state.Mountpoint {
		fs := filepath.Join(root, "fs")
		mountTmpfs(t, "t", fs, 0)
		must(t, os.WriteFile(filepath.Join(fs, "file"), nil, 0o600))
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, unix.Mount(filepath.Join(fs, "file"), path, "", unix.MS_BIND, ""))
		m := tmpfs(t, fs, "t", 0)
		m.Root = "/file"
		return onFile(state.RegularFile, m)
	},
}

func TestLook(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		for name, build := range lookCases {
			t.Run(name, func(t *testing.T) {
				t.Cleanup(func() { unmountBelow(t, root) })
				base, err := os.MkdirTemp(root, "case")
				must(t, err)
				path := filepath.Join(base, "dir", "target")
				must(t, os.Mkdir(filepath.Dir(path), 0o750))
				wantLook(t, h, path, build(t, base, path))
			})
		}
	})
}

func TestLookBelowWhatIsNoDirectory(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		must(t, os.WriteFile(filepath.Join(root, "file"), nil, 0o600))
		must(t, os.Symlink(root, filepath.Join(root, "link")))
		wantLook(t, h, filepath.Join(root, "file", "x"), state.Mountpoint{File: state.NoFile, InFile: true})
		wantLook(t, h, filepath.Join(root, "none", "x"), state.Mountpoint{File: state.NoFile})
		_, err := h.Look(t.Context(), filepath.Join(root, "link", "x"), hang.NoLimit)
		wantClass(t, err, state.InvalidArgument, filepath.Join(root, "link")+" is a symbolic link")
	})
}

func TestLookAtOddPaths(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		for _, name := range oddNames {
			for _, path := range []string{filepath.Join(root, name), filepath.Join(root, "in", name, "x")} {
				must(t, os.MkdirAll(path, 0o750))
				wantLook(t, h, path, state.Mountpoint{File: state.Directory, Empty: true})
				mountTmpfs(t, "low", path, 0)
				low := tmpfs(t, path, "low", 0)
				mountTmpfs(t, "top", path, 0)
				wantLook(t, h, path, on(tmpfs(t, path, "top", 0), low))
				must(t, h.Unmount(t.Context(), path))
				wantLook(t, h, path, on(low))
				must(t, h.Unmount(t.Context(), path))
				must(t, h.Remove(t.Context(), path))
				wantLook(t, h, path, state.Mountpoint{File: state.NoFile})
			}
		}
	})
}

// A root with odd names shows in mounts that are bound from it.
func TestLookAtOddRoots(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		fs, path := filepath.Join(root, "fs"), filepath.Join(root, "target")
		mountTmpfs(t, "t", fs, 0)
		must(t, os.Mkdir(path, 0o750))
		for _, name := range oddNames {
			must(t, os.Mkdir(filepath.Join(fs, name), 0o750))
			must(t, unix.Mount(filepath.Join(fs, name), path, "", unix.MS_BIND, ""))
			m := tmpfs(t, fs, "t", 0)
			m.Root = "/" + name
			wantLook(t, h, path, on(m))
			must(t, h.Unmount(t.Context(), path))
		}
	})
}

func TestPathsUpToPathMax(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		path := root
		for len(path) < unix.PathMax-1-202 {
			path += "/" + strings.Repeat(" \\", 100)
		}
		path += "/" + strings.Repeat("x", unix.PathMax-2-len(path))
		mustBe(t, "length", len(path), unix.PathMax-1)
		must(t, h.Check(path))
		d := newDevice(t, root, "ext4")
		must(t, h.MountDevice(t.Context(), d, path, "ext4", state.Flags{}, false))
		wantMount(t, h, path, d.Number)
		_, _, err := h.Usage(t.Context(), path)
		must(t, err)
		target := filepath.Join(root, "target")
		must(t, h.BindMount(t.Context(), path, d.Number, target, state.Flags{}))
		wantMount(t, h, target, d.Number)
		must(t, h.Unmount(t.Context(), path))
		must(t, h.Renew(t.Context(), path))
		wantLook(t, h, path, state.Mountpoint{File: state.Directory, Empty: true})
		must(t, h.Remove(t.Context(), path))
		wantClass(t, h.Check(path+"x"), state.InvalidArgument, "PATH_MAX")
	})
}

func TestLookWithARootThatIsALink(t *testing.T) {
	_, root := newHost(t)
	real, link := filepath.Join(root, "real"), filepath.Join(root, "link")
	must(t, os.Mkdir(real, 0o750))
	must(t, os.Symlink(real, link))
	h, err := New(link)
	must(t, err)
	d := newDevice(t, root, "ext4")
	must(t, h.MountDevice(t.Context(), d, link+"/stage", "ext4", state.Flags{}, false))
	wantMount(t, h, link+"/stage", d.Number)
	wantMount(t, h, real+"/stage", d.Number)
	must(t, os.Symlink("stage", real+"/below"))
	wantClass(t, h.Check(link+"/below/x"), state.InvalidArgument, link+"/below is a symbolic link")
}

// What a file system says when it has broken down, each in its own way.
func TestLookAtBrokenFilesystems(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		t.Run("xfs that was shut down", func(t *testing.T) {
			path := filepath.Join(root, "odd\nxfs")
			d := newDevice(t, root, "xfs")
			mountTmpfs(t, "low", path, 0)
			low := tmpfs(t, path, "low", 0)
			must(t, unix.Mount(d.Path, path, "xfs", 0, ""))
			machine.ShutDown(t, path)
			wantLook(t, h, path, on(state.Mount{Device: d.Number, FSType: "xfs", Source: d.Path, Root: "/", Corrupt: true}, low))
			must(t, h.Unmount(t.Context(), path))
			wantLook(t, h, path, on(low))
		})
		t.Run("ext4 that was shut down", func(t *testing.T) {
			if kernelBefore(t, 6, 15) {
				return // before Linux 6.15 ext4 does not tell
			}
			path := filepath.Join(root, "shutdown")
			d := mounted(t, h, path)
			machine.ShutDown(t, path)
			if m := wantMount(t, h, path, d.Number); !m.Corrupt {
				t.Errorf("%+v is not corrupt", m)
			}
			must(t, h.Unmount(t.Context(), path))
		})
		t.Run("ext4 that turned read-only", func(t *testing.T) {
			if kernelBefore(t, 6, 15) {
				return // from Linux 6.12 to 6.14, and where that was ported back, ext4 does not tell
			}
			path := filepath.Join(root, "errors")
			d := newDevice(t, root, "ext4")
			must(t, h.MountDevice(t.Context(), d, path, "ext4", state.Flags{Super: []string{"errors=remount-ro"}}, false))
			if m := wantMount(t, h, path, d.Number); m.SuperReadOnly {
				t.Errorf("%+v is read-only too early", m)
			}
			must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(d.Path)+"/trigger_fs_error", []byte("a test"), 0))
			if m := wantMount(t, h, path, d.Number); !m.SuperReadOnly || m.Attributes&state.ReadOnly != 0 {
				t.Errorf("%+v: want a read-only superblock below a writable mount", m)
			}
		})
	})
}

func wantLook(t *testing.T, h *Host, path string, want state.Mountpoint) {
	t.Helper()
	got, err := h.Look(t.Context(), path, hang.NoLimit)
	for i := range got.Mounts {
		got.Mounts[i].Options = "" // which TestSuperblockOptions looks at
		got.Mounts[i].ID = 0       // another one each time
	}
	got.Apart = false // which TestLookInCache looks at
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("look at %q:\n got %+v, %v\nwant %+v", path, got, err, want)
	}
}

func on(mounts ...state.Mount) state.Mountpoint { return onFile(state.Directory, mounts...) }

func onFile(file state.FileType, mounts ...state.Mount) state.Mountpoint {
	return state.Mountpoint{File: file, Mounts: mounts}
}

// tmpfs describes the tmpfs that is on top at path now.
func tmpfs(t *testing.T, path, source string, attributes state.Attributes) state.Mount {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return state.Mount{
		Device: devnode.NumberOf(st.Dev),
		FSType: "tmpfs", Source: source, Root: "/", Attributes: attributes,
	}
}

// bindOf binds a directory of a tmpfs of its own at path.
func bindOf(t *testing.T, root, path string, remount uintptr) state.Mount {
	t.Helper()
	fs := filepath.Join(root, "origin")
	mountTmpfs(t, "origin", fs, 0)
	must(t, os.MkdirAll(filepath.Join(fs, "a b"), 0o750))
	must(t, os.MkdirAll(path, 0o750))
	must(t, unix.Mount(filepath.Join(fs, "a b"), path, "", unix.MS_BIND, ""))
	must(t, unix.Mount("", path, "", unix.MS_PRIVATE, ""))
	if remount != 0 {
		must(t, unix.Mount("", path, "", remount, ""))
	}
	m := tmpfs(t, fs, "origin", 0)
	m.Root = "/a b"
	return m
}

// node describes a bound node of /dev.
func node(t *testing.T, d state.Device) state.Mount {
	t.Helper()
	return state.Mount{Device: d.Number, Node: true, FSType: "devtmpfs", Source: source(t, "/dev"), Root: "/" + filepath.Base(d.Path)}
}

func source(t *testing.T, path string) string {
	t.Helper()
	stack, err := stackAt(path)
	must(t, err)
	return stack[0].source
}

// A directory that is removed while its entries are read is looked at again.
func TestNoEntriesOfARemovedDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	must(t, os.Mkdir(dir, 0o750))
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, os.Remove(dir))
	if empty, err := noEntries(fd); empty || err != errChanged {
		t.Errorf("it is empty: %t (%v)", empty, err)
	}
}

func BenchmarkLook(b *testing.B) {
	for _, others := range []struct {
		name  string
		count int
	}{{"1 other mount", 1}, {"1000 other mounts", 1000}} {
		h, root := newHost(b)
		tables := map[string]table{"statmount": h.table, "mountinfo": mountinfoTable{}}
		path := filepath.Join(root, "target")
		mountTmpfs(b, "target", path, 0)
		for i := range others.count {
			mountTmpfs(b, "other", filepath.Join(root, "others", strings.Repeat("x", i/200+1), strings.Repeat("y", i%200+1)), 0)
		}
		for name, table := range tables {
			b.Run(name+"/"+others.name, func(b *testing.B) {
				h.table = table
				for b.Loop() {
					if m, err := h.Look(b.Context(), path, hang.NoLimit); err != nil || len(m.Mounts) != 1 {
						b.Fatal(m, err)
					}
				}
			})
		}
		unmountBelow(b, root)
	}
}

// What a mount on a directory above hides is not taken for gone; where nothing
// is hidden, a mount on the way is none of the volume's business.
func TestLookAtWhatIsHidden(t *testing.T) {
	h, root := newHost(t)
	above, bare := filepath.Join(root, "above"), filepath.Join(root, "above/bare")
	hidden := filepath.Join(root, "above/between/hidden")
	must(t, os.MkdirAll(hidden, 0o750))
	mountTmpfs(t, "hidden", hidden, 0)
	for range 2 {
		mountTmpfs(t, "theirs", above, 0)
		_, err := h.Look(t.Context(), hidden, hang.NoLimit)
		wantClass(t, err, state.Unavailable, hidden, "hidden by theirs (tmpfs)", "mounted at "+above)
		wantFile(t, h, bare, state.NoFile)
		must(t, os.MkdirAll(hidden, 0o750)) // the directory is not the one that was mounted on
		_, err = h.Look(t.Context(), hidden, hang.NoLimit)
		wantClass(t, err, state.Unavailable, "hidden by")
		must(t, machine.Unmount(above))
		if m, err := h.Look(t.Context(), hidden, hang.NoLimit); err != nil || len(m.Mounts) != 1 {
			t.Errorf("uncovered it is %+v (%v)", m, err)
		}
	}
	must(t, machine.Unmount(hidden))
	mountTmpfs(t, "theirs", above, 0)
	wantFile(t, h, hidden, state.NoFile)
}

// So does a mount on the directory that holds all mounts, or above it.
func TestLookBelowACoveredRoot(t *testing.T) {
	h, root := newHost(t)
	target := filepath.Join(root, "pods/target")
	must(t, os.MkdirAll(target, 0o750))
	mountTmpfs(t, "ours", target, 0)
	for _, cover := range []string{root, filepath.Dir(root)} {
		mountTmpfs(t, "theirs", cover, 0)
		must(t, os.MkdirAll(root, 0o750))
		for range 2 {
			_, err := h.Look(t.Context(), target, hang.NoLimit)
			wantClass(t, err, state.Unavailable, target, "hidden by theirs (tmpfs)", "mounted at "+cover)
			must(t, os.MkdirAll(target, 0o750)) // that of the cover
		}
		wantFile(t, h, filepath.Join(root, "pods"), state.Directory)
		must(t, machine.Unmount(cover))
		if m, err := h.Look(t.Context(), target, hang.NoLimit); err != nil || len(m.Mounts) != 1 {
			t.Errorf("uncovered it is %+v (%v)", m, err)
		}
	}
}

// A look does not wait longer than its limit for a file system that does not answer.
func TestLookWithin(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	must(t, os.Mkdir(path, 0o750))
	mountTmpfs(t, "tmpfs", path, 0) // of which the caches are not asked
	hangs := make(chan struct{})
	defer close(hangs)
	_, err := h.looks.Do(t.Context(), path, time.Millisecond, func() (m state.Mountpoint, err error) { <-hangs; return m, nil })
	wantClass(t, err, state.DeadlineExceeded)
	_, err = h.Look(t.Context(), path, time.Millisecond)
	wantClass(t, err, state.DeadlineExceeded, path, "an earlier look")
}

// What the kernel has in its caches is looked at in line: nothing there can hang. So is a
// directory in the mount of the root. About a file system that is on no disk its server may
// be asked.
func TestLookInCache(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	wantInCache := func(what, path string, want bool) state.Mountpoint {
		t.Helper()
		m, ok := h.lookInCache(path)
		if ok != want {
			t.Errorf("%s: seen in line: %t, %+v", what, ok, m)
		}
		return m
	}
	look := func() state.Mountpoint {
		m, err := h.Look(t.Context(), path, hang.NoLimit)
		must(t, err)
		return m
	}
	look()
	unique := h.rootMount != 0 // else the kernel gives ids again
	if m := wantInCache("nothing", path, unique); m.Apart != unique {
		t.Errorf("nothing that is mounted hides what is there: %t", m.Apart)
	}
	must(t, os.Mkdir(path, 0o750))
	for _, empty := range []bool{true, false} {
		if m := wantInCache("a directory", path, unique); unique && (!m.Apart || m.Empty != empty || m.File != state.Directory) {
			t.Errorf("empty: %t, %+v", empty, m)
		}
		must(t, os.WriteFile(filepath.Join(path, "file"), nil, 0o600))
	}
	must(t, os.Remove(filepath.Join(path, "file")))
	d := newDevice(t, root, "ext4")
	must(t, h.MountDevice(t.Context(), d, path, "ext4", state.Flags{}, false))
	own := wantInCache("the mount of a disk that was made here", path, true)
	h.setDisk(path, false)
	wantInCache("a mount that was not seen before", path, false)
	seen := look()
	if m := wantInCache("the mount of a disk", path, true); !reflect.DeepEqual(m, seen) || !reflect.DeepEqual(own, seen) {
		t.Errorf("in line %+v and %+v are seen, else %+v", own, m, seen)
	}
	target := filepath.Join(root, "target")
	must(t, h.BindMount(t.Context(), path, d.Number, target, state.Flags{}))
	wantInCache("a bind of it", target, true)
	must(t, h.Unmount(t.Context(), target))
	mountTmpfs(t, "tmpfs", path, 0)
	look()
	wantInCache("the mount of something else", path, false)
	must(t, machine.Unmount(path))
	look()
	wantInCache("the disk again", path, true)
	must(t, h.Unmount(t.Context(), path))
	look()
	wantInCache("a mount point that was", path, unique)

	above, other := filepath.Join(root, "above"), filepath.Join(root, "other")
	must(t, os.Mkdir(above, 0o750))
	must(t, os.Mkdir(other, 0o750))
	must(t, unix.Mount(other, above, "", unix.MS_BIND, ""))
	_, err := h.Look(t.Context(), above+"/gone", hang.NoLimit)
	must(t, err)
	wantInCache("nothing, where another mount may hide what is there", above+"/gone", false)
	must(t, os.Mkdir(above+"/dir", 0o750))
	wantInCache("a directory of another mount", above+"/dir", false)
}

// Since Linux 6.15 an ext4 tells by an option alone that it refuses writes.
func TestEmergencyReadOnly(t *testing.T) {
	e := entry{options: "rw,emergency_ro"}
	if !e.mount().SuperReadOnly {
		t.Error("a superblock that refuses writes counts as writable")
	}
	if e = (entry{options: "rw,errors=remount-ro"}); e.mount().SuperReadOnly {
		t.Error("a writable superblock counts as read-only")
	}
}
