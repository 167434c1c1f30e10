package filesystem

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// headSize is how many bytes at the start of a device hold all signatures that
// are looked for there (the superblock of a btrfs is the last).
const headSize = btrfsOffset + btrfsLength

// parseAttempts is how often a superblock is read before it is called damaged.
// A mounted ext4 changes its superblock and then the checksum, in the very page
// that Probe reads first. The further reads go past the page cache: what is on
// the disk was written under the lock that covers both changes (resize2fs and
// libblkid do likewise).
const parseAttempts = 5

// Probe says what is on a device. mountpoint is where its file system is mounted on
// this node, "" if nowhere. The kernel knows more than the device about a mounted one:
// an xfs that has grown writes its superblock later.
//
// A recognised device costs one read of 68 KiB. One without any known signature
// is blank if all of it that may be data, up to 64 MiB, is read and is zero; with
// more than that it is ContentsUnproven, and with more than ProveLimit
// ContentsOther, for nobody would read it, unless it was cleared. Do not probe a device
// that somebody uses as a raw block volume.
//
// An error means that the device could not be looked at now (no such node,
// ctx ended). A device that cannot be read is ContentsOther, and Unreadable. A read from a
// dead device ends when the kernel gives it up; ctx is looked at between reads.
func (h *Host) Probe(ctx context.Context, facts state.Device, mountpoint string) (state.Contents, error) {
	if err := ctx.Err(); err != nil {
		return state.Contents{}, fmt.Errorf("probe %s: %w", facts.Path, err)
	}
	d, err := open(facts, 0)
	if err != nil {
		return state.Contents{}, fmt.Errorf("probe: %w", err)
	}
	d.unmounted = d.block && mountpoint == ""
	contents, err := h.probe(ctx, d, mountpoint)
	if err = errors.Join(err, d.Close()); err != nil {
		return state.Contents{}, fmt.Errorf("probe %s: %w", facts.Path, err)
	}
	return contents, nil
}

func (h *Host) probe(ctx context.Context, d *device, mountpoint string) (state.Contents, error) {
	blank := state.Contents{Kind: state.ContentsBlank, Found: "a blank device"}
	if hole, err := d.isHole(ctx); hole || err != nil {
		return blank, err
	}
	if d.isStamped() {
		return state.Contents{Kind: state.ContentsUnproven, Found: "the stamp of a format that was about to begin, and the rest is read before that is begun again"}, nil
	}
	k, sb, other := h.recognise(d)
	switch {
	case other != nil:
		return *other, nil
	case sb != nil:
		return h.describe(d, k, sb, mountpoint)
	}
	p, err := proveBlank(ctx, d, lookLimit)
	switch {
	case err != nil:
		return state.Contents{}, err
	case p.unread > ProveLimit && !d.facts.Formatting && !d.facts.WasCleared:
		return state.Contents{Kind: state.ContentsOther, Found: p.describeUnread()}, nil
	case p.unread > 0:
		return state.Contents{Kind: state.ContentsUnproven, Found: fmt.Sprintf("no known signature, and %.1f GiB that may be data, which are read before it is formatted", gib(p.unread))}, nil
	case !p.blank():
		if d.facts.FormatUUID == "" {
			p.origin = state.OriginUnknown
		}
		return state.Contents{Kind: state.ContentsOther, Found: p.found, Origin: p.origin, Unreadable: p.failed}, nil
	}
	return blank, nil
}

// isStamped reports whether a trial has left its stamp on a device.
func (d *device) isStamped() bool {
	if d.facts.Trial == "" {
		return false
	}
	head, err := d.readAt(0, stampBytes)
	return err == nil && hasStamp(head, d.facts.Trial) // recognise tells what cannot be read
}

