package pool

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Provisioning says when a volume takes its space from the pool.
type Provisioning string

const (
	// Thick volumes have all their blocks allocated when they are created.
	Thick Provisioning = "thick"
	// Thin volumes take blocks as they are written. The space is promised, and
	// promises are never made beyond what the pool has, unless a volume is
	// overcommitted.
	Thin Provisioning = "thin"
)

// Volume is the facts about a volume, which live with its data. The JSON is
// additive: a version ignores the fields that it does not know, and keeps them
// when it writes the file again.
type Volume struct {
	Version      int          `json:"version"` // of the file's layout; set by Create
	ID           string       `json:"id"`
	Name         string       `json:"name"`  // as the CO asked for it
	Bytes        int64        `json:"bytes"` // a multiple of blockSize
	Provisioning Provisioning `json:"provisioning"`
	FSType       string       `json:"fsType"`      // that the volume was created for; may be empty
	SectorBytes  int64        `json:"sectorBytes"` // logical sectors of its device: 512 or 4096; 0 is the default
	Created      time.Time    `json:"created"`     // set by Create

	// OvercommitPercent, of a thin volume, says how far promises may exceed the
	// pool, see devices.Claim; 0 stands for devices.NoOvercommit.
	OvercommitPercent int64 `json:"overcommitPercent"`

	// Ephemeral, when set, says whose inline ephemeral volume this is.
	Ephemeral *Owner `json:"ephemeral"`

	// Layers are keys of the volume context that ask the engine for layers.
	Layers map[string]string `json:"layers"`

	// Formatting is the mark: a format was begun, and its end is not known.
	Formatting bool `json:"formatting"`
	// Formatted is the file system type of the last format that completed.
	Formatted string `json:"formatted"`

	// Raw says that the volume was published as a raw block device for writing,
	// and not cleared since: it is never formatted.
	Raw bool `json:"raw"`
	// Fresh is when the data was last changed by the pool itself, which left
	// nothing but zeros; zero once anybody may have had the volume. A file that
	// was changed at another time is not fresh, whoever changed it.
	Fresh time.Time `json:"fresh"`
}

// Owner is the one publish that an inline ephemeral volume lives for.
type Owner struct {
	PodUID string `json:"podUID"`
	Target string `json:"target"` // target path
}

// blockSize is what the sizes of volumes are multiples of, in bytes.
const blockSize = 4096

const volumeVersion = 1

// maxID is the length of the longest volume id, in bytes (CSI spec v1.13,
// "Size limits").
const maxID = 128

// idPunctuation may stand in an id, but not at its begin.
const idPunctuation = "._-"

// ValidateID returns InvalidArgument for an id that no volume can have: ids
// are names of directories. Each call asks several times: a pattern would take eight times as long.
func ValidateID(id string) error {
	unfit := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune(idPunctuation, c)
	}
	if id == "" || len(id) > maxID || strings.Contains(idPunctuation, id[:1]) || strings.ContainsFunc(id, unfit) || strings.Contains(id, "..") {
		return state.Errorf(state.InvalidArgument, "volume id %.200q: must be 1 to %d letters, digits, dots, dashes and underscores, begin with a letter or digit, and hold no two dots in a row", id, maxID)
	}
	return nil
}

// ID returns the id of the volume of that name.
func ID(name string) string { return devices.VolumeID("", name) }

// Get returns the facts about a volume. NotFound: there is no such volume.
// InvalidArgument: there can be none of that id. Internal: volume.json is
// damaged. Unclassified: the pool is not there, or cannot be read.
func (p *Pool) Get(ctx context.Context, id string) (Volume, error) {
	v, _, err := p.read(ctx, id)
	return v, err
}

// getCached returns the facts about a volume if they are in the cache, and the kernel's own
// caches show that the file is unchanged: no disk is asked.
func (p *Pool) getCached(id string) (Volume, bool) {
	v, _, ok := p.cache.get(id, p.path(volumesDir, id, volumeFile), rawfile.ResolveCached)
	return v, ok && !p.durable.failed(id)
}

// IDs returns the ids of all volumes, in order, also of those whose facts
// cannot be read. It is an error when the pool is not there.
func (p *Pool) IDs(ctx context.Context) ([]string, error) {
	if err := p.Check(ctx); err != nil { // a pool that is away looks empty
		return nil, err
	}
	entries, err := os.ReadDir(p.path(volumesDir))
	if err != nil {
		return nil, fmt.Errorf("pool: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		if ValidateID(entry.Name()) == nil && entry.IsDir() {
			ids = append(ids, entry.Name())
		}
	}
	return ids, nil
}

// read returns the facts about a volume, parsed and as they are on the disk. If the sync of
// their last change failed, it must succeed now: whoever sees them believes that they last.
func (p *Pool) read(ctx context.Context, id string) (Volume, []byte, error) {
	v, raw, err := p.readAny(ctx, id)
	if err == nil && p.durable.failed(id) {
		err = p.settle(ctx, id)
	}
	if err != nil {
		return Volume{}, nil, err
	}
	return v, raw, nil
}

