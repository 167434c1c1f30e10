package driver

import (
	"cmp"
	"context"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// refusals remembers, for each volume, the last call that was refused. A refused call
// leaves no intent, so nothing else would tell of it. It is in memory only, bounded in
// time and in number. The zero value is ready; the methods may be called concurrently.
type refusals struct {
	mu  sync.Mutex
	all map[string]report.Refusal // by volume
}

const (
	refusalAge     = time.Hour // how long one is remembered
	maxRefusals    = 256       // the oldest goes first
	maxRefusalText = 2 << 10   // bytes that are kept of a message; a longer volume id is not kept
)

// note remembers calls that are refused. A call that succeeds ends the memory of its
// own refusal, and the deletion of a volume that of all.
func (r *refusals) note(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	call, at := path.Base(info.FullMethod), pathOf(req)
	volume := volumeNamed(req)
	switch {
	case volume == "" || len(volume) > maxRefusalText || !asksForChange(call):
	case err == nil:
		r.succeeded(volume, call, at)
	case isRefusal(status.Code(err)):
		r.refused(report.Refusal{Volume: volume, Call: call, Path: short(at, maxRefusalText), Pod: podOf(req), Claim: claimOf(req), Code: status.Code(err).String(), Error: short(status.Convert(err).Message(), maxRefusalText)}, time.Now())
	}
	return resp, err
}

// asksForChange reports whether a call is to change something: it is no query.
func asksForChange(call string) bool {
	return !strings.Contains(call, "Get") && !strings.HasPrefix(call, "Validate") && !strings.HasPrefix(call, "List")
}

// isRefusal reports whether the plugin may have dropped a call that it answered with the
// code: all final codes, Aborted and ResourceExhausted. After the other codes the work
// goes on, and the report of the volume's parts tells how.
func isRefusal(code codes.Code) bool {
	switch code {
	case codes.OK, codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Unimplemented:
		return false
	}
	return true
}

// volumeNamed returns the volume that a request is about; empty: none. To create a
// volume only its name is known.
func volumeNamed(req any) string {
	switch r := req.(type) {
	case interface{ GetVolumeId() string }:
		return r.GetVolumeId()
	case interface{ GetSourceVolumeId() string }:
		return r.GetSourceVolumeId()
	case *csi.CreateVolumeRequest:
		return r.GetName()
	}
	return ""
}

// pathOf returns the path by which a request tells its part of the volume.
func pathOf(req any) string {
	switch r := req.(type) {
	case interface{ GetTargetPath() string }:
		return r.GetTargetPath()
	case interface{ GetVolumePath() string }:
		return r.GetVolumePath()
	case interface{ GetStagingTargetPath() string }:
		return r.GetStagingTargetPath()
	}
	return ""
}

// podOf returns the pod that a publish is for, if kubelet told it.
func podOf(req any) string {
	r, is := req.(*csi.NodePublishVolumeRequest)
	if !is {
		return ""
	}
	return (&state.Target{Context: r.GetVolumeContext()}).Pod()
}

// claimOf returns the claim for which a volume is to be created, if the provisioner told it
// (--extra-create-metadata).
func claimOf(req any) string {
	r, is := req.(*csi.CreateVolumeRequest)
	if !is {
		return ""
	}
	return state.ClaimOf(r.GetParameters())
}

func (r *refusals) refused(now report.Refusal, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now.Since, now.At, now.Times = at, at, 1
	if was := r.all[now.Volume]; was.Call == now.Call && was.Path == now.Path && was.Error == now.Error {
		now.Since, now.Times = was.Since, was.Times+1
	}
	if r.all == nil {
		r.all = map[string]report.Refusal{}
	}
	r.all[now.Volume] = now
	r.forgetOld(at)
}

func (r *refusals) succeeded(volume, call, path string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if was := r.all[volume]; call == "DeleteVolume" || was.Call == call && was.Path == short(path, maxRefusalText) {
		delete(r.all, volume)
	}
}

// forgetOld drops what is too old, and the oldest if there are too many. The caller
// holds mu.
func (r *refusals) forgetOld(now time.Time) {
	maps.DeleteFunc(r.all, func(_ string, one report.Refusal) bool { return now.Sub(one.At) > refusalAge })
	if len(r.all) > maxRefusals {
		oldest := slices.MinFunc(slices.Collect(maps.Values(r.all)), func(a, b report.Refusal) int { return a.At.Compare(b.At) })
		delete(r.all, oldest.Volume)
	}
}

// of returns what is remembered of a volume; nil: nothing.
func (r *refusals) of(volume string) *report.Refusal {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetOld(time.Now())
	if one, known := r.all[volume]; known {
		return &one
	}
	return nil
}

// list returns all that is remembered, in the order of the volumes.
func (r *refusals) list() []report.Refusal {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetOld(time.Now())
	return slices.SortedFunc(maps.Values(r.all), func(a, b report.Refusal) int { return cmp.Compare(a.Volume, b.Volume) })
}
