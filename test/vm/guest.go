// Package vm runs the tests in virtual machines: on another kernel than the
// host's, with other capabilities, and through power cuts.
//
// The guest is Debian's own kernel and a small root file system, which
// build-image makes of packages; QEMU runs it without KVM. A guest does one
// job, a directory with a program `run`, and turns itself off:
//
//	build-image ──> vmlinuz, root.ext4       once, kept in a cache
//	job/ ──tar──> disk "job" ──> init unpacks it, runs ./run ──> console
//
// The root file system is never changed by a run: QEMU keeps what a guest
// writes in a temporary file without a name. Nobody need be root for it. `make
// test-vm` runs everything, `make demo-vm` the demo; `go test ./...` does
// neither, because the tests have the build tag vm. Begin with TestOtherKernel.
package vm

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ImageCache is the environment variable of the directory where images are
// kept; csi-node-vm in the user's cache directory if it is not set.
const ImageCache = "CSI_NODE_VM_CACHE"

// Image returns the directory with the guest's kernel and root file system,
// which it makes if what they are made from has changed. dir is that of this
// package's source. It blocks for the download of about 60 MB then.
func Image(ctx context.Context, dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	recipe := sha256.New()
	for _, name := range []string{"build-image", "packages", "init"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		recipe.Write(text)
	}
	cache := os.Getenv(ImageCache)
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("%w: set %s", err, ImageCache)
		}
		cache = filepath.Join(user, "csi-node-vm")
	}
	image := filepath.Join(cache, hex.EncodeToString(recipe.Sum(nil)[:8]))
	if _, err := os.Stat(filepath.Join(image, "root.ext4")); err == nil { // which is put there last
		return image, nil
	}
	if out, err := exec.CommandContext(ctx, filepath.Join(dir, "build-image"), image).CombinedOutput(); err != nil {
		return "", fmt.Errorf("build-image %s: %w\n%s", image, err, out)
	}
	return image, nil
}

// Disk is one more disk of a guest.
type Disk struct {
	Serial string // the guest finds it as /dev/by-serial/<Serial>
	Path   string // a raw image

	// Log, if any, is a file that gets every write and flush of the guest, in
	// their order, for OpenLog.
	Log string
}

// Guest is a machine to run.
type Guest struct {
	Image string // as Image returned it
	Job   string // directory with an executable `run`
	Disks []Disk

	Kernel string // more of its command line

	// Line is called with each line of the job as it comes. When it returns
	// true, the machine's power is cut at once.
	Line func(line string) (cut bool)
}

// consoleTail is how many lines of the console an error shows.
const consoleTail = 60

// JobError says that a job has failed. The job itself has told why.
type JobError struct {
	Code int // its exit code
}

func (e JobError) Error() string { return fmt.Sprintf("the job failed with exit code %d", e.Code) }

// What init prints before the job, and after it, with its exit code.
const (
	begins = "job begins"
	ended  = "job ended with "
)

// A boot takes seconds. One of some hundreds had said nothing after 45 minutes:
// on a host with much work, an emulated kernel can lose a timer, and waits for
// it for ever. The job has not begun then, and the power is turned on again.
const (
	boots    = 3
	bootTime = 3 * time.Minute
)

// Run boots the machine and runs it until its job ends, its power is cut by
// Line, or ctx ends. It returns nil if the job ended with 0 or the power was
// cut, a JobError if the job failed; any other error holds the end of the
// console.
func (g *Guest) Run(ctx context.Context) error {
	work, err := os.MkdirTemp("", "csi-node-vm-")
	if err != nil {
		return err
	}
	return errors.Join(g.boot(ctx, work), os.RemoveAll(work))
}

func (g *Guest) boot(ctx context.Context, work string) error {
	job := filepath.Join(work, "job.tar") // which is the disk
	out, err := exec.CommandContext(ctx, "tar", "-C", g.Job, "-cf", job, "--record-size=1M", ".").CombinedOutput()
	if err != nil {
		return fmt.Errorf("tar: %w: %s", err, out)
	}
	for range boots {
		if err = g.run(ctx, job); !errors.Is(err, errNotUp) {
			break
		}
		fmt.Fprintln(os.Stderr, "vm:", err)
	}
	return err
}

