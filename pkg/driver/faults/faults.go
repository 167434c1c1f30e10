// Package faults makes steps fail, hang or die, in programs for tests only: a
// release has no business to import it.
package faults

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// Hook returns what a driver's Options.Hook does as the text says:
//
//	before:format=die,after:mount=fail,before:bind=hang
//
// A step that dies takes the whole process with it, by SIGKILL.
func Hook(text string) func(ctx context.Context, volume, moment, step string) error {
	wanted := map[string]string{}
	for _, fault := range strings.Split(text, ",") {
		at, what, _ := strings.Cut(fault, "=")
		wanted[at] = what
	}
	return func(ctx context.Context, volume, moment, step string) error {
		switch wanted[moment+":"+step] {
		case "die":
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		case "hang":
			<-ctx.Done()
			return ctx.Err()
		case "fail":
			return fmt.Errorf("fault %s %s of volume %s", moment, step, volume)
		}
		return nil
	}
}
