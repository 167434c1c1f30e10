package node

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

const mib = 1 << 20

// Access modes, as short as tables need them.
const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

// volume is one volume and how kubelet calls the plugin for it.
type volume = harness.Volume

// Capabilities, as short as tables need them.
var mountAs, blockAs = harness.MountAs, harness.BlockAs

// fsTypes are the file systems that the plugin makes.
var fsTypes = []string{"ext4", "xfs", "btrfs"}

// smallest is a size in bytes that suits a file system, and raw blocks.
func smallest(fsType string) int64 {
	switch fsType {
	case "xfs":
		return 320 * mib // mkfs.xfs makes nothing under 300 MiB
	case "btrfs":
		return 256 * mib // the plugin makes none that is smaller
	}
	return 32 * mib
}

// create makes a thin volume of bytes.
func create(t *testing.T, p *harness.Plugin, name string, bytes int64, c *csi.VolumeCapability) *volume {
	t.Helper()
	return createAs(t, p, name, bytes, c, "thin")
}

func createAs(t *testing.T, p *harness.Plugin, name string, bytes int64, c *csi.VolumeCapability, provisioning string) *volume {
	t.Helper()
	v := harness.NewVolume(t, p, name, c)
	must(t, v.Create(t.Context(), bytes, provisioning))
	return v
}
