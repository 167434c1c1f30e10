package driver

import (
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Whoever asks again and again, as a test or a monitor does, keeps no
// connection open, neither in the plugin nor in itself.
func TestReadReportLeavesNoConnection(t *testing.T) {
	dir := filepath.Dir(strings.TrimPrefix(testConfig(t).Endpoint, "unix://"))
	listener, err := net.Listen("unix", filepath.Join(dir, StatusSocket))
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{}, 1)
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"running":true}`)) }),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed {
				closed <- struct{}{}
			}
		},
	}
	go func() { _ = server.Serve(listener) }() // ends when it is closed
	defer server.Close()
	if report, err := ReadReport(t.Context(), dir); err != nil || !report.Running {
		t.Fatalf("%+v (%v)", report, err)
	}
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Error("the connection stays open")
	}
}
