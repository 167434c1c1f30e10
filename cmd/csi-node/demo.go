package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/csi-node/csi-node/pkg/client"
	"github.com/csi-node/csi-node/pkg/driver"
)

const (
	demoSize  = 320 << 20 // bytes; mkfs.xfs makes nothing under 300 MiB
	demoGrown = 512 << 20
	demoText  = "written through the first pod"

	// demoLookEvery is how often a wait looks whether the demo was ended, in milliseconds.
	demoLookEvery = 100
)

func newDemoCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Play kubelet for one volume, from creation to deletion",
		Long: `demo starts a plugin of its own on a temporary pool and socket and takes one
volume through its life: create, stage, publish to two pods, write, read, grow
while mounted, stats, a plugin killed and started again, mounts torn off and
healed, unpublish, unstage, delete. It needs root and leaves nothing behind,
however it ends: interrupted and killed, too.

Where it lacks a privilege it says so and does nothing. "make demo-vm", in the
source, runs it in a virtual machine.`,
		Example: "  sudo csi-node demo",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if missing := demoLacks(); len(missing) > 0 {
				return fmt.Errorf("the demo cannot run here: %s; in the source, `make demo-vm` runs it in a virtual machine instead", strings.Join(missing, "; "))
			}
			// main handles interrupts. Nothing must be left behind either when the terminal is closed, or when the reader of
			// the output ends. The keeper process handles what cannot be caught, such as SIGKILL.
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP, syscall.SIGQUIT)
			defer stop()
			signal.Ignore(syscall.SIGPIPE)
			return runDemo(ctx, cmd.OutOrStdout())
		},
	}
	cmd.AddCommand(newDemoKeeperCommand())
	return cmd
}

// demo takes one volume through its life, with a plugin of its own.
type demo struct {
	out    io.Writer
	dir    string
	alive  *os.File // kept open by all that must end before the keeper cleans up
	plugin *exec.Cmd
	log    *os.File
	client *client.Client
	volume string
}

func runDemo(ctx context.Context, out io.Writer) error {
	// The plugin refuses paths through symbolic links, which a TMPDIR may hold.
	temp, err := filepath.EvalSymlinks(os.TempDir())
	if err != nil {
		return err
	}
	// The plugin is killed when the thread that started it ends, so this thread must live as long as the demo.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	d := &demo{out: stoppingWriter{out, stop}, dir: filepath.Join(temp, demoPrefix+rand.Text()[:10])}
	keeper, err := startDemoKeeper(d.dir)
	if err != nil {
		return err
	}
	d.alive = keeper.alive
	start := time.Now()
	err = errors.Join(d.play(ctx), d.kill())
	if err == nil {
		err = d.mustBeOver()
	}
	if clean := keeper.end(); clean != nil {
		return errors.Join(err, fmt.Errorf("something of the demo is left: %w", clean))
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: nothing is left of the demo (%v)", context.Cause(ctx), err)
	}
	if err == nil {
		fmt.Fprintf(out, "\nA whole life in %s: nothing was lost, and nothing is left.\n", time.Since(start).Round(time.Millisecond))
	}
	return err
}

// stoppingWriter is an output whose failure stops the demo.
type stoppingWriter struct {
	to   io.Writer
	stop context.CancelCauseFunc
}

func (t stoppingWriter) Write(p []byte) (int, error) {
	n, err := t.to.Write(p)
	if err != nil {
		t.stop(err)
	}
	return n, err
}

// play takes the volume through its life.
func (d *demo) play(ctx context.Context) (err error) {
	for _, sub := range []string{"", "state", "kubelet", "kubelet/stage", "kubelet/pod-1", "kubelet/pod-2"} {
		if err := os.Mkdir(filepath.Join(d.dir, sub), 0o700); err != nil {
			return err
		}
	}
	if d.log, err = os.Create(filepath.Join(d.dir, "plugin.log")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.log.Close()) }()
	for i, step := range d.story() {
		began := time.Now()
		fmt.Fprintf(d.out, "%2d. %s\n", i+1, step.title)
		result, err := step.do(ctx)
		if err == nil {
			err = ctx.Err()
		} else if ctx.Err() == nil {
			d.showLog()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
		fmt.Fprintf(d.out, "    ok in %s%s\n", time.Since(began).Round(100*time.Microsecond), result)
		if step.status {
			d.showStatus(ctx)
		}
	}
	return nil
}

