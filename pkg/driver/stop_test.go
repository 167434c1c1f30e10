package driver

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/test/require"
)

// hung never answers, whatever becomes of the call.
type hung struct {
	csi.UnimplementedIdentityServer
	asked, release chan struct{}
}

func (h hung) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	close(h.asked)
	<-h.release
	return &csi.ProbeResponse{}, nil
}

// A call that hangs does not keep the plugin from its end, in which others would wait for
// its locks.
func TestServerStopsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hung{asked: make(chan struct{}), release: make(chan struct{})}
		listener, server := bufconn.Listen(1<<10), grpc.NewServer()
		csi.RegisterIdentityServer(server, h)
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		conn, err := grpc.NewClient("passthrough:///test", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
		require.NoError(t, err)
		answered := make(chan error, 1)
		go func() {
			_, err := csi.NewIdentityClient(conn).Probe(context.Background(), &csi.ProbeRequest{})
			answered <- err
		}()
		<-h.asked
		ended, end := context.WithCancel(t.Context())
		end()
		start := time.Now()
		stopServer(ended, server)
		if took := time.Since(start); took != stopTimeout {
			t.Errorf("it took %s", took)
		}
		if err := <-answered; err == nil {
			t.Error("the call was answered")
		}
		require.NoError(t, <-served)
		close(h.release)
		require.NoError(t, conn.Close())
	})
}

// A backend that hangs while it is opened keeps nobody from ending the plugin.
func TestStopWhileTheStorageIsOpened(t *testing.T) {
	c := testConfig(t)
	synctest.Test(t, func(t *testing.T) {
		opening, release, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
		o := testOptions()
		o.Backends[0].Open = func(context.Context, devices.Environment) (devices.Backend, error) {
			defer close(ended)
			close(opening)
			<-release
			return nil, errors.New("too late")
		}
		ctx, stop := context.WithCancel(t.Context())
		run := make(chan error, 1)
		go func() { run <- Run(ctx, c, o) }()
		<-opening
		stop()
		if err := <-run; err == nil || !strings.Contains(err.Error(), "a disk does not answer") {
			t.Error(err)
		}
		close(release)
		<-ended
	})
}

func TestEndInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended, end := context.WithCancel(t.Context())
		release := make(chan struct{})
		if !endInTime(ended, func() { time.Sleep(time.Hour) }) {
			t.Error("nobody stopped it")
		}
		end()
		if !endInTime(ended, func() { time.Sleep(stopTimeout / 2) }) {
			t.Error("it ended in time")
		}
		if endInTime(ended, func() { <-release }) {
			t.Error("it hangs")
		}
		close(release)
	})
}
