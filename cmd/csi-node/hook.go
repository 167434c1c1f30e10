//go:build faults

package main

import (
	"context"
	"os"

	"github.com/csi-node/csi-node/pkg/driver/faults"
)

// hook makes steps fail, hang or die as the environment says, in builds for
// tests only:
//
//	CSI_NODE_FAULT=before:format=die,after:mount=fail,before:bind=hang
func hook() func(ctx context.Context, volume, moment, step string) error {
	return faults.Hook(os.Getenv("CSI_NODE_FAULT"))
}
