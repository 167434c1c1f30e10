// Package registration registers the plugin with kubelet, without the
// node-driver-registrar sidecar: it serves kubelet's plugin registration API on a
// socket in the directory that kubelet watches. kubelet asks for the driver's name and
// socket (GetInfo), calls NodeGetInfo on that socket, and reports the result
// (NotifyRegistrationStatus). Begin with serve.
package registration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/csi-node/csi-node/pkg/process"
)

// csiVersions are the versions that kubelet's CSI plugin accepts (it checks the
// major number: validateVersions in pkg/volume/csi/csi_plugin.go, v1.36).
var csiVersions = []string{"1.0.0"}

// Config says what is registered, and where.
type Config struct {
	Dir        string // that kubelet watches: <kubelet-dir>/plugins_registry
	DriverName string
	Endpoint   string // path of the CSI socket, as kubelet sees it
}

// Status is the last answer of kubelet.
type Status struct {
	Socket     string
	Registered bool
	Error      string    // why kubelet refused, or cannot be reached
	Since      time.Time // of the answer; zero: kubelet has not asked yet
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

// Status returns the last answer of kubelet.
func (r *Registrar) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// Run serves until ctx ends. Then it removes the socket, and kubelet unregisters the
// plugin. A socket or a directory that somebody removes is created again, so that a
// kubelet that restarts finds it. Whatever fails is tried again.
func (r *Registrar) Run(ctx context.Context) {
	for removed := false; ctx.Err() == nil; {
		err := r.serve(ctx)
		again := errors.Is(err, errRemoved) && !removed
		if err != nil && !again && ctx.Err() == nil {
			r.fail(ctx, err)
		}
		removed = errors.Is(err, errRemoved)
	}
}

// errRemoved says that the directory went away as soon as it was there. It is made again at
// once; if that happens twice in a row, it is something else.
var errRemoved = errors.New("the directory of the registration socket was removed; if it is a mount whose source is gone, restart the pod")

// errServed says that somebody else serves in the plugin's place. kubelet would end the registration
// of one whose socket is replaced, and its volumes be asked of another: who is there stays.
var errServed = errors.New("another process serves the plugin's registration socket: two plugins of the node have the same driver name: end one, or give it another --driver-name and directories of its own")

const (
	retryTime = 10 * time.Second // the pause after serving failed
	dialTime  = time.Second      // bounds the question whether somebody serves
)

// fail reports why kubelet cannot find the plugin, and waits for retryTime. The plugin
// serves its volumes all the same.
func (r *Registrar) fail(ctx context.Context, err error) {
	klog.FromContext(ctx).Error(err, "Cannot serve the registration socket for kubelet; it is tried again", "socket", r.Status().Socket, "pause", retryTime)
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

// serve serves on one socket until the socket is removed or ctx ends.
func (r *Registrar) serve(ctx context.Context) error {
	if err := os.MkdirAll(r.cfg.Dir, 0o750); err != nil {
		return err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil { // EMFILE: others have all instances of inotify that the user may have
		return fmt.Errorf("watch %s: %w", r.cfg.Dir, err)
	}
	defer watcher.Close()
	// Watching the parent notices when the directory itself is removed.
	for _, dir := range []string{filepath.Dir(r.cfg.Dir), r.cfg.Dir} {
		if err := watcher.Add(dir); errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%w: %w", errRemoved, err)
		} else if err != nil {
			return fmt.Errorf("watch %s: %w", dir, err)
		}
	}
	listener, err := r.listen()
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %w", errRemoved, err)
	}
	if err != nil {
		return err
	}
	r.forgetAnswer()
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
	if e := <-served; !errors.Is(e, grpc.ErrServerStopped) { // returned if Stop came before Serve
		err = errors.Join(err, e)
	}
	return err
}

// awaitLoss blocks until the socket is removed or replaced, or ctx ends.
func (r *Registrar) awaitLoss(ctx context.Context, watcher *fsnotify.Watcher, listener *placed) error {
	if err := watcher.Add(r.cfg.Dir); err != nil && listener.inPlace() { // again: it may have been replaced before the socket was made
		return fmt.Errorf("watch %s: %w", r.cfg.Dir, err)
	}
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
	if err := refuseServed(listener.path); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("The registration socket was removed and is created again", "socket", listener.path)
	r.forgetAnswer() // as kubelet does with the socket
	return nil
}

// forgetAnswer says that kubelet has not asked yet.
func (r *Registrar) forgetAnswer() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = Status{Socket: r.status.Socket}
}

// placed is a listener and its socket file.
type placed struct {
	net.Listener
	path string
	file os.FileInfo
}

func (l *placed) inPlace() bool {
	now, err := os.Lstat(l.path)
	return err == nil && os.SameFile(now, l.file)
}

// NewSocket returns where the socket of a driver is made: under a name that kubelet ignores.
func NewSocket(dir, driver string) string { return filepath.Join(dir, "."+driver+"-reg.sock") }

// refuseServed returns an error if a process serves a socket that is not about to end.
func refuseServed(path string) error {
	conn, err := net.DialTimeout("unix", path, dialTime)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED): // whoever made it has ended
		return nil
	case err != nil: // such as EAGAIN of a process that is busy
		return fmt.Errorf("%w (%w)", errServed, err)
	}
	server, err := process.Peer(conn)
	if err := errors.Join(err, conn.Close()); err != nil {
		return err
	}
	if dead, err := process.Dead(server); err != nil || dead {
		return err
	}
	return fmt.Errorf("%w: it is %s", errServed, process.Name(server))
}

// listen creates the socket under a name that kubelet ignores, and then renames it:
// kubelet never finds a socket that does not answer.
func (r *Registrar) listen() (*placed, error) {
	path := r.Status().Socket
	if err := refuseServed(path); err != nil {
		return nil, err
	}
	fresh := NewSocket(r.cfg.Dir, r.cfg.DriverName)
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

// GetInfo returns the driver's name and the path of its CSI socket.
func (r *Registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: r.cfg.DriverName, Endpoint: r.cfg.Endpoint, SupportedVersions: csiVersions,
	}, nil
}

// NotifyRegistrationStatus keeps the answer of kubelet. After a refusal kubelet tries
// again by itself.
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
