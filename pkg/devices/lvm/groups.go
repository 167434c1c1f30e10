package lvm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
)

// groupState is what this process remembers of a group.
type groupState struct {
	paths  []string // of its disks; nil: they have to be found
	report *report  // nil: it has to be read
	read   time.Time

	// durable is the metadata that is known to last on all disks of the group.
	durable metadata
}

// metadata is one state of a group's metadata.
type metadata struct {
	group    string // UUID
	sequence int64
}

const (
	// turnLimit is how long a caller waits for its turn at a group: two commands may have
	// to time out before it.
	turnLimit = 2 * commandLimit
	// findLimit is turnLimit for Find. It is short, because what is attached is found, and
	// taken down, without LVM.
	findLimit = 10 * time.Second
	// reportAge is the greatest age of a report that is used for how much room there is, or
	// for the absence of a volume: others change the group, too.
	reportAge = 10 * time.Second
)

// inTurn runs f when nobody else works on the group. Once f has begun, it runs to its end
// even if ctx ends first; so f may still run when inTurn returns an error. If the group
// does not answer, a caller with a deadline gets that error a little before it.
func (b *Backend) inTurn(ctx context.Context, group string, limit time.Duration, f func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	waiting, stop := deadline.UntilAnswer(ctx)
	defer stop()
	_, err := b.turns.Do(waiting, group, limit, func() (struct{}, error) { return struct{}{}, f(context.WithoutCancel(ctx)) })
	late, hangs := err.(*hang.Unanswered)
	switch {
	case !hangs:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return state.Errorf(state.DeadlineExceeded, "the volume group %s has not answered since %s: an lvm works on it, or hangs; see whether the group's disks answer", group, state.Clock(late.Since))
}

// command runs lvm on a group. The caller has the group's turn.
func (b *Backend) command(ctx context.Context, group string, args ...string) ([]byte, error) {
	paths, err := b.members(ctx, group)
	if err != nil {
		return nil, err
	}
	out, err := b.lvm(ctx, slices.Insert(args, 1, "--config", config(paths))...)
	if err != nil {
		if state.ClassOf(err) != state.DeadlineExceeded { // a command that did not end says nothing about the group
			b.dropReport(group)
		}
		b.forgetDisks(group) // they may have changed
		return nil, fmt.Errorf("volume group %s: %w", group, err)
	}
	return out, nil
}

// change is command for what writes to the group's metadata. The change is durable when it
// returns.
//
// Unavailable: a disk of the group is not there. LVM would make most changes all the same,
// and note the disk as lost: it would not use the volumes on it, nor make new ones in the
// group, when it is back (vgextend --restoremissing).
func (b *Backend) change(ctx context.Context, group string, args ...string) error {
	if b.observeOnly {
		return state.Errorf(state.FailedPrecondition, "volume group %s: this program only looks", group)
	}
	known := ""
	if r := b.cachedReport(group, 0); r != nil {
		known = r.uuid // another group of the name may have come since
	}
	m, err := b.findMembers(ctx, group, known)
	if err == nil && m.missing > 0 {
		err = state.Errorf(state.Unavailable, "the volume group %s lacks %d of its disks%s: it is not changed, as LVM would note them as lost. Attach them; if they are lost for good, remove them from the group (vgreduce --removemissing)", group, m.missing, m.perhaps())
	}
	if err != nil {
		return err
	}
	if _, err := b.command(ctx, group, args...); err != nil {
		return noRoom(err)
	}
	if err := b.flush(m.paths); err != nil {
		b.dropReport(group)
		return fmt.Errorf("volume group %s: make the change durable: %w", group, err)
	}
	return nil
}

// noRoom classifies the error of lvm when somebody else has taken the room meanwhile.
func noRoom(err error) error {
	for _, words := range []string{"insufficient free space", "Insufficient free space", "Insufficient suitable", "exceeds maximum metadata size", "Maximum number of logical volumes"} {
		if strings.Contains(err.Error(), words) {
			return state.Errorf(state.ResourceExhausted, "%w", err)
		}
	}
	return err
}

// members returns the paths of the disks of a group.
func (b *Backend) members(ctx context.Context, group string) ([]string, error) {
	b.mu.Lock()
	paths := b.groups[group].paths
	b.mu.Unlock()
	if paths != nil {
		return paths, nil
	}
	m, err := b.findMembers(ctx, group, "")
	return m.paths, err
}

// members are the disks of a group.
type members struct {
	paths   []string
	missing int
	hidden  hidden // the missing ones may be these
}

// perhaps says which disks the missing ones may be; empty: none that is here.
func (m members) perhaps() string {
	if !m.hidden.any() {
		return ""
	}
	return fmt.Sprintf(" (%v)", m.hidden)
}

// findMembers finds the disks of a group, by its UUID, too, if that is known. errGone,
// wrapped: no disk of the group was found; hidden is wrapped with it if there are disks that
// it may be on.
func (b *Backend) findMembers(ctx context.Context, group, known string) (m members, err error) {
	disks, err := b.disks(ctx)
	if err != nil {
		return m, err
	}
	m.hidden = hiddenDisks(group, disks)
	m.paths, m.missing, err = membersOf(group, known, disks)
	switch {
	case errors.Is(err, errGone) && m.hidden.any():
		return members{}, fmt.Errorf("%w; %w", err, m.hidden)
	case err != nil:
		return members{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].paths = m.paths
	return m, nil
}

// forgetDisks makes the next command find the disks of a group anew.
func (b *Backend) forgetDisks(group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].paths = nil
}

// dropReport makes the next caller read the report of a group anew.
func (b *Backend) dropReport(group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].report = nil
}

