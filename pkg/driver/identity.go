package driver

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// identity serves the CSI Identity RPCs (spec v1.13, "Identity Service RPC").
type identity struct {
	csi.UnimplementedIdentityServer
	name, version string
	capabilities  []*csi.PluginCapability
	checks        []func(context.Context) error // of everything that the plugin needs
	looks         hang.Calls[struct{}]
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.name, VendorVersion: i.version}, nil
}

func (i *identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: i.capabilities}, nil
}

// capabilities are those of the backends and those that the driver's builder adds.
func (p *plugin) capabilities() (all []*csi.PluginCapability) {
	service := func(t csi.PluginCapability_Service_Type) {
		all = append(all, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}})
	}
	if p.controller != nil {
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE)
	}
	if p.properties.NodeLocal || p.options.Topology != nil {
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
	}
	if _, ok := ability[devices.Grower](p); ok {
		all = append(all, &csi.PluginCapability{
			Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}},
		})
	}
	return append(all, p.options.Capabilities...)
}

// Probe answers ready: the socket serves only once the store is open and every
// record is queued. It returns FailedPrecondition while something is missing.
func (i *identity) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if err := i.healthy(ctx); err != nil {
		return nil, state.Errorf(state.FailedPrecondition, "%w", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// checkTime bounds the checks. A check that hangs on a dead disk is no reason to
// restart the plugin: that would kill the helper programs that work on other disks.
const checkTime = 3 * time.Second

// healthy returns what is missing. Concurrent callers share one round of checks.
func (i *identity) healthy(ctx context.Context) error {
	waiting, stop := context.WithTimeout(ctx, checkTime)
	defer stop()
	_, _, err := i.looks.Join(waiting, "", hang.NoLimit, func() (struct{}, error) {
		for _, check := range i.checks {
			if err := check(context.WithoutCancel(ctx)); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	_, late := err.(*hang.Unanswered)
	switch {
	case !late:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	klog.FromContext(ctx).Info("A check of the plugin's needs does not end", "waited", checkTime)
	return nil
}

// checks cover everything that may go missing while the plugin runs.
func (p *plugin) checks() []func(context.Context) error {
	return []func(context.Context) error{
		p.defaultStorage(),
		func(context.Context) error { return p.filesystem.CheckPrograms() },
	}
}

// defaultStorage checks whether the default backend can serve volumes. Roll-outs
// wait for a plugin that is not ready, and external-provisioner does not start. So what another backend lacks does not
// count here: its volumes and NodeGetStorageHealth report it.
func (p *plugin) defaultStorage() func(context.Context) error {
	place, ok := p.backends[0].Backend.(devices.Checker)
	return func(ctx context.Context) error {
		if !ok {
			return nil
		}
		if err := place.Check(ctx); !report.Serves(err) {
			return err
		}
		return nil
	}
}

// storageTime bounds the check of each backend.
const storageTime = 5 * time.Second

// storage returns what is wrong with the places of the backends. They are asked at the same
// time, and one that does not answer is named.
func (p *plugin) storage(ctx context.Context) []report.Finding {
	return p.checkStorage(ctx, storageTime, 0)
}

// storageProblems is storage in sentences. It waits for the given time. A backend that has
// not answered by then is named only if its check has been running for storageTime.
func (p *plugin) storageProblems(wait time.Duration) (all []string) {
	for _, f := range p.checkStorage(context.Background(), wait, storageTime) {
		all = append(all, f.Message)
	}
	return all
}

// checkStorage waits for the check of each backend, and reports those whose check has been
// running for longer than silence. A check that hangs goes on, and the next caller joins
// it.
func (p *plugin) checkStorage(ctx context.Context, wait, silence time.Duration) []report.Finding {
	ctx, stop := context.WithTimeout(ctx, wait)
	defer stop()
	errs := make([]error, len(p.backends))
	var asked sync.WaitGroup
	for i, b := range p.backends {
		place, can := b.Backend.(devices.Checker)
		if !can {
			continue
		}
		asked.Go(func() {
			_, _, err := p.looks.Join(ctx, b.name, hang.NoLimit, func() (struct{}, error) {
				ctx, stop := context.WithTimeout(context.Background(), storageTime)
				defer stop()
				return struct{}{}, place.Check(ctx)
			})
			if late, is := err.(*hang.Unanswered); is {
				err = nil
				if time.Since(late.Since) >= silence {
					err = fmt.Errorf("the backend %s: %w", b.name, late)
				}
			}
			errs[i] = err
		})
	}
	asked.Wait()
	return report.StorageHealth(errs)
}
