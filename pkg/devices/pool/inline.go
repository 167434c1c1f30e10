package pool

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// sizeKey is the attribute of an inline ephemeral volume for its size, a Kubernetes
// quantity; the other attributes are the parameters of a StorageClass except overcommit.
const sizeKey = "size"

// sizeText is what a size may look like before it is calculated with: whoever writes a pod
// chooses it, and a number with a large exponent, such as 1e2000000000, takes hours and
// gigabytes.
var sizeText = regexp.MustCompile(`^[+-]?[0-9.]{1,40}(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$`)

// MakeInline implements devices.Inliner.
func (p Provisioner) MakeInline(ctx context.Context, r devices.InlineRequest) (devices.InlineVolume, error) {
	v, err := wantedInline(r)
	if err != nil {
		return devices.InlineVolume{}, fmt.Errorf("volume %s: %w", r.ID, err)
	}
	// Without a name: CreateVolume never gives it to a claim.
	v.ID, v.Ephemeral = r.ID, &Owner{PodUID: r.Owner.PodUID, Target: r.Owner.Target}
	if v, err = p.Volumes.Create(ctx, v); err != nil {
		return devices.InlineVolume{}, err
	}
	return devices.InlineVolume{FSType: v.FSType, Used: v.Formatted != ""}, nil
}

// wantedInline returns the volume that is asked for, without its id and its owner.
func wantedInline(r devices.InlineRequest) (Volume, error) {
	parameters := maps.Clone(r.Attributes)
	delete(parameters, sizeKey)
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		if _, known := values[key]; !known {
			return Volume{}, state.Errorf(state.InvalidArgument, "attribute %.200q is not known; there are %s: such as 500Mi, or 1Gi (default); %s",
				key, sizeKey, manual(provisioningKey, sectorSizeKey))
		}
	}
	v, err := parse(parameters)
	switch {
	case err != nil:
		return v, err
	case v.OvercommitPercent != devices.NoOvercommit:
		return v, state.Errorf(state.InvalidArgument, "attribute %s: whoever writes a pod cannot overcommit the pool; a StorageClass can", overcommitKey)
	}
	size := devices.SizeRange{}
	if text, given := r.Attributes[sizeKey]; given {
		q, err := parseSize(text)
		if err != nil || q.Sign() <= 0 || q.Cmp(*resource.NewQuantity(devices.LargestBytes, resource.BinarySI)) > 0 {
			return v, state.Errorf(state.InvalidArgument, "attribute %s: %.200q is not a size such as 500Mi or 1Gi", sizeKey, text)
		}
		size.Required = q.Value()
	}
	if v.Bytes, err = size.Choose(blockSize); err != nil {
		return v, err
	}
	v.FSType, size.Smallest = r.Filesystem(v.Bytes)
	v.Bytes, err = size.Choose(blockSize)
	return v, err
}

func parseSize(text string) (resource.Quantity, error) {
	if !sizeText.MatchString(text) {
		return resource.Quantity{}, resource.ErrFormatWrong
	}
	return resource.ParseQuantity(text)
}

// InlineOwner implements devices.Inliner.
func (p Provisioner) InlineOwner(ctx context.Context, id string) (*devices.InlineOwner, error) {
	v, err := p.Volumes.Get(ctx, id)
	if err != nil || v.Ephemeral == nil {
		return nil, err
	}
	return &devices.InlineOwner{PodUID: v.Ephemeral.PodUID, Target: v.Ephemeral.Target}, nil
}

// ListInline implements devices.Inliner. It reads the facts of every volume.
func (p Provisioner) ListInline(ctx context.Context) ([]string, error) {
	ids, err := p.Volumes.IDs(ctx)
	if err != nil {
		return nil, err
	}
	var may []string
	for _, id := range ids {
		v, err := p.Volumes.Get(ctx, id)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case state.ClassOf(err) == state.NotFound, err == nil && v.Ephemeral == nil:
		default:
			may = append(may, id)
		}
	}
	return may, nil
}
