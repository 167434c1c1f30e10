//go:build vm

package luks

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// The tests with the build tag need the device mapper, and run in a guest of
// test/vm.

const mib = 1 << 20

// costly is a cost that no test lives to see, cf. cheap.
var costly = []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "2000000000"}

func TestLayer(t *testing.T) {
	devicestest.Layer(t, func(t *testing.T) devicestest.LayerHarness {
		return devicestest.LayerHarness{Layer: layer(t), Volume: volume(secrets("right", "")), WrongSecrets: secrets("wrong", ""), Size: 32 * mib}
	})
}

// bench is a layer on a loop device of its own.
type bench struct {
	*testing.T
	*Layer
	file  string
	lower state.Device
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{T: t, Layer: layer(t)}
	b.lower, b.file = attached(b.T)
	t.Cleanup(func() {
		require.NoError(t, b.Close(context.WithoutCancel(t.Context()), state.Device{}, volume(nil)))
	})
	return b
}

func (b *bench) run(program string, args ...string) string {
	b.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "DM_DISABLE_UDEV=1") // there is none
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.Fatalf("%s %q: %v: %s", program, args, err, out)
	}
	return string(out)
}

// opens opens the layer with passphrases, and closes it.
func (b *bench) opens(passphrase, previous string) error {
	b.Helper()
	v := volume(secrets(passphrase, previous))
	err := b.Open(b.Context(), b.lower, v, false)
	require.NoError(b, b.Close(b.Context(), b.lower, v))
	return err
}

func (b *bench) made() {
	b.Helper()
	require.NoError(b, b.Create(b.Context(), b.lower, volume(secrets("one", ""))))
	require.NoError(b, b.Used(b.Context(), b.lower, volume(nil)))
}

func (b *bench) header() header {
	b.Helper()
	h, err := readHeader(b.lower, true)
	require.NoError(b, err)
	return h
}

// sum is of what the element holds.
func (b *bench) sum() [sha256.Size]byte {
	b.Helper()
	raw, err := os.ReadFile(b.lower.Path)
	require.NoError(b, err)
	return sha256.Sum256(raw)
}

func (b *bench) write(at int64, data []byte) {
	b.Helper()
	f, err := os.OpenFile(b.lower.Path, os.O_WRONLY, 0)
	require.NoError(b, err)
	_, err = f.WriteAt(data, at)
	require.NoError(b, errors.Join(err, f.Sync(), f.Close()))
}

// A passphrase is changed when both are named, whenever that was interrupted, and the
// previous one opens nothing afterwards.
func TestPassphraseIsChanged(t *testing.T) {
	b := newBench(t)
	b.made()
	before := b.sum()
	require.Class(t, b.opens("two", ""), state.Unauthenticated, PassphraseKey)
	require.Class(t, b.opens("two", "three"), state.Unauthenticated, PassphraseKey)
	if b.sum() != before {
		t.Error("wrong passphrases have changed something")
	}
	require.NoError(t, b.opens("one", "one"))
	require.NoError(t, b.opens("one", "never there"))
	require.NoError(t, b.opens("two", "one"))
	require.NoError(t, b.opens("two", "one"))
	require.Class(t, b.opens("one", ""), state.Unauthenticated)
	if h := b.header(); h.keyslots != 1 || h.fresh() {
		t.Errorf("after the change: %+v", h)
	}

	// Interrupted between its halves: both open it.
	require.NoError(t, b.try(t.Context(), []string{"two", "three"}, append(append([]string{"luksAddKey", "--key-file", keyFile(0)}, cheap...), b.lower.Path, keyFile(1))...))
	require.NoError(t, b.opens("three", "two"))
	require.Class(t, b.opens("two", ""), state.Unauthenticated)
	require.NoError(t, b.opens("three", ""))

	// Read-only, nothing is changed: the previous one opens it.
	before = b.sum()
	v := volume(secrets("four", "three"))
	require.NoError(t, b.Open(t.Context(), b.lower, v, true))
	require.NoError(t, b.Close(t.Context(), b.lower, v))
	if b.sum() != before {
		t.Error("a read-only open has changed something")
	}
}

func TestStrangePassphrases(t *testing.T) {
	b := newBench(t)
	all := []string{"line\n", "line", "nul\x00byte", strings.Repeat("x", longest)}
	require.NoError(t, b.Create(t.Context(), b.lower, volume(secrets(all[0], ""))))
	for i, passphrase := range all[1:] {
		require.Class(t, b.opens(passphrase, ""), state.Unauthenticated)
		require.NoError(t, b.opens(passphrase, all[i]))
	}
	require.Class(t, b.opens(strings.Repeat("x", longest+1), ""), state.InvalidArgument)
}

