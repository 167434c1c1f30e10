package driver

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/require"
)

// A full listener closes the oldest connection without a request. One that is being
// answered stays; while all are being answered, the newest is refused.
func TestBoundedListener(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := newBoundedListener(plain, 2)
	defer l.Close()
	accepted := make(chan net.Conn, 8)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- conn
		}
	}()
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", plain.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	mustBeClosed := func(title string, conn net.Conn) {
		t.Helper()
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
		if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%s is not closed (%v)", title, err)
		}
	}
	first, firstHere := dial(), <-accepted
	second, secondHere := dial(), <-accepted
	l.note(firstHere, http.StateActive)
	third, thirdHere := dial(), <-accepted
	mustBeClosed("the oldest silent one", second)
	if err := secondHere.Close(); err != nil {
		t.Errorf("closing what had to go: %v", err)
	}
	l.note(thirdHere, http.StateActive)
	if late, err := net.Dial("tcp", plain.Addr().String()); err == nil { // else it was faster
		mustBeClosed("one too many", late)
		late.Close()
	}
	for title, pair := range map[string][2]net.Conn{"the first": {first, firstHere}, "the third": {third, thirdHere}} {
		if _, err := pair[1].Write([]byte("x")); err != nil {
			t.Errorf("%s was closed: %v", title, err)
		}
		if _, err := io.ReadFull(pair[0], make([]byte, 1)); err != nil {
			t.Errorf("%s was closed: %v", title, err)
		}
	}
	l.note(firstHere, http.StateIdle)
	dial()
	if conn := <-accepted; conn == nil {
		t.Error("a place that is free again is not given")
	}
	mustBeClosed("one that was answered", first)
	if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	if _, open := <-accepted; open {
		t.Error("a closed listener accepts")
	}
}
