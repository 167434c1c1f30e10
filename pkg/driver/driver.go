// Package driver wires the plugin together and runs it: the store, the
// reconciler, the CSI services on their socket, metrics, health and shutdown.
package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/controllerserver"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/disk"
	"github.com/csi-node/csi-node/pkg/devices/note"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/ephemeral"
	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/nodeserver"
	"github.com/csi-node/csi-node/pkg/pods"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/registration"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/pkg/uevents"
)

// Config is how the plugin is set up; each field is a flag of `csi-node serve`.
type Config struct {
	Endpoint     string // of the CSI socket: unix:///path
	DriverName   string
	NodeID       string
	StateDir     string
	LibDir       string // of notes, which outlive reboots
	KubeletDir   string
	PoolDir      string
	HTTPEndpoint string // host:port; empty: none
	// What is kept of the pool: amounts as pool.ParseAmount reads them; empty: none.
	PoolReserve, InlineMaxSize, InlineMaxTotal string
	// RegistrationDir is where kubelet looks for plugins; empty: somebody else
	// registers the plugin.
	RegistrationDir string
	MaxVolumes      int64
	DetectOnly      bool // tell of lost mounts, and do not restore them unasked
	Version         string

	// Hook is called before and after each step, and its error fails the step;
	// only builds for tests set it.
	Hook func(ctx context.Context, volume, moment, step string) error
}

// StoreFile and StatusSocket are the names in the state directory.
const (
	StoreFile    = "intents.db"
	StatusSocket = "status.sock"
)

// resync is how often a volume is looked at though nothing was noticed.
const resync = 10 * time.Minute

// stopTimeout bounds the wait, at shutdown, for calls to be answered and for
// steps to end. A step that hangs longer is left to the next start.
const stopTimeout = 10 * time.Second

// CSI spec v1.13, GetPluginInfo: domain name notation, at most 63 characters.
// The topology key is made of it, which Kubernetes wants in lower case.
var driverName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

func (c Config) validate() error {
	switch {
	case len(c.DriverName) > 63 || !driverName.MatchString(c.DriverName):
		return fmt.Errorf("--driver-name %q: must be a domain name of at most 63 lower-case letters, digits, dots and dashes, as csi-node.local", c.DriverName)
	case c.NodeID == "" || len(c.NodeID) > 256:
		return fmt.Errorf("--node-id %q: must have 1 to 256 bytes", c.NodeID)
	case c.MaxVolumes < 0:
		return fmt.Errorf("--max-volumes-per-node %d: must not be negative; 0 means no limit", c.MaxVolumes)
	}
	if _, err := socketPath(c.Endpoint); err != nil {
		return err
	}
	if _, err := c.limits(); err != nil {
		return err
	}
	for _, dir := range []struct{ flag, path string }{
		{"--state-dir", c.StateDir}, {"--lib-dir", c.LibDir}, {"--kubelet-dir", c.KubeletDir}, {"--pool-dir", c.PoolDir}, {"--registration-dir", c.RegistrationDir},
	} {
		if !filepath.IsAbs(dir.path) && (dir.flag != "--registration-dir" || dir.path != "") {
			return fmt.Errorf("%s %q: must be an absolute path", dir.flag, dir.path)
		}
	}
	return nil
}

// limits reads what is kept of the pool.
func (c Config) limits() (l pool.Limits, err error) {
	for _, amount := range []struct {
		flag, text string
		to         *pool.Amount
	}{
		{"--pool-reserve", c.PoolReserve, &l.Reserve}, {"--inline-max-size", c.InlineMaxSize, &l.InlineSize}, {"--inline-max-total", c.InlineMaxTotal, &l.InlineTotal},
	} {
		if *amount.to, err = pool.ParseAmount(amount.text); err != nil {
			return l, fmt.Errorf("%s %q: %w", amount.flag, amount.text, err)
		}
	}
	return l, nil
}

