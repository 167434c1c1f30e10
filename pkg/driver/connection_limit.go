package driver

import (
	"errors"
	"net"
	"net/http"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// limits are how many connections each listener keeps, so that the clients of one
// listener do not use up the memory and the files that the others need.
type limits struct {
	csi    int // the CSI socket; root only
	status int // the status socket; root only
	http   int // the HTTP endpoint; any process that can reach it
}

// connectionLimits divides the files that the process may open among the listeners.
// The larger part is left for its work. The Go runtime has raised the soft limit to
// the hard one.
func connectionLimits() (limits, error) {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return limits{}, err
	}
	share := func(part uint64, least, most int) int {
		return max(least, int(min(files.Cur/part, uint64(most))))
	}
	return limits{csi: share(4, 16, 1024), status: share(16, 4, 64), http: share(16, 4, 64)}, nil
}

// boundedListener keeps at most max connections. A new one takes the place of the
// oldest that has not sent a request yet, so that clients which connect and stay
// silent keep nobody out. While all are being answered, which takes a bounded time,
// a new one is refused.
type boundedListener struct {
	net.Listener // nil while web waits for its address
	max          int

	mu    sync.Mutex
	conns []*boundedConn // open ones, the oldest first
}

type boundedConn struct {
	net.Conn
	listener *boundedListener
	asked    bool // a whole request was read; listener.mu guards it
}

func newBoundedListener(l net.Listener, most int) *boundedListener {
	return &boundedListener{Listener: l, max: most}
}

// Accept implements net.Listener.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c, out := l.admit(conn)
		if out != nil {
			reset(out)
		}
		if c != nil {
			return c, nil
		}
	}
}

// Close implements net.Listener.
func (l *boundedListener) Close() error {
	if l.Listener == nil {
		return nil
	}
	return l.Listener.Close()
}

// admit accepts a connection, and returns the one to be closed for it. That is the
// new one itself if there is no room for it; then in is nil.
func (l *boundedListener) admit(conn net.Conn) (in *boundedConn, out net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.conns) >= l.max {
		silent := slices.IndexFunc(l.conns, func(c *boundedConn) bool { return !c.asked })
		if silent < 0 {
			return nil, conn
		}
		out = l.conns[silent].Conn
		l.conns = slices.Delete(l.conns, silent, silent+1)
	}
	in = &boundedConn{Conn: conn, listener: l}
	l.conns = append(l.conns, in)
	return in, out
}

// reset closes a connection at once, so that the kernel keeps no data of it.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // else it is closed as usual
	}
	_ = conn.Close() // the peer may have been faster
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	c.listener.mu.Lock()
	c.listener.conns = slices.DeleteFunc(c.listener.conns, func(o *boundedConn) bool { return o == c })
	c.listener.mu.Unlock()
	if err := c.Conn.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil // admit closed it before
}

// note is an http.Server's ConnState: a connection is active from the last byte
// of a request's header until its answer is written.
func (l *boundedListener) note(conn net.Conn, s http.ConnState) {
	if c, ok := conn.(*boundedConn); ok {
		l.mu.Lock()
		defer l.mu.Unlock()
		c.asked = s == http.StateActive
	}
}
