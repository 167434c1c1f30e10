package nodeserver

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// statsAgeHeader is the gRPC response header of a NodeGetVolumeStats answer that
// repeats an earlier look: the age of that in whole seconds.
const statsAgeHeader = "csi-node-stats-age"

// NodeGetVolumeStats returns how full a volume is. It answers within answerTimeout. If
// the volume does not, the answer is its last known usage, or DeadlineExceeded.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	req, err := spell(ctx, s.Paths, req)
	if err != nil {
		return nil, err
	}
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := s.volumeID(id); err != nil {
		return nil, err
	}
	if err := s.volumePath(id, path); err != nil {
		return nil, err
	}
	if err := s.Paths.Check(path); state.ClassOf(err) == state.InvalidArgument {
		return nil, state.Errorf(state.NotFound, "volume %s: it cannot be at such a path: %w", id, err)
	} else if err != nil {
		return nil, err
	}
	usage, err := s.queries.ask(ctx, id, path, func(ctx context.Context) ([]*csi.VolumeUsage, error) { return s.usage(ctx, id, path) })
	if hangs := (noAnswer{}); errors.As(err, &hangs) {
		if last, ok := s.queries.seen(id); ok && isAskedAt(s.Records.Get(id), path) {
			tellAge(ctx, path, last.at, hangs)
			usage, err = last.usage, nil
		}
	}
	if err != nil {
		return nil, state.InVolume(id, "usage of "+path, err)
	}
	s.queries.dropUnknown(func(id string) bool { return s.Records.Get(id) != nil })
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

// isAskedAt reports whether the volume is to be staged or published at path.
func isAskedAt(v *state.Volume, path string) bool {
	if v == nil {
		return false
	}
	t := v.Targets[path]
	return t != nil && !t.Gone || v.Stage != nil && !v.Stage.Gone && v.Stage.Path == path
}

// tellAge marks the answer as an old one, in its header and in the log.
func tellAge(ctx context.Context, path string, at time.Time, hangs noAnswer) {
	logger := klog.FromContext(ctx)
	logger.Info("The volume does not answer: told its last known usage", "path", path, "age", age(at), "silent", age(hangs.since))
	seconds := strconv.FormatInt(int64(time.Since(at)/time.Second), 10)
	if err := grpc.SetHeader(ctx, metadata.Pairs(statsAgeHeader, seconds)); err != nil {
		logger.Error(err, "The answer does not tell its age")
	}
}

func age(since time.Time) time.Duration { return time.Since(since).Round(time.Second / 10) }

// usage looks at the volume. It may never return.
func (s *Server) usage(ctx context.Context, id, path string) ([]*csi.VolumeUsage, error) {
	have, err := s.Reconciler.Observe(ctx, &state.Volume{ID: id})
	if err != nil && (have.Device.Err == nil || !have.Device.Attached()) { // else only the backend's facts are not known
		return nil, err
	}
	bytes := []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: have.Device.Size}}
	if s.stagedBlock(id, path) {
		return bytes, nil
	}
	at, usage, err := s.Paths.Usage(ctx, path)
	if err != nil || at.Corrupt { // no event reports a file system that broke down
		s.Reconciler.Changed(path)
	}
	switch {
	case err != nil:
		return nil, err
	case at.Node && (at.Is(have.Device.Number) || at.Is(have.View.Number)):
		return bytes, nil
	case at.Node, !at.Is(have.Device.Number) && !have.Source.Is(at):
		return nil, state.Errorf(state.NotFound, "the volume is not mounted there")
	case at.Corrupt:
		return nil, state.Errorf(state.Unavailable, "its file system is broken: it was shut down, or its device failed")
	}
	return []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: usage.Bytes.Total, Used: usage.Bytes.Used, Available: usage.Bytes.Available},
		{Unit: csi.VolumeUsage_INODES, Total: usage.Inodes.Total, Used: usage.Inodes.Used, Available: usage.Inodes.Available},
	}, nil
}

// stagedBlock reports whether path is where a raw block volume is staged;
// nothing is mounted there.
func (s *Server) stagedBlock(id, path string) bool {
	record := s.Records.Get(id)
	return record != nil && record.Stage != nil && record.Stage.Accepted &&
		record.Stage.Path == path && record.Stage.Capability.Access == state.BlockAccess
}
