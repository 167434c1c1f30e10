package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// newDisk makes a disk, a loop device over a file that the plugin does not know for one, and
// returns its node and its file.
func newDisk(t *testing.T, bytes int64) (node, file string) {
	t.Helper()
	file = machine.Image(t, bytes)
	return machine.Losetup(t, file), file
}

// disks returns a plugin with notes of its own.
func disks(t *testing.T, o harness.Options) (*harness.Plugin, harness.Options) {
	t.Helper()
	p := harness.New(t)
	o.Flags = append(o.Flags, "--lib-dir", filepath.Join(p.Dir, "lib"))
	return p, o
}

// onDisk is a volume that is a disk.
func onDisk(p *harness.Plugin, t *testing.T, id, node, fsType string) *volume {
	t.Helper()
	v := harness.NewVolume(t, p, id, harness.Shared(fsType))
	v.Context = map[string]string{"backend": "disk", "path": node}
	return v
}

// diskVolume starts a plugin and returns a volume of it that is a disk of 32 MiB, the
// node of the disk and the file behind it.
func diskVolume(t *testing.T, fsType string) (p *harness.Plugin, v *volume, node, file string) {
	t.Helper()
	p, o := disks(t, harness.Options{})
	p.Start(o)
	node, file = newDisk(t, 32*mib)
	return p, onDisk(p, t, "a-disk", node, fsType), node, file
}

// mustBeFree fails unless nobody has a disk, and it takes writes.
func mustBeFree(t *testing.T, node string) {
	t.Helper()
	var f *os.File
	harness.Eventually(t, node+" is free", func() (free bool) { // a program that is being started may have it for a moment
		var err error
		if f, err = os.OpenFile(node, os.O_RDWR|unix.O_EXCL, 0); !errors.Is(err, unix.EBUSY) {
			must(t, err)
			return true
		}
		return false
	})
	readOnly, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET)
	if err := errors.Join(err, f.Close()); err != nil || readOnly != 0 {
		t.Errorf("%s: read-only %d, %v", node, readOnly, err)
	}
}

// interruptedFormat kills a plugin while it formats a volume that is a disk of 32 MiB. o are
// the options for the next one, in which mkfs waits until w is open.
func interruptedFormat(t *testing.T) (p *harness.Plugin, o harness.Options, w *wrapper, v *volume) {
	t.Helper()
	p, o = disks(t, harness.Options{})
	w = wrapMkfs(t, p, byExec)
	o.Env = w.env()
	p.Start(o)
	node, _ := newDisk(t, 32*mib)
	v = onDisk(p, t, "a-disk", node, "ext4")
	staged := w.stageInto(v)
	killWithHelpers(t, p, syscall.SIGKILL)
	mustRefuse(t, <-staged, codes.Unavailable)
	return p, o, w, v
}

// What a format that was interrupted has left on a disk is erased, and the disk
// formatted anew, also by a plugin that has lost its store.
func TestDiskFormatIsInterrupted(t *testing.T) {
	t.Parallel()
	p, o, w, v := interruptedFormat(t)
	node := v.Context["path"]
	f, err := os.OpenFile(node, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("half a file system"), 4096)
	must(t, errors.Join(err, f.Sync(), f.Close()))
	must(t, os.RemoveAll(p.StateDir))

	w.open()
	p.Start(o)
	must(t, v.Stage(t.Context()))
	w.mustHaveRun(2)
	write(t, filepath.Join(v.Staging, "file"), "kept")
	must(t, v.Unstage(t.Context()))

	// A disk that was formatted and is blank now has lost its data: it is not formatted again.
	must(t, exec.Command("wipefs", "-aq", node).Run())
	must(t, exec.Command("blkdiscard", "-f", "-z", node).Run())
	mustRefuse(t, v.Stage(t.Context()), codes.FailedPrecondition, "was formatted as ext4 before")
	must(t, v.Unstage(t.Context()))
	mustBeFree(t, node)
}

