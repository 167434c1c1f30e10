package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// Report is the answer of the status socket.
type Report struct {
	Running bool                `json:"running"` // a plugin answered; else the store was read
	Driver  string              `json:"driver,omitempty"`
	Version string              `json:"version,omitempty"`
	Volumes []reconciler.Status `json:"volumes"`
}

// ReadReport asks the plugin that runs on the state directory, and if none
// does, reads its store. It changes nothing, and ctx bounds it.
func ReadReport(ctx context.Context, stateDir string) (Report, error) {
	socket := filepath.Join(stateDir, StatusSocket)
	report, err := ask(ctx, socket)
	if err == nil || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
		return report, err
	}
	path := filepath.Join(stateDir, StoreFile)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return report, fmt.Errorf("no plugin answers at %s and there is no store at %s: is --state-dir right?", socket, path)
	}
	store, err := state.OpenReadOnly(ctx, path)
	if err != nil {
		return report, err
	}
	report.Volumes = []reconciler.Status{}
	for _, record := range store.List() {
		report.Volumes = append(report.Volumes, reconciler.StatusOf(record))
	}
	return report, store.Close()
}

func ask(ctx context.Context, socket string) (report Report, err error) {
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true, // nobody asks again through this one
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://csi-node/status", nil)
	if err != nil {
		return report, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	if resp.StatusCode != http.StatusOK {
		return report, fmt.Errorf("the plugin answers %s", resp.Status)
	}
	return report, json.NewDecoder(resp.Body).Decode(&report)
}
