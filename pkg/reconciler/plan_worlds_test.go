package reconciler_test

import (
	"errors"
	"iter"
	"slices"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// ---- Worlds: desired and actual states in few bytes, and a model of the kernel. ----

// planWorld is a desired state and what is really there. It is comparable.
type planWorld struct {
	stage    stageWorld
	at       placeWorld // of the stage
	targets  [2]targetWorld
	size     sizeWorld
	device   deviceWorld
	contents contentsWorld // of the device, whether it can be read now or not
	layer    layerWorld    // on the device, and then contents and mounts are of the layer's
	source   sourceWorld
	others   othersWorld // where the file system is mounted and no record is left
}

type othersWorld uint8

const (
	noOthers othersWorld = iota
	otherStage
	otherPod
	otherPath // either
)

func (o othersWorld) look() []string {
	return [][]string{nil, {"/plugins/v/globalmount"}, {"/pods/c/volume"}, {"/other"}}[o]
}

// sourceWorld is what a volume without a device is mounted from.
type sourceWorld struct {
	wanted bool
	other  bool // the stage asks for another type of file system
}

// layerWorld is a layer of the volume.
type layerWorld struct {
	wanted                        bool
	state                         deviceCondition
	made, stamped, stray          bool // what the source bears, and on what the layer's device stands
	readOnly, held, short, locked bool
	beneath                       contentsKind // of a source that does not bear the layer
	origin                        state.Origin // of that
}

type wish uint8

const (
	wantNothing wish = iota
	wantThere
	wantGone
)

type stageWorld struct {
	want                              wish
	block, readOnly, noDev, withdrawn bool
	open                              bool // the type of file system
	remembers                         bool // the file system that it was seen with
	identity                          bool // it remembers that of the device
	accepted, asked                   bool
	lost                              bool // the record of it
}

type targetWorld struct {
	want                                               wish
	block, readOnly, noDev, withdrawn, accepted, asked bool
	inside                                             bool // its path lies in the data of a volume
	remembers                                          number
	at                                                 placeWorld
}

type sizeWorld struct {
	want, larger, accepted bool
}

// number names a block device.
type number uint8

const (
	noDevice number = iota
	theDevice
	theView
	olderDevice // which the volume once was
	otherDevice // which the volume never was
	theSource   // beneath a layer
)

func (n number) number() state.DeviceNumber {
	if n == noDevice {
		return state.DeviceNumber{}
	}
	return state.DeviceNumber{Major: 7, Minor: uint32(n)}
}

type deviceWorld struct {
	state                 deviceCondition
	missing, readOnly     bool
	held                  heldWorld
	bytes                 bytesWorld
	view                  deviceCondition
	viewHeld, viewShort   bool // it is smaller than its device
	formatting, formatted bool
	uuid                  bool // the mark has one
	noted, proved         bool // it is marked late, and was proved blank just now
	stale                 bool // others may have had it since formatting began
	unread                bool // what the backend knows of the volume
	raw                   bool
	identity              string // what it says that it is
	shared, exclusive     bool
	locked                bool // its secret is not at hand
	numbered              bool // a disk that has gone is known by the number that it had
}

// deviceCondition is the condition of a device, and whether it was looked at.
type deviceCondition uint8

const (
	isAbsent deviceCondition = iota
	isAttached
	isDetaching
	isForeign
	isUnlooked
)

func (s deviceCondition) state() state.DeviceState {
	return [...]state.DeviceState{state.DeviceAbsent, state.DeviceAttached, state.DeviceDetaching, state.DeviceForeign, state.DeviceUnknown}[s]
}

type heldWorld uint8

const (
	heldByMounts heldWorld = iota // by those at the paths of the record
	heldElsewhere
	heldUnseen // its mounts came after the look at the device
)

type bytesWorld uint8

const (
	bytesPromised bytesWorld = iota // 100, as the backend promised
	bytesUnknown                    // 100, and no promise is known
	bytesFewer                      // 50 of 100
	bytesGrown                      // 200, as the backend promised
)

type contentsWorld struct {
	kind                                          contentsKind
	check, growable, growsMounted, growsUnmounted bool
	swapped                                       bool // for another than a stage remembers
	tooSmall                                      bool // the device, for the file system wanted
	origin                                        state.Origin
}

type contentsKind uint8

const (
	holdsNothing contentsKind = iota
	holdsExt4
	holdsXFS
	holdsOther
	holdsUnreadable
	holdsUnproven
	holdsUnlooked // it was not looked at
)

// placeWorld is a path: the file there and what is mounted on it, the top first.
type placeWorld struct {
	file   fileWorld
	err    errWorld
	mounts [2]mountWorld
}

type fileWorld uint8

const (
	fileNone fileWorld = iota
	fileEmptyDirectory
	fileFullDirectory
	fileEmpty
	fileFull
	fileSpecial
	fileInFile
)

type errWorld uint8

const (
	errNone     errWorld = iota
	errNow               // the path cannot be looked at now
	errPath              // it is no path to look at
	errUnlooked          // it was not looked at
)

type mountWorld struct {
	kind                                         mountKind
	of                                           number
	xfs, superReadOnly, corrupt, readOnly, noDev bool
}

type mountKind uint8

const (
	noMount mountKind = iota
	wholeMount
	subMount
	nodeMount
	otherMount  // of no block device
	sourceMount // of the volume's source
	sourcePart  // of a directory of it
	sourceOther // of another one of its type
)

const (
	planStagePath = "/staging"
	planPathA     = "/pods/a/volume"
	planPathB     = "/pods/b/volume"
)

var (
	planPaths = [2]string{planPathA, planPathB}
	planFirst = state.TargetPart(planPathA)

	planSource = state.Source{FSType: "nfs4", Source: "server:/export"}

	errPlanNow    = errors.New("input/output error")
	errPlanInside = state.Errorf(state.FailedPrecondition, "in a volume")
	errPlanPath   = state.Errorf(state.InvalidArgument, "a symbolic link")
)

// look returns what the planner is told of a world, and what it decides.
func (w *planWorld) look() planCase {
	c := planCase{want: &state.Volume{ID: "vol", Targets: map[string]*state.Target{}}}
	if s := w.stage; s.want != wantNothing {
		capability := planCapability(s.block, s.noDev)
		if s.open {
			capability.FSType = ""
		}
		if s.lost {
			capability = state.Capability{}
		}
		c.want.Stage = &state.Stage{Path: planStagePath, Capability: capability, ReadOnly: s.readOnly, Intent: state.Intent{Gone: s.want == wantGone, Withdrawn: s.withdrawn, Accepted: s.accepted, CallerWaits: s.asked}}
		if s.remembers {
			c.want.Stage.UUID = "its"
		}
		if s.identity {
			c.want.Stage.Identity = "its"
		}
		c.have.Stage = w.at.look()
	}
	for i, t := range w.targets {
		if t.want == wantNothing {
			continue
		}
		path := planPaths[i]
		c.want.Targets[path] = &state.Target{
			Path: path, Capability: planCapability(t.block, t.noDev), ReadOnly: t.readOnly, SeenDevice: state.SeenDevice{Device: t.remembers.number()},
			Intent: state.Intent{Gone: t.want == wantGone, Withdrawn: t.withdrawn, Accepted: t.accepted, CallerWaits: t.asked},
		}
		if t.at.err != errUnlooked {
			m := t.at.look()
			c.have.Targets.Set(path, m)
			if t.inside && t.want == wantGone && m.Err == nil && len(m.Mounts) == 0 && m.File != state.NoFile {
				c.have.Unfit = map[state.Part]error{state.TargetPart(path): errPlanInside}
			}
		}
	}
	if w.size.want {
		c.want.Size = &state.Size{Bytes: 80, Intent: state.Intent{Accepted: w.size.accepted}}
		if w.size.larger {
			c.want.Size.Bytes = 200
		}
	}
	w.lookAtDevice(&c)
	if w.layer.wanted {
		w.lookAtLayer(&c)
	}
	if w.source.wanted {
		w.lookAtSource(&c)
	}
	c.parts = c.want.Parts()
	c.plan = reconciler.MakePlan(c.want, c.have)
	return c
}

func planCapability(block, noDev bool) state.Capability {
	c := state.Capability{Access: state.MountAccess, FSType: "ext4"}
	if block {
		c = state.Capability{Access: state.BlockAccess}
	}
	if noDev {
		c.Flags = []string{"nodev"}
	}
	return c
}

func (w *planWorld) lookAtDevice(c *planCase) {
	d := w.device
	c.have.View.State = d.view.state()
	if d.state == isUnlooked {
		return
	}
	there := d.state == isAttached || d.state == isDetaching
	c.have.Device = state.Device{State: d.state.state(), Missing: d.missing, Formatting: d.formatting, StaleMark: d.stale, Raw: d.raw, ReadOnly: there && d.readOnly}
	have := &c.have.Device
	have.Identity, have.Shared, have.Exclusive, have.NeedsSecret = d.identity, d.shared, d.exclusive, d.locked
	have.Noted, have.Proved = d.noted, d.proved
	if d.uuid {
		have.FormatUUID = "the format's"
	}
	if d.state == isForeign {
		have.Holder = "somebody"
	}
	if d.numbered {
		have.Number = theDevice.number()
	}
	if d.formatted {
		have.Formatted = "ext4"
	}
	if d.unread {
		*have = state.Device{State: d.state.state(), ReadOnly: have.ReadOnly, Err: errors.New("unread")}
		if there {
			have.Size = 100
		}
	}
	switch d.bytes {
	case bytesPromised:
		if d.unread {
			break
		}
		have.Size, have.Capacity = 100, 100
	case bytesUnknown:
		have.Size = 100
	case bytesFewer:
		have.Size, have.Capacity = 50, 100
	case bytesGrown:
		have.Size, have.Capacity = 200, 200
	}
	if !there {
		return
	}
	have.Number = theDevice.number()
	if d.held == heldElsewhere {
		c.have.Keepers = []string{"somebody"}
	}
	have.Held = d.held == heldElsewhere || d.held == heldByMounts && w.mounted(theDevice) || w.others != noOthers
	c.have.Others = w.others.look()
	if d.view != isAbsent && d.view != isUnlooked {
		c.have.View = state.Device{State: d.view.state(), Number: theView.number(), ReadOnly: true, Held: d.viewHeld || w.mounted(theView), Size: have.Size}
		if d.viewShort {
			c.have.View.Size /= 2
		}
	}
	if d.state == isAttached && !d.unread && w.stage.want == wantThere && !w.stage.block {
		c.have.Contents = w.contents.look()
		c.have.Contents.Origin = w.contents.origin
		if w.contents.tooSmall {
			c.have.Smallest = 1000
		}
	}
}

// lookAtLayer puts the layer on what was looked at as the device.
func (w *planWorld) lookAtLayer(c *planCase) {
	l, source := w.layer, c.have.Device
	if (source.Number != state.DeviceNumber{}) {
		source.Number, source.Held = theSource.number(), w.device.held == heldElsewhere
	}
	if source.Formatted != "" {
		source.Formatted = "L"
	}
	c.have.Lower = []state.Element{{Device: source}}
	c.have.Layer, c.have.Keepers = "L", nil
	d := state.Device{State: l.state.state(), NeedsSecret: l.locked, Missing: source.Missing, Identity: source.Identity, Err: source.Err}
	there := l.state == isAttached || l.state == isDetaching
	if source.Attached() {
		d.Unmade = !l.made && !l.stray
		d.Fresh = l.made && l.stamped
	}
	d.Formatting, d.Raw = d.Fresh, source.Raw && !d.Fresh
	if there || l.stray {
		d.Number, d.ReadOnly, d.Stray = theDevice.number(), l.readOnly, l.stray
		d.Held = l.held || w.mounted(theDevice)
		d.Size, d.Capacity = 99, 99
		if l.short {
			d.Size = 49
		}
	}
	wanted := w.stage.want == wantThere
	if c.have.Contents, c.have.Smallest = (state.Contents{}), 0; l.state == isAttached && d.Err == nil && wanted && !w.stage.block {
		c.have.Contents = w.contents.look()
	}
	if d.Unmade && wanted {
		c.have.Beneath = contentsWorld{kind: l.beneath}.look()
		c.have.Beneath.Origin = l.origin
	}
	c.have.Device = d
}

// lookAtSource puts a source in the place of what was looked at as the device.
func (w *planWorld) lookAtSource(c *planCase) {
	d := c.have.Device
	if c.have.Device = (state.Device{State: d.State, Missing: d.Missing, Err: d.Err}); d.State != state.DeviceUnknown {
		c.have.Source = &planSource
	}
	if s := c.want.Stage; s != nil && s.Capability.Access == state.MountAccess && !w.source.other {
		s.Capability.FSType = planSource.FSType
	}
}

// mountedElsewhere reports whether a target of the volume shows its file system.
func (c *planCase) mountedElsewhere() bool {
	for path := range c.want.Targets {
		for _, m := range c.have.Targets.At(path).Mounts {
			if wholeOf(m, c.have.Device.Number) && !m.Node {
				return true
			}
		}
	}
	return false
}

// mounted reports whether a file system on the device is mounted. A bound node
// claims nothing.
func (w *planWorld) mounted(n number) bool {
	for _, place := range []placeWorld{w.at, w.targets[0].at, w.targets[1].at} {
		for _, m := range place.mounts {
			if m.of == n && (m.kind == wholeMount || m.kind == subMount) {
				return true
			}
		}
	}
	return false
}

func (f contentsWorld) look() state.Contents {
	switch f.kind {
	case holdsNothing:
		return state.Contents{Kind: state.ContentsBlank}
	case holdsOther:
		return state.Contents{Kind: state.ContentsOther, Found: "something"}
	case holdsUnreadable:
		c := state.Contents{Err: errPlanNow}
		if f.swapped {
			c.UUID = "another"
		}
		return c
	case holdsUnproven:
		return state.Contents{Kind: state.ContentsUnproven}
	case holdsUnlooked:
		return state.Contents{}
	}
	c := state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", NeedsCheck: f.check, Growable: f.growable, GrowsMounted: f.growsMounted, GrowsUnmounted: f.growsUnmounted}
	if f.kind == holdsXFS {
		c.FSType = "xfs"
	}
	c.UUID = "its"
	if f.swapped {
		c.UUID = "another"
	}
	return c
}

func (p placeWorld) look() state.Mountpoint {
	switch p.err {
	case errUnlooked:
		return state.Mountpoint{}
	case errNow:
		return state.Mountpoint{Err: errPlanNow}
	case errPath:
		return state.Mountpoint{Err: errPlanPath}
	}
	m := state.Mountpoint{
		File:   [...]state.FileType{state.NoFile, state.Directory, state.Directory, state.RegularFile, state.RegularFile, state.OtherFile, state.NoFile}[p.file],
		InFile: p.file == fileInFile,
		Empty:  p.file == fileEmptyDirectory || p.file == fileEmpty,
	}
	for _, mount := range p.mounts {
		if mount.kind != noMount {
			m.Mounts = append(m.Mounts, mount.look())
		}
	}
	if len(m.Mounts) > 0 {
		m.File, m.Empty = state.Directory, false
		if m.Mounts[0].Node {
			m.File = state.BlockDevice
		}
	}
	return m
}

func (m mountWorld) look() state.Mount {
	if m.kind == otherMount {
		return state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}
	}
	look := state.Mount{Device: m.of.number(), FSType: "ext4", Source: "/dev/loop", Root: "/", SuperReadOnly: m.superReadOnly, Corrupt: m.corrupt, Lost: m.corrupt}
	switch {
	case m.kind == sourceMount:
		look.FSType, look.Source = planSource.FSType, planSource.Source
	case m.kind == sourcePart:
		look.FSType, look.Source, look.Root = planSource.FSType, planSource.Source, "/sub"
	case m.kind == sourceOther:
		look.FSType, look.Source = planSource.FSType, "server:/other"
	case m.kind == nodeMount:
		look.Node, look.FSType, look.Root = true, "devtmpfs", "/loop"
	case m.kind == subMount:
		look.Root = "/sub"
	case m.xfs:
		look.FSType = "xfs"
	}
	if m.readOnly {
		look.Attributes |= state.ReadOnly
	}
	if m.noDev {
		look.Attributes |= state.NoDev
	}
	return look
}

