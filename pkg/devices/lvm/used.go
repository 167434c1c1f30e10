package lvm

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// used is the note of a thick volume that was attached on this node, and so has been zeroed.
type used struct {
	Volume string `json:"volume"`
}

// refuseUsed returns FailedPrecondition for a volume that is tagged as never zeroed, and was
// attached on this node before: its tags come from a backup of the group's metadata, and what
// would be zeroed is its data. Internal: the note of that is damaged.
func (b *Backend) refuseUsed(at place) error {
	if b.used == "" || !at.volume.tags.unzeroed {
		return nil
	}
	switch was, err := b.used.Read(at.volume.uuid, &used{}); {
	case err != nil:
		return err
	case !was:
		return nil
	}
	return state.Errorf(state.FailedPrecondition, "the metadata of the volume group says that nobody has used the logical volume %s, and it was used on this node: the metadata was restored from a backup that is older (vgcfgrestore). It is not zeroed. "+
		"To keep what it holds: lvchange --deltag %[2]s%[3]s --deltag %[2]s%[4]s %[1]s; to destroy that, unstage the volume and run csi-node volume clear-device %[5]s --i-understand-this-destroys-data",
		at.path(), tagPrefix, unzeroedTag, freshTag, at.id())
}

// noteUsed notes that a thick volume is attached, or was until now. A note that cannot be
// written is logged: a volume can be used without.
func (b *Backend) noteUsed(ctx context.Context, at place) {
	if b.used == "" || at.volume.pool != "" {
		return
	}
	was, err := b.used.Read(at.volume.uuid, &used{})
	if !was && err == nil {
		err = b.used.Write(at.volume.uuid, used{at.id()})
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot note that a volume was used, so an older backup of its group's metadata, if one is restored, would have it zeroed", "logicalVolume", at.path())
	}
}

// forgetUsed removes the note of a volume that was deleted.
func (b *Backend) forgetUsed(ctx context.Context, at place) {
	if b.used == "" {
		return
	}
	if err := b.used.Remove(at.volume.uuid); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot remove the note of a volume that was deleted", "logicalVolume", at.path())
	}
}
