package driver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// web is an HTTP server and its listener.
type web struct {
	server   *http.Server
	listener net.Listener
}

func (w *web) serve() error {
	if err := w.server.Serve(w.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func (w *web) close() error { return w.server.Close() }

// webServers opens the status socket, and the HTTP endpoint if there is one.
func (p *plugin) webServers() ([]*web, error) {
	path := filepath.Join(p.StateDir, StatusSocket)
	listener, err := listenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("status socket %s: %w", path, err)
	}
	status := http.NewServeMux()
	status.HandleFunc("GET /status", p.serveStatus)
	all := []*web{{newHTTPServer(status), listener}}
	if p.HTTPEndpoint == "" {
		return all, nil
	}
	listener, err = net.Listen("tcp", p.HTTPEndpoint)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--http-endpoint %s: %w", p.HTTPEndpoint, err), all[0].listener.Close())
	}
	return append(all, &web{newHTTPServer(p.httpHandler()), listener}), nil
}

func newHTTPServer(handler http.Handler) *http.Server {
	return &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
}

// httpHandler serves /metrics, /healthz (the process serves) and /readyz (and
// nothing that it needs is missing).
func (p *plugin) httpHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(p.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	i := &identity{checks: p.checks()}
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, req *http.Request) { answer(w, i.healthy(req.Context())) })
	return mux
}

func answer(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = w.Write([]byte("ok\n")) // the client may have gone
}

func (p *plugin) serveStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	report := Report{Running: true, Driver: p.DriverName, Version: p.Version, Volumes: p.reconciler.Status()}
	_ = json.NewEncoder(w).Encode(report) // the client may have gone
}
