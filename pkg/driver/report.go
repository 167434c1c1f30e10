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

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/registration"
	"github.com/csi-node/csi-node/pkg/state"
)

// Report is the answer of the status socket.
type Report struct {
	Running bool                `json:"running"` // a plugin answered; else store and kernel were looked at
	Driver  string              `json:"driver,omitempty"`
	Version string              `json:"version,omitempty"`
	Volumes []reconciler.Status `json:"volumes"`
	// Registration is what kubelet answered, if the plugin registers itself.
	Registration *Registration `json:"registration,omitempty"`
}

// What a report is made of, for those who print it.
type (
	Story        = reconciler.Story
	PartStatus   = reconciler.PartStatus
	Registration = registration.Status
)

// ReadReport asks the plugin that runs on the state directory, and if none
// does, looks at its store and the kernel, with the kinds of backends that it has.
// It changes nothing, and ctx bounds it.
func ReadReport(ctx context.Context, stateDir string, kinds ...devices.Kind) (report Report, err error) {
	err = ask(ctx, stateDir, http.MethodGet, "/status", &report)
	if !errors.Is(err, errNotRunning) {
		return report, err
	}
	err = offline(ctx, stateDir, kinds, func(p *plugin) error {
		p.reconciler.Inspect(ctx)
		report.Volumes = p.reconciler.Status()
		return nil
	})
	return report, err
}

// Explain tells the story of a volume, by the plugin that runs on the state
// directory, else by a look at its store and the kernel, which changes nothing.
// NotFound: there is nothing to tell.
func Explain(ctx context.Context, stateDir, volume string, kinds ...devices.Kind) (story Story, err error) {
	err = ask(ctx, stateDir, http.MethodGet, volumePath(volume, "explain"), &story)
	if !errors.Is(err, errNotRunning) {
		return story, err
	}
	err = offline(ctx, stateDir, kinds, func(p *plugin) (err error) {
		p.reconciler.Inspect(ctx)
		story, err = p.reconciler.Explain(ctx, volume)
		story.InTheWay = append([]string{"No plugin runs on this node."}, story.InTheWay...)
		if len(story.Missing) > 0 {
			story.YouCan = []string{"Start the plugin: it takes up what is missing."}
		}
		return err
	})
	return story, err
}

// Orphans lists what the plugin made and no intent explains. It changes nothing,
// and also looks when no plugin runs on the state directory.
func Orphans(ctx context.Context, stateDir string, kinds ...devices.Kind) (orphans []Orphan, err error) {
	err = ask(ctx, stateDir, http.MethodGet, "/orphans", &orphans)
	if !errors.Is(err, errNotRunning) {
		return orphans, err
	}
	err = offline(ctx, stateDir, kinds, func(p *plugin) (err error) {
		orphans, err = p.findOrphans(ctx, func(a attachment, o *Orphan) bool {
			for _, d := range []state.Device{a.Device, a.view} {
				if d.State == state.DeviceAbsent {
					continue
				}
				if held, err := p.views.Held(ctx, d); err != nil {
					o.Kept = err.Error()
				} else if held {
					o.Kept = "it is in use, perhaps in another mount namespace"
				}
			}
			return true
		})
		return err
	})
	return orphans, err
}

// CleanOrphans lets the plugin that runs on the state directory detach the
// orphans that nobody uses, and returns all that it found.
func CleanOrphans(ctx context.Context, stateDir string) (orphans []Orphan, err error) {
	err = ask(ctx, stateDir, http.MethodPost, "/orphans/clean", &orphans)
	return orphans, err
}

// Unsettled says of each part that is not as asked how it stands and why.
func (report Report) Unsettled() []string {
	var all []string
	for _, v := range report.Volumes {
		for _, p := range v.Parts {
			if p.Is != reconciler.Settled {
				all = append(all, strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", p.Part, p.Is, p.Error), ": "))
			}
		}
	}
	return all
}

// Retry lets the plugin that runs on the state directory take a volume out of
// back-off, and returns how that volume stands after the attempt. ctx bounds the
// wait, not the attempt.
func Retry(ctx context.Context, stateDir, volume string) (report Report, err error) {
	err = ask(ctx, stateDir, http.MethodPost, volumePath(volume, "retry"), &report)
	return report, err
}

// InspectDevice lets the plugin that runs on the state directory look at what
// ClearDevice would destroy. It is an error, which says what stands in the way,
// when ClearDevice would refuse. It changes nothing.
func InspectDevice(ctx context.Context, stateDir, volume string) (c Clearance, err error) {
	err = ask(ctx, stateDir, http.MethodGet, volumePath(volume, "clear-device"), &c)
	return c, err
}

// ClearDevice lets the plugin that runs on the state directory destroy what is
// on a volume that nothing uses, and returns what that was. ctx bounds the wait
// for the volume's turn and for the answer: once begun, the plugin goes on.
func ClearDevice(ctx context.Context, stateDir, volume string) (c Clearance, err error) {
	err = ask(ctx, stateDir, http.MethodPost, volumePath(volume, "clear-device"), &c)
	return c, err
}

// Probes are what Probe can ask.
const (
	Live  = "live"  // the CSI socket answers
	Ready = "ready" // nothing that the plugin needs is missing
)

// Probe asks the plugin that runs on the state directory for its health. It goes
// over the status socket, so that nobody but root can keep it from its answer.
func Probe(ctx context.Context, stateDir, probe string) error {
	var word string
	return ask(ctx, stateDir, http.MethodGet, "/probes/"+probe, &word)
}

func volumePath(volume, act string) string {
	return "/volumes/" + url.PathEscape(volume) + "/" + act
}

// errNotRunning is in the error when no plugin runs on a state directory.
var errNotRunning = errors.New("no plugin runs on the state directory")

// maxAnswer bounds an error's text that is read from the plugin, in bytes.
const maxAnswer = 64 << 10

// ask makes a request of the plugin's status socket.
func ask(ctx context.Context, stateDir, method, path string, answer any) (err error) {
	socket := filepath.Join(stateDir, StatusSocket)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	req, err := http.NewRequestWithContext(ctx, method, "http://csi-node"+path, nil)
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		req.Header.Set(timeoutHeader, (left - min(left/10, 2*time.Second)).String())
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w %s (%s answers nobody): start it, or set --state-dir (or CSI_NODE_STATE_DIR) to the plugin's", errNotRunning, stateDir, socket)
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
	return json.NewDecoder(resp.Body).Decode(answer)
}
