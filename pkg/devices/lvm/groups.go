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

// known is what this process knows of a group.
type known struct {
	paths  []string // of its disks; nil: they are looked for
	report *report  // nil: it is to be read
	read   time.Time
}

const (
	// turnLimit is how long a caller waits for a group of which one command, or a few
	// that belong together, do not end.
	turnLimit = 2 * commandLimit
	// findLimit is how long Find waits, of each lvm that hangs, once: what is attached is
	// told, and taken down, without LVM.
	findLimit = 10 * time.Second
	// reportAge is how old a report may be that tells of room, or that there is no such
	// volume: others change groups, too.
	reportAge = 10 * time.Second
)

// inTurn runs f when nobody else works on the group. What f has begun it ends, though
// ctx ends meanwhile: the next caller finds it done. After an error, f may still run.
// A caller with a deadline is told before it that the group does not answer.
func (b *Backend) inTurn(ctx context.Context, group string, limit time.Duration, f func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	waiting, stop := ctx, func() {}
	if at, has := ctx.Deadline(); has {
		waiting, stop = context.WithDeadline(ctx, at.Add(-deadline.Margin(time.Until(at))))
	}
	defer stop()
	_, err := b.turns.Do(waiting, group, limit, func() (struct{}, error) { return struct{}{}, f(context.WithoutCancel(ctx)) })
	late, is := err.(*hang.Unanswered)
	switch {
	case !is:
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
		if state.ClassOf(err) != state.DeadlineExceeded { // else it says nothing of the group
			b.changed(group)
		}
		b.forgetDisks(group) // they may be others now
		return nil, fmt.Errorf("volume group %s: %w", group, err)
	}
	return out, nil
}

// change is command for what writes to the group's metadata, which is durable then.
func (b *Backend) change(ctx context.Context, group string, args ...string) error {
	if b.lookOnly {
		return state.Errorf(state.FailedPrecondition, "volume group %s: this program only looks", group)
	}
	paths, err := b.members(ctx, group)
	if err != nil {
		return err
	}
	if _, err := b.command(ctx, group, args...); err != nil {
		return noRoom(err)
	}
	if err := flush(paths); err != nil {
		return fmt.Errorf("volume group %s: make the change durable: %w", group, err)
	}
	return nil
}

// noRoom classifies what lvm says where somebody else has taken the room meanwhile.
func noRoom(err error) error {
	for _, words := range []string{"insufficient free space", "Insufficient free space", "Insufficient suitable"} {
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
	paths, _, err := b.findMembers(ctx, group)
	return paths, err
}

// findMembers looks for the disks of a group. late are those that do not answer, if the
// group lacks some of its own. errGone, wrapped: it has none; hidden, wrapped with it: but
// there are disks that do not answer.
func (b *Backend) findMembers(ctx context.Context, group string) (paths, late []string, err error) {
	disks, err := b.disks(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range disks {
		if d.silent {
			late = append(late, d.path)
		}
	}
	paths, missing, err := membersOf(group, disks)
	switch {
	case errors.Is(err, errGone) && len(late) > 0:
		return nil, nil, fmt.Errorf("%w; %w", err, hidden(late))
	case err != nil:
		return nil, nil, err
	case missing == 0:
		late = nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].paths = paths
	return paths, late, nil
}

// forgetDisks has the disks of a group looked for anew.
func (b *Backend) forgetDisks(group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].paths = nil
}

// changed drops the report of a group.
func (b *Backend) changed(group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].report = nil
}

// renew reads the report of a group after a change, so that whoever looks at a volume need
// not wait for it. The caller has the group's turn.
func (b *Backend) renew(ctx context.Context, group string) {
	b.changed(group)
	if _, err := b.refresh(ctx, group); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read a volume group after a change; it is read when it is next looked at", "group", group)
	}
}

// latest returns the report of a group that is no older than age; 0: any that there is.
// nil: it has to be read.
func (b *Backend) latest(group string, age time.Duration) *report {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[group]
	if g == nil || g.report == nil || age > 0 && time.Since(g.read) > age {
		return nil
	}
	return g.report
}

