package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sync/singleflight"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/client"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// web is an HTTP server and its listener.
type web struct {
	server   *http.Server
	listener *boundedListener
	awaits   string        // the address to listen on once it is free; empty: it listens already
	closed   chan struct{} // closed by close, which is called once
}

// portEvery is how often an address that is not free yet is tried.
const portEvery = 5 * time.Second

func (w *web) serve() error {
	for w.awaits != "" {
		select {
		case <-w.closed:
			return nil
		case <-time.After(portEvery):
		}
		l, err := net.Listen("tcp", w.awaits)
		if err == nil {
			w.listener.Listener, w.awaits = l, ""
		} else if !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
	}
	if err := w.server.Serve(w.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (w *web) close() error {
	close(w.closed)
	return w.server.Close()
}

// webServers opens the status socket, and the HTTP endpoint if there is one. The
// file of the status socket stays when the socket is closed: it holds the inode that
// the next one needs, which a full file system could not provide. If there is no
// room for the first one, the plugin serves without.
func (p *plugin) webServers(ctx context.Context, most limits) ([]*web, error) {
	path := filepath.Join(p.StateDir, statusSocket)
	listener, err := listenUnix(path)
	if errors.Is(err, syscall.ENOSPC) {
		klog.FromContext(ctx).Error(err, "There is no status socket: status, explain and probe get no answer until the plugin is started with room for it", "socket", path)
	} else if err != nil {
		return nil, fmt.Errorf("status socket %s: %w", path, err)
	}
	var all []*web
	if listener != nil {
		listener.SetUnlinkOnClose(false)
		all = append(all, newWeb(p.statusHandler(), listener, most.status))
	}
	if p.HTTPEndpoint == "" {
		return all, nil
	}
	open, err := net.Listen("tcp", p.HTTPEndpoint)
	awaits := ""
	if dead := p.store.TakenFrom(); dead != 0 && errors.Is(err, syscall.EADDRINUSE) {
		klog.FromContext(ctx).Info("The HTTP endpoint is served once its address is free, which a dead process may still have", "address", p.HTTPEndpoint, "process", process.Name(dead))
		awaits = p.HTTPEndpoint
	} else if err != nil {
		err = fmt.Errorf("--http-endpoint %s: %w", p.HTTPEndpoint, err)
		for _, w := range all {
			err = errors.Join(err, w.listener.Close())
		}
		return nil, err
	}
	w := newWeb(p.httpHandler(), open, most.http).forAnyone()
	w.awaits = awaits
	return append(all, w), nil
}

// No request needs a body.
const (
	maxHeaderBytes = 16 << 10
	maxBodyBytes   = 4 << 10
)

// newWeb returns a server that keeps at most so many connections.
func newWeb(handler http.Handler, l net.Listener, most int) *web {
	bounded := newBoundedListener(l, most)
	return &web{closed: make(chan struct{}), listener: bounded, server: &http.Server{
		Handler:           http.MaxBytesHandler(handler, maxBodyBytes),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnState:         bounded.note,
	}}
}

// forAnyone prepares a server for clients that are not trusted: it bounds the time of
// every connection, which serves one request.
func (w *web) forAnyone() *web {
	w.server.ReadHeaderTimeout, w.server.ReadTimeout, w.server.WriteTimeout = 5*time.Second, 5*time.Second, 10*time.Second
	w.server.SetKeepAlivesEnabled(false)
	w.server.Handler = withoutBody(w.server.Handler)
	return w
}

// withoutBody closes the connection of a request with a body: the server would
// wait for that after the answer, and the client would keep another's place.
func withoutBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now()) // else ReadTimeout ends it
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, req)
	})
}

// httpHandler serves /metrics, /healthz and /readyz. Whatever it does, it does
// once for all who ask at a time.
func (p *plugin) httpHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", p.metricsHandler())
	live, ready := p.probes()
	mux.HandleFunc("GET /healthz", p.probed("not alive", liveProbe, live))
	mux.HandleFunc("GET /readyz", p.probed("not ready", readyProbe, ready))
	return mux
}

// metricsHandler serves the metrics, not compressed: that takes more memory than they. Those
// of a backend that cannot be, such as two with one name, are logged and left out.
func (p *plugin) metricsHandler() http.Handler {
	return promhttp.HandlerFor(&sharedGatherer{from: p.metrics.registry}, promhttp.HandlerOpts{
		DisableCompression: true, ErrorHandling: promhttp.ContinueOnError, ErrorLog: metricsLog{},
	})
}

// metricsLog implements promhttp.Logger.
type metricsLog struct{}

// Println implements promhttp.Logger.
func (metricsLog) Println(v ...any) {
	klog.Background().Error(nil, "Some metrics cannot be told", "why", fmt.Sprint(v...))
}

// sharedGatherer gathers once for all callers of the same moment.
type sharedGatherer struct {
	from    prometheus.Gatherer
	gathers singleflight.Group
}