// settle notes what a plan found to hold: ends are forgotten, the rest accepted.
func (w planWorld) settle(c *planCase) planWorld {
	for i := range w.targets {
		t := &w.targets[i]
		switch {
		case t.want == wantNothing || !c.plan.Verdicts.Of(state.TargetPart(planPaths[i])).Settled:
		case t.want == wantGone:
			*t = targetWorld{}
		case !t.accepted:
			t.accepted, t.asked = true, false
			if t.block {
				t.remembers = w.shownBy(t)
			}
		}
	}
	if w.stage.want == wantGone && c.plan.Verdicts.Of(state.StagePart()).Settled {
		w.stage, w.at = stageWorld{}, placeWorld{}
	}
	if w.size.want && c.plan.Verdicts.Of(state.SizePart()).Settled {
		w.size.accepted = true
	}
	return w
}

func (w *planWorld) shownBy(t *targetWorld) number {
	if t.readOnly && !w.device.readOnly {
		return theView
	}
	return theDevice
}

// after returns the world after a step that did what it is for.
func (w planWorld) after(step reconciler.Step) planWorld {
	var t *targetWorld
	if i := slices.Index(planPaths[:], step.Part.Path); i >= 0 {
		t = &w.targets[i]
	}
	d, s := &w.device, w.stage
	d.proved = step.Action == reconciler.BeginFormat && d.noted
	switch step.Action {
	case reconciler.Unbind:
		t.at.pop()
	case reconciler.RemoveTarget:
		t.at.file = fileNone
	case reconciler.Unmount:
		w.at.pop()
	case reconciler.Release:
		d.held, w.layer.held = heldByMounts, false
	case reconciler.DetachView:
		d.view, d.viewHeld, d.viewShort = isAbsent, false, false
	case reconciler.Detach:
		d.state, d.readOnly = isAbsent, false
	case reconciler.Choose:
		w.stage.open = false
	case reconciler.Attach:
		if d.state == isAbsent {
			d.readOnly = s.readOnly
		}
		d.state = isAttached
	case reconciler.GrowDevice:
		d.bytes, d.viewShort = bytesPromised, d.view == isAttached
		if step.Part == state.SizePart() {
			d.bytes = bytesGrown
		}
		if w.layer.wanted {
			w.layer.short = w.layer.state == isAttached
			break
		}
		w.contents.growable = w.contents.kind == holdsExt4 || w.contents.kind == holdsXFS
	case reconciler.CreateLayer:
		w.layer.made, w.layer.stamped, d.formatting, d.uuid, d.stale, d.formatted = true, true, false, false, false, true
	case reconciler.OpenLayer:
		w.layer.state, w.layer.readOnly = isAttached, s.readOnly
	case reconciler.CloseLayer:
		w.layer = layerWorld{wanted: true, made: w.layer.made, stamped: w.layer.stamped, locked: w.layer.locked, beneath: w.layer.beneath, origin: w.layer.origin}
	case reconciler.GrowLayer:
		w.layer.short = false
		w.contents.growable = w.contents.kind == holdsExt4
	case reconciler.BeginFormat:
		d.formatting = !d.noted
	case reconciler.AbandonFormat:
		d.formatting, d.uuid, d.formatted = false, false, !w.layer.wanted && (w.contents.kind == holdsExt4 || w.contents.kind == holdsXFS)
	case reconciler.MarkRaw:
		d.raw, w.layer.stamped = true, false
	case reconciler.Erase:
		if w.layer.wanted && step.Layer == "" {
			w.layer.beneath, w.layer.origin = holdsNothing, state.OriginUnknown
			break
		}
		w.contents = contentsWorld{growsMounted: w.contents.growsMounted, growsUnmounted: w.contents.growsUnmounted}
	case reconciler.Format:
		if w.layer.wanted {
			w.layer.stamped, w.contents.kind = false, holdsExt4
			break
		}
		d.formatting, d.uuid, d.stale, d.formatted, w.contents.kind = false, false, false, true, holdsExt4
	case reconciler.Check:
		w.contents.check = false
	case reconciler.GrowFilesystem:
		w.contents.growable = false
	case reconciler.Mount:
		w.at.push(fileEmptyDirectory, mountWorld{kind: wholeMount, of: theDevice, superReadOnly: s.readOnly, readOnly: s.readOnly, noDev: s.noDev})
	case reconciler.SetAttributes:
		m := &w.at.mounts[0]
		m.readOnly, m.noDev = s.readOnly, m.noDev || s.noDev
		if t != nil {
			m = &t.at.mounts[0]
			m.readOnly, m.noDev = s.readOnly || t.readOnly, m.noDev || s.noDev || t.noDev
		}
	case reconciler.AttachView:
		d.view, d.viewShort = isAttached, false
	case reconciler.Bind:
		if t.block {
			t.at.push(fileEmpty, mountWorld{kind: nodeMount, of: w.shownBy(t)})
			break
		}
		stage := w.at.mounts[0]
		t.at.push(fileEmptyDirectory, mountWorld{
			kind: wholeMount, of: stage.of, superReadOnly: stage.superReadOnly,
			readOnly: s.readOnly || t.readOnly, noDev: stage.noDev || s.noDev || t.noDev,
		})
	case reconciler.MountSource:
		t.at.push(fileEmptyDirectory, mountWorld{kind: sourceMount, readOnly: s.readOnly || t.readOnly, noDev: s.noDev || t.noDev})
	}
	return w
}

