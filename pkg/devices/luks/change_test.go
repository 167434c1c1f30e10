package luks

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// cheap is a cost that no test waits for.
var cheap = []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"}

// layer returns a layer of which each test has the devices for itself.
func layer(t *testing.T) *Layer {
	l := New()
	l.owner, l.cost = t.Name(), cheap
	return l
}

func secrets(passphrase, previous string) map[string]string {
	return map[string]string{PassphraseKey: passphrase, PreviousKey: previous}
}

func volume(named map[string]string) devices.Volume {
	return devices.Volume{ID: "v", Context: map[string]string{EncryptionKey: LUKS2}, Secrets: devices.NewSecrets(named)}
}

// attached makes an element of 32 MiB.
func attached(t *testing.T) (d state.Device, file string) {
	t.Helper()
	const bytes = 32 << 20
	file = machine.Image(t, bytes)
	path := machine.Losetup(t, file)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	return state.Device{State: state.DeviceAttached, Path: path, Size: bytes, Number: devnode.NumberOf(st.Rdev)}, file
}

// made makes a layer whose passphrase is "one".
func made(t *testing.T) (l *Layer, lower state.Device, h header) {
	t.Helper()
	l = layer(t)
	lower, _ = attached(t)
	require.NoError(t, l.Create(t.Context(), lower, volume(secrets("one", ""))))
	h, err := readHeader(lower, true)
	require.NoError(t, err)
	return l, lower, h
}

func (l *Layer) tests(t *testing.T, lower state.Device, passphrase string) error {
	t.Helper()
	return l.try(t.Context(), []string{passphrase}, append(opens(), "--test-passphrase", lower.Path)...)
}

// A new passphrase that the device does not keep replaces none.
func TestPassphraseThatIsNotKept(t *testing.T) {
	l, lower, h := made(t)
	l.program = filepath.Join(t.TempDir(), "cryptsetup")
	const second = 32<<10 + 258048 // where the second passphrase has its copy of the key
	forgetful := fmt.Sprintf("#!/bin/sh\ncryptsetup \"$@\" || exit\ncase \" $* \" in *' luksAddKey '*) dd if=/dev/zero of=%s bs=%d seek=1 count=1 conv=notrunc,fsync status=none;; esac\n", lower.Path, second)
	require.NoError(t, os.WriteFile(l.program, []byte(forgetful), 0o700))
	if _, err := l.change(t.Context(), lower, h, "one", "two", false); err == nil {
		t.Error("it was changed to one that opens nothing")
	}
	require.NoError(t, l.tests(t, lower, "one"))
}

// A key that the header names a place for opens nothing: only the passphrase does.
func TestTokenIsNoPassphrase(t *testing.T) {
	l, lower, _ := made(t)
	key := fmt.Sprintf("csi-node-test:token:%d", os.Getpid())
	// The user's, if there is no session: to name that would make one, which only this thread has.
	ring, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false)
	require.NoError(t, err)
	id, err := unix.AddKey("user", key, []byte("in the keyring"), ring)
	require.NoError(t, err)
	defer unix.KeyctlInt(unix.KEYCTL_UNLINK, id, ring, 0, 0)
	require.NoError(t, l.try(t.Context(), []string{"one", "in the keyring"}, append(append([]string{"luksAddKey", "--key-file", keyFile(0)}, cheap...), lower.Path, keyFile(1))...))
	machine.Command(t, "cryptsetup", "token", "add", "--key-description", key, lower.Path)
	require.NoError(t, l.tests(t, lower, "in the keyring"))
	if err := l.try(t.Context(), []string{"wrong"}, "open", "--type", "luks2", "--key-file", keyFile(0), "--test-passphrase", lower.Path); err != nil {
		t.Errorf("cryptsetup by itself does not take the token, so nothing is tested: %v", err)
	}
	if err := l.tests(t, lower, "wrong"); err == nil {
		t.Error("a token opens it")
	}
}