// recognise looks at the known places of a device. It returns the one file
// system that is there, or what else is there, or nothing.
func (h *Host) recognise(d *device) (kind, *superblock, *state.Contents) {
	buffer := headBuffers.Get().(*[headSize]byte)
	defer headBuffers.Put(buffer) // what was found keeps nothing of it
	var head []byte
	var k kind
	var sb *superblock
	var found, damaged []string
	for attempt := range parseAttempts {
		var err error
		if head, err = d.readHead(buffer, attempt > 0 || d.unmounted); err != nil {
			return nil, nil, &state.Contents{Kind: state.ContentsOther, Found: describeReadError(err), Unreadable: true}
		}
		if k, sb, found, damaged = h.parse(head); len(damaged) == 0 {
			break
		}
	}
	signatures, fsType := headSignatures(head, sb)
	found = append(found, signatures...)
	if sb != nil {
		tail, err := tailOwners(d, sb.bytes)
		if err != nil {
			return nil, nil, &state.Contents{Kind: state.ContentsOther, Found: describeReadError(err), Unreadable: true}
		}
		found = append(found, tail...)
		if sb.own < headSize { // else it is found already
			udf, err := hasUDF(d, head)
			if err != nil {
				return nil, nil, &state.Contents{Kind: state.ContentsOther, Found: describeReadError(err), Unreadable: true}
			}
			if udf {
				found = append(found, "udf file system at byte 32769")
			}
		}
	}
	found = append(found, damaged...)
	switch {
	case len(found) == 0:
		return nil, nil, nil
	case len(found) > 1 || sb == nil:
		return nil, nil, &state.Contents{Kind: state.ContentsOther, FSType: fsType, Found: joinFindings(found), Origin: d.origin(head, found)}
	case sb.bytes > d.bytes:
		return nil, nil, &state.Contents{Kind: state.ContentsOther, FSType: sb.fsType, Origin: d.origin(head, found),
			Found: fmt.Sprintf("%s file system of %d bytes, of which the device has only %d: it can be mounted again once the device is as large again", sb.fsType, sb.bytes, d.bytes)}
	}
	return k, sb, nil
}

// origin says whether what was found at the head of a device is what a format has left.
func (d *device) origin(head []byte, found []string) state.Origin {
	switch {
	case d.facts.FormatUUID == "":
		return state.OriginUnknown
	case bears(head, d.facts.FormatUUID):
		return state.OriginFormat
	case len(found) == 1 && strings.HasPrefix(found[0], unfinishedBtrfs):
		return state.OriginUnnamed
	}
	return state.OriginOther
}

// parse tries all kinds on the head of a device. What is like a damaged superblock where files
// of a valid file system can lie is not told.
func (h *Host) parse(head []byte) (k kind, sb *superblock, found, damaged []string) {
	for _, candidate := range h.kinds {
		switch s, err := candidate.parse(head); {
		case err != nil && (sb == nil || candidate.traits().offset < sb.own):
			damaged = append(damaged, err.Error())
		case s != nil:
			k, sb = candidate, s
			found = append(found, s.fsType+" file system")
		}
	}
	return k, sb, found, damaged
}

// describe says of a file system what the planner asks.
func (h *Host) describe(d *device, k kind, sb *superblock, mountpoint string) (state.Contents, error) {
	if mountpoint != "" {
		if err := k.live(d, mountpoint, sb); err != nil {
			return state.Contents{}, err
		}
	}
	c := state.Contents{
		Kind:       state.ContentsFilesystem,
		FSType:     sb.fsType,
		UUID:       sb.uuid.String(),
		Size:       sb.bytes,
		Found:      sb.fsType + " file system",
		NeedsCheck: sb.needsCheck,
		Growable:   sb.grown(d.bytes) > sb.bytes,
	}
	switch {
	case d.facts.FormatUUID == "":
	case c.UUID == d.facts.FormatUUID:
		c.Origin = state.OriginFormat
	default:
		c.Origin = state.OriginOther
	}
	if t := k.traits(); t.name == sb.fsType {
		c.GrowsMounted, c.GrowsUnmounted = h.growsMounted[t.name], t.growsOffline && !sb.onlyMounted
	}
	return c, nil
}
