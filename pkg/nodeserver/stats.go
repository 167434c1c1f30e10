package nodeserver

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/singleflight"

	"github.com/csi-node/csi-node/pkg/state"
)

// probes lets one look at a volume's usage run at a time; callers share it.
type probes struct{ flight singleflight.Group }

// statsTimeout bounds NodeGetVolumeStats, which kubelet calls for each volume in turn.
const statsTimeout = 10 * time.Second

// NodeGetVolumeStats tells how full a volume is. It answers within statsTimeout,
// even if the file system hangs.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := s.volumeID(id); err != nil {
		return nil, err
	}
	if path == "" {
		return nil, state.Errorf(state.InvalidArgument, "volume_path is missing")
	}
	if !filepath.IsAbs(path) {
		return nil, state.Errorf(state.NotFound, "volume %s: not at the path %s, which is relative", id, path)
	}
	if err := s.path("volume_path", path); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	want := &state.Volume{ID: id, Targets: map[string]*state.Target{path: {Path: path}}}
	have, err := s.Reconciler.Observe(ctx, want)
	if err != nil {
		return nil, err
	}
	at := have.Targets[path]
	switch {
	case at.Err != nil:
		return nil, at.Err
	case len(at.Mounts) > 0 && at.Mounts[0].Node && (at.Mounts[0].Is(have.Device.Number) || at.Mounts[0].Is(have.View.Number)), s.stagedBlock(id, path):
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: have.Device.Size}}}, nil
	case len(at.Mounts) == 0 || !at.Mounts[0].Is(have.Device.Number):
		return nil, state.Errorf(state.NotFound, "volume %s: not mounted at %s", id, path)
	}
	usage, err := s.usage(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("volume %s: usage of %s: %w", id, path, err)
	}
	// What was unmounted meanwhile would have told of the file system beneath.
	have, err = s.Reconciler.Observe(ctx, want)
	if err != nil {
		return nil, err
	}
	if at := have.Targets[path]; len(at.Mounts) == 0 || !at.Mounts[0].Is(have.Device.Number) {
		return nil, state.Errorf(state.NotFound, "volume %s: not mounted at %s any more", id, path)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: usage.Bytes.Total, Used: usage.Bytes.Used, Available: usage.Bytes.Available},
		{Unit: csi.VolumeUsage_INODES, Total: usage.Inodes.Total, Used: usage.Inodes.Used, Available: usage.Inodes.Available},
	}}, nil
}

// stagedBlock reports whether path is where a raw block volume is staged;
// nothing is mounted there.
func (s *Server) stagedBlock(id, path string) bool {
	record := s.Records.Get(id)
	return record != nil && record.Stage != nil && record.Stage.Accepted &&
		record.Stage.Path == path && record.Stage.Capability.Access == state.BlockAccess
}

func (s *Server) usage(ctx context.Context, path string) (state.Usage, error) {
	look := s.probes.flight.DoChan(path, func() (any, error) { return s.Paths.Usage(context.WithoutCancel(ctx), path) })
	select {
	case res := <-look:
		usage, _ := res.Val.(state.Usage)
		return usage, res.Err
	case <-ctx.Done():
		return state.Usage{}, ctx.Err()
	}
}
