package harness

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// Plugin is a place for a plugin to run in: directories, a socket, and clients
// that speak to whatever process serves the socket. The process may come and go.
type Plugin struct {
	Dir        string // holds all the others
	StateDir   string
	KubeletDir string
	PoolDir    string
	Socket     string

	// The clients wait for a process that is not there yet, and give each call
	// that has no deadline Patience.
	Identity   csi.IdentityClient
	Controller csi.ControllerClient
	Node       csi.NodeClient

	// Driver, when set before the first start, is what runs in the place of csi-node.
	Driver *Driver

	// Interrupted, when set, says at the end of the test whether somebody has
	// interrupted it: what is left is removed then, and neither that nor the logs are told.
	Interrupted func() bool

	// Process is the last one started by Start, nil before.
	*Process

	t         testing.TB
	conn      *grpc.ClientConn
	processes []*Process
}

// Driver is a program that was built on package driver.
type Driver struct {
	Path  string
	Env   []string // added to the test's own
	Flags []string // of its backends
}

// Options is how a process is started.
type Options struct {
	Env    []string // added to the test's own
	Flags  []string // added to those that name the directories
	Faults bool     // run the binary that obeys CSI_NODE_FAULT
	Files  int      // how many files it may open, as by ulimit -n; 0: as many as the test
}

// New makes the directories and starts nothing. At the end of the test it stops
// the plugin and fails the test if anything is left: mounts or loop devices
// that have to do with Dir, helper processes. It removes those, too.
func New(t testing.TB) *Plugin {
	t.Helper()
	machine.Kernel(t)
	// Not t.TempDir, which may be too long for a socket.
	dir, err := os.MkdirTemp("", "csi-node-test-")
	require.NoError(t, err)
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		t.Fatal(err)
	}
	p := &Plugin{
		Dir:        dir,
		StateDir:   filepath.Join(dir, "state"),
		KubeletDir: filepath.Join(dir, "kubelet"),
		PoolDir:    filepath.Join(dir, "pool"),
		Socket:     filepath.Join(dir, "socket", "csi.sock"),
		t:          t,
	}
	t.Cleanup(p.cleanUp)
	for _, sub := range []string{p.KubeletDir, filepath.Dir(p.Socket)} {
		require.NoError(t, os.MkdirAll(sub, 0o750))
	}
	p.dial()
	return p
}

// Start is New, with a plugin that is ready.
func Start(t testing.TB, o Options) *Plugin {
	t.Helper()
	p := New(t)
	p.Start(o)
	return p
}

// Start starts a process and waits until it is ready. A process that ends
// instead fails the test.
func (p *Plugin) Start(o Options) {
	p.t.Helper()
	p.Process = p.Launch(o)
	p.AwaitReady(p.Process)
}

// Launch starts a process and does not wait for it.
func (p *Plugin) Launch(o Options) *Process {
	p.t.Helper()
	binary := Binary
	if o.Faults {
		binary = FaultsBinary
	}
	path, env := "", o.Env
	if p.Driver != nil {
		path, env = p.Driver.Path, append(slices.Clone(p.Driver.Env), o.Env...)
	} else {
		path = binary(p.t)
	}
	line := append([]string{path, "serve"}, append(p.Flags(), o.Flags...)...)
	if o.Files > 0 {
		line = append([]string{"prlimit", fmt.Sprintf("--nofile=%d:%d", o.Files, o.Files)}, line...)
	}
	process := launch(p.t, line[0], env, line[1:]...)
	p.processes = append(p.processes, process)
	return process
}

// Flags returns the flags of `csi-node serve` for these directories.
func (p *Plugin) Flags() []string {
	flags := []string{"--endpoint", "unix://" + p.Socket, "--node-id", "node-1", "--v", "4",
		"--state-dir", p.StateDir, "--lib-dir", filepath.Join(p.Dir, "lib"), "--kubelet-dir", p.KubeletDir}
	if p.Driver != nil {
		return append(flags, p.Driver.Flags...)
	}
	return append(flags, "--pool-dir", p.PoolDir, "--pool-reserve", "0")
}

// AwaitReady blocks until the socket is served and Probe says ready. A process
// that ends meanwhile fails the test.
func (p *Plugin) AwaitReady(process *Process) {
	p.t.Helper()
	p.await(process, func(ctx context.Context) (bool, error) {
		resp, err := p.Identity.Probe(ctx, &csi.ProbeRequest{})
		return resp.GetReady().GetValue(), err
	})
}

// AwaitServing is AwaitReady for a plugin that serves and is not ready.
func (p *Plugin) AwaitServing(process *Process) {
	p.t.Helper()
	p.await(process, func(ctx context.Context) (bool, error) {
		_, err := p.Identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		return true, err
	})
}

func (p *Plugin) await(process *Process, call func(context.Context) (bool, error)) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	ctx, end := process.WhileAlive(ctx)
	defer end()
	for {
		done, err := call(ctx)
		switch {
		case err == nil && done:
			return
		case status.Code(err) == codes.Unavailable && ctx.Err() == nil:
			// The connection was still that to the process before.
		default:
			p.t.Fatalf("the plugin is not there as awaited: %t, %v", done, err)
		}
	}
}

// Kill ends the process with SIGKILL, as a crash would.
func (p *Plugin) Kill() {
	p.t.Helper()
	p.Signal(p.t, syscall.SIGKILL)
	p.Wait(p.t)
}

// Terminate ends the process with SIGTERM, which it must take with exit code 0.
func (p *Plugin) Terminate() {
	p.t.Helper()
	p.Signal(p.t, syscall.SIGTERM)
	if state := p.Wait(p.t); state.ExitCode() != 0 {
		p.t.Fatalf("after SIGTERM: %s", state)
	}
}

// Restart is Terminate and Start.
func (p *Plugin) Restart(o Options) {
	p.t.Helper()
	p.Terminate()
	p.Start(o)
}

// Reconnect makes new clients: the old ones' connection may be that to a process
// which was killed and cannot end.
func (p *Plugin) Reconnect() {
	p.t.Helper()
	if err := p.conn.Close(); err != nil {
		p.t.Error(err)
	}
	p.dial()
}

// dial makes the clients. They connect when they are first used, and again
// after each restart.
func (p *Plugin) dial() {
	p.t.Helper()
	quickly := grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: 50 * time.Millisecond},
		MinConnectTimeout: Patience,
	}
	conn, err := grpc.NewClient("unix://"+p.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(quickly), grpc.WithUnaryInterceptor(patiently), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	require.NoError(p.t, err)
	p.conn = conn
	p.Identity, p.Controller, p.Node = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
}

// patiently gives each call that has no deadline Patience.
func patiently(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, Patience)
		defer cancel()
	}
	return invoke(ctx, method, req, reply, conn, options...)
}

// stop ends a process at the end of the test, in peace if it can be had.
func (p *Plugin) stop(process *Process) {
	select {
	case <-process.Exited():
	default:
		process.Signal(p.t, syscall.SIGTERM)
		if state := process.Wait(p.t); state.ExitCode() != 0 {
			p.t.Errorf("stopping the plugin: %s", state)
		}
	}
	p.checkLog(process)
}

// checkLog fails the test if a process broke the rules of Go.
func (p *Plugin) checkLog(process *Process) {
	p.t.Helper()
	for _, sign := range []string{"WARNING: DATA RACE", "panic: ", "fatal error: "} {
		if strings.Contains(process.Log.String(), sign) {
			p.t.Errorf("the log of process %d holds %q", process.PID(), sign)
		}
	}
}