// Gather implements prometheus.Gatherer.
func (g *sharedGatherer) Gather() ([]*dto.MetricFamily, error) {
	all, err, _ := g.gathers.Do("", func() (any, error) { return g.from.Gather() })
	families, _ := all.([]*dto.MetricFamily) // nil beside some errors
	return families, err
}

// probes returns the functions that check whether the plugin lives (the CSI socket
// answers) and whether it is ready (nothing that it needs is missing, and if it registers
// itself, kubelet has registered it: else a rollout would succeed on a node where no pod
// finds the driver). Concurrent callers share one check.
func (p *plugin) probes() (live, ready func(context.Context) error) {
	var looks singleflight.Group
	live = func(ctx context.Context) error {
		_, err, _ := looks.Do("", func() (any, error) { return nil, p.socketAnswers(context.WithoutCancel(ctx)) })
		return err
	}
	ready = func(ctx context.Context) error {
		if err := p.needs.missing(ctx); err != nil || p.registrar == nil {
			return err
		}
		if answer := report.Registration(p.registrar.Status()); !answer.Registered {
			return errors.New(answer.Tell())
		}
		return nil
	}
	return live, ready
}

// socketTime bounds how long the CSI socket may take to answer.
const socketTime = 5 * time.Second

// socketAnswers calls the plugin as kubelet does. A pool that is not there does not count: a
// restart of the plugin would not bring it back, and would kill the helper programs that work
// on other disks.
func (p *plugin) socketAnswers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, socketTime)
	defer cancel()
	c, err := client.Dial(ctx, p.Endpoint)
	if err != nil {
		return err
	}
	_, err = c.DriverName(ctx)
	return errors.Join(err, c.Close())
}

// probed answers anyone whether a check fails, and not why: an error may name paths.
func (p *plugin) probed(bad, probe string, check func(context.Context) error) http.HandlerFunc {
	bad = fmt.Sprintf("%s: `%s probe %s` says why", bad, p.options.program(), probe)
	return func(w http.ResponseWriter, req *http.Request) {
		if check(req.Context()) != nil {
			http.Error(w, bad, http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n")) // the client may have gone
	}
}

// statusHandler serves the status socket, which only root may use (listenUnix).
// GET looks, POST acts.
func (p *plugin) statusHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", serve(func(req *http.Request) (any, error) {
		node := p.report(p.reconciler.Reports()...)
		node.Storage, node.StorageProblems, node.Orphans = p.metrics.places(), p.storageProblems(), p.orphansLeft(req.Context())
		return node, nil
	}))
	live, ready := p.probes()
	mux.HandleFunc("GET /probes/live", serveInTime(func(ctx context.Context, _ *http.Request) (any, error) { return "ok", live(ctx) }))
	mux.HandleFunc("GET /probes/ready", serveInTime(func(ctx context.Context, _ *http.Request) (any, error) { return "ok", ready(ctx) }))
	mux.HandleFunc("GET /about", serve(func(*http.Request) (any, error) { return p.about(), nil }))
	mux.Handle("GET /metrics", p.metricsHandler())
	mux.HandleFunc("GET /goroutines", serveText(writeGoroutines))
	mux.HandleFunc("GET /log", serveText(p.writeLog))
	mux.HandleFunc("GET /volumes", serveInTime(func(ctx context.Context, _ *http.Request) (any, error) { return p.inventory(ctx) }))
	mux.HandleFunc("GET /orphans", serveInTime(func(ctx context.Context, _ *http.Request) (any, error) { return p.reconciler.Orphans(ctx, false) }))
	mux.HandleFunc("POST /orphans/clean", serveInTime(func(ctx context.Context, _ *http.Request) (any, error) { return p.reconciler.Orphans(ctx, true) }))
	mux.HandleFunc("GET /volume/explain", p.serveVolume(func(ctx context.Context, id string) (any, error) {
		volume, err := p.explain(ctx, id)
		if err != nil {
			return nil, err
		}
		return volume.Explanation(), nil
	}))
	mux.HandleFunc("POST /volume/retry", p.serveVolume(func(ctx context.Context, id string) (any, error) {
		volume, err := p.reconciler.Retry(ctx, id)
		if err != nil {
			return nil, err
		}
		return p.report(volume).Pick(report.Filter{Volumes: []string{id}}), nil
	}))
	mux.HandleFunc("GET /volume/clear-device", p.serveVolume(func(ctx context.Context, id string) (any, error) { return p.reconciler.Clear(ctx, id, false) }))
	mux.HandleFunc("POST /volume/clear-device", p.serveVolume(func(ctx context.Context, id string) (any, error) { return p.reconciler.Clear(ctx, id, true) }))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { mux.ServeHTTP(ownAnswer{w, p.options}, req) })
}

// ownAnswer rewrites each answer, which comes in one piece, by Options.inOwnName.
type ownAnswer struct {
	http.ResponseWriter
	options Options
}

func (w ownAnswer) Write(answer []byte) (int, error) {
	if w.options.program() == engine {
		return w.ResponseWriter.Write(answer)
	}
	return ownName{w.ResponseWriter, w.options}.Write(answer)
}