func (p *placeWorld) pop() { p.mounts = [2]mountWorld{p.mounts[1]} }

func (p *placeWorld) push(file fileWorld, m mountWorld) {
	if p.file == fileNone {
		p.file = file
	}
	p.mounts = [2]mountWorld{m, p.mounts[0]}
}

// ---- The bounds of the walks. ----

var (
	mountedHere = mountWorld{kind: wholeMount, of: theDevice}
	mountedRO   = mountWorld{kind: wholeMount, of: theDevice, readOnly: true}
	mountedTurn = mountWorld{kind: wholeMount, of: theDevice, superReadOnly: true}
	mountedBoth = mountWorld{kind: wholeMount, of: theDevice, superReadOnly: true, readOnly: true}
	mountedDev  = mountWorld{kind: wholeMount, of: theDevice, noDev: true}
	mountedSick = mountWorld{kind: wholeMount, of: theDevice, corrupt: true}
	mountedXFS  = mountWorld{kind: wholeMount, of: theDevice, xfs: true}
	mountedSub  = mountWorld{kind: subMount, of: theDevice}
	mountedView = mountWorld{kind: wholeMount, of: theView}
	mountedDisk = mountWorld{kind: wholeMount, of: otherDevice}
	mountedTmp  = mountWorld{kind: otherMount}
	mountedFrom = mountWorld{kind: sourceMount}
	mountedPart = mountWorld{kind: sourcePart}
	mountedFar  = mountWorld{kind: sourceOther}
	boundNode   = mountWorld{kind: nodeMount, of: theDevice}
	boundView   = mountWorld{kind: nodeMount, of: theView}
	boundOld    = mountWorld{kind: nodeMount, of: olderDevice}
	boundDisk   = mountWorld{kind: nodeMount, of: otherDevice}
)