func (g *Guest) run(ctx context.Context, job string) error {
	ctx, cut := context.WithCancelCause(ctx)
	defer cut(nil)
	booting := time.AfterFunc(bootTime, func() { cut(errNotUp) })
	defer booting.Stop()
	// It must not outlive the test, which may be killed: Pdeathsig, sent when the
	// thread ends that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	qemu := exec.CommandContext(ctx, "qemu-system-x86_64", g.arguments(job)...) // killed with SIGKILL when ctx ends
	qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var complaints strings.Builder
	qemu.Stderr = &complaints
	console, err := qemu.StdoutPipe()
	if err != nil {
		return err
	}
	if err := qemu.Start(); err != nil {
		return err
	}
	var tail []string
	begun, result := false, "" // the job
	lines := bufio.NewScanner(console)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		if tail = append(tail, line); len(tail) > consoleTail {
			tail = tail[1:]
		}
		if line == begins {
			begun = booting.Stop()
			continue
		}
		if status, is := strings.CutPrefix(line, ended); is {
			result = status
		}
		if begun && g.Line != nil && g.Line(line) {
			cut(errPowerCut)
			break
		}
	}
	if lines.Err() != nil {
		cut(lines.Err())
	}
	err = errors.Join(lines.Err(), qemu.Wait())
	switch {
	case errors.Is(context.Cause(ctx), errPowerCut):
		return nil
	case ctx.Err() != nil:
		err = fmt.Errorf("the guest was ended: %w", context.Cause(ctx))
	case err == nil && result == "0":
		return nil
	case err == nil && result != "":
		code, err := strconv.Atoi(result)
		if err != nil {
			return err
		}
		return JobError{code}
	case err == nil:
		err = errors.New("the guest ended before its job")
	}
	return fmt.Errorf("%w\n%sthe end of the console:\n  %s", err, complaints.String(), strings.Join(tail, "\n  "))
}

var (
	errPowerCut = errors.New("power cut")
	errNotUp    = fmt.Errorf("its job has not begun %s after power on", bootTime)
)

func (g *Guest) arguments(job string) []string {
	args := []string{
		// Without la57 because Linux 6.1 mangles paths in mountinfo with it; without erms and fsrm because
		// string instructions that the emulator does byte by byte are slow, and Linux then copies by words.
		// One processor: to keep a second one in step costs more than it does.
		"-accel", "tcg", "-cpu", "max,-la57,-erms,-fsrm", "-smp", "1", "-m", "2G", "-M", "q35",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", filepath.Join(g.Image, "vmlinuz"),
		"-append", "console=ttyS0 quiet loglevel=2 panic=-1 mitigations=off root=/dev/nvme0n1 rw rootfstype=ext4" +
			" no_timer_check" + // which fails on a host with much work
			" nvme_core.io_timeout=300 " + g.Kernel, // s: there a disk may be slow, too; it is not dead
		"-drive", "if=none,id=root,format=raw,cache=unsafe,snapshot=on,file=" + filepath.Join(g.Image, "root.ext4"),
		"-device", "nvme,drive=root,serial=root",
		"-drive", "if=none,id=job,format=raw,cache=unsafe,file=" + job,
		"-device", "nvme,drive=job,serial=job",
	}
	for i, d := range g.Disks {
		node := fmt.Sprintf("disk%d", i)
		// Flushes need not reach the host's disk: the host does not crash.
		file := "driver=file,cache.no-flush=on,filename=" + d.Path + ",node-name=" + node
		if d.Log != "" {
			args = append(args,
				"-blockdev", file+"-file",
				"-blockdev", "driver=file,cache.no-flush=on,filename="+d.Log+",node-name="+node+"-log",
				"-blockdev", "driver=blklogwrites,log-super-update-interval=1,file="+node+"-file,log="+node+"-log,node-name="+node)
		} else {
			args = append(args, "-blockdev", file)
		}
		args = append(args, "-device", "virtio-blk-pci,drive="+node+",serial="+d.Serial) // it has a volatile cache, and no FUA
	}
	return args
}
