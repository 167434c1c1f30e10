package client

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

type mode = csi.VolumeCapability_AccessMode_Mode

// shortModes are the access modes of Kubernetes. For ReadWriteOnce a driver that does
// not know SINGLE_NODE_MULTI_WRITER gets SINGLE_NODE_WRITER, as from
// external-provisioner and kubelet.
var shortModes = map[string]mode{
	"ReadWriteOnce":    csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
	"ReadWriteOncePod": csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	"ReadOnlyMany":     csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
	"ReadWriteMany":    csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
}

// AccessModes lists the names that Access.Mode may have: those of Kubernetes,
// then those of CSI.
func AccessModes() []string {
	names := []string{"ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany", "ReadWriteMany"}
	for _, number := range slices.Sorted(maps.Keys(csi.VolumeCapability_AccessMode_Mode_name)) {
		if number != int32(csi.VolumeCapability_AccessMode_UNKNOWN) {
			names = append(names, csi.VolumeCapability_AccessMode_Mode_name[number])
		}
	}
	return names
}

// Access is how a volume is to be used.
type Access struct {
	Mode   string // one of AccessModes
	Block  bool   // as a raw block device; FSType and Flags are empty then
	FSType string // "": the driver chooses
	Flags  []string
}

// Check returns an error that names the wrong flag of the command line.
func (a Access) Check() error {
	if !slices.Contains(AccessModes(), a.Mode) {
		return fmt.Errorf("--access-mode %q: must be one of %s", a.Mode, strings.Join(AccessModes(), ", "))
	}
	if a.Block && (a.FSType != "" || len(a.Flags) > 0) {
		return fmt.Errorf("--block: a raw block device takes neither --fs-type nor --mount-flag")
	}
	return nil
}

// Capability translates a checked Access for the driver.
func (c *Client) Capability(ctx context.Context, a Access) (*csi.VolumeCapability, error) {
	m, short := shortModes[a.Mode]
	switch {
	case !short:
		m = mode(csi.VolumeCapability_AccessMode_Mode_value[a.Mode])
	case m == csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER || m == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER:
		knows, err := c.nodeOffers(ctx, csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
		switch {
		case err != nil:
			return nil, err
		case !knows && a.Mode == "ReadWriteOncePod":
			return nil, fmt.Errorf("--access-mode %s: the driver does not know it (capability SINGLE_NODE_MULTI_WRITER)", a.Mode)
		case !knows:
			m = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
		}
	}
	out := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: a.FSType, MountFlags: a.Flags}},
	}
	if a.Block {
		out.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	}
	return out, nil
}