// A header of which one copy is whole opens; of one that has none nothing is opened,
// nor is anything made on it.
func TestDamagedHeader(t *testing.T) {
	b := newBench(t)
	b.made()
	b.write(4096, []byte("damage"))
	if h := b.header(); !h.made {
		t.Errorf("the first copy is damaged: %+v", h)
	}
	require.NoError(t, b.opens("one", ""))
	for _, at := range []int64{5000, 16<<10 + 5000} {
		b.write(at, []byte("damage"))
	}
	before := b.sum()
	d, err := b.Find(t.Context(), b.lower, volume(nil))
	if err != nil || !d.Unmade || d.Fresh || d.Err != nil {
		t.Errorf("both copies are damaged: %+v (%v)", d, err)
	}
	require.Class(t, b.opens("one", ""), state.FailedPrecondition, "left as it is")
	require.Class(t, b.Create(t.Context(), b.lower, volume(secrets("one", ""))), state.Unavailable, "LUKS header")
	if b.sum() != before {
		t.Error("it was not left as it is")
	}
}

// A header that somebody has used is never made anew, with whatever passphrase.
func TestUsedLayerIsNotMadeAgain(t *testing.T) {
	b := newBench(t)
	b.made()
	before := b.sum()
	require.Class(t, b.Create(t.Context(), b.lower, volume(secrets("two", ""))), state.FailedPrecondition, "already")
	require.Class(t, b.Erase(t.Context(), b.lower, volume(nil)), state.FailedPrecondition)
	if b.sum() != before {
		t.Error("it was changed")
	}
}

// A luksFormat that is killed leaves a header that no passphrase opens, which is none,
// and is not written over before it was erased.
func TestInterruptedCreate(t *testing.T) {
	b := newBench(t)
	b.cost = costly
	ctx, kill := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Create(ctx, b.lower, volume(secrets("one", ""))) }()
	for deadline := time.Now().Add(time.Minute); !b.header().magic && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
	}
	kill()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("killed: %v", err)
	}
	d, err := b.Find(t.Context(), b.lower, volume(nil))
	if err != nil || !d.Unmade || d.Fresh || !b.header().magic {
		t.Fatalf("after the kill: %+v (%v), %+v", d, err, b.header())
	}
	b.cost = cheap
	require.Class(t, b.Create(t.Context(), b.lower, volume(secrets("one", ""))), state.Unavailable, "LUKS header")
	b.write(0, make([]byte, 32*mib))
	b.made()
	require.NoError(t, b.opens("one", ""))
}

// A device of the volume's name that stands on nothing, or on no LUKS, is never taken
// for the volume's; the first is closed, the second left.
func TestZombie(t *testing.T) {
	b := newBench(t)
	b.made()
	v := volume(secrets("one", ""))
	name := b.device(v)
	uuid := "CRYPT-LUKS2-" + strings.ReplaceAll(b.header().uuid, "-", "") + "-" + name
	b.run("dmsetup", "create", name, "--uuid", uuid, "--table", "0 32768 error")
	d, err := b.Find(t.Context(), b.lower, v)
	if err != nil || d.State != state.DeviceForeign || !d.Stray || !strings.Contains(d.Holder, "nothing") {
		t.Errorf("on nothing: %+v (%v)", d, err)
	}
	require.Class(t, b.Open(t.Context(), b.lower, v, false), state.Unavailable, "foreign")
	require.NoError(t, b.Close(t.Context(), b.lower, v))

	b.run("dmsetup", "create", name, "--notable", "--uuid", uuid) // cryptsetup was killed here
	if d, err := b.Find(t.Context(), b.lower, v); err != nil || d.State != state.DeviceAbsent {
		t.Errorf("without a table: %+v (%v)", d, err)
	}
	require.NoError(t, b.opens("one", ""))
	b.run("dmsetup", "create", name, "--notable", "--uuid", uuid)
	require.NoError(t, b.Close(t.Context(), b.lower, v))

	b.run("dmsetup", "create", name, "--uuid", "LVM-other", "--table", fmt.Sprintf("0 32768 linear %s 0", b.lower.Path))
	if d, err := b.Find(t.Context(), b.lower, v); err != nil || d.State != state.DeviceForeign || d.Stray {
		t.Errorf("another's: %+v (%v)", d, err)
	}
	require.Class(t, b.Close(t.Context(), b.lower, v), state.FailedPrecondition, "left as it is")
	b.run("dmsetup", "remove", name)
	require.NoError(t, b.opens("one", ""))

	// The header was made anew beneath the open device.
	require.NoError(t, b.Open(t.Context(), b.lower, v, false))
	b.run("cryptsetup", "luksUUID", "--batch-mode", "--uuid", someUUID, b.lower.Path)
	if d, err := b.Find(t.Context(), b.lower, v); err != nil || d.State != state.DeviceAttached || !d.Unmade {
		t.Errorf("over another header: %+v (%v)", d, err)
	}
	b.run("dmsetup", "suspend", name)
	if d, err := b.Find(t.Context(), b.lower, v); err != nil || d.State != state.DeviceAttached || d.Err == nil {
		t.Errorf("suspended: %+v (%v)", d, err)
	}
	b.run("dmsetup", "resume", name)
	require.NoError(t, b.Close(t.Context(), state.Device{State: state.DeviceAbsent}, volume(nil)))
	if left := b.run("dmsetup", "ls"); strings.Contains(left, name) {
		t.Errorf("left: %s", left)
	}
	if _, err := os.Lstat("/dev/mapper/" + name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the node is left: %v", err)
	}
}