// Without an fs_type a disk that others have formatted is mounted as what it is, also if it
// comes only after the stage was asked for.
func TestDiskIsStagedAsItIs(t *testing.T) {
	t.Parallel()
	p, o := disks(t, harness.Options{})
	p.Start(o)
	ctx := t.Context()
	dir, err := os.MkdirTemp("/dev", "csi-node-test-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		for _, late := range []bool{false, true} {
			image, link := machine.Image(t, 400*mib), filepath.Join(dir, fmt.Sprint(fsType, "-late-", late))
			machine.Mkfs(t, fsType, image)
			v := onDisk(p, t, filepath.Base(link), link, "")
			v.Capability = mountAs("", multiWriter)
			if late {
				soon, cancel := context.WithTimeout(ctx, time.Second)
				mustRefuse(t, v.Stage(soon), codes.DeadlineExceeded)
				cancel()
			}
			node := machine.Losetup(t, image)
			must(t, os.Symlink(node, link))
			must(t, v.Stage(ctx))
			at, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(v.Staging))
			must(t, err)
			if len(at) != 1 || at[0].FSType != fsType {
				t.Errorf("%s is mounted as %+v", v.ID, at)
			}
			must(t, v.Unstage(ctx))
			if other := "ext4"; late && fsType != other { // another node has made the disk anew
				machine.Mkfs(t, other, "-qF", node)
				must(t, v.Stage(ctx))
				must(t, v.Unstage(ctx))
			}
			mustBeFree(t, node)
		}
	}
}

// A clearing that was refused destroys nothing later, either: the disk may have become writable,
// or free, and somebody may count on what it holds.
func TestRefusedClearingKeepsTheDisk(t *testing.T) {
	t.Parallel()
	p, v, node, _ := diskVolume(t, "ext4")
	ctx := t.Context()
	must(t, v.Stage(ctx))
	write(t, filepath.Join(v.Staging, "file"), "kept")
	must(t, v.Unstage(ctx))
	must(t, exec.Command("blockdev", "--setro", node).Run())
	refused(t, p, 1, "csi-node volume clear-device "+v.ID+" --i-understand-this-destroys-data", node, "takes no writes")
	must(t, exec.Command("blockdev", "--setrw", node).Run())
	must(t, v.Stage(ctx))
	mustRead(t, filepath.Join(v.Staging, "file"), "kept")
	must(t, v.Unstage(ctx))
	mustBeFree(t, node)
}

// divided returns a disk with a partition of 32 MiB.
func divided(t *testing.T) (disk, partition string) {
	t.Helper()
	disk = machine.Losetup(t, "--partscan", machine.Image(t, 64*mib)) // as the disks that can have partitions
	harness.Command(t, "addpart", disk, "1", "2048", "65536")         // sectors; the kernel here may not know any table
	return disk, disk + "p1"
}

// A partition that a pod has for reading stays read-only, though nobody has it open: nobody can
// have the kernel read the partition table again, by which a partition loses that mode.
func TestReadOnlyPartitionStaysReadOnly(t *testing.T) {
	t.Parallel()
	p, o := disks(t, harness.Options{})
	p.Start(o)
	ctx := t.Context()
	node, partition := divided(t)
	v := onDisk(p, t, "a-partition", partition, "")
	v.Capability = blockAs(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY)
	target := v.Target("pod")
	must(t, v.Stage(ctx))
	must(t, v.PublishReadOnly(ctx, target))
	if err := exec.Command("blockdev", "--rereadpt", node).Run(); err == nil {
		t.Error("the partition table was read again: the partition, which has the same number a little later, takes writes then")
	}
	if err := os.WriteFile(target, []byte("written"), 0); err == nil {
		t.Error("the pod has written")
	}
	must(t, v.Unpublish(ctx, target))
	must(t, v.Unstage(ctx))
	mustBeFree(t, partition)
}

// A disk stays mounted, and nothing is known of that any more: neither the store nor the notes are
// left. The unstage says so, as kubelet would give the disk away.
func TestUnstageTellsOfAnUnknownMount(t *testing.T) {
	t.Parallel()
	p, o := disks(t, harness.Options{})
	p.Start(o)
	ctx := t.Context()
	node, _ := newDisk(t, 32*mib)
	v := onDisk(p, t, "a-disk", node, "ext4")
	must(t, v.Stage(ctx))
	p.Kill()
	must(t, os.RemoveAll(p.StateDir))
	must(t, os.RemoveAll(filepath.Join(p.Dir, "lib")))
	p.Start(o)
	mustRefuse(t, v.Unstage(ctx), codes.FailedPrecondition, v.Staging, node, "is mounted")
	must(t, machine.Unmount(v.Staging))
	must(t, v.Unstage(ctx))
	mustBeFree(t, node)
}

// Whenever mkfs is killed on a disk, and the plugin with it, the next one takes the format up
// by itself.
func TestMkfsOfADiskIsKilled(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			formatsAfterAKill(t, fsType, "mkfs."+fsType, "", nil, "0.001", "0.004", "0.01", "0.02", "0.05", "0.1", "0.3", "60")
		})
	}
}