// mustBeOver returns an error if the whole story has left anything, which the
// keeper would take down in silence.
func (d *demo) mustBeOver() error {
	points, err := demoMounts(d.dir)
	devices, alsoErr := demoDevices(d.dir)
	if left := append(points, devices...); len(left) > 0 {
		return fmt.Errorf("the story has ended and has left %s", strings.Join(left, ", "))
	}
	return errors.Join(err, alsoErr)
}

type demoStep struct {
	title  string
	status bool // show desired against actual afterwards
	do     func(context.Context) (string, error)
}

func (d *demo) path(name string) string { return filepath.Join(d.dir, name) }

func (d *demo) capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "xfs"}},
	}
}

func (d *demo) story() []demoStep {
	stage, pod1, pod2 := d.path("kubelet/stage"), d.path("kubelet/pod-1/mount"), d.path("kubelet/pod-2/mount")
	node := func() csi.NodeClient { return d.client.Node }
	controller := func() csi.ControllerClient { return d.client.Controller }
	publish := func(path string) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) {
			_, err := node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: d.volume, StagingTargetPath: stage, TargetPath: path, VolumeCapability: d.capability()})
			return "", err
		}
	}
	unpublish := func(path string) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) {
			if _, err := node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: d.volume, TargetPath: path}); err != nil {
				return "", err
			}
			return "", mustBeGone(path)
		}
	}
	return []demoStep{
		{"Start the plugin on a temporary pool and socket", false, d.start},
		{fmt.Sprintf("CreateVolume: %d MiB in the pool, thin", demoSize>>20), false, func(ctx context.Context) (string, error) {
			resp, err := controller().CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "demo", CapacityRange: &csi.CapacityRange{RequiredBytes: demoSize}, VolumeCapabilities: []*csi.VolumeCapability{d.capability()},
				Parameters: map[string]string{"provisioning": "thin"}}) // the device of a thick one would refuse discards ever after
			d.volume = resp.GetVolume().GetVolumeId()
			return ": volume " + d.volume, err
		}},
		{"NodeStageVolume: attach a loop device, prove it blank, make an xfs file system, mount it", true, func(ctx context.Context) (string, error) {
			_, err := node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: d.volume, StagingTargetPath: stage, VolumeCapability: d.capability()})
			return "", err
		}},
		{"NodePublishVolume: bind it into a first pod", false, publish(pod1)},
		{"NodePublishVolume: bind it into a second pod", true, publish(pod2)},
		{"Write through the first pod, read through the second", false, func(context.Context) (string, error) {
			if err := os.WriteFile(filepath.Join(pod1, "hello"), []byte(demoText), 0o600); err != nil {
				return "", err
			}
			return ": “" + demoText + "”", d.readBack(pod2)
		}},
		{fmt.Sprintf("NodeExpandVolume: grow to %d MiB while it is mounted", demoGrown>>20), false, func(ctx context.Context) (string, error) {
			resp, err := node().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: d.volume, VolumePath: pod1, StagingTargetPath: stage, CapacityRange: &csi.CapacityRange{RequiredBytes: demoGrown}, VolumeCapability: d.capability()})
			if err == nil && resp.GetCapacityBytes() < demoGrown {
				err = fmt.Errorf("it has %d bytes", resp.GetCapacityBytes())
			}
			return "", err
		}},
		{"NodeGetVolumeStats: the pod sees the new size", false, func(ctx context.Context) (string, error) {
			resp, err := node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: d.volume, VolumePath: pod2})
			if err != nil {
				return "", err
			}
			bytes := resp.GetUsage()[0]
			if bytes.GetTotal() <= demoSize {
				return "", fmt.Errorf("the file system still has %d bytes", bytes.GetTotal())
			}
			return fmt.Sprintf(": %d MiB, %d MiB of them available", bytes.GetTotal()>>20, bytes.GetAvailable()>>20), nil
		}},
		{"Kill the plugin (SIGKILL): the pods' mounts stay", false, func(context.Context) (string, error) {
			return "", errors.Join(d.kill(), d.readBack(pod1), d.readBack(pod2))
		}},
		{"Start it again: it takes over what is there", false, d.start},
		{"Unmount the volume behind its back: it is healed", true, func(ctx context.Context) (string, error) {
			return "", d.tear(ctx, pod1, stage)
		}},
		{"NodeUnpublishVolume: first pod", false, unpublish(pod1)},
		{"NodeUnpublishVolume: second pod", false, unpublish(pod2)},
		{"NodeUnstageVolume: unmount and detach", true, func(ctx context.Context) (string, error) {
			_, err := node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: d.volume, StagingTargetPath: stage})
			return "", err
		}},
		{"DeleteVolume", false, func(ctx context.Context) (string, error) {
			_, err := controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: d.volume})
			return "", err
		}},
	}
}

