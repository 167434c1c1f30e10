package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/csi-node/csi-node/pkg/client"
	"github.com/csi-node/csi-node/pkg/driver"
)

const (
	demoSize  = 320 << 20 // bytes; mkfs.xfs makes nothing under 300 MiB
	demoGrown = 512 << 20
	demoText  = "written through the first pod"
)

func newDemoCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "demo",
		Short: "Play kubelet for one volume, from creation to deletion",
		Long: `demo starts a plugin of its own on a temporary pool and socket and takes one
volume through its life: create, stage, publish to two pods, write, read, grow
while mounted, stats, a plugin killed and started again, unpublish, unstage,
delete. It needs root and leaves nothing behind.`,
		Example: "  sudo csi-node demo",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("the demo mounts file systems: run it as root")
			}
			return runDemo(cmd.Context(), cmd.OutOrStdout())
		},
	}
}

// demo is one volume's life and the plugin that it is lived with.
type demo struct {
	out    io.Writer
	dir    string
	plugin *exec.Cmd
	log    *os.File
	client *client.Client
	volume string
}

func runDemo(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "csi-node-demo-")
	if err != nil {
		return err
	}
	// The plugin refuses paths through symbolic links, which a TMPDIR may hold.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return err
	}
	d := &demo{out: out, dir: dir}
	defer func() {
		if clean := d.cleanUp(); clean != nil {
			err = errors.Join(err, fmt.Errorf("something of the demo is left in %s: %w", dir, clean))
		}
	}()
	for _, sub := range []string{"state", "kubelet", "kubelet/stage", "kubelet/pod-1", "kubelet/pod-2"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o750); err != nil {
			return err
		}
	}
	if d.log, err = os.Create(filepath.Join(dir, "plugin.log")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.log.Close()) }()
	start := time.Now()
	for i, step := range d.story() {
		began := time.Now()
		fmt.Fprintf(out, "%2d. %s\n", i+1, step.title)
		result, err := step.do(ctx)
		if err != nil {
			d.showLog()
			return fmt.Errorf("%s: %w", step.title, err)
		}
		fmt.Fprintf(out, "    ok in %s%s\n", time.Since(began).Round(100*time.Microsecond), result)
		if step.status {
			d.showStatus(ctx)
		}
	}
	fmt.Fprintf(out, "\nA whole life in %s: nothing was lost, and nothing is left.\n", time.Since(start).Round(time.Millisecond))
	return nil
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
		{fmt.Sprintf("CreateVolume: %d MiB in the pool", demoSize>>20), false, func(ctx context.Context) (string, error) {
			resp, err := controller().CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "demo", CapacityRange: &csi.CapacityRange{RequiredBytes: demoSize}, VolumeCapabilities: []*csi.VolumeCapability{d.capability()}})
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
		{"Start it again: it takes over what is there", true, d.start},
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
	err := errors.Join(d.plugin.Process.Kill(), d.client.Close())
	_ = d.plugin.Wait() // reports the kill itself
	d.plugin = nil
	return err
}

func (d *demo) showStatus(ctx context.Context) {
	fmt.Fprintln(d.out, "    csi-node status:")
	report, err := driver.ReadReport(ctx, d.path("state"))
	if err == nil {
		for _, v := range report.Volumes {
			for i := range v.Parts {
				p := &v.Parts[i]
				p.Part, p.Asked = strings.ReplaceAll(p.Part, d.dir, "…"), strings.ReplaceAll(p.Asked, d.dir, "…")
			}
		}
		var text strings.Builder
		if err = printStatus(&text, report); err == nil {
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
	fmt.Fprintf(d.out, "The plugin's last words:\n  %s\n", strings.Join(lines[max(0, len(lines)-20):], "\n  "))
}

// cleanUp takes down whatever a story that broke off has left.
func (d *demo) cleanUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if d.plugin != nil && d.volume != "" {
		node := d.client.Node
		var errs []error
		for _, pod := range []string{"kubelet/pod-1/mount", "kubelet/pod-2/mount"} {
			_, err := node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: d.volume, TargetPath: d.path(pod)})
			errs = append(errs, err)
		}
		_, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: d.volume, StagingTargetPath: d.path("kubelet/stage")})
		if err := errors.Join(append(errs, err)...); err != nil {
			return errors.Join(err, d.kill())
		}
	}
	if err := d.kill(); err != nil {
		return err
	}
	return os.RemoveAll(d.dir)
}
