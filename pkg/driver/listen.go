package driver

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/csi-node/csi-node/pkg/process"
)

// listen opens the CSI socket. A socket that a dead process left behind is replaced.
// One that a process serves, or a file of another kind, is an error.
func listen(endpoint string) (net.Listener, error) {
	path, err := socketPath(endpoint)
	if err != nil {
		return nil, err
	}
	listener, err := listenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("--endpoint %s: %w", endpoint, err)
	}
	return listener, nil
}

// socketPath returns the path of the socket that an endpoint names.
func socketPath(endpoint string) (string, error) {
	path, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok {
		path, ok = strings.CutPrefix(endpoint, "unix:")
	}
	if !ok || !filepath.IsAbs(path) {
		return "", fmt.Errorf("--endpoint %q: must be unix:// and an absolute path, such as unix:///csi/csi.sock", endpoint)
	}
	return path, nil
}

// listenUnix listens on a socket that only root may use. It replaces one whose process
// is gone or dead (process.Dead).
func listenUnix(path string) (*net.UnixListener, error) {
	if info, err := os.Lstat(path); err == nil {
		if info.Mode()&os.ModeSocket == 0 {
			return nil, errors.New("a file that is not a socket is there: remove it")
		}
		switch conn, err := net.Dial("unix", path); {
		case err == nil:
			server, err := process.Peer(conn)
			if err := errors.Join(err, conn.Close()); err != nil {
				return nil, err
			}
			dead, err := process.Dead(server)
			if err != nil {
				return nil, err
			}
			if !dead {
				return nil, fmt.Errorf("another process serves it: stop that first: %s", process.Name(server))
			}
		case !errors.Is(err, syscall.ECONNREFUSED): // such as EAGAIN of a process that is busy
			return nil, fmt.Errorf("another process may serve it: stop that, or remove the socket: %w", err)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("%w (its directory must exist and be writable)", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}