// plugin is the parts that Run has put together.
type plugin struct {
	Config
	store      *state.Store
	pool       *pool.Pool
	unlock     func() error // the pool
	loops      *loop.Devices
	devices    *pool.Backend
	views      *blockdev.Devices
	disks      *disk.Backend
	facts      *note.Facts
	watcher    *mounts.Watcher // nil until it serves
	filesystem *filesystem.Host
	mounts     *mounts.Host
	pods       *pods.Directory
	reconciler *reconciler.Reconciler
	ephemeral  *ephemeral.Volumes
	controller *controllerserver.Server
	metrics    *metrics
	looking    chan struct{}           // holds a token while orphans are looked for
	registrar  *registration.Registrar // nil when somebody else registers the plugin
}

// Run serves until ctx ends, and then leaves every mount and device as it is.
// An error that comes back before the socket serves names what is wrong with
// the setup and what to do. A second process on the same state directory waits
// until the first has ended; one with another may not have the same pool.
func Run(ctx context.Context, cfg Config) (err error) {
	if err := cfg.validate(); err != nil {
		return err
	}
	p := &plugin{Config: cfg, metrics: newMetrics(cfg.Version), looking: make(chan struct{}, 1)}
	if cfg.RegistrationDir != "" {
		if err := p.register(); err != nil {
			return err
		}
	}
	if err := p.open(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.letGo()) }()
	return p.serve(ctx)
}

// register makes the registrar, which speaks to kubelet once the CSI socket serves.
func (p *plugin) register() error {
	path, err := socketPath(p.Endpoint)
	if err != nil {
		return err
	}
	p.registrar = registration.New(registration.Config{Dir: p.RegistrationDir, DriverName: p.DriverName, Endpoint: path})
	p.metrics.watchRegistration(func() bool { return p.registrar.Status().Registered })
	return nil
}

