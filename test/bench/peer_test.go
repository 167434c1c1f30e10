package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/csi-node/csi-node/test/machine"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"
)

// peerVariable names the environment variable that makes this test binary serve as
// the driver of that name, instead of testing.
const peerVariable = "CSI_NODE_BENCH_PEER"

// way is how a peer does what a volume needs, inside the call.
type way interface {
	// attach returns the loop device that shows a file.
	attach(id, file string) (device string, err error)
	// mount mounts the device, and formats it before if it is blank.
	mount(device, path, fsType string) error
	bind(from, to string, readOnly bool) error
	mounted(path string) (bool, error)
	unmount(path string) error
	detach(id, file string) error
}

// ways are the peers by name. The floor does with bare system calls what cannot be
// left out, and writes a record for each volume; bare is the floor without records;
// usual is how other drivers do it, by k8s.io/mount-utils and losetup.
func wayOf(name, stateDir string) (w way, records string, err error) {
	switch name {
	case floorName:
		return &bare{devices: map[string]*os.File{}}, stateDir, nil
	case bareName:
		return &bare{devices: map[string]*os.File{}}, "", nil
	case usualName:
		return usual{&mount.SafeFormatAndMount{Interface: mount.New(""), Exec: utilexec.New()}, &sync.Mutex{}}, "", nil
	}
	return nil, "", fmt.Errorf("there is no peer %q", name)
}

// servePeer serves a peer until SIGTERM, with the flags that the harness gives a driver.
func servePeer(name string) error {
	flags := map[string]string{}
	for i := 2; i+1 < len(os.Args); i += 2 {
		flags[strings.TrimPrefix(os.Args[i], "--")] = os.Args[i+1]
	}
	pool := filepath.Join(flags["lib-dir"], "volumes")
	w, records, err := wayOf(name, flags["state-dir"])
	if err := errors.Join(err, os.MkdirAll(pool, 0o750), os.MkdirAll(flags["state-dir"], 0o750)); err != nil {
		return err
	}
	listener, err := net.Listen("unix", strings.TrimPrefix(flags["endpoint"], "unix://"))
	if err != nil {
		return err
	}
	server, p := grpc.NewServer(), &peer{way: w, pool: pool, records: records}
	csi.RegisterIdentityServer(server, p)
	csi.RegisterControllerServer(server, p)
	csi.RegisterNodeServer(server, p)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, server.GracefulStop)
	return server.Serve(listener)
}

// peer serves the calls of a volume's life, and acts inside them.
type peer struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	way
	pool    string
	records string // the directory of the records, "" without any
}

func (*peer) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (p *peer) data(id string) string { return filepath.Join(p.pool, id, "data") }

// CreateVolume makes a thin volume, which is on the disk when it answers.
func (p *peer) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	id, bytes := req.GetName(), req.GetCapacityRange().GetRequiredBytes()
	dir := filepath.Dir(p.data(id))
	if err := os.Mkdir(dir, 0o750); err != nil {
		return nil, err
	}
	data, err := os.Create(p.data(id))
	if err != nil {
		return nil, err
	}
	err = errors.Join(data.Truncate(bytes), data.Close())
	facts, factsErr := os.Create(filepath.Join(dir, "volume.json"))
	if err := errors.Join(err, factsErr); err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(facts, `{"id":%q,"bytes":%d}`, id, bytes)
	if err := errors.Join(err, facts.Sync(), facts.Close(), syncDir(dir), syncDir(p.pool)); err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id, CapacityBytes: bytes}}, nil
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (p *peer) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, os.RemoveAll(filepath.Dir(p.data(req.GetVolumeId())))
}

// record remembers what stands of a volume, as a crash would need it.
func (p *peer) record(id, text string) error {
	if p.records == "" {
		return nil
	}
	return os.WriteFile(filepath.Join(p.records, id), []byte(text), 0o600)
}

func (p *peer) NodeStageVolume(_ context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	if err := errors.Join(p.record(id, path), os.MkdirAll(path, 0o750)); err != nil {
		return nil, err
	}
	if is, err := p.mounted(path); is || err != nil {
		return &csi.NodeStageVolumeResponse{}, err
	}
	device, err := p.attach(id, p.data(id))
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, p.mount(device, path, req.GetVolumeCapability().GetMount().GetFsType())
}

func (p *peer) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetTargetPath()
	if err := errors.Join(p.record(id, path), os.MkdirAll(path, 0o750)); err != nil {
		return nil, err
	}
	if is, err := p.mounted(path); is || err != nil {
		return &csi.NodePublishVolumeResponse{}, err
	}
	return &csi.NodePublishVolumeResponse{}, p.bind(req.GetStagingTargetPath(), path, req.GetReadonly())
}

func (p *peer) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	path := req.GetTargetPath()
	err := errors.Join(p.record(req.GetVolumeId(), path), p.unmount(path))
	if err == nil {
		err = unix.Rmdir(path)
	}
	if errors.Is(err, unix.ENOENT) { // mount-utils removes it
		err = nil
	}
	return &csi.NodeUnpublishVolumeResponse{}, err
}

