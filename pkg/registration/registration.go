// Package registration makes the plugin known to kubelet, without the
// node-driver-registrar sidecar: it serves kubelet's plugin registration API on
// a socket in the directory that kubelet watches. kubelet asks what the plugin
// is, calls NodeGetInfo, and tells what came of it.
package registration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// csiVersions are the versions that kubelet's CSI plugin takes (it looks at the
// major number: validateVersions in pkg/volume/csi/csi_plugin.go, v1.36).
var csiVersions = []string{"1.0.0"}

// Config says what is registered where.
type Config struct {
	Dir        string // that kubelet watches: <kubelet-dir>/plugins_registry
	DriverName string
	Endpoint   string // path of the CSI socket, as kubelet sees it
}

// Status is what kubelet told last. The JSON is part of the contract of
// `csi-node status --output json`.
type Status struct {
	Socket     string    `json:"socket"`
	Registered bool      `json:"registered"`
	Error      string    `json:"error,omitempty"` // why kubelet refused, or cannot be spoken to
	Since      time.Time `json:"since,omitzero"`  // kubelet said so; zero: it has not asked
}

// Registrar serves the registration API. Its methods may be called concurrently.
type Registrar struct {
	registerapi.UnimplementedRegistrationServer
	cfg Config

	mu     sync.Mutex
	status Status
}

// New returns a Registrar that does nothing until Run.
func New(cfg Config) *Registrar {
	return &Registrar{cfg: cfg, status: Status{Socket: filepath.Join(cfg.Dir, cfg.DriverName+"-reg.sock")}}
}

// Status returns what kubelet told last.
func (r *Registrar) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// Run serves until ctx ends, and removes the socket then, by which kubelet
// forgets the plugin. A socket or a directory that is taken away is made again,
// so that a kubelet which starts anew finds it.
func (r *Registrar) Run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("registration: watch %s: %w", r.cfg.Dir, err)
	}
	for ctx.Err() == nil {
		if err := r.serve(ctx, watcher); err != nil && ctx.Err() == nil {
			r.fail(ctx, err)
		}
	}
	return watcher.Close()
}

// retryTime is the pause after a failure to serve.
const retryTime = 10 * time.Second

// fail tells why kubelet cannot find the plugin, which serves its volumes all
// the same, and waits a while.
func (r *Registrar) fail(ctx context.Context, err error) {
	klog.FromContext(ctx).Error(err, "kubelet cannot be spoken to; it is tried again", "socket", r.Status().Socket, "pause", retryTime)
	r.mu.Lock()
	r.status.Registered, r.status.Error, r.status.Since = false, err.Error(), time.Now()
	r.mu.Unlock()
	pause := time.NewTimer(retryTime)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-ctx.Done():
	}
}

// serve serves on one socket until it is taken away or ctx ends.
func (r *Registrar) serve(ctx context.Context, watcher *fsnotify.Watcher) error {
	if err := os.MkdirAll(r.cfg.Dir, 0o750); err != nil {
		return err
	}
	// The directory above tells when this one is removed.
	for _, dir := range []string{filepath.Dir(r.cfg.Dir), r.cfg.Dir} {
		if err := watcher.Add(dir); errors.Is(err, os.ErrNotExist) {
			return nil // once more
		} else if err != nil {
			return fmt.Errorf("watch %s: %w", dir, err)
		}
	}
	listener, err := r.listen()
	if errors.Is(err, os.ErrNotExist) {
		return nil // once more
	}
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Waiting for kubelet to register the plugin", "socket", r.Status().Socket)
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, r)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	err = r.awaitLoss(ctx, watcher, listener)
	if listener.inPlace() {
		err = errors.Join(err, os.Remove(listener.path))
	}
	server.Stop()
	if e := <-served; !errors.Is(e, grpc.ErrServerStopped) { // stopped before it served
		err = errors.Join(err, e)
	}
	return err
}

// awaitLoss blocks until the socket is not in its place any more, or ctx ends.
func (r *Registrar) awaitLoss(ctx context.Context, watcher *fsnotify.Watcher, listener *placed) error {
	for listener.inPlace() {
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.Events:
		case err := <-watcher.Errors: // an overflow: something has changed
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return err
			}
		}
	}
	klog.FromContext(ctx).Info("The registration socket was taken away and is made again", "socket", listener.path)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = Status{Socket: r.status.Socket} // kubelet forgets with the socket
	return nil
}

// placed is a listener and the file that it was put into place as.
type placed struct {
	net.Listener
	path string
	file os.FileInfo
}

func (l *placed) inPlace() bool {
	now, err := os.Lstat(l.path)
	return err == nil && os.SameFile(now, l.file)
}

// listen makes the socket under a name that kubelet passes over, and then puts
// it into place: kubelet never meets one that does not answer, and does not
// forget the plugin when it takes the place of an old one.
func (r *Registrar) listen() (*placed, error) {
	path := r.Status().Socket
	fresh := filepath.Join(r.cfg.Dir, "."+filepath.Base(path))
	if err := os.Remove(fresh); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false) // it knows the old name
	err = os.Chmod(fresh, 0o600)
	var file os.FileInfo
	if err == nil {
		file, err = os.Lstat(fresh)
	}
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return &placed{listener, path, file}, nil
}

// GetInfo answers kubelet's question what the plugin is.
func (r *Registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: r.cfg.DriverName, Endpoint: r.cfg.Endpoint, SupportedVersions: csiVersions,
	}, nil
}

// NotifyRegistrationStatus keeps what kubelet says. After a refusal kubelet
// tries again by itself.
func (r *Registrar) NotifyRegistrationStatus(ctx context.Context, status *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		klog.FromContext(ctx).Info("Registered with kubelet", "driver", r.cfg.DriverName)
	} else {
		klog.FromContext(ctx).Error(errors.New(status.GetError()), "kubelet refused to register the plugin", "driver", r.cfg.DriverName)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Registered, r.status.Error, r.status.Since = status.GetPluginRegistered(), status.GetError(), time.Now()
	return &registerapi.RegistrationStatusResponse{}, nil
}
