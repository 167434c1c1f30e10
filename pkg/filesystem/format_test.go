package filesystem

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/machine"
)

func TestNewNamesWhatIsMissing(t *testing.T) {
	if _, err := New(0); err == nil {
		t.Error("New(0) is no error")
	}
	t.Setenv("PATH", t.TempDir())
	_, err := New(1)
	wantClass(t, err, state.Unavailable, "mkfs.ext4", "apt-get install e2fsprogs")
}

func TestTypes(t *testing.T) {
	if got := strings.Join(newHost(t).Types(), " "); got != "ext4 xfs btrfs" {
		t.Errorf("Types: %s", got)
	}
}

func TestFormatReservesNothing(t *testing.T) {
	device := formatted(t, newHost(t), "ext4", 64*mib)
	if out := command(t, "dumpe2fs", "-h", device.Path); !strings.Contains(out, "Reserved block count:     0\n") {
		t.Errorf("blocks are reserved for root:\n%s", out)
	}
}

// Every ext4 has a journal, and blocks of 4 KiB where that allows.
func TestFormatSmall(t *testing.T) {
	h := newHost(t)
	wantClass(t, h.Format(t.Context(), attach(t, newImage(t, 2*mib-4096)), "ext4", nil), state.FailedPrecondition, "ext4 needs at least 2097152")
	for bytes, block := range map[int64]string{2 * mib: "1024", 8*mib - 4096: "1024", 8 * mib: "4096", 64 * mib: "4096"} {
		device := attach(t, newImage(t, bytes))
		must0(t, h.Format(t.Context(), device, "ext4", nil))
		out := command(t, "dumpe2fs", "-h", device.Path)
		if !strings.Contains(out, "has_journal") || !strings.Contains(out, "Block size:               "+block+"\n") {
			t.Errorf("%d bytes:\n%s", bytes, out)
		}
		if c := probe(t, h, device, mount(t, device, "ext4")); c.FSType != "ext4" || c.Growable {
			t.Errorf("%d bytes: %+v", bytes, c)
		}
	}
}

func TestFormatRefuses(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	unchanged(t, device.Backing, func() {
		wantClass(t, h.Format(t.Context(), device, "vfat", nil), state.InvalidArgument, "use one of ext4, xfs, btrfs")
		wantClass(t, h.Format(t.Context(), device, "xfs", nil), state.FailedPrecondition, "67108864 bytes", "at least 314572800")
		readOnly := device
		readOnly.ReadOnly = true
		wantClass(t, h.Format(t.Context(), readOnly, "ext4", nil), state.FailedPrecondition, "read-only")
		held, err := os.OpenFile(device.Path, os.O_RDONLY|unix.O_EXCL, 0)
		must0(t, err)
		wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.Unavailable, "mounted or claimed", "busy")
		must0(t, held.Close())
	})
	must0(t, h.Format(t.Context(), device, "ext4", nil))
	unchanged(t, device.Backing, func() {
		err := h.Format(t.Context(), device, "ext4", nil)
		wantClass(t, err, state.FailedPrecondition, "found ext4 file system")
	})
}

// A device of noise is formatted without a proof, whatever the noise looks like, and
// over what an interrupted mkfs left on it; any other is refused.
func TestFormatNoise(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 320*mib))
	noise := make([]byte, 2*mib)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise) // never fails
	for _, at := range []int64{0, 64 * mib, -2 * mib} {
		write(t, device.Path, at, noise)
	}
	wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, "data")
	device.Noise = true
	write(t, device.Path, 0, []byte("LUKS\xba\xbe"))
	write(t, device.Path, 1024+0x38, []byte(ext4Magic))
	unchanged(t, device.Backing, func() {
		held, err := os.OpenFile(device.Path, os.O_RDONLY|unix.O_EXCL, 0)
		must0(t, err)
		wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.Unavailable, "busy")
		must0(t, held.Close())
	})
	for _, fsType := range []string{"ext4", "xfs", "btrfs", "xfs", "ext4"} { // each over the one before
		must0(t, h.Format(t.Context(), device, fsType, nil))
		if c := probe(t, h, device, ""); c.Kind != state.ContentsFilesystem || c.FSType != fsType {
			t.Errorf("%s: %+v", fsType, c)
		}
		unmount(t, mount(t, device, fsType))
	}
	command(t, "e2fsck", "-fn", device.Path)
}