func mustBeGone(path string) error {
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is still there (%w)", path, err)
	}
	return nil
}

func (d *demo) readBack(pod string) error {
	text, err := os.ReadFile(filepath.Join(pod, "hello"))
	if err == nil && string(text) != demoText {
		err = fmt.Errorf("%s reads %q", pod, text)
	}
	return err
}

// demoHealLimit bounds the wait for a mount that was torn off.
const demoHealLimit = 30 * time.Second

// tear unmounts what is mounted at the paths, and waits until the plugin has restored all of it.
func (d *demo) tear(ctx context.Context, paths ...string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, demoHealLimit)
	defer cancel()
	// It is ready for poll(2) with each change of the mount table since it was opened, or polled last.
	table, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, table.Close()) }()
	for _, path := range paths {
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return &os.PathError{Op: "umount", Path: path, Err: err}
		}
	}
	for {
		var torn error
		for _, path := range paths {
			torn = errors.Join(torn, d.readBack(path))
		}
		if torn == nil { // the plugin must have seen that, too
			report, err := driver.Retry(ctx, d.path("state"), d.volume)
			if err != nil {
				return err
			}
			left := report.Unsettled()
			if len(left) == 0 {
				return nil
			}
			torn = errors.New(strings.Join(left, "; "))
		}
		if ctx.Err() != nil {
			return fmt.Errorf("not healed: %w", torn)
		}
		changes := []unix.PollFd{{Fd: int32(table.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(changes, demoLookEvery); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll %s: %w", table.Name(), err)
		}
	}
}

// start starts the plugin and waits until it is ready.
func (d *demo) start(ctx context.Context) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	endpoint := "unix://" + d.path("csi.sock")
	d.plugin = exec.Command(self, "serve", "--endpoint", endpoint, "--node-id", "demo", "--state-dir", d.path("state"),
		"--pool-dir", d.path("pool"), "--pool-reserve", "0", "--kubelet-dir", d.path("kubelet"))
	d.plugin.Stdout, d.plugin.Stderr = d.log, d.log
	d.plugin.ExtraFiles = []*os.File{d.alive}
	// In a process group of its own, as a terminal interrupts all of one.
	d.plugin.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := d.plugin.Start(); err != nil {
		d.plugin = nil
		return "", err
	}
	if d.client, err = client.Connect(endpoint); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	_, err = d.client.Identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
	return fmt.Sprintf(": pid %d", d.plugin.Process.Pid), err
}

// kill ends the plugin with SIGKILL, as a crash would.
func (d *demo) kill() error {
	if d.plugin == nil {
		return nil
	}
	err := d.plugin.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	_ = d.plugin.Wait() // reports the kill itself
	if d.client != nil {
		err = errors.Join(err, d.client.Close())
		d.client = nil
	}
	d.plugin = nil
	return err
}

func (d *demo) showStatus(ctx context.Context) {
	fmt.Fprintln(d.out, "    csi-node status:")
	report, err := driver.ReadReport(ctx, d.path("state"), options())
	if err == nil {
		for _, v := range report.Volumes {
			for i := range v.Parts {
				p := &v.Parts[i]
				for _, text := range []*string{&p.Part, &p.Path, &p.Asked} {
					*text = strings.ReplaceAll(*text, d.dir, "…")
				}
			}
		}
		var text strings.Builder
		if err = report.Print(&text); err == nil {
			fmt.Fprintf(d.out, "      %s\n", strings.ReplaceAll(strings.TrimRight(text.String(), "\n"), "\n", "\n      "))
		}
	}
	if err != nil {
		fmt.Fprintf(d.out, "      %v\n", err)
	}
}

// showLog prints the end of the plugin's log.
func (d *demo) showLog() {
	log, err := os.ReadFile(d.path("plugin.log"))
	if err != nil {
		return
	}
	lines := strings.Split(strings.TrimRight(string(log), "\n"), "\n")
	fmt.Fprintf(d.out, "The end of the plugin's log:\n  %s\n", strings.Join(lines[max(0, len(lines)-20):], "\n  "))
}
