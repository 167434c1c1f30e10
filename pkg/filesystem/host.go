package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/helper"
	"github.com/csi-node/csi-node/pkg/state"
)

// Host works on the file systems of this node's devices. Its methods may be
// called concurrently; calls that change the same device must not overlap.
type Host struct {
	kinds        []kind
	growsMounted map[string]bool // by file system type; what this process may do
	slots        chan struct{}   // one is held while mkfs or fsck runs
}

// kind is one kind of file system that the plugin makes and mounts.
type kind interface {
	traits() traits
	mountRules() mountRules
	// parse reads the superblock from the first headSize bytes of a device, or
	// from all bytes of a smaller one. It returns nil when the magic is not
	// there, and an error that says what is wrong when it is there and the
	// rest is not as it must be.
	parse(head []byte) (*superblock, error)
	// live adds to sb what only the kernel knows about a file system that is mounted at
	// mountpoint.
	live(d *device, mountpoint string, sb *superblock) error
	// format runs mkfs; the file system is to have the UUID, unless that is "". zeroed says
	// that every byte of the device reads as zero.
	format(ctx context.Context, d *device, uuid string, zeroed bool) error
	// check repairs what can be repaired without a human, unmounted.
	check(ctx context.Context, path string) error
	// grow grows the file system to bytes, unmounted if mountpoint is "".
	grow(ctx context.Context, d *device, mountpoint string, bytes int64) error
}

// alone is a program of a kind: neither it nor what it starts outlives its caller, or goes
// on writing unnoticed.
func alone(name string, args ...string) helper.Program {
	return helper.Program{Name: name, Args: args, Alone: true}
}

// kinds are all kinds; the first one is the default. Those whose superblocks lie where a file of
// another one can lie come last.
var kinds = []kind{ext4{}, xfs{}, btrfsKind{}}

// traits are the facts about a kind that need no device.
type traits struct {
	name         string   // the type, as mount(2) takes it
	programs     []string // that format, check and grow run
	debian       string   // the Debian package that has them
	smallest     int64    // in bytes: mkfs makes nothing smaller; 0: only mkfs knows
	offset       int      // of the superblock
	growsMounted bool
	growsOffline bool
	capability   uint // that growing mounted takes beyond CAP_SYS_ADMIN; 0: none
	onlyAsked    bool // never made unless somebody names it
	anyUUID      bool // mkfs chooses the UUID
}

// mostBytes is larger than any file system, and small enough to compute with.
const mostBytes = 1 << 60

// superblock is what was read from a file system's superblock.
type superblock struct {
	fsType string
	uuid   uuid.UUID
	bytes  int64 // that the file system spans
	own    int   // bytes at the head of the device in which no file can lie
	// onlyMounted: it grows only while it is mounted, unlike others of its kind.
	onlyMounted bool
	needsCheck  bool

	// grown returns the bytes that the file system would span after growing
	// on a device of so many bytes: never fewer than it spans now.
	grown func(deviceBytes int64) int64
}

// New returns a Host that runs at most maxConcurrent formats and checks at a
// time, not counting those that have run for five seconds: they wait for their
// disks, not for a CPU, and one that hangs keeps none of the others waiting for
// longer than that. It is an error when a helper program is not installed; the error names
// the program and its Debian package.
func New(maxConcurrent int) (*Host, error) {
	if maxConcurrent < 1 {
		return nil, fmt.Errorf("at most %d formats and checks at a time: at least 1 is needed", maxConcurrent)
	}
	h := &Host{
		kinds:        kinds,
		growsMounted: map[string]bool{},
		slots:        make(chan struct{}, maxConcurrent),
	}
	if err := h.CheckPrograms(); err != nil {
		return nil, err
	}
	for _, k := range h.kinds {
		t := k.traits()
		capable, err := hasCapability(t.capability)
		if err != nil {
			return nil, err
		}
		h.growsMounted[t.name] = t.growsMounted && capable
	}
	return h, nil
}

