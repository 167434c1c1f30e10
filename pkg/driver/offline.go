package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state/store"
)

// settingsFile in the state directory holds the settings of the last plugin that ran
// there, for the commands that look at the node when none runs.
const settingsFile = "settings.json"

// settings are the part of Config that commands need when no plugin runs.
type settings struct {
	DriverName string `json:"driverName,omitempty"`
	NodeID     string `json:"nodeID,omitempty"`
	KubeletDir string `json:"kubeletDir"`
	LibDir     string `json:"libDir,omitempty"`
	// Flags are the backends' own, by name.
	Flags map[string]string `json:"flags,omitempty"`
	// PoolDir was written by versions that had only one backend.
	PoolDir string `json:"poolDir,omitempty"`
}

// writeSettings replaces the file in one step, if its content changes. Only the
// commands need it: if it cannot be written it is removed, because a wrong one would
// be worse than none, and the plugin serves all the same.
func (p *plugin) writeSettings(ctx context.Context) error {
	raw, err := json.Marshal(settings{DriverName: p.DriverName, NodeID: p.NodeID, KubeletDir: p.KubeletDir, LibDir: p.LibDir, Flags: p.BackendFlags})
	if err != nil {
		return err
	}
	path := filepath.Join(p.StateDir, settingsFile)
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, raw) {
		return nil
	}
	err = os.WriteFile(path+".new", raw, 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		return nil
	}
	klog.FromContext(ctx).Error(err, "Settings cannot be written: while no plugin runs, the tools that look at this node will not find its directories", "file", path)
	for _, wrong := range []string{path + ".new", path} {
		if err := os.Remove(wrong); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func readSettings(stateDir string) (s settings, err error) {
	path := filepath.Join(stateDir, settingsFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return s, fmt.Errorf("no plugin answers at %s, and none has ever run on this directory since the node started (%s is missing): is --state-dir right?", filepath.Join(stateDir, statusSocket), path)
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("%s is damaged, and is written anew when the plugin starts: %w", path, err)
	}
	if s.Flags == nil && s.PoolDir != "" {
		s.Flags, s.LibDir = map[string]string{"pool-dir": s.PoolDir}, "/var/lib/csi-node"
	}
	return s, nil
}

// openOffline creates the parts that look at the store and the kernel, for a state
// directory on which no plugin runs. It changes nothing.
func openOffline(ctx context.Context, stateDir string, o Options) (*plugin, error) {
	s, err := readSettings(stateDir)
	if err != nil {
		return nil, err
	}
	p := &plugin{
		Config:  Config{DriverName: s.DriverName, NodeID: s.NodeID, StateDir: stateDir, LibDir: s.LibDir, KubeletDir: s.KubeletDir, BackendFlags: s.Flags},
		options: o,
	}
	if p.properties, err = checkKinds(o.Backends); err != nil {
		return nil, err
	}
	if p.store, err = store.OpenReadOnly(ctx, stateDir); err != nil {
		return nil, err
	}
	if p.mounts, err = mounts.New(s.KubeletDir); err != nil {
		return nil, fmt.Errorf("the kubelet directory %s: %w", s.KubeletDir, err)
	}
	p.spellRecords(ctx)
	if p.filesystem, err = filesystem.New(1); err != nil {
		return nil, err
	}
	if err := p.openBackends(ctx, true); err != nil {
		return nil, errors.Join(err, p.release())
	}
	if p.inline, err = p.inlineVolumes(ctx); err != nil {
		return nil, errors.Join(err, p.release())
	}
	kernel := p.kernel()
	kernel.Bound = nil // no watcher runs, so the mount table is read instead
	p.reconciler = reconciler.New(reconciler.Config{Store: p.store, Kernel: kernel})
	return p, nil
}

// close ends what openOffline began.
func (p *plugin) close() error {
	ended, end := context.WithCancel(context.Background())
	end()
	p.reconciler.Run(ended)
	return p.release()
}

// offline returns what look finds with parts that look at a node on which no plugin runs. If
// a disk hangs, look is left behind when ctx ends.
func offline[T any](ctx context.Context, stateDir string, o Options, look func(*plugin) (T, error)) (T, error) {
	var looks hang.Calls[T]
	found, err := looks.Do(ctx, stateDir, hang.NoLimit, func() (found T, err error) {
		p, err := openOffline(ctx, stateDir, o)
		if err != nil {
			return found, err
		}
		defer func() { err = errors.Join(err, p.close()) }()
		return look(p)
	})
	if _, late := err.(*hang.Unanswered); late {
		err = fmt.Errorf("perhaps a disk does not answer (see dmesg): %w", err)
	}
	if err != nil && !errors.Is(err, store.ErrLocked) {
		err = fmt.Errorf("no plugin runs on %s, so the node is looked at without it: %w", stateDir, err)
	}
	return found, err
}