func TestFormatToolFails(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	t.Run("exit code", func(t *testing.T) {
		script(t, "mkfs.ext4", "echo no luck today >&2; exit 3")
		wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.Unavailable, "mkfs.ext4 failed with exit code 3: no luck today", device.Path)
	})
	t.Run("nothing made", func(t *testing.T) {
		script(t, "mkfs.ext4", "exit 0")
		err := h.Format(t.Context(), device, "ext4", nil)
		wantClass(t, err, state.Unavailable, "there is no file system")
		if !errors.As(err, new(*state.Unwritten)) {
			t.Errorf("what turns up there would be taken for the remains of the format: %v", err)
		}
	})
	t.Run("something else made", func(t *testing.T) {
		script(t, "mkfs.ext4", `for last; do :; done; exec mkfs.ext3 -q "$last"`)
		wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.Unavailable, "file system of type ext3")
	})
}

// What somebody writes to a device between the proof and mkfs, which refuses a claimed device, is
// not formatted over when he has let go of it.
func TestFormatOfADeviceClaimedAfterTheProof(t *testing.T) {
	h := newHost(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		image := newImage(t, 400*mib)
		device, dir := attach(t, image), t.TempDir()
		real, err := exec.LookPath("mkfs." + fsType)
		must0(t, err)
		refused, free := filepath.Join(dir, "refused"), filepath.Join(dir, "free")
		script(t, "mkfs."+fsType, fmt.Sprintf("%s \"$@\"; code=$?; touch %s; until [ -e %s ]; do sleep .01; done; exit $code", real, refused, free))
		var holder sync.WaitGroup
		err = h.Format(t.Context(), device, fsType, func(context.Context) (string, error) {
			release := claimed(t, device)
			write(t, device.Path, 7*mib, []byte("somebody's data"))
			holder.Go(func() {
				for _, err := os.Stat(refused); err != nil; _, err = os.Stat(refused) {
					time.Sleep(time.Millisecond)
				}
				release()
				must0(t, os.WriteFile(free, nil, 0o600))
			})
			return itsUUID, nil
		})
		must0(t, os.WriteFile(refused, nil, 0o600)) // in case that mkfs was not run
		holder.Wait()
		wantClass(t, err, state.Unavailable, "mkfs."+fsType, device.Path)
		if !errors.Is(err, unix.EBUSY) || !errors.As(err, new(*state.Unwritten)) {
			t.Errorf("%v is not EBUSY, or mkfs counts as one that may have written", err)
		}
		unchanged(t, image, func() {
			wantClass(t, h.Format(t.Context(), device, fsType, nil), state.FailedPrecondition, "data at byte 7340032")
		})
	}
}

// Each claim that a mkfs makes can be refused. Nothing is written then, and Format says so.
func TestFormatThatIsRefusedAClaim(t *testing.T) {
	h := newHost(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		real, err := exec.LookPath("mkfs." + fsType)
		must0(t, err)
		// opens are the openings of the device by the mkfs, of which one is refused.
		format := func(refuse int) (opens []string, image string, err error) {
			image = newImage(t, 400*mib)
			device, log := attach(t, image), filepath.Join(t.TempDir(), "log")
			how := ""
			if refuse > 0 {
				how = fmt.Sprintf("-e inject=openat:error=EBUSY:when=%d ", refuse)
			}
			script(t, "mkfs."+fsType, fmt.Sprintf("exec strace -qq -o %s -e trace=openat -P %s %s%s \"$@\"", log, device.Path, how, real))
			err = h.Format(t.Context(), device, fsType, nil)
			text, readErr := os.ReadFile(log)
			must0(t, readErr)
			return strings.Split(strings.TrimSpace(string(text)), "\n"), image, err
		}
		opens, _, err := format(0)
		must0(t, err)
		refused := 0
		for i, call := range opens {
			if !strings.Contains(call, "O_EXCL") {
				continue
			}
			_, image, err := format(i + 1)
			if err == nil {
				continue // it is opened once more for writing
			}
			refused++
			if !errors.Is(err, unix.EBUSY) || !errors.As(err, new(*state.Unwritten)) {
				t.Errorf("%s: %v is not EBUSY, or mkfs counts as one that may have written", call, err)
			}
			if got, want := digest.Of(t, image), digest.Of(t, newImage(t, 400*mib)); got != want {
				t.Errorf("%s: mkfs.%s has written", call, fsType)
			}
		}
		if refused == 0 {
			t.Errorf("mkfs.%s claims the device nowhere: %q", fsType, opens)
		}
	}
}

