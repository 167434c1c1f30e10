package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestClassOf(t *testing.T) {
	inner := Errorf(NotFound, "volume %s: %w", "v", io.EOF)
	for _, test := range []struct {
		err  error
		want Class
	}{
		{io.EOF, Unavailable},
		{inner, NotFound},
		{fmt.Errorf("stage: %w", inner), NotFound},
		{Errorf(Aborted, "outer: %w", inner), Aborted},
		{errors.Join(io.EOF, inner), NotFound},
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), DeadlineExceeded},
		{context.Canceled, Canceled},
		{Errorf(Internal, "%w", context.Canceled), Internal},
	} {
		if got := ClassOf(test.err); got != test.want {
			t.Errorf("%v is %s, not %s", test.err, got, test.want)
		}
	}
	if !errors.Is(inner, io.EOF) || inner.Error() != "volume v: EOF" {
		t.Errorf("the error reads %q", inner)
	}
}

// The list of kubelet's isFinalError (pkg/volume/csi/csi_client.go): these are
// not final, all others are.
func TestFinal(t *testing.T) {
	open := map[string]bool{"Canceled": true, "DeadlineExceeded": true, "Unavailable": true, "ResourceExhausted": true, "Aborted": true}
	for c := range Class(len(classNames)) {
		if c.Final() == open[c.String()] {
			t.Errorf("%s is final: %v", c, c.Final())
		}
	}
	if Class(99).String() != "Class(99)" || Class(-1).String() != "Class(-1)" {
		t.Errorf("unknown classes read %s, %s", Class(99), Class(-1))
	}
}

// A volume is named once, however many add it, and the class and the cause stay.
func TestInVolume(t *testing.T) {
	inner := Errorf(ResourceExhausted, "volume v: grow: %w", io.ErrShortWrite)
	err := InVolume("v", "step grow-device", inner)
	if got, want := err.Error(), "volume v: step grow-device: grow: short write"; got != want {
		t.Errorf("told is %q, not %q", got, want)
	}
	if ClassOf(err) != ResourceExhausted || !errors.Is(err, io.ErrShortWrite) || !errors.Is(err, inner) {
		t.Errorf("of %v the class is %s", err, ClassOf(err))
	}
	if got, want := InVolume("w", "look", inner).Error(), "volume w: look: volume v: grow: short write"; got != want {
		t.Errorf("told is %q, not %q", got, want)
	}
}
