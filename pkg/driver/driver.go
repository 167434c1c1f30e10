// Package driver is the engine for whoever builds a CSI driver: Main is a whole
// program, made of Options that list the backends. It wires the parts and runs
// them: the store, the reconciler, the CSI services on their socket, metrics,
// health and shutdown. It decides nothing itself, and knows backends only by the
// interfaces of package devices.
//
//	func main() {
//		driver.Main(driver.Options{Name: "csi.acme.example", Version: version, Backends: []devices.Kind{acme.Kind()}})
//	}
//
// docs/backends.md explains how to write a backend, and examples/acme is one with
// its driver. Run is the plugin without a command line.
//
// Read options.go for what a driver's builder decides, then this file from Run
// down: how the plugin is put together, served and stopped. kernel.go is what the
// reconciler acts on. web.go is the server, and status_client.go the client, of the socket
// over which the command line (command_*.go) asks a running plugin; offline.go
// answers when none runs.
package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/controllerserver"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/boot"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/nodeserver"
	"github.com/csi-node/csi-node/pkg/pods"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/registration"
	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/pkg/tracing"
	"github.com/csi-node/csi-node/pkg/uevents"
)

// Config is how an operator sets the plugin up; each field is a flag of the serve
// command.
type Config struct {
	Endpoint     string // of the CSI socket: unix:///path
	DriverName   string
	NodeID       string
	StateDir     string // on a tmpfs
	LibDir       string // outlives reboots
	KubeletDir   string
	HTTPEndpoint string // host:port; empty: none
	// BackendFlags are the values of the backends' own flags, by name. Flags that
	// are missing have their defaults.
	BackendFlags map[string]string
	// RegistrationDir is where kubelet looks for plugins; empty: somebody else
	// registers the plugin.
	RegistrationDir string
	MaxVolumes      int64 // reported to the scheduler; 0: the limit of the backends
	DetectOnly      bool  // report lost mounts without restoring them

	TracingEndpoint   string // of an OTLP collector: host:port or unix:///path; empty: nothing is traced
	TracingPerMillion int    // see tracing.Config

	log *logTail // nil: the log's end is not kept
}

// longestSocketPath is sun_path without the zero at its end (unix(7)).
const longestSocketPath = 107

// statusSocket is the name of a socket in the state directory.
const statusSocket = "status.sock"

// resync is how often a volume is looked at when no event asks for it.
const resync = 10 * time.Minute

func (c Config) validate() error {
	if err := checkName(c.DriverName); err != nil {
		return fmt.Errorf("--driver-name %w", err)
	}
	switch {
	case c.NodeID == "" || len(c.NodeID) > 256:
		return fmt.Errorf("--node-id %q: must have 1 to 256 bytes", c.NodeID)
	case c.MaxVolumes < 0:
		return fmt.Errorf("--max-volumes-per-node %d: must not be negative; 0 means the limit of the storage", c.MaxVolumes)
	}
	if c.TracingEndpoint != "" {
		if err := tracing.CheckEndpoint(c.TracingEndpoint); err != nil {
			return fmt.Errorf("--tracing-endpoint %w", err)
		}
	}
	if c.TracingPerMillion < 0 || c.TracingPerMillion > tracing.AllTraces {
		return fmt.Errorf("--tracing-sampling-rate-per-million %d: must be 0 to %d", c.TracingPerMillion, tracing.AllTraces)
	}
	if c.HTTPEndpoint != "" {
		_, port, err := net.SplitHostPort(c.HTTPEndpoint)
		if err == nil {
			_, err = net.LookupPort("tcp", port)
		}
		if err != nil {
			return fmt.Errorf("--http-endpoint %q: must be an address with a port, such as 127.0.0.1:9810: %w", c.HTTPEndpoint, err)
		}
	}
	endpoint, err := socketPath(c.Endpoint)
	if err != nil {
		return err
	}
	for _, dir := range []struct{ flag, path string }{
		{"--state-dir", c.StateDir}, {"--kubelet-dir", c.KubeletDir}, {"--lib-dir", c.LibDir}, {"--registration-dir", c.RegistrationDir},
	} {
		if !filepath.IsAbs(dir.path) && (dir.flag != "--registration-dir" || dir.path != "") {
			return fmt.Errorf("%s %q: must be an absolute path", dir.flag, dir.path)
		}
	}
	for _, socket := range []struct{ flag, path string }{
		{"--endpoint", endpoint}, {"--state-dir", filepath.Join(c.StateDir, statusSocket)}, {"--registration-dir", registration.NewSocket(c.RegistrationDir, c.DriverName)},
	} {
		if len(socket.path) > longestSocketPath {
			return fmt.Errorf("%s: the path of the socket %s is too long: it has %d bytes, and the kernel takes %d", socket.flag, socket.path, len(socket.path), longestSocketPath)
		}
	}
	return nil
}

