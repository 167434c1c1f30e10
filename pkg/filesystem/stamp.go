package filesystem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// stampBytes is how much of the start of a device a stamp takes.
const stampBytes = pageBytes

// stampMagic begins a stamp, so that a stamp can be recognised also without its UUID.
const stampMagic = "csi-node tries to format "

// stampOf returns the stamp of a trial.
func stampOf(uuid string) []byte {
	line := stampMagic + uuid + "\n"
	return []byte(strings.Repeat(line, stampBytes/len(line)+1))[:stampBytes]
}

// Try finds out whether a device that was proved blank keeps what is written to it: it writes
// a stamp to byte 0, sees that it is on the disk, past all caches of this node, and makes
// the bytes zero again. A disk behind a fault that reads as zeros and drops what is written
// does not pass.
//
// state.Unwritten: it does not keep what is written, or was not blank. After any other error
// it may have all of the stamp, a part of it, or nothing of it.
func (h *Host) Try(ctx context.Context, facts state.Device, uuid string) (err error) {
	defer state.Wrap(&err, "try whether %s keeps what is written to it", facts.Path)
	err = pastCache(ctx, facts, func(d *stamped) error {
		if err := d.expect(make([]byte, stampBytes)); err != nil {
			return err
		}
		for _, text := range [][]byte{stampOf(uuid), make([]byte, stampBytes)} {
			if err := d.put(text); err != nil {
				return err
			}
			if err := d.expect(text); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return h.refuseUnlessUnknown(facts)
}

// refuseUnlessUnknown returns state.Unwritten if anything is recognised on the disk: one that
// read as zeros and has its data again keeps a stamp, too.
func (h *Host) refuseUnlessUnknown(facts state.Device) error {
	d, err := open(facts, 0)
	if err != nil {
		return err
	}
	if err = d.dropPages(); err == nil {
		switch _, sb, other := h.recognise(d); {
		case other != nil:
			err = &state.Unwritten{Err: fmt.Errorf("it is not blank any more since it was looked at: found %s", other.Found)}
		case sb != nil:
			err = &state.Unwritten{Err: fmt.Errorf("it is not blank any more since it was looked at: found %s file system", sb.fsType)}
		}
	}
	return errors.Join(err, d.Close())
}

// unstamp makes a stamp zero that a trial has left on a device (Device.Trial), and nothing else.
func unstamp(ctx context.Context, facts state.Device) (err error) {
	if facts.Trial == "" {
		return nil
	}
	defer state.Wrap(&err, "take the stamp of an earlier trial away")
	return pastCache(ctx, facts, func(d *stamped) error {
		found, err := d.get()
		if err != nil || !hasStamp(found, facts.Trial) {
			return err
		}
		return d.put(make([]byte, stampBytes))
	})
}

// stamped is a device whose first bytes are read and written past the page cache.
type stamped struct {
	*device
	buffer []byte // aligned
}

// pastCache calls do with a device that nobody had claimed right before, past its cache.
func pastCache(ctx context.Context, facts state.Device, do func(*stamped) error) error {
	d, err := open(facts, unix.O_RDWR|unix.O_DIRECT)
	if err != nil {
		return err
	}
	err = claim(ctx, d)
	if err == nil {
		var buffer []byte
		if buffer, err = unix.Mmap(-1, 0, stampBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err == nil {
			err = errors.Join(do(&stamped{d, buffer}), unix.Munmap(buffer))
		}
	}
	return errors.Join(err, d.Close())
}

// get reads the first bytes; they are valid until the next call.
func (d *stamped) get() ([]byte, error) {
	_, err := d.ReadAt(d.buffer, 0)
	return d.buffer, err
}

// put writes the first bytes, durably.
func (d *stamped) put(text []byte) error {
	copy(d.buffer, text)
	if _, err := d.WriteAt(d.buffer, 0); err != nil {
		return err
	}
	return d.flush()
}

// expect returns state.Unwritten unless the first bytes are as they should be.
func (d *stamped) expect(text []byte) error {
	found, err := d.get()
	if err == nil && !bytes.Equal(found, text) {
		err = &state.Unwritten{Err: errors.New("the disk does not: what was written to its first bytes is not there when it is read back. It is behind a fault, and what it shows may not be what is on it: nothing else is written to it")}
		if isZero(text) {
			err = &state.Unwritten{Err: errors.New("its first bytes are not zero, and should be")}
		}
	}
	return err
}

// hasStamp reports whether the head of a device is what is left of a stamp: each sector is
// that of the stamp, or zero, as a power cut may leave it.
func hasStamp(head []byte, uuid string) bool {
	const sector = 512
	if uuid == "" || len(head) < stampBytes {
		return false
	}
	stamp, found := stampOf(uuid), false
	for at := 0; at < stampBytes; at += sector {
		switch part := head[at:][:sector]; {
		case bytes.Equal(part, stamp[at:][:sector]):
			found = true
		case !isZero(part):
			return false
		}
	}
	return found
}

// bears reports whether the head of a device has the UUID of a format where the formats that
// the plugin begins write it, whether or not the rest is whole. mkfs.btrfs gets no UUID.
func bears(head []byte, text string) bool {
	if hasStamp(head, text) {
		return true
	}
	binary, err := uuid.Parse(text)
	if err != nil {
		return false
	}
	for _, place := range []struct {
		magicAt int
		magic   string
		uuidAt  int
		uuid    string
	}{
		{ext4Offset + 0x38, ext4Magic, ext4Offset + 0x68, string(binary[:])},
		{0, xfsMagic, 32, string(binary[:])},
		{0, "LUKS\xba\xbe", luksUUID, text},
		{16 << 10, "SKUL\xba\xbe", 16<<10 + luksUUID, text},
	} {
		if magicAt(head, place.magicAt, place.magic) && magicAt(head, place.uuidAt, place.uuid) {
			return true
		}
	}
	return false
}

// luksUUID is where the header of LUKS2 has its UUID, as text. The second one begins at byte
// 16384 if cryptsetup chose the size.
const luksUUID = 168
