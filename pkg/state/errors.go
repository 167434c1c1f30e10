package state

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Class says what a failure means to the caller of a CSI RPC. Each class is
// named after the gRPC code that it becomes; pkg/driver holds the only mapping.
type Class int

// The zero class is Unavailable: an error that nobody has classified is worth
// another try.
const (
	Unavailable Class = iota
	DeadlineExceeded
	Canceled
	Aborted
	ResourceExhausted
	InvalidArgument
	NotFound
	AlreadyExists
	FailedPrecondition
	OutOfRange
	Unauthenticated
	Unimplemented
	Internal
)

var classNames = [...]string{
	"Unavailable", "DeadlineExceeded", "Canceled", "Aborted", "ResourceExhausted",
	"InvalidArgument", "NotFound", "AlreadyExists", "FailedPrecondition", "OutOfRange",
	"Unauthenticated", "Unimplemented", "Internal",
}

func (c Class) String() string {
	if c < 0 || int(c) >= len(classNames) {
		return fmt.Sprintf("Class(%d)", int(c))
	}
	return classNames[c]
}

// Final reports whether kubelet takes the class to mean that nothing was done
// and nothing is under way (isFinalError in kubelet's CSI client). An intent that
// was taken is kept after every error whose class is not final.
func (c Class) Final() bool { return c >= InvalidArgument }

// Error is a failure with a class. Packages wrap it with %w to add the volume,
// the path and the step.
type Error struct {
	Class Class
	Err   error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Errorf returns an *Error of the class; the format is that of fmt.Errorf.
func Errorf(class Class, format string, args ...any) error {
	return &Error{Class: class, Err: fmt.Errorf(format, args...)}
}

// Degraded is the error of storage that serves its volumes, and of which one more fault
// can lose data, such as a mirror that lacks a disk.
type Degraded struct{ Err error }

func (e *Degraded) Error() string { return e.Err.Error() }
func (e *Degraded) Unwrap() error { return e.Err }

// Unwritten is the error of a format, or of a clearing, that has left nothing of its own on
// the device: if there are any contents later, they are somebody's data.
type Unwritten struct{ Err error }

func (e *Unwritten) Error() string { return e.Err.Error() }
func (e *Unwritten) Unwrap() error { return e.Err }

// Wrap puts what was being done before an error, if there is one. It is to be deferred:
//
//	defer state.Wrap(&err, "volume %s: attach", id)
func Wrap(err *error, format string, args ...any) {
	if *err != nil {
		*err = fmt.Errorf(format+": %w", append(args, *err)...)
	}
}

// InVolume adds the volume, and what was done with it, to an error: "volume v: doing:
// …". A volume that err begins with is not named twice.
func InVolume(id, doing string, err error) error {
	volume := "volume " + id + ": "
	return Reword(err, volume+doing+": "+strings.TrimPrefix(err.Error(), volume))
}

// Reword returns err with another text.
func Reword(err error, text string) error { return &reworded{text, err} }

type reworded struct {
	text string
	error
}

func (r *reworded) Error() string { return r.text }
func (r *reworded) Unwrap() error { return r.error }

// ClassOf returns the class of the outermost *Error in err's chain, else that
// of a context error, else Unavailable.
func ClassOf(err error) Class {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Class
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return Canceled
	}
	return Unavailable
}
