// Package client calls a CSI plugin on its socket, as a container orchestrator (CO)
// does, for a person at a terminal: it asks what the driver offers before it calls,
// creates the directories that a CO creates, and explains errors.
//
// Read this file for the connection, then node.go and controller.go for the calls.
// explain.go turns errors of gRPC into advice.
package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// Client is a connection to a plugin. Its methods may be called concurrently;
// they block until the plugin answers or ctx ends. Their errors say what to do
// (see explain.go); the clients in its fields return plain errors of gRPC.
type Client struct {
	Identity   csi.IdentityClient
	Controller csi.ControllerClient
	Node       csi.NodeClient
	conn       *grpc.ClientConn
}

// Dial returns a client of a socket that a process serves now.
func Dial(ctx context.Context, endpoint string) (*Client, error) {
	path, err := SocketPath(endpoint)
	if err != nil {
		return nil, err
	}
	// For a missing socket gRPC would only say Unavailable.
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("there is no socket at %s: is the plugin running, and is --endpoint (or CSI_ENDPOINT) right?", path)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("the socket %s is not for this user: run the command as root", path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("nobody serves the socket %s: the plugin is not running, start it", path)
	case err != nil:
		return nil, fmt.Errorf("the socket %s: %w", path, err)
	}
	if err := conn.Close(); err != nil {
		return nil, fmt.Errorf("the socket %s: %w", path, err)
	}
	return Connect(endpoint)
}

// Connect returns a client of a socket that may come and go: it connects when it
// is used, and again when the connection is lost.
func Connect(endpoint string) (*Client, error) {
	path, err := SocketPath(endpoint)
	if err != nil {
		return nil, err
	}
	// A socket that is not there yet is tried again soon, not only after a second. A
	// busy plugin is given time.
	quickly := grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second},
		MinConnectTimeout: 20 * time.Second,
	}
	// Not unix://, which would take a path with a % or a # for a URL.
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	conn, err := grpc.NewClient("passthrough:///localhost", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(quickly))
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	return &Client{csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn), conn}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// SocketPath returns the path of the socket that an endpoint names: unix:// and
// an absolute path, or the path alone.
func SocketPath(endpoint string) (string, error) {
	path := strings.TrimPrefix(strings.TrimPrefix(endpoint, "unix:"), "//")
	if !filepath.IsAbs(path) || strings.HasPrefix(endpoint, "//") {
		return "", fmt.Errorf("endpoint %q: must be unix:// and an absolute path, such as unix:///csi/csi.sock", endpoint)
	}
	return path, nil
}
