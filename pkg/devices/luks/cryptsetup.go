package luks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/helper"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// slotTime is how long a try of a passphrase keeps its slot: one that hangs at a
	// dead disk keeps no other volume waiting for longer than that.
	slotTime = 10 * time.Second

	// longest is the longest passphrase, in bytes: what the smallest pipe holds.
	longest = 4096
)

// errPassphrase: the header does not have the passphrase that was tried.
var errPassphrase = errors.New("no key is available with this passphrase")

// exitPassphrase is cryptsetup's exit code for errPassphrase.
const exitPassphrase = 2

// try is run for a command that tries a passphrase, which takes memory: it waits for a
// slot.
func (l *Layer) try(ctx context.Context, passphrases []string, args ...string) error {
	select {
	case l.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("waiting for one of %d other volumes to be opened: %w", cap(l.slots), ctx.Err())
	}
	free := sync.OnceFunc(func() { <-l.slots })
	defer free()
	defer time.AfterFunc(slotTime, free).Stop()
	return l.run(ctx, passphrases, args...)
}

// run runs cryptsetup and waits for it. It is killed when ctx ends, and when the
// plugin does.
//
// The passphrases are in pipes, which the program reads as keyFile(0), keyFile(1). They
// are in no argument, no environment and no file, and the program tells none.
//
// The program waits for no udev, which cannot answer to a container, and takes no lock
// on the header: that would be a file in the container's own /run, and whoever calls
// run has the volume's turn.
func (l *Layer) run(ctx context.Context, passphrases []string, args ...string) error {
	var pipes []*os.File
	defer func() {
		for _, pipe := range pipes {
			_ = pipe.Close() // the program has read it, or never will
		}
	}()
	for _, passphrase := range passphrases {
		pipe, err := pipeOf(passphrase)
		if err != nil {
			return err
		}
		pipes = append(pipes, pipe)
	}
	r, err := helper.Program{
		Name: l.program, Title: "cryptsetup " + args[0], Args: append([]string{"--batch-mode", "--disable-locks"}, args...),
		Env: []string{"DM_DISABLE_UDEV=1"}, Files: pipes,
	}.Run(ctx)
	switch {
	case errors.As(err, new(*exec.Error)):
		return state.Errorf(state.FailedPrecondition, "%w: install cryptsetup where the plugin runs", err)
	case err == nil && r.Code == exitPassphrase:
		return fmt.Errorf("cryptsetup %s: %w", args[0], errPassphrase)
	case err == nil && r.Code != 0:
		return r.Failure()
	}
	return err
}

// keyFile is where the program finds a passphrase.
func keyFile(i int) string { return "/proc/self/fd/" + strconv.Itoa(3+i) }

// pipeOf returns a pipe from which a passphrase can be read once. The buffer for it is
// kept from swap and from core files, and cleared.
func pipeOf(passphrase string) (read *os.File, err error) {
	if len(passphrase) > longest {
		return nil, state.Errorf(state.InvalidArgument, "a passphrase has more than %d bytes", longest)
	}
	buffer, err := unix.Mmap(-1, 0, longest, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	defer func() {
		clear(buffer)
		err = errors.Join(err, unix.Munmap(buffer))
	}()
	_ = unix.Mlock(buffer) // a limit may forbid it
	if err := unix.Madvise(buffer, unix.MADV_DONTDUMP); err != nil {
		return nil, fmt.Errorf("madvise: %w", err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, err = write.Write(buffer[:copy(buffer, passphrase)]) // an empty pipe takes all of it
	if err = errors.Join(err, write.Close()); err != nil {
		return nil, errors.Join(err, read.Close())
	}
	return read, nil
}