// An open device grows without a passphrase, but for one that somebody else has opened.
func TestGrowthNeedsNoPassphrase(t *testing.T) {
	b := newBench(t)
	b.made()
	v := volume(secrets("one", ""))
	require.NoError(t, b.Open(t.Context(), b.lower, v, false))
	grow := func(bytes int64, named map[string]string) error {
		require.NoError(t, os.Truncate(b.file, bytes))
		b.run("losetup", "--set-capacity", b.lower.Path)
		b.lower.Size = bytes
		err := b.Grow(t.Context(), b.lower, volume(named))
		d, findErr := b.Find(t.Context(), b.lower, v)
		if findErr != nil || err == nil && d.Size != bytes-HeaderBytes {
			t.Errorf("grown to %+v (%v), on %d bytes", d, findErr, bytes)
		}
		return err
	}
	require.NoError(t, grow(48*mib, nil))
	require.NoError(t, b.Close(t.Context(), b.lower, v))

	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte("one"), 0o600))
	b.run("cryptsetup", "open", "--batch-mode", "--disable-locks", "--type", "luks2", "--key-file", key, b.lower.Path, b.device(v))
	if !strings.Contains(b.run("dmsetup", "table", b.device(v)), ":logon:") {
		t.Fatal("the key is in no keyring: there is nothing to test")
	}
	require.Class(t, grow(56*mib, nil), state.Unauthenticated, PassphraseKey)
	require.NoError(t, grow(56*mib, secrets("one", "")))
}

// No passphrase is in an argument or in the environment of the program, nor anywhere in
// what it says.
func TestPassphrasesStaySecret(t *testing.T) {
	b := newBench(t)
	dir := t.TempDir()
	b.program = filepath.Join(dir, "cryptsetup")
	script := "#!/bin/bash\n{ tr '\\0' '\\n' </proc/$$/cmdline; env; ulimit -c; } >>" + dir + "/seen\nexec /sbin/cryptsetup \"$@\"\n"
	machine.WriteProgram(t, b.program, script)
	const one, two = "s3cret-one", "s3cret-two"
	v := volume(secrets(one, ""))
	require.NoError(t, b.Create(t.Context(), b.lower, v))
	require.NoError(t, b.opens(two, one))
	told := b.opens("s3cret-wrong", "")
	seen, err := os.ReadFile(filepath.Join(dir, "seen"))
	require.NoError(t, err)
	if !bytes.Contains(seen, []byte("luksFormat")) || !bytes.Contains(seen, []byte("luksRemoveKey")) {
		t.Fatalf("the program was not seen: %s", seen)
	}
	if bytes.Contains(seen, []byte("s3cret")) || told == nil || strings.Contains(told.Error(), "s3cret") {
		t.Errorf("told: %v; seen: %s", told, seen)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &limit); err != nil || limit.Cur > 1 {
		t.Errorf("core files may have %d bytes (%v)", limit.Cur, err)
	}
}

// What every volume pays for: the cost of the real thing is what the header says.
func TestCost(t *testing.T) {
	b := newBench(t)
	b.cost = argon2id
	require.NoError(t, b.Create(t.Context(), b.lower, volume(secrets("one", ""))))
	told := b.run("cryptsetup", "luksDump", b.lower.Path)
	for _, words := range []string{"argon2id", fmt.Sprintf("Memory:     %d", costMiB<<10), "sector: 4096 [bytes]", "offset: 16777216 [bytes]", "aes-xts-plain64"} {
		if !strings.Contains(told, words) {
			t.Errorf("no %q in %s", words, told)
		}
	}
	require.NoError(t, b.opens("one", ""))
}