// CheckPrograms returns an error that names a helper program which is not
// installed, and its Debian package.
func (h *Host) CheckPrograms() error {
	for _, k := range h.kinds {
		t := k.traits()
		for _, program := range t.programs {
			if _, err := exec.LookPath(program); err != nil {
				return fmt.Errorf("%s is needed for %s and was not found (Debian: apt-get install %s): %w", program, t.name, t.debian, err)
			}
		}
	}
	return nil
}

// TakesUUID reports whether Format makes a file system of a type with the UUID that it is given.
func TakesUUID(fsType string) bool {
	return slices.ContainsFunc(kinds, func(k kind) bool { return k.traits().name == fsType && !k.traits().anyUUID })
}

// Types returns the file system types that Format makes.
func (h *Host) Types() []string {
	var names []string
	for _, k := range h.kinds {
		names = append(names, k.traits().name)
	}
	return names
}

// Smallest returns the bytes below which Format makes no file system of the
// type; 0 if only mkfs knows, or if there is no such type.
func (h *Host) Smallest(fsType string) int64 {
	if k := h.find(fsType); k != nil {
		return k.traits().smallest
	}
	return 0
}

// Default returns the type to make on a device of that size if nobody names one: ext4,
// or xfs if only that can grow while mounted on this node (see New), and fits.
func (h *Host) Default(bytes int64) string {
	for _, k := range h.kinds {
		if t := k.traits(); h.growsMounted[t.name] && t.smallest <= bytes && !t.onlyAsked {
			return t.name
		}
	}
	return h.kinds[0].traits().name
}

// find returns the kind of a type; nil: there is none.
func (h *Host) find(fsType string) kind {
	for _, k := range h.kinds {
		if k.traits().name == fsType {
			return k
		}
	}
	return nil
}

// kind returns the kind of a type; InvalidArgument when there is none.
func (h *Host) kind(fsType string) (kind, error) {
	if k := h.find(fsType); k != nil {
		return k, nil
	}
	return nil, state.Errorf(state.InvalidArgument, "file system type %q: not supported, use one of %s", fsType, strings.Join(h.Types(), ", "))
}

// with opens a device for do, which formats or checks it, and waits for a slot first. It is
// held open throughout, so that its path and number are not given to another device, and a
// loop device with autoclear stays.
func (h *Host) with(ctx context.Context, facts state.Device, fsType string, do func(d *device, k kind) error) error {
	k, err := h.kind(fsType)
	if err != nil {
		return err
	}
	if facts.ReadOnly {
		return state.Errorf(state.FailedPrecondition, "the device is read-only")
	}
	release, err := h.slot(ctx)
	if err != nil {
		return err
	}
	defer release()
	d, err := open(facts, 0)
	if err != nil {
		return err
	}
	return errors.Join(do(d, k), d.Close())
}

// slotTime is how long a format or check keeps its slot. Those that work are
// over by then, or wait for their disk.
const slotTime = 5 * time.Second

// slot waits for a slot to run mkfs or fsck; the function it returns frees the slot.
// After slotTime it becomes free by itself, so that a helper program that the kernel
// cannot kill, because it waits for a dead disk, does not hold up other volumes.
func (h *Host) slot(ctx context.Context) (release func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case h.slots <- struct{}{}:
		giveBack := sync.OnceFunc(func() { <-h.slots })
		timer := time.AfterFunc(slotTime, giveBack)
		return func() { timer.Stop(); giveBack() }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for one of %d formats and checks under way to end: %w", cap(h.slots), ctx.Err())
	}
}

// hasCapability reports whether a capability is in this process's effective
// set; 0 stands for none needed.
func hasCapability(capability uint) (bool, error) {
	if capability == 0 {
		return true, nil
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, fmt.Errorf("read the capabilities of this process: %w", err)
	}
	return data[capability/32].Effective&(1<<(capability%32)) != 0, nil
}
