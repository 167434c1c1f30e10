package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
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

// answers lists the final codes that each verb may get here. The codes
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

// mayBe reports whether a call may be answered so. Unavailable is for what fails
// and is tried again. While the plugin lives nothing fails here but for one thing:
// whoever on this machine makes a mount namespace holds, as long as that lives,
// what is mounted at that moment.
func (c call) mayBe(dying bool) bool {
	switch {
	case c.code == codes.Unavailable:
		return dying || strings.Contains(status.Convert(c.err).Message(), "is still held")
	case c.code == codes.OK || !harness.Final(c.err):
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
	start, end time.Duration // since the run began
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

// orderly reports whether a call asks for the volume as kubelet would: at its first staging
// path, with nothing odd.
func (c call) orderly(m *member) bool {
	readOnly := c.verb == stage && c.readOnly || c.verb == publish && c.readOnly != m.volume.readOnly(c.path)
	return c.odd == "" && len(c.flags) == 0 && c.path != m.stagings[1] && c.staging != m.stagings[1] && !readOnly
}

// member is a volume of the fleet and what was asked of it.
type member struct {
	*volume
	c        *chaos
	stagings []string // where it may be staged, as a rule at the first

	mu    sync.Mutex
	calls []call // since the last judgement, and of those before it the certain ones
	tale  []call // the last calls

	// What was written into it, which of the volumes of that name it was, and how
	// often that one had been formatted when it was first seen mounted.
	text, created string
	formats       int
	judged        time.Duration // when it was last judged
}

func newMember(c *chaos, v *volume) *member {
	elsewhere := filepath.Join(filepath.Dir(v.Staging), "elsewhere")
	must(c.t, os.MkdirAll(elsewhere, 0o750))
	return &member{volume: v, c: c, stagings: []string{v.Staging, elsewhere}}
}

// complain fails the test and tells what was asked of the volume lately.
func (m *member) complain(format string, args ...any) {
	m.T.Helper()
	m.mu.Lock()
	tale := slices.Clone(m.tale)
	m.mu.Unlock()
	slices.SortFunc(tale, func(a, b call) int { return int(a.start - b.start) })
	var b strings.Builder
	for _, c := range tale {
		fmt.Fprintln(&b, c)
	}
	m.T.Errorf("volume %s at %s: %s\n%s", m.ID, m.c.now(), fmt.Sprintf(format, args...), b.String())
}

// draw returns a call at random: as a rule one that makes sense for the volume.
func (m *member) draw(random *rand.Rand) ask {
	rarely := func() bool { return random.IntN(12) == 0 }
	a := ask{verb: verbs[random.IntN(len(verbs))], bytes: m.bytes}
	target := random.IntN(len(m.targets))
	staging := m.stagings[0]
	if rarely() {
		staging = m.stagings[1]
	}
	a.path = staging
	switch a.verb {
	case create:
		if rarely() {
			a.bytes *= 2
		}
	case publish, unpublish:
		a.path, a.staging = m.targets[target], staging
		a.readOnly = target == len(m.targets)-1 != rarely()
	case stage:
		a.readOnly = rarely()
	case expand:
		a.bytes += int64(random.IntN(16)) * mib
		if random.IntN(2) == 0 {
			a.path = m.targets[target]
		}
	case stats, health:
		if random.IntN(2) == 0 {
			a.path = m.targets[target]
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

// callAtRandom makes a call for any of the fleet, as patiently as it is drawn.
func (c *chaos) callAtRandom(ctx context.Context, random *rand.Rand) {
	m := c.fleet[random.IntN(len(c.fleet))]
	ctx, cancel := patience(ctx, random)
	defer cancel()
	m.make(ctx, m.draw(random))
}

// make makes a call, notes it, and fails if its code is none that may be.
func (m *member) make(ctx context.Context, a ask) call {
	m.T.Helper()
	c := call{ask: a, start: m.c.now()}
	m.c.mu.Lock()
	dying := m.c.dying
	m.c.mu.Unlock()
	c.err = m.send(ctx, a)
	c.end, c.code = m.c.now(), status.Code(c.err)
	m.mu.Lock()
	m.calls = append(m.calls, c)
	m.tale = append(m.tale[max(len(m.tale)-60, 0):], c)
	m.mu.Unlock()
	m.c.count(fmt.Sprintf("%s %s", a.verb, c.code))
	refused := c.code == codes.InvalidArgument && a.verb == create && m.readOnlyFlag(c) // it could never be formatted
	if !refused && !c.mayBe(dying) {
		m.complain("%s answers %v", a.verb, c.err)
	}
	return c
}

// word makes a call until its answer is final, and returns the last one.
func (m *member) word(a ask) (c call) {
	m.T.Helper()
	if m.T.Failed() {
		return c // what is not answered now is a consequence
	}
	_ = harness.Insist(m.T.Context(), func(ctx context.Context) error {
		if c = m.make(ctx, a); m.heldByForgotten(c.err) {
			for _, target := range m.targets { // as the answer says
				m.make(ctx, ask{verb: unpublish, path: target})
			}
			c = m.make(ctx, a)
		}
		return c.err
	})
	if !harness.Final(c.err) {
		m.complain("not answered for good: %s", c)
	}
	return c
}

// heldByForgotten reports whether an answer names targets that were lost with the store as
// what must be unpublished first.
func (m *member) heldByForgotten(err error) bool {
	said := status.Convert(err).Message()
	return m.storeWasDamaged() && (strings.Contains(said, "unpublish it there") || strings.Contains(said, "NodeUnpublishVolume comes first"))
}

// storeWasDamaged reports whether the store was damaged since the volume was last judged.
func (m *member) storeWasDamaged() bool {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	return m.c.damaged > m.judged
}

// insist makes a call that must be answered OK in the end.
func (m *member) insist(a ask) {
	m.T.Helper()
	if c := m.word(a); c.err != nil {
		m.complain("%s at %s: %v", a.verb, a.path, c.err)
	}
}

// publishAsk is an orderly publish.
func (m *member) publishAsk(target string) ask {
	return ask{verb: publish, path: target, staging: m.stagings[0], readOnly: m.readOnly(target)}
}

// live is the whole life of a volume, as kubelet leads it. Others disturb it: what
// comes of it is seen by who looks.
func (m *member) live(ctx context.Context, random *rand.Rand) {
	try := func(a ask) { // somebody else may have to end first what he began
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_ = harness.Insist(ctx, func(ctx context.Context) error { return m.make(ctx, a).err })
	}
	try(ask{verb: create, bytes: m.bytes})
	try(ask{verb: stage, path: m.stagings[0]})
	for _, target := range m.targets {
		try(m.publishAsk(target))
	}
	if random.IntN(2) == 0 {
		try(ask{verb: expand, path: m.stagings[0], bytes: m.bytes + int64(random.IntN(16))*mib})
	}
	for _, target := range m.targets {
		try(ask{verb: unpublish, path: target})
	}
	for _, staging := range m.stagings {
		try(ask{verb: unstage, path: staging})
	}
	if random.IntN(2) == 0 {
		try(ask{verb: remove})
	}
}

// race lets two to four calls that contradict or repeat each other race for the
// stage or a target, and then makes one alone. What is known afterwards must be true
// at once.
func (m *member) race(random *rand.Rand) {
	m.word(ask{verb: create, bytes: m.bytes})
	on, off := ask{verb: stage, path: m.stagings[0]}, ask{verb: unstage, path: m.stagings[0]}
	if c := m.word(ask{verb: unstage, path: m.stagings[1]}); c.code != codes.OK { // it is published from there
		m.clear()
	}
	if random.IntN(3) == 0 {
		for _, target := range m.targets {
			m.word(ask{verb: unpublish, path: target})
		}
	} else {
		m.word(on)
		target := m.targets[random.IntN(len(m.targets))]
		on, off = m.publishAsk(target), ask{verb: unpublish, path: target}
	}
	draw := []ask{on, off}
	if random.IntN(3) == 0 {
		draw = []ask{on, on}
	}
	for range random.IntN(3) {
		draw = append(draw, draw[random.IntN(2)])
	}
	var group sync.WaitGroup
	for _, a := range draw {
		ctx, cancel := patience(m.T.Context(), random)
		group.Go(func() {
			defer cancel()
			m.make(ctx, a)
		})
	}
	group.Wait()
	m.judgePart(on)
	m.word([]ask{on, off}[random.IntN(2)])
	m.judgePart(on)
}

// finishUnstage lets an unstage end that was cut off. Of targets that were lost with
// the store it is not refused: it waits until they are unpublished.
func (m *member) finishUnstage() {
	m.T.Helper()
	if m.storeWasDamaged() && m.Leaving() {
		m.clear()
	}
}

// askAlone makes calls with no other at the same time, each repeated until its answer is
// final, for about half of the parts: what these must be is certain then.
func (c *chaos) askAlone() {
	for _, m := range c.fleet {
		m.word(ask{verb: create, bytes: m.bytes})
		if c.random.IntN(2) == 0 {
			m.word(ask{verb: stage, path: m.stagings[0]})
		}
		for _, target := range m.targets {
			switch c.random.IntN(3) {
			case 0:
				m.word(m.publishAsk(target))
			case 1:
				m.word(ask{verb: unpublish, path: target})
			}
		}
		if c.random.IntN(4) == 0 {
			for _, target := range m.targets {
				m.word(ask{verb: unpublish, path: target})
			}
			m.unstage(func(a ask) { m.word(a) })
			if c.random.IntN(2) == 0 {
				m.word(ask{verb: remove})
			}
		}
	}
}

// restage takes each volume down and up again and looks for its data.
func (c *chaos) restage() {
	c.t.Helper()
	for _, m := range c.fleet {
		if m.text == "" {
			continue
		}
		m.clear()
		if m.generation() != m.created {
			continue // it was deleted and made again since it was last judged
		}
		m.insist(ask{verb: stage, path: m.stagings[0]})
		m.insist(m.publishAsk(m.targets[0]))
		m.read(m.targets[0])
	}
}

// clear takes a volume down as kubelet does.
func (m *member) clear() {
	m.T.Helper()
	for _, target := range m.targets {
		m.insist(ask{verb: unpublish, path: target})
	}
	m.unstage(m.insist)
}

// unstage ends what may be staged, at both paths at a time: what is known of none after a
// loss of the store is unstaged at one only when the mount at the other has gone.
func (m *member) unstage(call func(ask)) {
	m.T.Helper()
	var group sync.WaitGroup
	for _, staging := range m.stagings {
		group.Go(func() { call(ask{verb: unstage, path: staging}) })
	}
	group.Wait()
}

// capability is what the call asks for.
func (m *member) capability(a ask) *csi.VolumeCapability {
	fsType := m.fsType
	if a.odd != "" {
		fsType = strings.TrimPrefix(a.odd, "block")
	}
	c := harness.Shared(fsType, a.flags...)
	if a.readOnly && a.verb == stage {
		c.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	}
	return c
}

func (m *member) send(ctx context.Context, a ask) (err error) {
	v := *m.Volume
	v.Capability, v.Staging = m.capability(a), a.path
	switch a.verb {
	case create:
		_, err = v.Controller.CreateVolume(ctx, v.CreateRequest(a.bytes, map[string]string{"provisioning": m.provisioning}))
	case remove:
		err = v.Delete(ctx)
	case validate:
		_, err = v.Controller.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.ID, VolumeCapabilities: []*csi.VolumeCapability{v.Capability}})
	case stage:
		err = v.Stage(ctx)
	case unstage:
		err = v.Unstage(ctx)
	case publish:
		req := v.PublishRequest(a.path)
		req.StagingTargetPath, req.Readonly = a.staging, a.readOnly
		_, err = v.Node.NodePublishVolume(ctx, req)
	case unpublish:
		err = v.Unpublish(ctx, a.path)
	case expand:
		var got int64
		v.Staging = m.stagings[0]
		if got, err = v.ExpandAt(ctx, a.path, a.bytes); err == nil && got < a.bytes {
			m.complain("grown to %d bytes, asked for %d", got, a.bytes)
		}
	case stats:
		err = v.Stats(ctx, a.path)
	case health:
		_, err = v.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
	}
	return err
}