// open puts the parts together, those first that fail on a wrong setup.
func (p *plugin) open(ctx context.Context) (err error) {
	if p.mounts, err = mounts.New(p.KubeletDir); err != nil {
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
	bootID, err := state.BootID()
	if err != nil {
		return err
	}
	// The store's lock comes before everything that two processes must not share.
	if p.store, err = state.Open(ctx, filepath.Join(p.StateDir, StoreFile), bootID); err != nil {
		return err
	}
	p.spellRecords(ctx)
	if err := p.openVolumes(ctx); err != nil {
		return errors.Join(err, p.letGo())
	}
	if err := p.writeSettings(ctx); err != nil {
		return errors.Join(fmt.Errorf("--state-dir %s: %w", p.StateDir, err), p.letGo())
	}
	return nil
}

// letGo leaves the pool and the store to others.
func (p *plugin) letGo() (err error) {
	if p.unlock != nil {
		err = p.unlock()
	}
	return errors.Join(err, p.store.Close())
}

func (p *plugin) openVolumes(ctx context.Context) (err error) {
	p.pool, err = pool.Open(ctx, p.PoolDir)
	absent := err
	if errors.Is(err, pool.ErrAbsent) {
		p.pool, err = pool.OpenAbsent(p.PoolDir)
	}
	if err != nil {
		return fmt.Errorf("--pool-dir %s: %w", p.PoolDir, err)
	}
	limits, err := p.limits()
	if err != nil {
		return err
	}
	p.pool.SetLimits(limits)
	if p.unlock, err = p.pool.Lock(p.StateDir); err != nil {
		return fmt.Errorf("--pool-dir %s: %w", p.PoolDir, err)
	}
	if err := p.openDevices(ctx); err != nil {
		return err
	}
	if err := p.openDisks(); err != nil {
		return err
	}
	switch {
	case absent != nil && len(p.store.List()) == 0 && !p.devices.Any():
		return fmt.Errorf("--pool-dir %s: %w", p.PoolDir, absent)
	case absent != nil:
		klog.FromContext(ctx).Error(absent, "Serving without the pool, so that volumes which stand can be unpublished and unstaged", "pool", p.PoolDir)
	}
	p.reconciler = reconciler.New(reconciler.Config{
		Store:      p.store,
		Kernel:     p.kernel(),
		Hook:       p.hook(),
		Metrics:    p.metrics,
		Retired:    func(string) { p.ephemeral.Look() },
		DetectOnly: p.DetectOnly,
		Resync:     resync,
	})
	p.controller = controllerserver.New(controllerserver.Config{
		NodeID:      topologyValue(p.NodeID),
		TopologyKey: topologyKey(p.DriverName),
		Filesystems: p.filesystem,
		Pool:        p.pool,
		Deleter:     p.devices,
		Intents:     p.store,
	})
	staging, err := p.mounts.Spell(ctx, filepath.Join(p.KubeletDir, "plugins", p.DriverName+"-ephemeral"))
	if err != nil {
		return err
	}
	p.ephemeral = ephemeral.New(ephemeral.Config{
		// Not in the directory of the socket: sidecars, and the plugin, have that as a volume, and each new
		// container would get a copy of what is mounted below it.
		StagingDir:  staging,
		Reconciler:  p.reconciler,
		Records:     p.store,
		Pool:        p.pool,
		Maker:       p.controller,
		Deleter:     p.devices,
		Directories: p.mounts,
		Pods:        p.pods,
		Spell:       p.mounts.Spell,
	})
	p.metrics.watch(p.reconciler)
	p.metrics.watchPool(func() (pool.Capacity, error) { return p.pool.Capacity(context.WithoutCancel(ctx)) })
	return nil
}

// openDevices finds the devices of the pool's volumes.
func (p *plugin) openDevices(ctx context.Context) (err error) {
	if p.loops, err = loop.New(ctx); err != nil {
		return err
	}
	if p.devices, err = pool.NewBackend(ctx, p.pool, p.loops); err != nil {
		return err
	}
	p.views = blockdev.New(p.loops, p.devices.VolumeAt)
	return nil
}

func (p *plugin) openDisks() (err error) {
	if p.disks, err = disk.New(devices.Environment{LibDir: p.LibDir}); err != nil {
		return err
	}
	p.facts, err = note.Open(p.LibDir)
	return err
}

// spellTime bounds how long the start waits for directories that lead to the
// kubelet directory in the paths of records.
const spellTime = 5 * time.Second

// spellRecords gives the paths of records the spelling of requests. One of which
// that cannot be told now stays as it is.
func (p *plugin) spellRecords(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, spellTime)
	defer cancel()
	p.store.Spell(func(path string) string {
		spelled, err := p.mounts.Spell(ctx, path)
		if err != nil {
			klog.FromContext(ctx).Error(err, "A path in a record is taken as it is spelled", "path", path)
			return path
		}
		return spelled
	})
}

func (p *plugin) kernel() reconciler.Kernel {
	set := devices.NewSet(pool.Name, map[string]devices.Backend{pool.Name: p.devices, disk.Name: p.disks})
	set.KeepFacts(p.facts)
	k := reconciler.Kernel{
		Devices:     set,
		Views:       p.views,
		Filesystems: p.filesystem,
		Mounts:      p.mounts,
		Directories: p.mounts,
		Holders:     mounts.Holders,
		Bound:       func(number state.DeviceNumber) (bool, error) { return p.watcher.Bound(number) },
	}
	if p.pods != nil {
		k.Pods = p.pods
	}
	return k
}

func (p *plugin) hook() func(context.Context, string, reconciler.Step, reconciler.Moment) error {
	if p.Hook == nil {
		return nil
	}
	return func(ctx context.Context, volume string, step reconciler.Step, moment reconciler.Moment) error {
		return p.Hook(ctx, volume, string(moment), string(step.Action))
	}
}