// placesOf returns the places at which mounts stand on a file, each stack the top first.
func placesOf(file fileWorld, stacks ...[2]mountWorld) []placeWorld {
	var places []placeWorld
	for _, stack := range stacks {
		places = append(places, placeWorld{file: file, mounts: stack})
	}
	return places
}

// unmounted are the places at which nothing is mounted.
var unmounted = []placeWorld{
	{}, {file: fileEmptyDirectory}, {file: fileFullDirectory}, {file: fileEmpty}, {file: fileFull}, {file: fileSpecial}, {file: fileInFile}, {err: errNow}, {err: errPath}, {err: errUnlooked},
}

var (
	stagePlaces = slices.Concat(unmounted, placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedHere}, [2]mountWorld{mountedRO}, [2]mountWorld{mountedTurn}, [2]mountWorld{mountedBoth}, [2]mountWorld{mountedDev},
		[2]mountWorld{mountedSick}, [2]mountWorld{mountedXFS}, [2]mountWorld{mountedSub}, [2]mountWorld{mountedView},
		[2]mountWorld{mountedDisk}, [2]mountWorld{mountedTmp}, [2]mountWorld{boundNode},
		[2]mountWorld{mountedHere, mountedHere}, [2]mountWorld{mountedSick, mountedHere}, [2]mountWorld{mountedSick, mountedTmp}, [2]mountWorld{mountedRO, mountedSick},
		[2]mountWorld{mountedTmp, mountedHere}, [2]mountWorld{mountedHere, mountedTmp}, [2]mountWorld{mountedDisk, mountedTmp},
	))
	targetPlaces = slices.Concat(unmounted, placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedHere}, [2]mountWorld{mountedRO}, [2]mountWorld{mountedDev}, [2]mountWorld{mountedSick}, [2]mountWorld{mountedSub},
		[2]mountWorld{mountedView}, [2]mountWorld{mountedDisk}, [2]mountWorld{mountedTmp}, [2]mountWorld{boundNode},
		[2]mountWorld{mountedHere, mountedHere}, [2]mountWorld{mountedRO, mountedHere}, [2]mountWorld{mountedTmp, mountedHere}, [2]mountWorld{mountedHere, mountedTmp},
	), placesOf(fileFullDirectory, [2]mountWorld{mountedHere}))
	nodePlaces = slices.Concat(unmounted, placesOf(fileEmpty,
		[2]mountWorld{boundNode}, [2]mountWorld{boundView}, [2]mountWorld{boundOld}, [2]mountWorld{boundDisk}, [2]mountWorld{mountedHere}, [2]mountWorld{mountedTmp},
		[2]mountWorld{boundNode, boundNode}, [2]mountWorld{boundNode, boundView}, [2]mountWorld{boundView, boundNode}, [2]mountWorld{boundOld, boundNode},
		[2]mountWorld{mountedTmp, boundNode}, [2]mountWorld{boundNode, mountedTmp}, [2]mountWorld{mountedTmp, boundView},
	), placesOf(fileFull, [2]mountWorld{boundNode}))
)

