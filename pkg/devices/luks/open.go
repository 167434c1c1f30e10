package luks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	dm "github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

// Open implements devices.Layer. If the previous passphrase is named, too, a change of
// the passphrase is begun or finished first.
//
// The volume key is kept in the device's own table and not in a keyring, so that the
// device can grow without a passphrase. Discards are passed on: thin storage gets back
// what is deleted, and shows who reads it which blocks are in use.
func (l *Layer) Open(ctx context.Context, lower state.Device, v devices.Volume, readOnly bool) error {
	return l.withHeader(ctx, "open", lower, v, func(h header) error {
		passphrase, err := passphraseOf(v)
		if err != nil {
			return err
		}
		have, err := l.Find(ctx, lower, v)
		switch {
		case err != nil || have.State == state.DeviceAttached && have.ReadOnly == readOnly:
			return errors.Join(err, have.Err)
		case have.State != state.DeviceAbsent:
			return state.Errorf(state.Unavailable, "there is the device %s, which is %s, not what is wanted", have.Path, have.State)
		case !h.made:
			return state.Errorf(state.FailedPrecondition, "%s has no LUKS2 header, or a damaged one: it is left as it is. Restore the header from a backup (cryptsetup luksHeaderRestore)", lower.Path)
		}
		if previous := v.Secrets.Get(PreviousKey); previous != "" && previous != passphrase {
			if passphrase, err = l.change(ctx, lower, h, previous, passphrase, readOnly); err != nil {
				return err
			}
		}
		name := l.device(v)
		if err := l.mappers.sweep(name); err != nil {
			return err
		}
		args := append(opens(), "--disable-keyring", "--allow-discards")
		if readOnly {
			args = append(args, "--readonly")
		}
		err = l.try(ctx, []string{passphrase}, append(args, lower.Path, name)...)
		if errors.Is(err, errPassphrase) {
			return state.Errorf(state.Unauthenticated, "the passphrase (%s) does not open the volume, nor does the previous one if there is any: nothing was changed on it: %w", PassphraseKey, err)
		}
		if err != nil {
			if targets, unknown := dm.Targets(); unknown == nil && !slices.Contains(targets, "crypt") { // others may use the device mapper without it
				return state.Errorf(state.FailedPrecondition, "this node's kernel cannot encrypt devices: load its module dm_crypt")
			}
			return err
		}
		return l.opened(ctx, lower, v)
	})
}

// opens returns the arguments that open a header with the passphrase, and with nothing else. A token
// in the header, such as a key in the kernel's keyring, would be tried first: the type is one that
// none has.
func opens() []string {
	return []string{"open", "--type", "luks2", "--token-type", "csi-node", "--key-file", keyFile(0)}
}

// opened sees that the device that was opened stands on the element that was meant, and
// closes it if not.
func (l *Layer) opened(ctx context.Context, lower state.Device, v devices.Volume) error {
	d, err := l.Find(ctx, lower, v)
	if err == nil && d.State != state.DeviceAttached {
		err = state.Errorf(state.Unavailable, "the device that was opened is %s (%s)", d.State, d.Holder)
		if d.Stray {
			err = errors.Join(err, remove(l.device(v)))
		}
	}
	return err
}

// change makes the passphrase one that opens the volume, and the previous one none: it
// is added first, and the previous one is removed only when it was seen to work. Each
// half is one write of the header, and is done again if it was interrupted. It returns
// the passphrase to open with; an element that takes no writes keeps the previous one.
func (l *Layer) change(ctx context.Context, lower state.Device, h header, previous, passphrase string, readOnly bool) (string, error) {
	test := func() error {
		return l.try(ctx, []string{passphrase}, append(opens(), "--test-passphrase", lower.Path)...)
	}
	switch err := test(); {
	case err == nil && (h.keyslots == 1 || readOnly):
		return passphrase, nil
	case errors.Is(err, errPassphrase) && readOnly:
		return previous, nil
	case errors.Is(err, errPassphrase):
		args := append([]string{"luksAddKey", "--key-file", keyFile(0)}, l.cost...)
		err := l.try(ctx, []string{previous, passphrase}, append(args, lower.Path, keyFile(1))...)
		if errors.Is(err, errPassphrase) {
			return passphrase, nil // Open tells that neither is right
		}
		if err != nil {
			return "", err
		}
		if err := test(); err != nil {
			return "", fmt.Errorf("the new passphrase was added, and does not open the header, so the previous one stays: the device may lose what is written to it (see dmesg): %w", err)
		}
	case err != nil:
		return "", err
	}
	h, err := readHeader(lower, true)
	if err != nil || h.keyslots < 2 { // the last one is never removed
		return passphrase, err
	}
	err = l.try(ctx, []string{previous}, "luksRemoveKey", "--key-file", keyFile(0), lower.Path)
	if errors.Is(err, errPassphrase) {
		err = nil // it was removed before
	}
	return passphrase, errors.Join(err, l.sync(lower.Path))
}