// formatsAfterAKill kills a program that formats disks after one of the times, in seconds, and
// then the plugin. command is the one of its arguments that says that it formats; "" if it always does.
func formatsAfterAKill(t *testing.T, fsType, program, command string, encrypted map[string]string, times ...string) {
	t.Helper()
	ctx := t.Context()
	p, o := disks(t, harness.Options{})
	real, err := exec.LookPath(program)
	must(t, err)
	bin := filepath.Join(p.Dir, "bin")
	makeDir(t, bin)
	for i, after := range times {
		machine.WriteProgram(t, filepath.Join(bin, program), fmt.Sprintf(`#!/bin/sh
case "$*" in *%s*) timeout --signal KILL %s %s "$@"; exit 137; esac
exec %s "$@"
`, command, after, real, real))
		node, _ := newDisk(t, 320*mib)
		v := onDisk(p, t, fmt.Sprintf("disk-%d", i), node, fsType)
		if encrypted != nil {
			maps.Copy(v.Context, encrypted)
			v.Secrets = map[string]string{"encryptionPassphrase": "a passphrase"}
		}
		p.Start(harness.Options{Flags: o.Flags, Env: []string{"PATH=" + bin + ":" + os.Getenv("PATH")}})
		if err := v.Stage(ctx); err == nil {
			t.Fatalf("%s killed after %s s, and staged", program, after)
		}
		p.Kill()
		p.Start(o)
		must(t, v.Stage(ctx))
		write(t, filepath.Join(v.Staging, "file"), "kept")
		must(t, v.Unstage(ctx))
		must(t, v.Stage(ctx))
		mustRead(t, filepath.Join(v.Staging, "file"), "kept")
		must(t, v.Unstage(ctx))
		mustBeFree(t, node)
		p.Terminate()
	}
}

// A read-only raw publish is as large as the disk, whoever has noticed that the disk grew.
func TestReadOnlyRawDiskGrows(t *testing.T) {
	t.Parallel()
	_, v, node, file := diskVolume(t, "")
	ctx := t.Context()
	writer, reader := v.Target("writer"), v.Target("reader")
	must(t, v.Up(ctx, writer))
	must(t, v.PublishReadOnly(ctx, reader))
	must(t, os.Truncate(file, 64*mib)) // which the plugin asks the disk for
	_, err := v.Expand(ctx, 64*mib)
	must(t, err)
	must(t, os.Truncate(file, 96*mib)) // and here it knows
	must(t, exec.Command("losetup", "-c", node).Run())
	_, err = v.Expand(ctx, 96*mib)
	must(t, err)
	for _, pod := range []string{writer, reader} {
		if size := deviceSize(t, pod); size != 96*mib {
			t.Errorf("%s has %d bytes", pod, size)
		}
	}
	refuseWrite(t, reader)
	must(t, v.Down(ctx, reader, writer))
	mustBeFree(t, node)
}

// The read-only device that a pod has of a disk comes back with its number if somebody takes
// it away; and what the pod puts behind it while the plugin is not there does not stay.
func TestLostViewOfADiskComesBack(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]csi.VolumeCapability_AccessMode_Mode{
		"staged for writing": multiWriter,
		"staged for reading": csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, o := disks(t, harness.Options{})
			p.Start(o)
			ctx := t.Context()
			_, partition := divided(t)
			v := onDisk(p, t, "a-partition", partition, "")
			v.Capability = blockAs(mode)
			target := v.Target("pod")
			must(t, v.Stage(ctx))
			path := ""
			for lost, back := 0, false; !back; lost++ { // another test may have taken the number
				if lost == 5 {
					t.Fatal("the pod's device does not come back")
				}
				must(t, v.PublishReadOnly(ctx, target))
				path = fmt.Sprint("/dev/loop", unix.Minor(numberAt(t, target)))
				if back = comesBack(t, p, path); !back {
					must(t, v.Unpublish(ctx, target))
				}
			}
			backing := backingOf(path)
			p.Kill()
			swapBacking(t, path, 32*mib)
			p.Start(o)
			must(t, v.PublishReadOnly(ctx, target))
			if now := backingOf(path); now != backing {
				t.Errorf("the pod is shown %s, want %s", now, backing)
			}
			must(t, v.Down(ctx, target))
			mustBeFree(t, partition)
		})
	}
}
