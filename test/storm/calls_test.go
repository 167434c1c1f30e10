package storm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// verb is what a call asks for.
type verb string

const (
	create    verb = "create"
	remove    verb = "delete"
	stage     verb = "stage"
	unstage   verb = "unstage"
	publish   verb = "publish"
	unpublish verb = "unpublish"
	expand    verb = "expand"
	stats     verb = "stats"
	health    verb = "health"
	validate  verb = "validate"
)

// opposite is what undoes a verb.
var opposite = map[verb]verb{create: remove, remove: create, stage: unstage, unstage: stage, publish: unpublish, unpublish: publish}

// verbs are drawn from; some come more often.
var verbs = []verb{create, create, remove, stage, stage, stage, stage, unstage, unstage,
	publish, publish, publish, publish, publish, unpublish, unpublish, unpublish, expand, expand, stats, stats, health, validate}

// answers lists the final codes that each verb may get in a storm. The codes
// that are not final may come of any.
var answers = map[verb][]codes.Code{
	create:    {codes.AlreadyExists},
	remove:    {codes.FailedPrecondition},
	stage:     {codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition},
	unstage:   {codes.FailedPrecondition},
	publish:   {codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition},
	unpublish: {},
	expand:    {codes.NotFound, codes.FailedPrecondition},
	stats:     {codes.NotFound},
	health:    {codes.NotFound},
	validate:  {codes.NotFound},
}

// unfinal are the codes after which the work goes on, or may be asked for again.
var unfinal = []codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Unavailable}

func final(c codes.Code) bool { return !slices.Contains(unfinal, c) }

// mayBe reports whether a call may be answered so. Unavailable is for what fails
// and is tried again, and nothing fails here but for one thing: whoever on this
// machine makes a mount namespace holds, as long as that lives, what is mounted
// at that moment.
func (c call) mayBe() bool {
	switch {
	case c.code == codes.Unavailable:
		return strings.Contains(status.Convert(c.err).Message(), "is still held")
	case c.code == codes.OK || !final(c.code):
		return true
	}
	return slices.Contains(answers[c.verb], c.code)
}

// ask is a call to be made. What is not set is as the volume was made for.
type ask struct {
	verb     verb
	path     string // of the stage or the target
	staging  string // of a publish
	readOnly bool
	odd      string // another fs type than the volume's; "block" for none
	flags    []string
	bytes    int64
}

// call is an ask that was made, and its answer.
type call struct {
	ask
	start, end time.Duration // since the storm began
	code       codes.Code
	err        error
}

func (c call) String() string {
	text := fmt.Sprintf("%9.3fms to %9.3fms %s", float64(c.start)/1e6, float64(c.end)/1e6, c.verb)
	if parts := strings.Split(c.path, "/"); len(parts) > 2 {
		text += " " + strings.Join(parts[len(parts)-3:], "/")
	}
	if c.readOnly {
		text += " read-only"
	}
	if c.odd != "" || len(c.flags) > 0 {
		text += fmt.Sprintf(" as %s %v", c.odd, c.flags)
	}
	if c.bytes > 0 {
		text += fmt.Sprintf(" %d MiB", c.bytes/mib)
	}
	return fmt.Sprintf("%s → %s %.200s", text, c.code, status.Convert(c.err).Message())
}

// story tells the last calls for the volume in the order of their starts.
func (v *volume) story(last int) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	calls := slices.Clone(v.calls)
	slices.SortFunc(calls, func(a, b call) int { return int(a.start - b.start) })
	var b strings.Builder
	for _, c := range calls[max(len(calls)-last, 0):] {
		fmt.Fprintln(&b, c)
	}
	return b.String()
}