const (
	// closeTime is how long Close waits for the end of somebody's look at the device, as
	// udev looks at each that appears. The kernel sends no event when it ends.
	closeTime     = 500 * time.Millisecond
	closeInterval = 10 * time.Millisecond
)

// Close implements devices.Layer. It needs neither the element, nor a secret, nor a
// program.
func (l *Layer) Close(ctx context.Context, _ state.Device, v devices.Volume) (err error) {
	defer state.Wrap(&err, "volume %s: close", v.ID)
	name := l.device(v)
	var m *mapper
	if poll.Until(ctx, closeInterval, closeTime, func() bool {
		m, err = l.tryClose(name)
		return m == nil
	}) {
		return err
	}
	return state.Errorf(state.Unavailable, "the device %s (%s) is still in use: it is mounted, or another device is over it, or it is open in %s", name, m.path, process.Openers(ctx, m.number))
}

// tryClose removes the device of a name, and returns it if it stays because somebody has it
// open.
func (l *Layer) tryClose(name string) (*mapper, error) {
	m, err := l.mappers.find(name)
	switch {
	case err != nil:
		return nil, err
	case m == nil:
		return nil, l.mappers.sweep(name)
	}
	if _, ours := m.luks(name); !ours {
		return nil, state.Errorf(state.FailedPrecondition, "the device %s (%s) is no LUKS2 device: it is left as it is", name, m.path)
	}
	switch err := remove(name); {
	case err == nil:
		return l.mappers.find(name)
	case !errors.Is(err, unix.EBUSY):
		return nil, err
	}
	return m, nil
}

// Grow implements devices.Layer. It takes the passphrase only if somebody else has
// opened the device, with the key in a keyring.
func (l *Layer) Grow(ctx context.Context, lower state.Device, v devices.Volume) error {
	return l.withHeader(ctx, "grow", lower, v, func(h header) error {
		d, err := l.Find(ctx, lower, v)
		switch {
		case err != nil || d.Err != nil:
			return errors.Join(err, d.Err)
		case d.State != state.DeviceAttached || !h.made:
			return state.Errorf(state.Unavailable, "the device is %s", d.State)
		case d.Size >= d.Capacity:
			return nil
		}
		passphrase := cmp.Or(v.Secrets.Get(PassphraseKey), "\x00") // it takes no empty one
		args := []string{"resize", "--key-file", keyFile(0), "--size", strconv.FormatInt(d.Capacity/512, 10), l.device(v)}
		err = l.try(ctx, []string{passphrase}, args...)
		if errors.Is(err, errPassphrase) {
			return state.Errorf(state.Unauthenticated, "somebody else has opened the device %s, so that it grows with the right passphrase (%s) only: %w", d.Path, PassphraseKey, err)
		}
		return err
	})
}

// Erase implements devices.Layer.
func (l *Layer) Erase(ctx context.Context, lower state.Device, v devices.Volume) error {
	return l.withHeader(ctx, "erase", lower, v, func(h header) (err error) {
		d, err := l.Find(ctx, lower, v)
		switch {
		case err != nil || d.Err != nil:
			return errors.Join(err, d.Err)
		case !h.made || !h.fresh():
			return state.Errorf(state.FailedPrecondition, "the layer is not new")
		case d.State != state.DeviceAttached:
			return state.Errorf(state.Unavailable, "the device is %s", d.State)
		}
		f, err := devnode.Claim(ctx, d.Number, func() (*os.File, error) { return devnode.Open(d.Path, d.Number, os.O_RDWR|unix.O_EXCL) })
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		return blockdev.Zero(ctx, f, d.Size, nil)
	})
}