// plugin holds the parts that Run has put together.
type plugin struct {
	Config
	options    Options
	properties devices.Properties
	store      *store.Store
	backends   []backend // open ones, the default one first
	devices    *devices.Set
	layers     []devices.Layer
	loops      *loop.Devices
	views      reconciler.Views
	watcher    *mounts.Watcher // nil until it serves
	filesystem *filesystem.Host
	mounts     *mounts.Host
	pods       *pods.Directory
	reconciler *reconciler.Reconciler
	inline     *reconciler.Inline   // nil: no backend accepts inline volumes
	controller csi.ControllerServer // nil: there is none on this node
	metrics    *metrics
	tracing    *tracing.Tracing // nil: nothing is traced
	refusals   refusals
	listing    hang.Calls[inventory]
	looks      hang.Calls[struct{}] // checks of the backends, by name
	needs      *needs
	registrar  *registration.Registrar // nil when somebody else registers the plugin
}

// Run serves until ctx ends, and then leaves every mount and device as it is.
// An error before the socket serves names what is wrong with the setup and what
// to do. A second process on the same state directory waits
// until the first has ended.
func Run(ctx context.Context, cfg Config, o Options) (err error) {
	properties, err := o.check()
	if err != nil {
		return err
	}
	if err := cfg.validate(); err != nil {
		return command.WrongUse("%w", err)
	}
	p := &plugin{Config: cfg, options: o, properties: properties, metrics: newMetrics(o.version())}
	if p.tracing, err = startTracing(ctx, cfg, o.version()); err != nil {
		return fmt.Errorf("--tracing-endpoint %s: %w", cfg.TracingEndpoint, err)
	}
	defer p.tracing.Stop() // after the last call and step
	if cfg.RegistrationDir != "" {
		if err := p.register(); err != nil {
			return err
		}
	}
	var opened error // not err, which may be returned before it is set
	if !endInTime(ctx, func() { opened = p.open(ctx) }) {
		return errors.New("stopped while the storage was being opened, which does not end: perhaps a disk does not answer")
	}
	if opened != nil {
		return opened
	}
	defer func() { err = errors.Join(err, p.release()) }()
	return p.serve(ctx)
}

// register creates the registrar, which contacts kubelet once the CSI socket serves.
func (p *plugin) register() error {
	path, err := socketPath(p.Endpoint)
	if err != nil {
		return err
	}
	p.registrar = registration.New(registration.Config{Dir: p.RegistrationDir, DriverName: p.DriverName, Endpoint: path})
	p.metrics.addRegistration(func() bool { return p.registrar.Status().Registered })
	return nil
}

// open creates the parts. Those that a wrong setup makes fail come first.
func (p *plugin) open(ctx context.Context) (err error) {
	if p.mounts, err = mounts.New(p.KubeletDir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: make it, or set --kubelet-dir to kubelet's --root-dir", err)
		}
		return fmt.Errorf("--kubelet-dir %s: %w", p.KubeletDir, err)
	}
	if p.pods, err = pods.New(p.KubeletDir); err != nil {
		return fmt.Errorf("--kubelet-dir %s: %w", p.KubeletDir, err)
	}
	if p.filesystem, err = filesystem.New(runtime.NumCPU()); err != nil {
		return err
	}
	if err := os.MkdirAll(p.StateDir, 0o750); err != nil {
		return fmt.Errorf("--state-dir %s: %w", p.StateDir, err)
	}
	if err := directoryOrNone(p.LibDir); err != nil {
		return fmt.Errorf("--lib-dir %s: %w", p.LibDir, err)
	}
	bootID, err := boot.ID()
	if err != nil {
		return err
	}
	// The store's lock is taken before anything that two processes must not share.
	if p.store, err = store.Open(ctx, p.StateDir, bootID); err != nil {
		return err
	}
	if err := p.mounts.Sweep(); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot remove what a process that was killed has left", "directory", p.KubeletDir)
	}
	p.spellRecords(ctx)
	if err := p.openVolumes(ctx); err != nil {
		return errors.Join(err, p.release())
	}
	if err := p.writeSettings(ctx); err != nil {
		return errors.Join(fmt.Errorf("--state-dir %s: %w", p.StateDir, err), p.release())
	}
	return nil
}

// directoryOrNone returns an error for a path that neither is a directory nor can be made one:
// it, or what it is below, is something else. Other errors are left to those who use the path.
func directoryOrNone(path string) error {
	for {
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
			path = filepath.Dir(path)
		case err != nil || info.IsDir():
			return nil
		default:
			return fmt.Errorf("%s is not a directory: name one, or a path where one can be made", path)
		}
	}
}

