package driver

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// inventory is what the backends of a plugin have on this node.
type inventory struct {
	Driver  string `json:"driver"`
	Default string `json:"usualBackend"` // of volumes whose context names none
	// Topology is the segment that names the node, of a driver whose volumes are local
	// to one; nil: they are accessible from everywhere.
	Topology map[string]string `json:"topology,omitempty"`
	Volumes  []listedVolume    `json:"volumes"` // in the order of their ids
}

// listedVolume is a volume that a backend has, whether anything is asked of it or not.
type listedVolume struct {
	ID        string `json:"id"`
	Backend   string `json:"backend"`
	Bytes     int64  `json:"bytes,omitempty"`     // without those that its layers take
	Block     bool   `json:"block,omitempty"`     // it was made to be a raw block device
	FSType    string `json:"fsType,omitempty"`    // else the file system that it was made for; empty: not known
	Formatted string `json:"formatted,omitempty"` // the file system that it has; empty: none, or not known
	Inline    bool   `json:"inline,omitempty"`    // it lives for one pod
	// Layers are those that the volume has, such as an encrypted one, from its source up.
	Layers []string `json:"layers,omitempty"`
	// Parameters are those of its StorageClass; Context is its volume context.
	Parameters map[string]string `json:"parameters,omitempty"`
	Context    map[string]string `json:"context,omitempty"`
	Error      string            `json:"error,omitempty"` // why its facts cannot be read
	// Is is the condition of what is asked of it on this node; empty: nothing is.
	Is   report.Condition `json:"is,omitempty"`
	Pods []string         `json:"pods,omitempty"` // to which it is to be published, as namespace/name
}

// readInventory asks the plugin that runs on the state directory for the volumes of
// its backends, and if none does, looks at them itself. It changes nothing, and ctx
// bounds it.
func readInventory(ctx context.Context, stateDir string, o Options) (inventory, error) {
	return askOrLook(ctx, stateDir, "/volumes", o, func(p *plugin) (inventory, error) {
		p.reconciler.Inspect(ctx)
		return p.inventory(ctx)
	})
}

// inventory lists the volumes of all backends that list them. While a disk hangs, one
// listing at a time waits for it.
func (p *plugin) inventory(ctx context.Context) (inventory, error) {
	all, _, err := p.listing.Join(ctx, "", hang.NoLimit, func() (inventory, error) { return p.listAll(context.WithoutCancel(ctx)) })
	return all, err
}

func (p *plugin) listAll(ctx context.Context) (inventory, error) {
	all := inventory{Driver: p.DriverName, Default: p.devices.Default(), Topology: p.topology(), Volumes: []listedVolume{}}
	asked := map[string]report.Volume{}
	for _, v := range p.reconciler.Reports() {
		asked[v.ID] = v
	}
	for _, name := range p.devices.Provisioners() {
		backend := p.devices.Get(name).(devices.Provisioner)
		ids, err := backend.ListVolumes(ctx)
		if err != nil {
			return all, err
		}
		for _, id := range ids {
			v, there := p.describe(ctx, name, backend, id)
			if !there {
				continue
			}
			if record, known := asked[id]; known {
				v.Is = record.Worst()
				for _, part := range record.Parts {
					if part.Pod != "" {
						v.Pods = append(v.Pods, part.Pod)
					}
				}
			}
			all.Volumes = append(all.Volumes, v)
		}
	}
	slices.SortFunc(all.Volumes, func(a, b listedVolume) int { return cmp.Compare(a.ID, b.ID) })
	return all, nil
}

// describe returns a volume as its backend has it, and whether it is there.
func (p *plugin) describe(ctx context.Context, name string, backend devices.Provisioner, id string) (listedVolume, bool) {
	v := listedVolume{ID: id, Backend: name}
	of := devices.Volume{ID: id, Backend: name}
	have, err := backend.GetVolume(ctx, of)
	if state.ClassOf(err) == state.NotFound {
		return v, false // it was deleted meanwhile
	}
	if inliner, ok := backend.(devices.Inliner); ok && err == nil {
		var owner *devices.InlineOwner
		owner, err = inliner.InlineOwner(ctx, id)
		v.Inline = owner != nil
	}
	if err != nil {
		v.Error = err.Error()
		return v, true
	}
	v.Bytes = max(have.Bytes-p.devices.Overhead(have.Context), 0) // as ListVolumes tells
	v.Block, v.FSType, v.Parameters, v.Context = have.Use.Block, have.Use.FSType, have.Parameters, have.Context
	of.Context = have.Context
	for _, layer := range p.layers {
		if layer.Wanted(of) {
			v.Layers = append(v.Layers, layer.Name())
		}
	}
	if d, err := p.devices.Find(ctx, of); err == nil && d.Err == nil {
		v.Formatted = d.Formatted
	}
	return v, true
}

// details returns what the plugin of that driver on a state directory knows of its
// volumes; nil: none answers, or it is another driver's.
func details(ctx context.Context, stateDir, driver string) map[string]command.Detail {
	var all inventory
	if err := ask(ctx, stateDir, http.MethodGet, "/volumes", &all); err != nil || all.Driver != driver {
		return nil
	}
	known := map[string]command.Detail{}
	for _, v := range all.Volumes {
		d := command.Detail{Backend: v.Backend, Provisioning: v.Parameters["provisioning"], State: string(v.Is), Pods: v.Pods}
		switch {
		case v.Error != "":
			d.Filesystem = "unknown"
		case v.Formatted != "":
			d.Filesystem = v.Formatted
		case v.Block:
			d.Filesystem = "none (block)"
		default:
			d.Filesystem = strings.TrimSpace(v.FSType + " (unformatted)")
		}
		if v.Inline {
			d.Provisioning = strings.TrimSpace(d.Provisioning + " (inline)")
		}
		known[v.ID] = d
	}
	return known
}