var stageWishes = []stageWorld{
	{want: wantThere}, {want: wantThere, readOnly: true}, {want: wantThere, noDev: true, asked: true},
	{want: wantThere, block: true}, {want: wantThere, block: true, readOnly: true},
	{}, {want: wantGone}, {want: wantGone, withdrawn: true}, {want: wantGone, block: true},
	{want: wantThere, remembers: true, accepted: true}, {want: wantThere, readOnly: true, remembers: true},
	{want: wantThere, identity: true, accepted: true, asked: true}, {want: wantThere, block: true, identity: true, accepted: true}, {want: wantGone, identity: true, remembers: true},
	{want: wantThere, open: true}, {want: wantGone, lost: true},
}

// planDeviceWorlds ranges over everything that a device, its contents, the
// staging path and the size wanted can be, with few targets.
func planDeviceWorlds(yield func(planWorld) bool) {
	for _, stage := range stageWishes {
		for _, device := range deviceWorlds() {
			for _, contents := range contentsFor(stage, &device) {
				for _, at := range stagePlacesFor(stage) {
					for _, rest := range deviceSides(stage) {
						w := rest
						w.stage, w.at, w.device, w.contents = stage, at, device, contents
						if !yield(w) {
							return
						}
						if !stage.lost || (device.state != isAttached && device.state != isDetaching) || contents != (contentsWorld{kind: holdsExt4}) {
							continue
						}
						for w.others = otherStage; w.others <= otherPath; w.others++ {
							if !yield(w) {
								return
							}
						}
					}
				}
			}
		}
	}
}