// No more formats run at a time than New was told, and who waits can give up.
func TestFormatSlots(t *testing.T) {
	h, err := New(1)
	must0(t, err)
	first, second := attach(t, newImage(t, 16*mib)), attach(t, newImage(t, 16*mib))
	line := machine.NewFIFO(t)
	script(t, "mkfs.ext4", "exec 9>"+line.Path+"; echo started >&9; sleep 60")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Format(ctx, first, "ext4", nil) }()
	line.WaitFor(t, "started")
	impatient, giveUp := context.WithCancel(t.Context())
	waiting := make(chan error, 1)
	go func() { waiting <- h.Format(impatient, second, "ext4", nil) }()
	giveUp()
	wantClass(t, <-waiting, state.Canceled)
	cancel()
	wantClass(t, <-done, state.Canceled, "mkfs.ext4 was killed")
	line.WaitForEnd(t)
}

func TestSlotWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &Host{slots: make(chan struct{}, 1)}
		release, err := h.slot(t.Context())
		must0(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := h.slot(ctx)
			done <- err
		}()
		synctest.Wait()
		select {
		case err := <-done:
			t.Errorf("a second slot was not waited for: %v", err)
		default:
		}
		cancel()
		wantClass(t, <-done, state.Canceled, "waiting for one of 1 formats")
		release()
		release, err = h.slot(t.Context())
		must0(t, err)
		release()
	})
}

// What hangs gives its slot back, once, and leaves no timer behind when it ends
// in time.
func TestSlotOfAHungHelper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &Host{slots: make(chan struct{}, 2)}
		hung, err := h.slot(t.Context())
		must0(t, err)
		quick, err := h.slot(t.Context())
		must0(t, err)
		quick()
		slow, err := h.slot(t.Context())
		must0(t, err)
		start := time.Now()
		next, err := h.slot(t.Context())
		must0(t, err)
		if waited := time.Since(start); waited != slotTime {
			t.Errorf("a slot was had after %s, want %s", waited, slotTime)
		}
		hung()
		slow()
		if len(h.slots) != 1 {
			t.Errorf("%d slots are held, want 1", len(h.slots))
		}
		next()
		time.Sleep(2 * slotTime)
		if len(h.slots) != 0 {
			t.Errorf("%d slots are held at the end", len(h.slots))
		}
	})
}

// An mkfs.ext4 that does not know assume_storage_prezeroed is run without it.
func TestFormatWithOlderMkfs(t *testing.T) {
	real, err := exec.LookPath("mkfs.ext4")
	must0(t, err)
	dir := t.TempDir()
	script := "#!/bin/sh\ncase \"$*\" in *prezeroed*) echo 'Bad option(s) specified: assume_storage_prezeroed' >&2; exit 1;; esac\nexec " + real + " \"$@\"\n"
	machine.WriteProgram(t, filepath.Join(dir, "mkfs.ext4"), script)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	must0(t, newHost(t).Format(t.Context(), attach(t, newImage(t, 64*mib)), "ext4", nil))
}

// mkfs is not believed how much of the device it has used.
func TestFormatHalf(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	script(t, "mkfs.ext4", `for last; do :; done; exec mke2fs -t ext4 -q -b 4096 "$last" 2000`)
	wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.Unavailable, "only 8192000 of the device's 67108864 bytes")
}