// renew reads the report of a group after a change, so that the next observation of a
// volume need not wait for it. The caller has the group's turn.
func (b *Backend) renew(ctx context.Context, group string) {
	b.dropReport(group)
	if _, err := b.refresh(ctx, group); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read a volume group after a change; it is read when it is next looked at", "group", group)
	}
}

// cachedReport returns the report of a group if it is in memory and no older than age; an
// age of 0 takes any. nil: it has to be read.
func (b *Backend) cachedReport(group string, age time.Duration) *report {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[group]
	if g == nil || g.report == nil || age > 0 && time.Since(g.read) > age {
		return nil
	}
	return g.report
}

// reportOf returns a report of a group that is no older than age, and waits at most limit
// for it. errGone, wrapped: the group is not on this node.
func (b *Backend) reportOf(ctx context.Context, group string, age, limit time.Duration) (*report, error) {
	if r := b.cachedReport(group, age); r != nil {
		return r, nil
	}
	var found *report // set only if f has ended
	err := b.inTurn(ctx, group, limit, func(ctx context.Context) (err error) {
		if found = b.cachedReport(group, age); found == nil { // else whoever had the turn before has read it
			found, err = b.refresh(ctx, group)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// refresh reads the report of a group, locks the group, cleans up what an interrupted
// change has left, and makes durable what it tells. The caller has the group's turn.
func (b *Backend) refresh(ctx context.Context, group string) (*report, error) {
	r, err := b.readReport(ctx, group)
	if err != nil && !errors.Is(err, errGone) || err == nil && r.missing > 0 { // its disks may have changed
		b.forgetDisks(group)
		r, err = b.readReport(ctx, group)
	}
	if errors.Is(err, errGone) {
		b.dropReport(group)
	}
	if err == nil {
		err = b.lock(group, r.uuid)
	}
	if err != nil {
		return nil, err
	}
	if b.mend(ctx, group, r) {
		if r, err = b.readReport(ctx, group); err != nil {
			return nil, err
		}
	}
	if err := b.settle(ctx, group, r); err != nil {
		b.dropReport(group)
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[group]
	g.report, g.read = r, time.Now()
	return r, nil
}

// settle makes durable what a report tells, unless that is known to be: callers are
// answered by it, and take what is done for done. The caller has the group's turn.
func (b *Backend) settle(ctx context.Context, group string, r *report) error {
	seen := metadata{r.uuid, r.sequence}
	b.mu.Lock()
	known := b.groups[group].durable == seen
	b.mu.Unlock()
	if known || b.observeOnly {
		return nil
	}
	paths, err := b.members(ctx, group)
	if err == nil {
		err = b.flush(paths)
	}
	if err != nil {
		b.forgetDisks(group) // they may have changed
		return fmt.Errorf("volume group %s: make durable what was done before: %w", group, err)
	}
	if r.missing == 0 { // else the others are flushed when they are back
		b.mu.Lock()
		defer b.mu.Unlock()
		b.groups[group].durable = seen
	}
	return nil
}

func (b *Backend) readReport(ctx context.Context, group string) (*report, error) {
	out, err := b.command(ctx, group, append(slices.Clone(reportArguments), group)...)
	if err != nil {
		return nil, err
	}
	r, err := parseReport(out)
	if err != nil {
		return nil, fmt.Errorf("volume group %s: %w", group, err)
	}
	return r, nil
}

// maxPerCommand is how many volumes one lvm command may name, so that it ends in time.
const maxPerCommand = 100

// mend cleans up what a process that was killed has left, and reports whether there was
// anything. The caller has the group's turn.
func (b *Backend) mend(ctx context.Context, group string, r *report) (mended bool) {
	if b.observeOnly {
		return false
	}
	for _, cleanup := range cleanups {
		if cleanup.metadata && r.missing > 0 {
			continue // it is done when the disks are back
		}
		var volumes []string
		for _, name := range slices.Sorted(maps.Keys(r.volumes)) {
			v := r.volumes[name]
			ours := b.own(v) || v.tags.growth && v.tags.driver == b.driver
			if ours && cleanup.of(v) && !b.has(b.zeroing, deviceName(group, name)) {
				volumes = append(volumes, group+"/"+name)
			}
		}
		for some := range slices.Chunk(volumes, maxPerCommand) {
			mended = true // even if the command fails, it may have changed some of them
			log := klog.FromContext(ctx).WithValues("logicalVolumes", some, "by", strings.Join(cleanup.command, " "))
			arguments := slices.Concat(cleanup.command, some)
			var err error
			if cleanup.metadata {
				err = b.change(ctx, group, arguments...)
			} else {
				_, err = b.command(ctx, group, arguments...)
			}
			if err != nil {
				log.Error(err, "Cannot end what an interrupted change has left")
				continue
			}
			log.Info("Ended what an interrupted change has left")
		}
	}
	return mended
}

// cleanups are the commands for volumes that an interrupted change has left, in this
// order: resume a device, remove what a volume was to grow by, keep udev from activating
// a new volume, unless it is unfinished and will be made anew, and deactivate one that was
// being zeroed. Those that write no metadata are run even while a disk of the group is missing.
var cleanups = []struct {
	of       func(logical) bool
	metadata bool
	command  []string
}{
	{func(v logical) bool { return v.suspended }, false, []string{"lvchange", "--refresh"}},
	{func(v logical) bool { return !v.suspended && v.tags.growth }, true, []string{"lvremove", "--force", "--yes"}},
	{func(v logical) bool { return !v.suspended && !v.tags.growth && v.automatic && !v.unfinished }, true, []string{"lvchange", "--setautoactivation", "n"}},
	{func(v logical) bool { return !v.suspended && !v.tags.growth && v.tags.unzeroed && v.active }, false, []string{"lvchange", "--activate", "n"}},
}

// note puts a name into one of the backend's sets, or takes it out.
func (b *Backend) note(set map[string]bool, name string, in bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if in {
		set[name] = true
	} else {
		delete(set, name)
	}
}

// has reports whether a name is in one of the backend's sets.
func (b *Backend) has(set map[string]bool, name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return set[name]
}

// own reports whether a logical volume is a volume of this driver.
func (b *Backend) own(v logical) bool {
	return v.tags.driver == b.driver && v.tags.name != "" && !v.tags.growth
}

// place is where a volume is.
type place struct {
	group  string // name
	volume logical
	report *report
}

// errMissing says that a group has no such volume.
var errMissing = errors.New("there is no such volume")

// placeOf returns where a volume is, by the reports of the groups. errMissing: its group is
// there and has no such volume. errGone, wrapped: its group is not on this node; hidden is
// wrapped with it if there are disks that the group may be on. FailedPrecondition: this
// node has another group of the name that the volume's context gives.
func (b *Backend) placeOf(ctx context.Context, v devices.Volume, id volumeID, limit time.Duration) (place, error) {
	for _, name := range b.names {
		r := b.cachedReport(name, 0)
		if r == nil || r.uuid != id.group {
			continue
		}
		if lv, has := r.volumes[id.name]; has && b.own(lv) {
			return place{name, lv, r}, nil
		}
	}
	var failed, other error
	var hides hidden
	for _, name := range askedFirst(b.names, v.Context[groupKey]) {
		switch r, err := b.reportOf(ctx, name, reportAge, limit); {
		case errors.Is(err, errGone):
			errors.As(err, &hides)
		case err != nil:
			failed = errors.Join(failed, err)
		case r.uuid == id.group:
			lv, has := r.volumes[id.name]
			if !has || !b.own(lv) {
				return place{}, errMissing
			}
			return place{name, lv, r}, nil
		case v.Context[groupKey] == name:
			other = state.Errorf(state.FailedPrecondition, "the volume group %s of this node is another one: it has the UUID %s, and that of the volume has %s. Nothing is done to it", name, r.uuid, id.group)
		}
	}
	switch {
	case failed != nil: // the volume's group may be one of those that failed
		return place{}, failed
	case other != nil:
		return place{}, other
	case len(b.names) == 0:
		return place{}, state.Errorf(state.FailedPrecondition, "the plugin on this node has no volume groups: name them with --lvm-groups")
	}
	err := fmt.Errorf("the volume group with the UUID %s is not among %s: %w", id.group, strings.Join(b.names, ", "), errGone)
	if hides.any() {
		err = fmt.Errorf("%w; %w", err, hides)
	}
	return place{}, err
}

// askedFirst returns the names with the one that is asked for first, so that no other
// group, which may hang, is waited for before it.
func askedFirst(names []string, asked string) []string {
	i := slices.Index(names, asked)
	if i <= 0 {
		return names
	}
	return append([]string{asked}, slices.Delete(slices.Clone(names), i, i+1)...)
}

// locate is placeOf for a caller that is about to change the volume. NotFound: there is no
// such volume. ErrNoDevice, Unavailable: its group is not on this node now.
func (b *Backend) locate(ctx context.Context, v devices.Volume) (place, error) {
	id, own, err := parseID(v.ID)
	switch {
	case err != nil:
		return place{}, err
	case !own:
		return place{}, state.Errorf(state.NotFound, "this is no id of a volume of the backend %s", Name)
	}
	at, err := b.placeOf(ctx, v, id, turnLimit)
	if errors.Is(err, errMissing) {
		return place{}, state.Errorf(state.NotFound, "%w", err)
	}
	return at, classified(err)
}

// classified returns an error with the class of a group that is not on this node, if it is that.
func classified(err error) error {
	switch {
	case errors.As(err, new(hidden)): // it is tried again after a back-off: no event tells when the disks can be used
		return state.Errorf(state.Unavailable, "%w", err)
	case errors.Is(err, errGone):
		return state.Errorf(state.Unavailable, "%w: see that its disks are attached to this node: %w", err, devices.ErrNoDevice)
	}
	return err
}

// lookAgain returns where a volume is by a report of now, for a caller that is about to
// decide by it what becomes of data: another node may have used the volume since the last
// report, if its disks were carried there and back, and an operator may have changed its
// pool. Unavailable: it is not there any more. ErrNoDevice, Unavailable: its group is not.
func (b *Backend) lookAgain(ctx context.Context, was place) (place, error) {
	r, err := b.reportOf(ctx, was.group, reportAge, turnLimit)
	if err != nil {
		return place{}, classified(err)
	}
	now := place{was.group, r.volumes[was.volume.name], r}
	if r.uuid != was.report.uuid || now.volume.uuid != was.volume.uuid || !b.own(now.volume) {
		return place{}, state.Errorf(state.Unavailable, "the logical volume %s has changed since it was looked at", was.path())
	}
	return now, nil
}

// locateAlone is locate, and keeps other calls from changing the volume until done is
// called. After an error, done is nil.
func (b *Backend) locateAlone(ctx context.Context, v devices.Volume) (at place, done func(), err error) {
	unlock, err := b.volumes.Lock(ctx, v.ID)
	if err != nil {
		return place{}, nil, err
	}
	if at, err = b.locate(ctx, v); err != nil {
		unlock()
		return place{}, nil, err
	}
	return at, unlock, nil
}

// device returns the device of a volume in the device mapper; nil: it is not active.
func (p place) device() (*mapper.Device, error) {
	d, err := mapper.Find(deviceName(p.group, p.volume.name))
	if d != nil && d.UUID != uuidPrefix+p.report.uuid+p.volume.uuid {
		return nil, state.Errorf(state.FailedPrecondition, "the device %s is there and is another volume's, with the UUID %s", deviceName(p.group, p.volume.name), d.UUID)
	}
	return d, err
}

func (p place) path() string { return p.group + "/" + p.volume.name }

// id is that of the volume.
func (p place) id() string { return volumeID{p.report.uuid, p.volume.name}.String() }

// retag edits the tags of a volume, durably, and in the report.
func (b *Backend) retag(ctx context.Context, p place, edit func(*tags) error) error {
	return b.inTurn(ctx, p.group, turnLimit, func(ctx context.Context) error {
		lv := p.volume
		if r := b.cachedReport(p.group, 0); r != nil {
			if now, has := r.volumes[lv.name]; has && now.uuid == lv.uuid {
				lv = now
			}
		}
		after := lv.tags
		if err := edit(&after); err != nil {
			return err
		}
		arguments := changes(lv.tags, after)
		if len(arguments) == 0 {
			return nil
		}
		if err := b.change(ctx, p.group, append(append([]string{"lvchange"}, arguments...), p.path())...); err != nil {
			b.dropReport(p.group)
			return err
		}
		lv.tags = after
		b.updateReport(p.group, lv)
		return nil
	})
}

// takeBack gives a volume the tags that it had, after an edit to others of which it is not
// known whether it was made.
func (b *Backend) takeBack(ctx context.Context, p place, edited tags) error {
	return b.inTurn(ctx, p.group, turnLimit, func(ctx context.Context) error {
		defer b.dropReport(p.group)
		return b.change(ctx, p.group, append(append([]string{"lvchange"}, changes(edited, p.volume.tags)...), p.path())...)
	})
}

// updateReport replaces one volume in the report of a group.
func (b *Backend) updateReport(group string, lv logical) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.groups[group].report; r != nil {
		after := *r // others may be reading the old one
		after.volumes = maps.Clone(r.volumes)
		after.volumes[lv.name] = lv
		b.groups[group].report = &after
	}
}