func stagePlacesFor(stage stageWorld) []placeWorld {
	switch {
	case stage.want == wantNothing:
		return []placeWorld{{}}
	case stage.block && stage.want == wantThere: // nobody looks at the path
		return []placeWorld{{file: fileEmptyDirectory}, {err: errNow}, {err: errUnlooked}, {file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}}}
	}
	return stagePlaces
}

// deviceWorlds returns every device; the marks of a format vary with the contents.
func deviceWorlds() []deviceWorld {
	var all []deviceWorld
	for bytes := bytesPromised; bytes <= bytesGrown; bytes++ {
		all = append(all, deviceWorld{bytes: bytes})
	}
	all = append(all, deviceWorld{missing: true}, deviceWorld{unread: true}, deviceWorld{state: isUnlooked, view: isUnlooked}, deviceWorld{state: isForeign}, deviceWorld{state: isForeign, bytes: bytesFewer})
	for _, d := range []deviceWorld{
		{state: isAttached}, {state: isDetaching}, {state: isAttached, readOnly: true}, {state: isDetaching, readOnly: true},
	} {
		for d.held = heldByMounts; d.held <= heldUnseen; d.held++ {
			fewer := d
			fewer.bytes = bytesFewer
			all = append(all, d, withView(d), fewer)
		}
		d.held = heldByMounts
		heldView, leavingView, unseenView, missing, unknown, grown := d, d, d, d, d, d
		heldView.view, heldView.viewHeld, leavingView.view, unseenView.view = isAttached, true, isDetaching, isUnlooked
		missing.missing, unknown.bytes, grown.bytes = true, bytesUnknown, bytesGrown
		unread, unreadView := d, withView(d)
		unread.unread, unreadView.unread = true, true
		all = append(all, heldView, leavingView, unseenView, missing, unknown, grown)
		if !d.readOnly {
			all = append(all, unread, unreadView)
		}
	}
	for _, d := range []deviceWorld{{}, {state: isAttached}, {state: isAttached, readOnly: true}, {state: isAttached, bytes: bytesFewer}, {state: isDetaching}, {state: isForeign}} {
		for _, d.identity = range []string{"its", "another"} {
			all = append(all, d)
		}
	}
	for _, d := range []deviceWorld{{}, {state: isAttached}, {state: isAttached, readOnly: true}} {
		d.shared = true
		proven := d
		proven.exclusive = true
		all = append(all, d, proven)
	}
	for _, d := range []deviceWorld{{}, {state: isAttached}, {state: isAttached, readOnly: true}, {state: isDetaching}} {
		d.locked = true
		all = append(all, d)
	}
	return append(all, deviceWorld{numbered: true})
}

func withView(d deviceWorld) deviceWorld {
	d.view = isAttached
	return d
}

// contentsFor returns every contents that makes a difference to a stage. They
// are read only from an attached device for a wanted file system; elsewhere a
// few are enough to see what comes to light on the way.
func contentsFor(stage stageWorld, d *deviceWorld) iter.Seq2[int, contentsWorld] {
	return func(yield func(int, contentsWorld) bool) {
		all := []contentsWorld{
			{kind: holdsExt4}, {growsMounted: true, growsUnmounted: true}, {kind: holdsOther},
			{growsUnmounted: true}, {kind: holdsXFS}, {kind: holdsUnreadable}, {kind: holdsUnlooked}, {kind: holdsExt4, check: true},
			{kind: holdsExt4, growable: true}, {kind: holdsExt4, growable: true, growsUnmounted: true},
			{kind: holdsExt4, growable: true, growsMounted: true}, {kind: holdsExt4, growable: true, growsMounted: true, growsUnmounted: true},
			{kind: holdsExt4, growable: true, check: true, growsUnmounted: true}, {kind: holdsExt4, growable: true, check: true, growsMounted: true},
			{kind: holdsExt4, growsMounted: true}, {kind: holdsUnproven}, {tooSmall: true}, {kind: holdsOther, tooSmall: true},
		}
		if stage.remembers {
			all = []contentsWorld{
				{kind: holdsExt4}, {kind: holdsExt4, swapped: true}, {}, {kind: holdsXFS, swapped: true}, {kind: holdsUnreadable, swapped: true}, {kind: holdsUnlooked, swapped: true},
				{kind: holdsExt4, check: true, swapped: true}, {kind: holdsExt4, growable: true, growsMounted: true, growsUnmounted: true, swapped: true},
			}
		}
		read := stage.want == wantThere && !stage.block && d.state == isAttached && !d.missing && !d.unread
		if !read {
			all = all[:3]
		}
		d.formatting, d.formatted, d.raw, d.stale, d.noted = false, false, false, false, true // its facts are notes
		for _, contents := range all[:min(len(all), 5)] {
			for origin := range state.OriginOther + 1 {
				contents.origin = origin
				for _, d.stale = range []bool{false, true} {
					d.formatting, d.uuid = true, true
					if !yield(0, contents) {
						return
					}
				}
			}
			d.formatting, d.uuid, d.stale = false, false, false
			for _, d.proved = range []bool{false, true} {
				if contents.origin = state.OriginUnknown; !yield(0, contents) {
					return
				}
			}
			d.proved = false
			if !read {
				break
			}
		}
		d.noted = false
		for mark := range 7 { // what was published raw is not formatted, and seldom marked
			d.formatting, d.formatted, d.raw = mark&1 != 0, mark&2 != 0, mark&4 != 0
			if d.stale = mark == 6; d.stale {
				d.formatting, d.formatted, d.raw = true, false, false
			}
			if !read && mark >= 3 {
				continue
			}
			for i, contents := range all {
				if d.raw && i > 2 && contents.kind != holdsUnproven {
					continue
				}
				if !yield(i, contents) {
					return
				}
			}
		}
	}
}