// release closes the backends and the store, so that another process can open them.
func (p *plugin) release() (err error) {
	for _, b := range p.backends {
		if closer, ok := b.Backend.(io.Closer); ok {
			err = errors.Join(err, closer.Close())
		}
	}
	p.backends = nil
	return errors.Join(err, p.store.Close())
}

func (p *plugin) openVolumes(ctx context.Context) (err error) {
	if err := p.openBackends(ctx, false); err != nil {
		return err
	}
	p.needs = p.newNeeds()
	p.metrics.addReadiness(p.needs)
	if p.inline, err = p.inlineVolumes(ctx); err != nil {
		return err
	}
	p.reconciler = reconciler.New(reconciler.Config{
		Store:      p.store,
		Kernel:     p.kernel(),
		Hook:       p.hook(),
		Metrics:    p.metrics,
		Tracer:     p.tracing.Tracer(),
		DetectOnly: p.DetectOnly,
		Resync:     resync,
	})
	if len(p.devices.Provisioners()) > 0 {
		p.controller = p.provisioner()
	}
	if p.options.Controller != nil {
		p.controller = p.options.Controller(p.controller)
	}
	p.metrics.addVolumes(p.reconciler)
	for _, b := range p.backends {
		if meter, ok := b.Backend.(devices.Meter); ok {
			p.metrics.addBackend(b.name, func() ([]devices.Measurement, error) { return meter.Measure(context.WithoutCancel(ctx)) })
		}
	}
	return nil
}

// provisioner returns the Controller service of the backends that create volumes.
func (p *plugin) provisioner() csi.ControllerServer {
	return controllerserver.New(controllerserver.Config{
		NodeID:       topologyValue(p.NodeID),
		Topology:     p.topology(),
		MoreTopology: p.options.Topology,
		Filesystems:  p.filesystem,
		Backends:     p.devices,
		Intents:      p.store,
	})
}

// inlineVolumes returns where inline ephemeral volumes are; nil if no backend
// accepts them.
func (p *plugin) inlineVolumes(ctx context.Context) (*reconciler.Inline, error) {
	name, inliner, err := p.devices.Inliner()
	if err != nil || inliner == nil {
		return nil, err
	}
	staging, err := p.mounts.Spell(ctx, filepath.Join(p.KubeletDir, "plugins", p.DriverName+"-ephemeral"))
	if err != nil {
		return nil, err
	}
	// Not in the directory of the socket: the plugin and its sidecars mount that as a volume, and each new
	// container would get a copy of every mount below it.
	return &reconciler.Inline{Inliner: inliner, Backend: name, StagingDir: staging, Spell: p.mounts.Spell}, nil
}

// spellTime bounds how long the start waits to resolve the paths of records.
const spellTime = 5 * time.Second

// spellRecords gives the paths in records the spelling that paths in requests get. A
// path that cannot be resolved now stays as it is.
func (p *plugin) spellRecords(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, spellTime)
	defer cancel()
	p.store.RewritePaths(func(path string) string {
		spelled, err := p.mounts.Spell(ctx, path)
		if err != nil {
			klog.FromContext(ctx).Error(err, "A path in a record is taken as it is spelled", "path", path)
			return path
		}
		return spelled
	})
}