// serve runs the reconciler and the servers until ctx ends.
func (p *plugin) serve(ctx context.Context) error {
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
	// Before the first look at a volume, so that no change falls between the two.
	watcher, err := p.mounts.NewWatcher()
	if err != nil {
		for _, w := range web {
			err = errors.Join(err, w.listener.Close())
		}
		return errors.Join(err, listener.Close())
	}
	p.watcher = watcher
	p.loops.Spare(p.numbers(watcher))
	events, deaf := uevents.Listen()
	if deaf != nil {
		klog.FromContext(ctx).Error(deaf, "A device that is lost is noticed late", "after", resync)
	}
	server := p.grpcServer()
	klog.FromContext(ctx).Info("Serving", "driver", p.DriverName, "version", p.Version, "node", p.NodeID, "endpoint", p.Endpoint,
		"pool", p.PoolDir, "volumes", len(p.store.List()), "mountsWatchedBy", watcher.Source(), "heal", !p.DetectOnly)

	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var group sync.WaitGroup
	failed := make(chan error, 3+len(web))
	settled := make(chan struct{})
	go func() { defer close(settled); p.reconciler.Run(working) }()
	group.Go(func() { failed <- server.Serve(listener) })
	group.Go(func() { failed <- watcher.Run(working, p.reconciler.Changed) })
	if events != nil {
		group.Go(func() { p.hear(working, events) })
	}
	swept := make(chan struct{}) // or hung on a device, and left
	var sweeps sync.WaitGroup
	sweeps.Go(func() { p.adoptOrphans(working) })
	sweeps.Go(func() { p.ephemeral.Run(working) })
	go func() { defer close(swept); sweeps.Wait() }()
	for _, w := range web {
		group.Go(func() { failed <- w.serve() })
	}
	if p.registrar != nil {
		group.Go(func() { failed <- p.registrar.Run(working) })
	}

	select {
	case <-ctx.Done():
		klog.FromContext(ctx).Info("Stopping; mounts and devices stay")
	case err = <-failed:
	}
	stop() // answers every waiting call with Unavailable
	stopServer(server)
	for _, w := range web {
		err = errors.Join(err, w.close())
	}
	group.Wait()
	limit := time.After(stopTimeout)
	for _, ended := range []<-chan struct{}{settled, swept} {
		select {
		case <-ended:
		case <-limit:
			klog.FromContext(ctx).Info("A step does not end and is left to the next start", "waited", stopTimeout)
			return err
		}
	}
	return err
}

// hear tells the reconciler what becomes of devices. Without it, that is noticed
// when the volume is looked at.
func (p *plugin) hear(ctx context.Context, events *uevents.Listener) {
	err := events.Run(ctx, func(e uevents.Event) { p.reconciler.DeviceChanged(e.Number) }, p.reconciler.AllChanged)
	if err != nil {
		klog.FromContext(ctx).Error(err, "A device that is lost is noticed late from now on", "after", resync)
	}
}

// stopServer stops accepting and gives calls their answers, within stopTimeout.
func stopServer(server *grpc.Server) {
	timer := time.AfterFunc(stopTimeout, server.Stop)
	defer timer.Stop()
	server.GracefulStop()
}

func (p *plugin) grpcServer() *grpc.Server {
	node := nodeserver.New(nodeserver.Config{
		NodeID:           p.NodeID,
		TopologyKey:      topologyKey(p.DriverName),
		TopologyValue:    topologyValue(p.NodeID),
		MaxVolumes:       p.MaxVolumes,
		Filesystems:      p.filesystem,
		ValidateVolumeID: pool.ValidateID,
		VolumeAt:         p.devices.VolumeAt,
		Reconciler:       p.reconciler,
		Records:          p.store,
		Paths:            p.mounts,
		Ephemeral:        p.ephemeral,
		StorageHealth:    p.devices.Check,
	})
	return newServer(p.metrics, &identity{name: p.DriverName, version: p.Version, checks: p.checks()}, p.controller, node)
}

// What one client of the CSI socket may take up.
const (
	maxCalls      = 1024 // on one connection; more wait at the client
	handshakeTime = 10 * time.Second
)

// newServer returns a server of the services behind the interceptors.
func newServer(m *metrics, i csi.IdentityServer, c csi.ControllerServer, n csi.NodeServer) *grpc.Server {
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(m.intercept, logCalls, statusCodes, inTime),
		grpc.MaxConcurrentStreams(maxCalls), grpc.ConnectionTimeout(handshakeTime))
	csi.RegisterIdentityServer(server, i)
	csi.RegisterControllerServer(server, c)
	csi.RegisterNodeServer(server, n)
	return server
}
