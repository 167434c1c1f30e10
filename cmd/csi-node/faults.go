//go:build faults

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// faults makes steps fail, hang or die as the environment says, in builds for
// tests only:
//
//	CSI_NODE_FAULT=before:format=die,after:mount=fail,before:bind=hang
func faults() func(ctx context.Context, volume, moment, step string) error {
	wanted := map[string]string{}
	for _, fault := range strings.Split(os.Getenv("CSI_NODE_FAULT"), ",") {
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