// readAny is read of facts that need not be durable.
func (p *Pool) readAny(ctx context.Context, id string) (Volume, []byte, error) {
	if err := ValidateID(id); err != nil {
		return Volume{}, nil, err
	}
	path := p.path(volumesDir, id, volumeFile)
	if v, raw, ok := p.cache.get(id, path, 0); ok {
		return v, raw, nil
	}
	v, raw, damage, err := p.readUncached(ctx, id, path)
	if errors.Is(err, os.ErrNotExist) {
		if err := p.Check(ctx); err != nil { // else a pool that is away looks empty
			return Volume{}, nil, fmt.Errorf("volume %s: %w", id, err)
		}
		return Volume{}, nil, state.Errorf(state.NotFound, "volume %s: there is no such volume in the pool %s", id, p.dir)
	}
	if err != nil {
		return Volume{}, nil, fmt.Errorf("volume %s: %w", id, err)
	}
	if damage != nil {
		return Volume{}, nil, state.Errorf(state.Internal, "volume %s: %s is damaged: %w. Restore the file from a backup; the data beside it is untouched", id, path, damage)
	}
	return v, raw, nil
}

// update changes the facts about a volume, durably. The caller has the
// volume's turn.
func (p *Pool) update(ctx context.Context, id string, change func(*Volume) error) error {
	slot, claimed := p.claimSlot(id) // before the facts are read
	v, raw, err := p.read(ctx, id)
	if err != nil {
		return err
	}
	if err := change(&v); err != nil {
		return err
	}
	after, err := encode(v, raw)
	if err != nil {
		return fmt.Errorf("volume %s: %w", id, err)
	}
	err = claimed
	if err == nil {
		var file fileState
		if file, err = p.writeFacts(ctx, id, slot, after); err == nil {
			p.cache.put(id, cachedFacts{file, v, after})
		}
	}
	if durable.LacksRoom(err) {
		err = p.overwriteFacts(ctx, id, after)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", id, noRoom(err))
	}
	return nil
}

// claimSlot gives the slot of a volume a name that only this Pool uses. A
// process that was killed may hang in the kernel on a disk that is away, and let
// slot and facts change places once more when that comes back: it finds no
// slot then, or did so before the caller reads the facts.
func (p *Pool) claimSlot(id string) (path string, err error) {
	dir := p.path(volumesDir, id)
	path = filepath.Join(dir, p.slot)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), slotFile) && entry.Name() != p.slot {
			if err := os.Rename(filepath.Join(dir, entry.Name()), path); err != nil {
				return "", err
			}
		}
	}
	return path, nil
}