// serve runs the reconciler and the servers until ctx ends.
func (p *plugin) serve(ctx context.Context) error {
	server, err := p.grpcServer()
	if err != nil {
		return err
	}
	most, err := connectionLimits()
	if err != nil {
		return err
	}
	listener, err := listen(p.Endpoint)
	if err != nil {
		return err
	}
	listener = netutil.LimitListener(listener, most.csi)
	web, err := p.webServers(ctx, most)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	// Before the first look at a volume, so that no change is missed in between.
	watcher, err := p.mounts.NewWatcher()
	if err != nil {
		for _, w := range web {
			err = errors.Join(err, w.listener.Close())
		}
		return errors.Join(err, listener.Close())
	}
	p.watcher = watcher
	events, err := uevents.Listen()
	if err != nil {
		klog.FromContext(ctx).Error(err, "A device that is lost is noticed late", "after", resync)
		p.reconciler.DeviceEventsEnded()
	}
	klog.FromContext(ctx).Info("Serving", "driver", p.DriverName, "version", p.options.version(), "node", p.NodeID, "endpoint", p.Endpoint,
		"backends", p.devices.Names(), "volumes", len(p.store.List()), "mountsWatchedBy", watcher.Source(), "heal", !p.DetectOnly)

	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var group sync.WaitGroup
	failed := make(chan error, 2+len(web))
	var steps sync.WaitGroup // which never ends if one of them hangs on a device
	steps.Go(func() { p.reconciler.Run(working) })
	steps.Go(func() { p.reconciler.CleanOrphansAtStart(working) })
	steps.Go(func() { p.reconciler.Sweep(working) })
	group.Go(func() { failed <- server.Serve(listener) })
	group.Go(func() { failed <- watcher.Run(working, p.reconciler.Changed) })
	if events != nil {
		group.Go(func() { p.watchDevices(working, events) })
	}
	raiseProcessors()
	raiseGCPercent()
	relaxTimers()
	group.Go(func() { releaseIdleMemory(working) })
	for _, b := range p.backends {
		if w, ok := b.Backend.(devices.Watcher); ok {
			group.Go(func() { p.watchBackend(working, b.name, w) })
		}
	}
	for _, w := range web {
		group.Go(func() { failed <- w.serve() })
	}
	if p.registrar != nil {
		group.Go(func() { p.registrar.Run(working) })
	}

	select {
	case <-ctx.Done():
		klog.FromContext(ctx).Info("Stopping; mounts and devices stay")
	case err = <-failed:
	}
	stop() // answers every waiting call with Unavailable
	stopServer(working, server)
	for _, w := range web {
		err = errors.Join(err, w.close())
	}
	group.Wait()
	if !endInTime(working, steps.Wait) {
		klog.FromContext(ctx).Info("A step does not end and is left to the next start", "waited", stopTimeout)
	}
	return err
}

func (p *plugin) grpcServer() (*grpc.Server, error) {
	node := nodeserver.Config{
		NodeID:       p.NodeID,
		Topology:     p.topology(),
		MoreTopology: p.options.Topology,
		MaxVolumes:   cmp.Or(p.MaxVolumes, p.properties.VolumeLimit),
		Filesystems:  p.filesystem,
		Backends:     p.devices,
		Reconciler:   p.reconciler,
		Records:      p.store,
		Paths:        p.mounts,
		Inline:       p.inline,
		Expands:      p.expands(),
	}
	if _, checks := ability[devices.Checker](p); checks {
		node.Storage = p.storage
	}
	services := services{
		identity: &identity{name: p.DriverName, version: p.options.version(), capabilities: p.capabilities(), lacks: p.lacks},
		node:     nodeserver.New(node), controller: p.controller, more: p.options.Services,
	}
	if p.options.Identity != nil {
		services.identity = p.options.Identity(services.identity)
	}
	if p.options.Node != nil {
		services.node = p.options.Node(services.node)
	}
	if services.identity == nil || services.node == nil {
		return nil, errors.New("this driver was built with an Identity or a Node that is nil: they wrap those of the engine")
	}
	return newServer(p.metrics, &p.refusals, p.tracing.Tracer(), p.options, services), nil
}

// Limits of one client of the CSI socket.
const (
	maxCalls      = 1024            // on one connection; more wait at the client
	handshakeTime = 2 * time.Second // a client that says nothing delays the plugin's end for so long
	// keptWorkers goroutines wait for calls, with stacks that have grown already. Further
	// calls at a time get goroutines of their own.
	keptWorkers = 8
	// window is how many bytes of a request may be on their way. A window that adapts to
	// the link costs a ping with each call, and a local socket has nothing to adapt to.
	window = 64 << 10
)

// services are what a server serves.
type services struct {
	identity   csi.IdentityServer
	node       csi.NodeServer
	controller csi.ControllerServer        // nil: none
	more       func(grpc.ServiceRegistrar) // nil: none
}

// newServer returns a server of the services behind the interceptors. tracer may be nil.
func newServer(m *metrics, r *refusals, tracer trace.Tracer, o Options, s services) *grpc.Server {
	interceptors := []grpc.UnaryServerInterceptor{m.intercept, logCalls, r.note, statusCodes, o.ownNameInErrors, inTime}
	if tracer != nil {
		interceptors = slices.Insert(interceptors, 1, traceCalls(tracer))
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(interceptors...), grpc.StreamInterceptor(streamInterceptor(interceptors)),
		grpc.MaxConcurrentStreams(maxCalls), grpc.ConnectionTimeout(handshakeTime), grpc.NumStreamWorkers(keptWorkers),
		grpc.StaticStreamWindowSize(window))
	csi.RegisterIdentityServer(server, s.identity)
	csi.RegisterNodeServer(server, s.node)
	if s.controller != nil {
		csi.RegisterControllerServer(server, s.controller)
	}
	if s.more != nil {
		s.more(server)
	}
	return server
}