func (p *peer) NodeUnstageVolume(_ context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := p.unmount(req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	if err := p.detach(id, p.data(id)); err != nil {
		return nil, err
	}
	if p.records == "" {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	return &csi.NodeUnstageVolumeResponse{}, os.Remove(filepath.Join(p.records, id))
}

func (*peer) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(req.GetVolumePath(), &s); err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: int64(s.Blocks) * s.Bsize, Available: int64(s.Bavail) * s.Bsize, Used: int64(s.Blocks-s.Bfree) * s.Bsize},
		{Unit: csi.VolumeUsage_INODES, Total: int64(s.Files), Available: int64(s.Ffree), Used: int64(s.Files - s.Ffree)},
	}}, nil
}

// bare does everything by system calls; only mkfs is a program.
type bare struct {
	mu      sync.Mutex
	devices map[string]*os.File // by volume
}

func (b *bare) attach(id, file string) (string, error) {
	backing, err := os.OpenFile(file, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return "", err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer control.Close()
	for {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", err
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) {
			continue // somebody has removed it since
		}
		if err != nil {
			return "", err
		}
		config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
		config.Info.Flags = unix.LO_FLAGS_DIRECT_IO
		switch err := unix.IoctlLoopConfigure(int(device.Fd()), &config); {
		case err == nil:
			b.mu.Lock()
			b.devices[id] = device
			b.mu.Unlock()
			return device.Name(), nil
		case !errors.Is(err, unix.EBUSY): // somebody was faster
			return "", errors.Join(err, device.Close())
		}
		if err := device.Close(); err != nil {
			return "", err
		}
	}
}

func (b *bare) mount(device, path, fsType string) error {
	err := unix.Mount(device, path, fsType, 0, "")
	if !errors.Is(err, unix.EINVAL) { // what the kernel says of a device without that file system
		return err
	}
	if err := mkfs(device, fsType); err != nil {
		return err
	}
	return unix.Mount(device, path, fsType, 0, "")
}

// mkfs makes a file system with the options that the plugin gives.
func mkfs(device, fsType string) error {
	options := map[string][]string{
		"ext4": {"-q", "-m", "0", "-b", "4096", "-E", "nodiscard,assume_storage_prezeroed=1"},
		"xfs":  {"-q", "-K"},
	}[fsType]
	if out, err := exec.Command("mkfs."+fsType, append(options, device)...).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.%s: %w\n%s", fsType, err, out)
	}
	return nil
}

func (b *bare) bind(from, to string, readOnly bool) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	if readOnly {
		err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	}
	if err == nil {
		err = unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	return errors.Join(err, unix.Close(tree))
}

func (b *bare) mounted(path string) (bool, error) {
	var s unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BASIC_STATS, &s)
	return s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, err
}

func (b *bare) unmount(path string) error { return machine.Unmount(path) }

func (b *bare) detach(id, _ string) error {
	b.mu.Lock()
	device := b.devices[id]
	delete(b.devices, id)
	b.mu.Unlock()
	return errors.Join(unix.IoctlSetInt(int(device.Fd()), unix.LOOP_CLR_FD, 0), device.Close())
}

// usual does what other drivers do. Its losetup names a device by a number that may be
// another volume's by then, so one call at a time attaches or detaches.
type usual struct {
	*mount.SafeFormatAndMount
	losetup *sync.Mutex
}

func (u usual) attach(_, file string) (string, error) {
	u.losetup.Lock()
	defer u.losetup.Unlock()
	out, err := u.Exec.Command("losetup", "--find", "--show", file).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("losetup: %w\n%s", err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

func (u usual) mount(device, path, fsType string) error {
	return u.FormatAndMount(device, path, fsType, nil)
}

func (u usual) bind(from, to string, readOnly bool) error {
	options := []string{"bind"}
	if readOnly {
		options = append(options, "ro")
	}
	return u.Mount(from, to, "", options)
}

func (u usual) mounted(path string) (bool, error) {
	not, err := u.IsLikelyNotMountPoint(path)
	return !not, err
}

func (u usual) unmount(path string) error { return mount.CleanupMountPoint(path, u, true) }

func (u usual) detach(_, file string) error {
	u.losetup.Lock()
	defer u.losetup.Unlock()
	out, err := u.Exec.Command("losetup", "--associated", file, "--noheadings", "--output", "NAME,BACK-FILE").CombinedOutput()
	if err != nil {
		return fmt.Errorf("losetup: %w\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		// A device that is just being detached still shows the inode of a file that is
		// gone, and this file may have got the same number. By now it may be another's.
		device, of, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.TrimSpace(of) != file {
			continue
		}
		out, err := u.Exec.Command("losetup", "--detach", device).CombinedOutput()
		if err != nil && !strings.Contains(string(out), "No such device") {
			return fmt.Errorf("losetup: %w\n%s", err, out)
		}
	}
	return nil
}
