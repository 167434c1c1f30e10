// Package helper runs programs that are installed beside the plugin: mkfs, fsck, lvm, cryptsetup.
package helper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

const (
	outputBytes = 4 << 10          // of a program's output that are kept, the last ones
	pipeDelay   = 10 * time.Second // for output after the program has ended
)

// Program is a program, and how it is run.
type Program struct {
	Name   string // in PATH, or a path
	Title  string // in errors; empty: Name
	Args   []string
	Env    []string   // beyond the plugin's own, by which an operator may configure it, and LC_ALL=C
	Files  []*os.File // its descriptors from 3 on
	Stdout io.Writer  // nil: standard output is kept together with the error output

	// Alone makes the program the first process of a PID namespace of its own, so that the
	// kernel kills every descendant with it (pid_namespaces(7)): a wrapper's mkfs, too,
	// never goes on writing unnoticed. There is no fallback without the namespace: a process
	// that may not make one may not mount either.
	Alone bool
	// Outlives keeps the program running when the plugin dies. Its output is then kept in
	// memory until it ends, all of it.
	Outlives bool
}

// Result is how a program ended by itself.
type Result struct {
	title  string
	Code   int    // exit code
	Output string // the end of its error output, as one line
}

// Run starts the program and waits until it is gone. An exit code other than 0 is no
// error. A program that is not there is an *exec.Error.
//
// The program and its process group are killed when ctx ends. A program that waits for
// a dead disk dies only when the kernel lets go of it, and Run waits for that: a second
// one beside it would be worse.
func (p Program) Run(ctx context.Context) (Result, error) {
	r := Result{title: cmp.Or(p.Title, p.Name)}
	path, err := exec.LookPath(p.Name)
	if err != nil {
		return r, err
	}
	if err := ctx.Err(); err != nil {
		return r, fmt.Errorf("%s was not started: %w", r.title, err)
	}
	var output tail
	cmd := exec.CommandContext(ctx, path, p.Args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), p.Env...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = p.Stdout, &output, p.Files
	if p.Stdout == nil {
		cmd.Stdout = &output
	}
	var written spool
	if p.Outlives {
		defer written.close()
		if err := written.replace(&cmd.Stdout, &cmd.Stderr); err != nil {
			return r, fmt.Errorf("start %s: %w", r.title, err)
		}
	}
	cmd.WaitDelay = pipeDelay
	cmd.Cancel = func() error { return killGroup(cmd.Process.Pid) }
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if !p.Outlives {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
		runtime.LockOSThread() // it is sent when the thread ends that started the program
		defer runtime.UnlockOSThread()
	}
	if p.Alone {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
	}
	switch err := cmd.Start(); {
	case p.Alone && errors.Is(err, syscall.EPERM):
		return r, fmt.Errorf("start %s in a PID namespace of its own (the plugin needs CAP_SYS_ADMIN): %w", r.title, err)
	case err != nil:
		return r, fmt.Errorf("start %s: %w", r.title, err)
	}
	err = cmd.Wait()
	if err := written.copy(); err != nil {
		return r, fmt.Errorf("read what %s wrote: %w", r.title, err)
	}
	r.Code, r.Output = cmd.ProcessState.ExitCode(), output.String()
	switch {
	case err != nil && ctx.Err() != nil:
		return r, r.complained(fmt.Errorf("%s was killed: %w", r.title, ctx.Err()))
	case err == nil, errors.As(err, new(*exec.ExitError)) && r.Code >= 0:
		return r, nil
	}
	return r, r.complained(fmt.Errorf("%s: %w", r.title, err))
}

// Check is Run, and an exit code other than 0 is an error.
func (p Program) Check(ctx context.Context) error {
	r, err := p.Run(ctx)
	if err == nil && r.Code != 0 {
		return r.Failure()
	}
	return err
}

// Failure is the error of an exit code.
func (r Result) Failure() error {
	return r.complained(fmt.Errorf("%s failed with exit code %d", r.title, r.Code))
}

// complained adds the program's output, if there is any, to an error.
func (r Result) complained(err error) error {
	if r.Output == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, r.Output)
}

// killGroup kills a program, and what it has started.
func killGroup(pid int) error {
	if err := syscall.Kill(-pid, syscall.SIGKILL); err != syscall.ESRCH {
		return err
	}
	return os.ErrProcessDone
}

// spool takes what a program writes in files in memory. A pipe would end with the plugin,
// and with its next line the program, by SIGPIPE (signal(7)), in the middle of a change.
type spool struct {
	files   []*os.File
	writers []io.Writer // of the files: who is to get what is in them
}

// replace puts files in the place of writers.
func (s *spool) replace(writers ...*io.Writer) error {
	for _, w := range writers {
		i := slices.Index(s.writers, *w)
		if i < 0 {
			fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC)
			if err != nil {
				return os.NewSyscallError("memfd_create", err)
			}
			i = len(s.files)
			s.files, s.writers = append(s.files, os.NewFile(uintptr(fd), "output")), append(s.writers, *w)
		}
		*w = s.files[i]
	}
	return nil
}

// copy hands on what was written.
func (s *spool) copy() error {
	for i, f := range s.files {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(s.writers[i], f); err != nil {
			return err
		}
	}
	return nil
}

func (s *spool) close() {
	for _, f := range s.files {
		f.Close() // in memory: nothing is left to write
	}
}

// tail is a writer that keeps the last outputBytes bytes.
type tail struct{ kept []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if excess := len(t.kept) - outputBytes; excess > 0 {
		t.kept = append(t.kept[:0], t.kept[excess:]...)
	}
	return len(p), nil
}

// String returns what was kept as one line, with nothing in it that a terminal obeys: e2fsck prints
// the label of a disk.
func (t *tail) String() string {
	plain := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) && !strings.ContainsRune("\n\r\t", r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(string(t.kept), "?"))
	lines := strings.FieldsFunc(plain, func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "; ")
}