// deviceSides returns the sizes and targets that stand beside a device.
func deviceSides(stage stageWorld) []planWorld {
	place := placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}}
	if stage.block {
		place = placeWorld{file: fileEmpty, mounts: [2]mountWorld{boundNode}}
	}
	bound := targetWorld{want: wantThere, block: stage.block, accepted: true, at: place}
	sick := bound
	if !stage.block {
		sick.at.mounts[0] = mountedSick
	}
	leaving := targetWorld{want: wantGone, block: stage.block, at: place, asked: true}
	blind := targetWorld{want: wantThere, block: stage.block, at: placeWorld{err: errNow}}
	node := targetWorld{want: wantGone, block: true, at: placeWorld{file: fileEmpty, mounts: [2]mountWorld{boundNode}}}
	smaller, larger, accepted := sizeWorld{want: true}, sizeWorld{want: true, larger: true}, sizeWorld{want: true, larger: true, accepted: true}
	return []planWorld{
		{}, {size: larger, targets: [2]targetWorld{blind}}, {size: smaller, targets: [2]targetWorld{bound}}, {size: accepted, targets: [2]targetWorld{sick}},
		{targets: [2]targetWorld{leaving}}, {targets: [2]targetWorld{node}},
	}
}

// planTargetWorlds ranges over everything that a target can be, with a few
// second targets, devices and stages.
func planTargetWorlds(yield func(planWorld) bool) {
	for _, stage := range stageWishes {
		for _, block := range []bool{stage.block, !stage.block} {
			if block != stage.block && stage.want == wantThere {
				continue // a publish is refused that differs from the stage
			}
			for _, device := range targetDevices(block) {
				for _, at := range targetStages(stage) {
					for _, first := range targetWorlds(block) {
						for _, second := range secondTargets(block) {
							w := planWorld{stage: stage, at: at, targets: [2]targetWorld{first, second}, device: device, contents: contentsWorld{kind: holdsExt4, swapped: stage.remembers}, size: sizeWorld{want: block}}
							if !yield(w) {
								return
							}
						}
					}
				}
			}
		}
	}
}

// planLayerWorlds ranges over everything that a layer and its source can be.
func planLayerWorlds(yield func(planWorld) bool) {
	var sources []deviceWorld
	for _, d := range []deviceWorld{
		{}, {missing: true}, {unread: true}, {state: isUnlooked}, {state: isForeign}, {bytes: bytesFewer}, {state: isDetaching},
		{state: isAttached}, {state: isAttached, readOnly: true}, {state: isAttached, bytes: bytesFewer}, {state: isAttached, held: heldElsewhere},
		{state: isAttached, unread: true}, {state: isAttached, raw: true}, {state: isAttached, identity: "another"}, {state: isAttached, shared: true},
		{state: isAttached, stale: true}, {state: isAttached, noted: true}, {state: isAttached, noted: true, proved: true}, {state: isAttached, noted: true, stale: true},
	} {
		marked, formatted := d, d
		marked.formatting, formatted.formatted = true, true
		if marked.uuid = d.noted; d.proved {
			marked = d
		}
		sources = append(sources, d, marked, formatted)
	}
	layers := []layerWorld{
		{state: isUnlooked}, {state: isForeign}, {state: isForeign, stray: true}, {state: isForeign, stray: true, held: true}, {state: isForeign, stray: true, made: true},
		{beneath: holdsNothing}, {beneath: holdsExt4}, {beneath: holdsOther}, {beneath: holdsUnreadable}, {beneath: holdsUnlooked}, {beneath: holdsUnproven}, {locked: true},
		{beneath: holdsOther, origin: state.OriginFormat}, {beneath: holdsOther, origin: state.OriginUnnamed}, {beneath: holdsOther, origin: state.OriginOther},
		{made: true}, {made: true, stamped: true}, {made: true, locked: true}, {made: true, state: isDetaching}, {state: isAttached},
	}
	for _, l := range []layerWorld{{made: true, state: isAttached}, {made: true, state: isAttached, stamped: true}} {
		readOnly, held, short, locked := l, l, l, l
		readOnly.readOnly, held.held, short.short, locked.locked = true, true, true, true
		layers = append(layers, l, readOnly, held, short, locked)
	}
	places := append(slices.Clone(unmounted), placesOf(fileEmptyDirectory, [2]mountWorld{mountedHere}, [2]mountWorld{mountedBoth}, [2]mountWorld{mountedSick}, [2]mountWorld{mountedTmp, mountedHere})...)
	contents := []contentsWorld{{kind: holdsExt4}, {growsMounted: true}, {kind: holdsOther}, {kind: holdsExt4, growable: true, growsMounted: true}, {kind: holdsUnlooked}, {kind: holdsExt4, swapped: true}}
	for _, stage := range stageWishes {
		for _, device := range sources {
			for _, layer := range layers {
				layer.wanted = true
				for _, at := range places {
					for i, rest := range deviceSides(stage) {
						for _, c := range contents {
							w := rest
							w.stage, w.at, w.device, w.layer, w.contents = stage, at, device, layer, c
							if !yield(w) {
								return
							}
							if i > 2 || layer.state != isAttached || stage.want != wantThere {
								break // the rest is not read, or tells nothing new
							}
						}
					}
				}
			}
		}
	}
}