// look returns a report of a group that is no older than age, and waits for it no longer
// than limit. errGone, wrapped: the group is not on this node.
func (b *Backend) look(ctx context.Context, group string, age, limit time.Duration) (*report, error) {
	if r := b.latest(group, age); r != nil {
		return r, nil
	}
	var found *report // read only if f has ended
	err := b.inTurn(ctx, group, limit, func(ctx context.Context) (err error) {
		if found = b.latest(group, age); found == nil { // else who had the turn before has read it
			found, err = b.refresh(ctx, group)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// refresh reads the report of a group, locks it, and mends what an earlier process left. The caller
// has the group's turn.
func (b *Backend) refresh(ctx context.Context, group string) (*report, error) {
	r, err := b.readReport(ctx, group)
	if err != nil && !errors.Is(err, errGone) || err == nil && r.missing > 0 { // perhaps its disks are others now
		b.forgetDisks(group)
		r, err = b.readReport(ctx, group)
	}
	if errors.Is(err, errGone) {
		b.changed(group)
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
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[group]
	g.report, g.read = r, time.Now()
	return r, nil
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

// atOnce is of how many volumes one lvm is told, which then ends within its time.
const atOnce = 100

// mend ends what a process that was killed has left, and reports whether there was
// anything. The caller has the group's turn.
func (b *Backend) mend(ctx context.Context, group string, r *report) (mended bool) {
	if b.lookOnly {
		return false
	}
	for _, end := range ends {
		var volumes []string
		for _, name := range slices.Sorted(maps.Keys(r.volumes)) {
			v := r.volumes[name]
			ours := b.own(v) || v.tags.growth && v.tags.driver == b.driver
			if ours && end.of(v) && !b.busy(deviceName(group, name)) {
				volumes = append(volumes, group+"/"+name)
			}
		}
		for some := range slices.Chunk(volumes, atOnce) {
			mended = true // some of them even if it fails
			log := klog.FromContext(ctx).WithValues("logicalVolumes", some, "by", strings.Join(end.command, " "))
			if err := b.change(ctx, group, slices.Concat(end.command, some)...); err != nil {
				log.Error(err, "Cannot end what an interrupted change has left")
				continue
			}
			log.Info("Ended what an interrupted change has left")
		}
	}
	return mended
}

// ends are what lvm has to do to volumes that an interrupted change has left, in this
// order: resume a device, remove what a volume was to grow by, keep udev from activating
// a new volume, and deactivate one that was being zeroed.
var ends = []struct {
	of      func(logical) bool
	command []string
}{
	{func(v logical) bool { return v.suspended }, []string{"lvchange", "--refresh"}},
	{func(v logical) bool { return !v.suspended && v.tags.growth }, []string{"lvremove", "--force", "--yes"}},
	{func(v logical) bool { return !v.suspended && !v.tags.growth && v.automatic }, []string{"lvchange", "--setautoactivation", "n"}},
	{func(v logical) bool { return !v.suspended && !v.tags.growth && v.tags.unzeroed && v.active }, []string{"lvchange", "--activate", "n"}},
}

// busy reports whether this process writes zeros to a device.
func (b *Backend) busy(device string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.zeroing[device]
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

// known returns what the reports tell of a volume. errMissing: its group is there and has
// no such volume. errGone, wrapped: its group is not on this node; hidden, wrapped with it:
// but may be on disks that do not answer. FailedPrecondition: the group that the volume
// names is another one here.
func (b *Backend) known(ctx context.Context, v devices.Volume, id volumeID, limit time.Duration) (place, error) {
	for _, name := range b.names {
		r := b.latest(name, 0)
		if r == nil || r.uuid != id.group {
			continue
		}
		if lv, has := r.volumes[id.name]; has && b.own(lv) {
			return place{name, lv, r}, nil
		}
	}
	var failed, other error
	var silent hidden
	for _, name := range named(b.names, v.Context[groupKey]) {
		switch r, err := b.look(ctx, name, reportAge, limit); {
		case errors.Is(err, errGone):
			errors.As(err, &silent)
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
	case failed != nil: // the volume's may be among them
		return place{}, failed
	case other != nil:
		return place{}, other
	case len(b.names) == 0:
		return place{}, state.Errorf(state.FailedPrecondition, "the plugin on this node has no volume groups: name them with --lvm-groups")
	}
	err := fmt.Errorf("the volume group with the UUID %s is not among %s: %w", id.group, strings.Join(b.names, ", "), errGone)
	if len(silent) > 0 {
		err = fmt.Errorf("%w; %w", err, silent)
	}
	return place{}, err
}

// named returns names, the one that is asked for first: then no other group, which may
// hang, is waited for.
func named(names []string, asked string) []string {
	i := slices.Index(names, asked)
	if i <= 0 {
		return names
	}
	return append([]string{asked}, slices.Delete(slices.Clone(names), i, i+1)...)
}

// locate is known for whoever is about to change a volume. NotFound: there is no such
// volume. ErrNoDevice, Unavailable: its group is not on this node now.
func (b *Backend) locate(ctx context.Context, v devices.Volume) (place, error) {
	id, own, err := parseID(v.ID)
	switch {
	case err != nil:
		return place{}, err
	case !own:
		return place{}, state.Errorf(state.NotFound, "this is no id of a volume of the backend %s", Name)
	}
	at, err := b.known(ctx, v, id, turnLimit)
	switch {
	case errors.Is(err, errMissing):
		return place{}, state.Errorf(state.NotFound, "%w", err)
	case errors.As(err, new(hidden)): // it is tried again, as for what fails
		return place{}, state.Errorf(state.Unavailable, "%w", err)
	case errors.Is(err, errGone):
		return place{}, state.Errorf(state.Unavailable, "%w: see that its disks are attached to this node: %w", err, devices.ErrNoDevice)
	}
	return at, err
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

// retag replaces the tags of a volume, durably. The report is changed with them.
func (b *Backend) retag(ctx context.Context, p place, edit func(*tags) error) error {
	return b.inTurn(ctx, p.group, turnLimit, func(ctx context.Context) error {
		lv := p.volume
		if r := b.latest(p.group, 0); r != nil {
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
			b.changed(p.group)
			return err
		}
		lv.tags = after
		b.remember(p.group, lv)
		return nil
	})
}

// remember changes one volume in the report of a group.
func (b *Backend) remember(group string, lv logical) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.groups[group].report; r != nil {
		after := *r // others may be reading the old one
		after.volumes = maps.Clone(r.volumes)
		after.volumes[lv.name] = lv
		b.groups[group].report = &after
	}
}