// draw returns a call at random: as a rule one that makes sense for the volume.
func (s *storm) draw(v *volume, random *rand.Rand) ask {
	rarely := func() bool { return random.IntN(12) == 0 }
	a := ask{verb: verbs[random.IntN(len(verbs))], bytes: v.bytes}
	target := random.IntN(len(v.targets))
	staging := v.stagings[0]
	if rarely() {
		staging = v.stagings[1]
	}
	a.path = staging
	switch a.verb {
	case create:
		if rarely() {
			a.bytes *= 2
		}
	case publish, unpublish:
		a.path, a.staging = v.targets[target], staging
		a.readOnly = target == len(v.targets)-1 != rarely()
	case stage:
		a.readOnly = rarely()
	case expand:
		a.bytes += int64(random.IntN(16)) * mib
		if random.IntN(2) == 0 {
			a.path = v.targets[target]
		}
	case stats, health:
		if random.IntN(2) == 0 {
			a.path = v.targets[target]
		}
	}
	if rarely() {
		a.odd = []string{"ext4", "xfs", "block"}[random.IntN(3)]
	}
	if rarely() {
		a.flags = [][]string{{"noatime"}, {"ro"}, {"nodev", "nosuid"}}[random.IntN(3)]
	}
	return a
}

// patience draws how long a caller waits, and how it gives up.
func patience(ctx context.Context, random *rand.Rand) (context.Context, context.CancelFunc) {
	wait := time.Duration(random.Int64N(int64(time.Millisecond) << random.IntN(7)))
	switch random.IntN(4) {
	case 0:
		return context.WithTimeout(ctx, wait)
	case 1:
		ctx, cancel := context.WithCancel(ctx)
		timer := time.AfterFunc(wait, cancel)
		return ctx, func() { timer.Stop(); cancel() }
	}
	return context.WithCancel(ctx)
}

// make makes a call, notes it, and fails if its code is none that may be.
func (s *storm) make(ctx context.Context, v *volume, a ask) call {
	s.t.Helper()
	c := call{ask: a, start: time.Since(s.began)}
	c.err = s.send(ctx, v, a)
	c.end, c.code = time.Since(s.began), status.Code(c.err)
	v.mu.Lock()
	v.calls = append(v.calls, c)
	v.mu.Unlock()
	if !c.mayBe() {
		s.complain(v, "%s answers %v", a.verb, c.err)
	}
	return c
}

func (v *volume) capability(a ask) *csi.VolumeCapability {
	fsType := v.fsType
	if a.odd != "" {
		fsType = strings.TrimPrefix(a.odd, "block")
	}
	c := &csi.VolumeCapability{AccessMode: mode(a.readOnly && a.verb == stage)}
	if fsType == "" {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: a.flags}}
	}
	return c
}

func (s *storm) send(ctx context.Context, v *volume, a ask) (err error) {
	switch c := v.capability(a); a.verb {
	case create:
		_, err = s.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: v.name, VolumeCapabilities: []*csi.VolumeCapability{c},
			CapacityRange: &csi.CapacityRange{RequiredBytes: a.bytes}, Parameters: map[string]string{"provisioning": v.provisioning}})
	case remove:
		_, err = s.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.name})
	case validate:
		_, err = s.Controller.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.name, VolumeCapabilities: []*csi.VolumeCapability{c}})
	case stage:
		_, err = s.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.name, StagingTargetPath: a.path, VolumeCapability: c})
	case unstage:
		_, err = s.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.name, StagingTargetPath: a.path})
	case publish:
		_, err = s.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.name, StagingTargetPath: a.staging, TargetPath: a.path, VolumeCapability: c, Readonly: a.readOnly})
	case unpublish:
		_, err = s.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.name, TargetPath: a.path})
	case expand:
		var resp *csi.NodeExpandVolumeResponse
		resp, err = s.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.name, VolumePath: a.path, StagingTargetPath: v.stagings[0],
			VolumeCapability: c, CapacityRange: &csi.CapacityRange{RequiredBytes: a.bytes}})
		if got := resp.GetCapacityBytes(); err == nil && got < a.bytes {
			s.complain(v, "grown to %d bytes, asked for %d", got, a.bytes)
		}
	case stats:
		_, err = s.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.name, VolumePath: a.path})
	case health:
		_, err = s.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.name})
	}
	return err
}