// planSourceWorlds ranges over everything that the stage and the targets of a volume
// without a device can be.
func planSourceWorlds(yield func(planWorld) bool) {
	readOnly, noDev, sick := mountedFrom, mountedFrom, mountedFrom
	readOnly.readOnly, noDev.noDev, sick.corrupt = true, true, true
	places := append(slices.Clone(unmounted), placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedFrom}, [2]mountWorld{readOnly}, [2]mountWorld{noDev}, [2]mountWorld{sick}, [2]mountWorld{mountedPart}, [2]mountWorld{mountedFar}, [2]mountWorld{mountedTmp}, [2]mountWorld{mountedDisk}, [2]mountWorld{boundDisk},
		[2]mountWorld{mountedFrom, mountedFrom}, [2]mountWorld{sick, mountedFrom}, [2]mountWorld{mountedTmp, mountedFrom}, [2]mountWorld{mountedFrom, mountedTmp},
	)...)
	bound := placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedFrom}}
	seconds := []targetWorld{{}, {want: wantThere, accepted: true, at: bound}, {want: wantThere, at: placeWorld{err: errNow}}, {want: wantGone, at: bound}}
	for _, stage := range stageWishes[:9] { // it remembers nothing
		for _, source := range []sourceWorld{{wanted: true}, {wanted: true, other: true}} {
			for _, device := range []deviceWorld{{}, {missing: true}, {unread: true}, {state: isUnlooked, view: isUnlooked}} {
				for _, at := range []placeWorld{{file: fileEmptyDirectory}, {err: errNow}, {err: errUnlooked}, bound, {file: fileEmptyDirectory, mounts: [2]mountWorld{mountedTmp, mountedFrom}}} {
					for _, first := range targetWorldsAt(stage.block, places) {
						for i, second := range seconds {
							second.block = stage.block
							w := planWorld{stage: stage, at: at, targets: [2]targetWorld{first, second}, size: sizeWorld{want: i == 1}, device: device, source: source}
							if !yield(w) {
								return
							}
						}
					}
				}
			}
		}
	}
}

// targetDevices returns the devices that make a difference to a target.
func targetDevices(block bool) []deviceWorld {
	plain := deviceWorld{state: isAttached}
	readOnly, held, view := plain, plain, plain
	readOnly.readOnly, held.held, view.view = true, heldElsewhere, isAttached
	all := []deviceWorld{plain, readOnly, {}, {state: isDetaching}, view, {state: isUnlooked, view: isUnlooked}, {state: isAttached, view: isUnlooked}}
	if !block {
		return append(all, held, deviceWorld{state: isForeign})
	}
	heldView, leavingView, readOnlyView := view, view, view
	heldView.viewHeld, leavingView.view, readOnlyView.readOnly = true, isDetaching, true
	shortView := view
	shortView.viewShort = true
	return append(all, heldView, leavingView, readOnlyView, shortView)
}

func targetStages(stage stageWorld) []placeWorld {
	if stage.want == wantNothing {
		return []placeWorld{{}}
	}
	places := []placeWorld{{file: fileEmptyDirectory}}
	if stage.block {
		return places
	}
	return append(places, placesOf(fileEmptyDirectory,
		[2]mountWorld{mountedHere}, [2]mountWorld{mountedBoth}, [2]mountWorld{mountedDev}, [2]mountWorld{mountedSick}, [2]mountWorld{mountedTmp, mountedHere}, [2]mountWorld{mountedHere, mountedHere})...)
}

// targetWorlds returns every target of one access type.
func targetWorlds(block bool) []targetWorld {
	if block {
		return targetWorldsAt(block, nodePlaces)
	}
	return targetWorldsAt(block, targetPlaces)
}

func targetWorldsAt(block bool, places []placeWorld) []targetWorld {
	var wishes []targetWorld
	for _, readOnly := range []bool{false, true} {
		t := targetWorld{want: wantThere, block: block, readOnly: readOnly}
		asked, accepted, again := t, t, t
		asked.asked, accepted.accepted, again.accepted, again.asked = true, true, true, true
		wishes = append(wishes, t, asked, accepted, again)
		if block {
			for n := theDevice; n <= olderDevice; n++ {
				accepted.remembers, again.remembers = n, n
				wishes = append(wishes, accepted, again)
			}
		} else {
			accepted.noDev = true
			wishes = append(wishes, accepted)
		}
	}
	gone := targetWorld{want: wantGone, block: block}
	withdrawn, inside := gone, gone
	withdrawn.withdrawn, inside.inside = true, true
	wishes = append(wishes, gone, withdrawn, inside)
	if block {
		for gone.remembers = theDevice; gone.remembers <= olderDevice; gone.remembers++ {
			wishes = append(wishes, gone)
		}
	}
	var all []targetWorld
	for _, t := range wishes {
		for _, t.at = range places {
			all = append(all, t)
		}
	}
	return all
}

// secondTargets returns the targets that stand beside the first one.
func secondTargets(block bool) []targetWorld {
	there, gone := targetWorld{want: wantThere, block: block}, targetWorld{want: wantGone, block: block}
	file, ours := fileEmptyDirectory, mountedHere
	if block {
		file, ours = fileEmpty, boundNode
	}
	with := func(t targetWorld, p placeWorld) targetWorld { t.at = p; return t }
	bound := placeWorld{file: file, mounts: [2]mountWorld{ours}}
	foreign := placeWorld{file: file, mounts: [2]mountWorld{mountedTmp}}
	covered := placeWorld{file: file, mounts: [2]mountWorld{mountedTmp, ours}}
	readOnly, accepted := there, there
	readOnly.readOnly, accepted.accepted = true, true
	return []targetWorld{
		{}, with(there, placeWorld{file: file}), with(readOnly, bound), with(accepted, bound),
		with(there, foreign), with(there, placeWorld{err: errNow}),
		with(gone, bound), with(gone, covered), with(gone, foreign), with(gone, placeWorld{err: errNow}),
	}
}