// writeFacts replaces the facts about a volume, durably, and returns the file that holds
// them. It takes no space: they are written over the slot, which then changes places
// with them. What a crash leaves in the slot is ignored.
func (p *Pool) writeFacts(ctx context.Context, id, slot string, facts []byte) (file fileState, err error) {
	unlock, err := p.facts.Lock(ctx, id) // the slot may be what somebody opened as the facts, two changes ago
	if err != nil {
		return file, err
	}
	f, err := writeInPlace(slot, pad(facts))
	unlock()
	if err != nil {
		return file, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := syncContents(f); err != nil {
		return file, err
	}
	if err := p.change(ctx, id, func() error { return exchange(p.path(volumesDir, id, volumeFile), slot) }); err != nil {
		return file, err
	}
	return stateOf(f)
}

// overwriteFacts writes the facts about a volume in the block that they have,
// where there is none for a slot: a version that made none made the volume, or
// used it last. A block is not written by halves, but for a loss of power.
func (p *Pool) overwriteFacts(ctx context.Context, id string, facts []byte) error {
	unlock, err := p.facts.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	path := p.path(volumesDir, id, volumeFile)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	facts = append(facts, bytes.Repeat([]byte{' '}, max(int(st.Size)-len(facts), 0))...)
	if int64(len(facts)) > st.Blocks*512 { // see stat(2); what does not fit would be cut off
		return &os.PathError{Op: "write", Path: path, Err: unix.ENOSPC}
	}
	p.cache.forget(id) // before the kernel counts times in less than its ticks (Linux 6.13), they may be the same after
	return p.change(ctx, id, func() error {
		_, err := overwrite(path, facts)
		return err
	})
}

// readUncached reads the facts about a volume from the disk and puts them into the cache,
// unless they are damaged.
func (p *Pool) readUncached(ctx context.Context, id, path string) (v Volume, raw []byte, damage, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil { // before the file is read, so that the next caller notices a change that is made meanwhile
		return v, nil, nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if raw, err = p.readFacts(ctx, id); err != nil {
		return v, nil, nil, err
	}
	if v, damage = decode(raw, id); damage == nil {
		p.cache.put(id, cachedFacts{fileStateOf(st), v, raw})
	}
	return v, raw, damage, nil
}

// readFacts reads the facts about a volume as they are on the disk.
func (p *Pool) readFacts(ctx context.Context, id string) ([]byte, error) {
	unlock, err := p.facts.Lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	path := p.path(volumesDir, id, volumeFile)
	var st unix.Stat_t
	switch err := unix.Lstat(path, &st); {
	case err != nil:
		return nil, &os.PathError{Op: "lstat", Path: path, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxFacts:
		return nil, fmt.Errorf("%s is no regular file, or larger than %d bytes", path, maxFacts)
	}
	return rawfile.Read(path)
}

// maxFacts is how large facts may be, in bytes.
const maxFacts = 1 << 20

func decode(raw []byte, id string) (Volume, error) {
	var v Volume
	if err := json.Unmarshal(raw, &v); err != nil {
		return Volume{}, err
	}
	switch {
	case v.ID != id:
		return Volume{}, fmt.Errorf("it is about volume %q", v.ID)
	case v.Bytes <= 0 || v.Bytes%blockSize != 0:
		return Volume{}, fmt.Errorf("a size of %d bytes", v.Bytes)
	}
	v.OvercommitPercent = cmp.Or(v.OvercommitPercent, devices.NoOvercommit) // older versions wrote none
	return v, v.check()
}

// IsFresh reports whether nobody has had the data since the pool made it or
// cleared it, so that every byte of it is zero. It looks at the file.
func (p *Pool) IsFresh(v Volume) bool {
	if !v.mayBeFresh() {
		return false
	}
	path, err := p.DataPath(v.ID)
	if err != nil {
		return false
	}
	changed, err := changedAt(path)
	return err == nil && changed.Equal(v.Fresh)
}

func (v Volume) mayBeFresh() bool {
	return !v.Fresh.IsZero() && !v.Raw && !v.Formatting && v.Formatted == ""
}

// changedAt returns when a file's data was last changed.
func changedAt(path string) (time.Time, error) {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime().UTC(), nil
}

// check returns an error for facts that no volume can have.
func (v Volume) check() error {
	switch {
	case v.Provisioning != Thick && v.Provisioning != Thin:
		return fmt.Errorf("provisioning %q: must be %s or %s", v.Provisioning, Thick, Thin)
	case !devices.ValidOvercommit(v.OvercommitPercent):
		return fmt.Errorf("overcommit of %d%%: must be %d%% to %d%%", v.OvercommitPercent, devices.NoOvercommit, devices.MaxOvercommit)
	case v.OvercommitPercent > devices.NoOvercommit && v.Provisioning != Thin:
		return fmt.Errorf("overcommit of %d%%: a %s volume takes all of its space", v.OvercommitPercent, v.Provisioning)
	case v.SectorBytes != 0 && v.SectorBytes != 512 && v.SectorBytes != 4096:
		return fmt.Errorf("sectors of %d bytes: must be 512 or 4096", v.SectorBytes)
	}
	return nil
}

// encode returns the facts as JSON, with the fields of before, if any, that
// this version does not know. No field of Volume is ever left out, so that
// each one replaces what was there.
func encode(v Volume, before []byte) ([]byte, error) {
	var fields map[string]json.RawMessage
	if before != nil {
		if err := json.Unmarshal(before, &fields); err != nil {
			return nil, err
		}
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	var own map[string]json.RawMessage // the fields that this version has
	if err := json.Unmarshal(raw, &own); err != nil {
		return nil, err
	}
	for name := range own { // also as "FSTYPE", which encoding/json takes for fsType
		maps.DeleteFunc(fields, func(other string, _ json.RawMessage) bool { return strings.EqualFold(other, name) })
	}
	maps.Copy(own, fields)
	return json.MarshalIndent(own, "", "  ")
}

// defaultSector is the logical sector, in bytes, of a volume whose metadata
// names none: what loop devices have by default. It never depends on the pool's
// disk, as data made with sectors of 512 bytes cannot be used with 4096.
const defaultSector = 512

// sector returns the logical sector that the volume's device is to have, in bytes.
func (v Volume) sector() int64 { return cmp.Or(v.SectorBytes, defaultSector) }

// sameRequest reports whether two volumes were requested with the same parameters.
func sameRequest(a, b Volume) bool {
	return a.Name == b.Name && a.Bytes == b.Bytes && a.Provisioning == b.Provisioning &&
		a.OvercommitPercent == b.OvercommitPercent && a.FSType == b.FSType && a.sector() == b.sector() &&
		(a.Ephemeral == nil) == (b.Ephemeral == nil) && (a.Ephemeral == nil || *a.Ephemeral == *b.Ephemeral)
}

// roundUp returns the size of a volume that has at least so many bytes.
func roundUp(bytes int64) (int64, error) {
	switch {
	case bytes <= 0:
		return 0, state.Errorf(state.InvalidArgument, "a size of %d bytes: must be at least 1", bytes)
	case bytes > math.MaxInt64-blockSize:
		return 0, state.Errorf(state.OutOfRange, "a size of %d bytes: no file can have it", bytes)
	}
	return (bytes + blockSize - 1) / blockSize * blockSize, nil
}
