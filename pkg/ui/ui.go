// Package ui serves a page that shows how nodes and their volumes stand, to one person's
// browser. It listens on loopback only, answers only who has its token, changes nothing,
// and shows what the reports say, in their words.
//
//	Source ──> watcher (one reading for all open pages, and the stories) ──> /events ──> page.js
//	       ──────────────────────────────────────────────────────────────> /explain ──>
//
// Read this file first; server.go says who is answered, watch.go what is read and when,
// story.go what becomes of two readings, and page/ is the page itself.
package ui

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/net/netutil"

	"github.com/csi-node/csi-node/pkg/report"
)

// Source is what a page shows.
type Source struct {
	// Title says of what the page is, such as "node worker-1".
	Title string
	// Every is how long it rests between two readings, while a page is open.
	Every time.Duration
	// Read reads how the nodes stand. It is called by one goroutine, and blocks until ctx
	// ends at most.
	Read func(ctx context.Context) (Snapshot, error)
	// Explain tells of one volume of a node that Read returned. It may be called by several
	// goroutines at a time, and blocks until ctx ends at most.
	Explain func(ctx context.Context, node report.NodeOf, volume string) (report.Explanation, error)
}

// Snapshot is how the nodes stand at a moment.
type Snapshot struct {
	report.Cluster
	Notes []string // what could not be read beside the nodes, and why
}

// Listen listens on a port of the loopback interface; 0: one that is free.
func Listen(port int) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("--port %d: %w", port, err)
	}
	return l, nil
}

// Bounds of what clients cost. A browser opens at most six connections to a host.
const (
	maxConnections = 64
	maxHeaderBytes = 16 << 10
)

// Serve tells on out where the page is, and serves it on l until ctx ends. It closes l.
func Serve(ctx context.Context, l net.Listener, out io.Writer, source Source) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	s := &server{token: rand.Text(), watcher: newWatcher(source)}
	web := &http.Server{
		Handler:           s.handler(),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    maxHeaderBytes,
	}
	watched, served := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(watched)
		s.watcher.run(ctx)
	}()
	go func() { served <- web.Serve(netutil.LimitListener(l, maxConnections)) }()

	_, err := fmt.Fprintf(out, "The page is at http://%s/?token=%s\nOnly this machine can reach it, and only with this token. Ctrl-C ends it.\n", l.Addr(), s.token)
	if err == nil {
		select {
		case <-ctx.Done():
		case err = <-served:
			served <- http.ErrServerClosed
		}
	}
	end()
	err = errors.Join(err, web.Close())
	if ended := <-served; !errors.Is(ended, http.ErrServerClosed) {
		err = errors.Join(err, ended)
	}
	<-watched
	return err
}
