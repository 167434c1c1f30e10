package luks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// Create implements devices.Layer. An element that has anything of a LUKS header, be it
// damaged or half written, is left as it is: the engine erases what an interrupted
// Create left, under the formatting mark.
//
// Unauthenticated: there is no passphrase.
func (l *Layer) Create(ctx context.Context, lower state.Device, v devices.Volume) error {
	return l.withHeader(ctx, "create", lower, v, func(h header) error {
		switch {
		case h.made && h.fresh():
			return l.sync(lower.Path) // it may have been interrupted before it was durable
		case h.made:
			return state.Errorf(state.FailedPrecondition, "%s has a LUKS2 header already, of data that somebody has had", lower.Path)
		case h.magic:
			return state.Errorf(state.Unavailable, "%s has what is left of a LUKS header, since it was looked at", lower.Path)
		case h.room(lower.Size) == 0:
			return state.Errorf(state.FailedPrecondition, "%s has %d bytes, and the header alone takes %d", lower.Path, lower.Size, HeaderBytes)
		}
		passphrase, err := passphraseOf(v)
		if err != nil {
			return err
		}
		args := append([]string{"luksFormat", "--type", "luks2", "--key-file", keyFile(0), "--subsystem", stampNew,
			"--offset", strconv.Itoa(HeaderBytes / 512), "--sector-size", strconv.Itoa(sectorFor(lower.Size)),
			"--cipher", "aes-xts-plain64", "--key-size", "512", "--hash", "sha256"}, l.cost...)
		if lower.FormatUUID != "" {
			args = append(args, "--uuid", lower.FormatUUID)
		}
		if err := l.try(ctx, []string{passphrase}, append(args, lower.Path)...); err != nil {
			return err
		}
		return l.stamped(lower, true)
	})
}

// Used implements devices.Layer.
func (l *Layer) Used(ctx context.Context, lower state.Device, v devices.Volume) error {
	return l.withHeader(ctx, "take the stamp away", lower, v, func(h header) error {
		switch {
		case !h.made:
			return state.Errorf(state.Unavailable, "%s has no LUKS2 header any more", lower.Path)
		case !h.fresh():
			return l.sync(lower.Path)
		}
		if err := l.run(ctx, nil, "config", "--subsystem", stampUsed, lower.Path); err != nil {
			return err
		}
		return l.stamped(lower, false)
	})
}

// stamped makes a header durable, and sees that it is stamped so.
func (l *Layer) stamped(lower state.Device, fresh bool) error {
	if err := l.sync(lower.Path); err != nil {
		return err
	}
	h, err := readHeader(lower, true)
	if err == nil && (!h.made || h.fresh() != fresh) {
		err = fmt.Errorf("cryptsetup reported success, and the header on %s is stamped %q (made %t)", lower.Path, h.subsystem, h.made)
	}
	return err
}

// withHeader calls do with the header of an element while nobody else of the plugin
// works on that. The element stays open, so that it remains the one that is meant.
func (l *Layer) withHeader(ctx context.Context, what string, lower state.Device, v devices.Volume, do func(header) error) (err error) {
	defer state.Wrap(&err, "volume %s: %s", v.ID, what)
	unlock, err := l.headers.Lock(ctx, lower.Number.String())
	if err != nil {
		return err
	}
	defer unlock()
	f, err := devnode.Open(lower.Path, lower.Number, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h, err := parseHeader(f, true)
	if err != nil {
		return err
	}
	return do(h)
}

// passphraseOf returns the passphrase of a volume.
func passphraseOf(v devices.Volume) (string, error) {
	if passphrase := v.Secrets.Get(PassphraseKey); passphrase != "" {
		return passphrase, nil
	}
	return "", state.Errorf(state.Unauthenticated, "no secret has the key %s", PassphraseKey)
}