// explain reports on a volume, also on one of which nothing is known but a call that
// was refused.
func (p *plugin) explain(ctx context.Context, id string) (report.Volume, error) {
	volume, err := p.reconciler.Explain(ctx, id)
	refusal := p.refusals.of(id)
	if state.ClassOf(err) == state.NotFound && refusal != nil {
		facts := report.Facts{Want: &state.Volume{ID: id}, Looked: true}
		facts.Have.Device = state.Device{State: state.DeviceAbsent, Missing: true}
		volume, err = report.Make(facts, time.Now()), nil
	}
	if refusal != nil && !volume.Tells(*refusal) {
		volume.Refusal = refusal
	}
	return volume, err
}

// placesWait is how long a report waits for the measurement of a backend, and for the
// checks of all: a disk that hangs must not hold it up.
const placesWait = 200 * time.Millisecond

// orphansLeft returns how many orphans there are: if any are left of the last search, those of a
// new one, which knows what was detached by hand, unless that does not end in time. A search
// looks at every device, and a node without any at its start has none later.
func (p *plugin) orphansLeft(ctx context.Context) int {
	if p.reconciler.OrphansLeft(ctx) == 0 {
		return 0
	}
	search, stop := context.WithTimeout(ctx, placesWait)
	defer stop()
	if _, err := p.reconciler.Orphans(search, false); err != nil {
		klog.FromContext(ctx).V(4).Info("How many orphans there are is told as of the last search", "err", err)
	}
	return p.reconciler.OrphansLeft(ctx)
}

// report is the answer about volumes of this node.
func (p *plugin) report(volumes ...report.Volume) report.Node {
	node := report.Node{Running: true, NodeID: p.NodeID, Driver: p.DriverName, Version: p.options.version(), Volumes: report.Statuses(volumes), Refusals: p.refusedBeside(volumes)}
	if p.registrar != nil {
		answer := report.Registration(p.registrar.Status())
		node.Registration = &answer
	}
	return node
}

// refusedBeside returns the calls that were refused and of which the reports of the
// volumes do not tell.
func (p *plugin) refusedBeside(volumes []report.Volume) []report.Refusal {
	byID := map[string]report.Volume{}
	for _, v := range volumes {
		byID[v.ID] = v
	}
	return slices.DeleteFunc(p.refusals.list(), func(r report.Refusal) bool { return byID[r.Volume].Tells(r) })
}

// timeoutHeader is how long the client will wait for the answer, in Go's notation.
// The plugin answers before that, if only with what it is waiting for.
const timeoutHeader = "Csi-Node-Timeout"

// serveVolume serves a request about the volume that the query names. Of a call that was
// refused because of the id there is something to tell.
func (p *plugin) serveVolume(do func(ctx context.Context, id string) (any, error)) http.HandlerFunc {
	return serveInTime(func(ctx context.Context, req *http.Request) (any, error) {
		id := req.URL.Query().Get("id")
		if p.store.Get(id) == nil && p.refusals.of(id) == nil {
			if err := p.devices.ValidateID(id); err != nil {
				return nil, err
			}
		}
		return do(ctx, id)
	})
}

// serveInTime serves with a context that ends when the client stops waiting.
func serveInTime(do func(ctx context.Context, req *http.Request) (any, error)) http.HandlerFunc {
	return serve(func(req *http.Request) (any, error) {
		ctx := req.Context()
		if text := req.Header.Get(timeoutHeader); text != "" {
			timeout, err := time.ParseDuration(text)
			if err != nil {
				return nil, state.Errorf(state.InvalidArgument, "%s: %w", timeoutHeader, err)
			}
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		return do(ctx, req)
	})
}

// serve answers with JSON, or with an error's text.
func serve(do func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		value, err := do(req)
		if err != nil {
			code, known := httpCodes[state.ClassOf(err)]
			if !known {
				code = http.StatusInternalServerError
			}
			http.Error(w, err.Error(), code)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(value) // the client may have gone
	}
}

// serveText answers with a text, or with an error's text.
func serveText(write func(io.Writer) error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		var text bytes.Buffer
		if err := write(&text); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write(text.Bytes()) // the client may have gone
	}
}

// writeLog writes the end of the log.
func (p *plugin) writeLog(out io.Writer) error {
	if p.log == nil {
		return errors.New("this plugin does not keep its log")
	}
	_, err := io.WriteString(out, p.log.String())
	return err
}

var httpCodes = map[state.Class]int{
	state.InvalidArgument:    http.StatusBadRequest,
	state.NotFound:           http.StatusNotFound,
	state.FailedPrecondition: http.StatusConflict,
	state.Unavailable:        http.StatusServiceUnavailable,
	state.DeadlineExceeded:   http.StatusGatewayTimeout,
	state.Canceled:           http.StatusGatewayTimeout,
	state.ResourceExhausted:  http.StatusInsufficientStorage,
}
