package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
)

// ReadReport asks the plugin that runs on the state directory, and if none
// does, looks at its store and the kernel, with the backends and layers of the driver
// o. It changes nothing, and ctx bounds it.
func ReadReport(ctx context.Context, stateDir string, o Options) (report.Node, error) {
	return askOrLook(ctx, stateDir, "/status", o, func(p *plugin) (node report.Node, _ error) {
		p.reconciler.Inspect(ctx)
		node.NodeID, node.Volumes, node.StorageProblems = p.NodeID, report.Statuses(p.reconciler.Reports()), p.storageProblems()
		return node, nil
	})
}

// readExplanation reports on a volume in sentences: as the plugin says that runs on the state
// directory, else by a look at its store and the kernel, which changes nothing.
// NotFound: nothing is known of the volume.
func readExplanation(ctx context.Context, stateDir, volume string, o Options) (report.Explanation, error) {
	return askOrLook(ctx, stateDir, volumePath(volume, "explain"), o, func(p *plugin) (explanation report.Explanation, _ error) {
		p.reconciler.Inspect(ctx)
		found, err := p.reconciler.Explain(ctx, volume)
		if err != nil {
			return explanation, err
		}
		found.Unattended = true
		return found.Explanation(), nil
	})
}

// readOrphans lists what the plugin made and no intent explains. It changes nothing, and
// works also when no plugin runs on the state directory.
func readOrphans(ctx context.Context, stateDir string, o Options) ([]reconciler.Orphan, error) {
	return askOrLook(ctx, stateDir, "/orphans", o, func(p *plugin) ([]reconciler.Orphan, error) { return p.reconciler.InspectOrphans(ctx) })
}

// cleanOrphans makes the plugin that runs on the state directory detach the orphans
// that nobody uses, and returns all that it found.
func cleanOrphans(ctx context.Context, stateDir string) (orphans []reconciler.Orphan, err error) {
	err = ask(ctx, stateDir, http.MethodPost, "/orphans/clean", &orphans)
	return orphans, err
}

// Retry makes the plugin that runs on the state directory take a volume out of
// back-off, and returns the report of that volume after the attempt. ctx bounds the
// wait, not the attempt.
func Retry(ctx context.Context, stateDir, volume string) (node report.Node, err error) {
	err = ask(ctx, stateDir, http.MethodPost, volumePath(volume, "retry"), &node)
	return node, err
}

// inspectDevice makes the plugin that runs on the state directory look at what
// clearDevice would destroy. If clearDevice would refuse, its error is returned. It
// changes nothing.
func inspectDevice(ctx context.Context, stateDir, volume string) (c reconciler.Clearance, err error) {
	err = ask(ctx, stateDir, http.MethodGet, volumePath(volume, "clear-device"), &c)
	return c, err
}

// clearDevice makes the plugin that runs on the state directory destroy what is
// on a volume that nothing uses, and returns what that was. ctx bounds the wait
// for the volume's turn and for the answer: once begun, the plugin goes on.
func clearDevice(ctx context.Context, stateDir, volume string) (c reconciler.Clearance, err error) {
	err = ask(ctx, stateDir, http.MethodPost, volumePath(volume, "clear-device"), &c)
	return c, err
}

// What askProbe can ask.
const (
	liveProbe  = "live"  // the CSI socket answers
	readyProbe = "ready" // nothing that the plugin needs is missing
)

// askProbe asks the plugin that runs on the state directory for its health. It uses the
// status socket, so that only root can keep the plugin from answering.
func askProbe(ctx context.Context, stateDir, probe string) error {
	var word string
	return ask(ctx, stateDir, http.MethodGet, "/probes/"+probe, &word)
}

// volumePath has the id in the query: as a part of a path, ids such as ".." and "/" cannot be asked for.
func volumePath(volume, act string) string {
	return "/volume/" + act + "?id=" + url.QueryEscape(volume)
}

// errNotRunning is in the error when no plugin runs on a state directory.
var errNotRunning = errors.New("no plugin runs on the state directory")

// maxAnswer bounds the text of an error that is read from the plugin, in bytes.
const maxAnswer = 64 << 10

// askOrLook asks the plugin that runs on the state directory, or, if none does, returns what
// look finds. ctx bounds both.
func askOrLook[T any](ctx context.Context, stateDir, path string, o Options, look func(*plugin) (T, error)) (answer T, err error) {
	err = ask(ctx, stateDir, http.MethodGet, path, &answer)
	if !errors.Is(err, errNotRunning) {
		return answer, err
	}
	return offline(ctx, stateDir, o, look)
}

// ask makes a request of the plugin's status socket, which is answered with JSON.
func ask(ctx context.Context, stateDir, method, path string, answer any) error {
	return askFor(ctx, stateDir, method, path, func(body io.Reader) error { return json.NewDecoder(body).Decode(answer) })
}

// askText is ask for an answer that is a text, of which it reads no more than a bundle
// takes.
func askText(ctx context.Context, stateDir, path string, out io.Writer) error {
	return askFor(ctx, stateDir, http.MethodGet, path, func(body io.Reader) error {
		_, err := io.Copy(out, io.LimitReader(body, maxBundleText))
		return err
	})
}

func askFor(ctx context.Context, stateDir, method, path string, read func(io.Reader) error) (err error) {
	socket := filepath.Join(stateDir, statusSocket)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	req, err := http.NewRequestWithContext(ctx, method, "http://csi-node"+path, nil)
	if err != nil {
		return err
	}
	if at, ok := deadline.AnswerTime(ctx); ok {
		req.Header.Set(timeoutHeader, time.Until(at).String())
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w %s (nothing answers at %s): start it, or set --state-dir (or CSI_NODE_STATE_DIR) to the plugin's", errNotRunning, stateDir, socket)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%s is not for this user: run the command as root", socket)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the plugin did not answer in time; it goes on: repeat the command, or give it more time: %w", err)
	case err != nil:
		return fmt.Errorf("the plugin went away or does not answer: %w", err)
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	if resp.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		if err != nil {
			return fmt.Errorf("the plugin answers %s: %w", resp.Status, err)
		}
		if resp.StatusCode == http.StatusGatewayTimeout {
			return fmt.Errorf("the plugin is busy: %s (it goes on with that; repeat the command)", strings.TrimSpace(string(text)))
		}
		return fmt.Errorf("the plugin says: %s", strings.TrimSpace(string(text)))
	}
	return read(resp.Body)
}
