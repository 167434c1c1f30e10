package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// sizeKey is the attribute of an inline ephemeral volume that tells its size, as
// a Kubernetes quantity; the others are the parameters of a StorageClass, but for
// overcommit.
const sizeKey = "size"

// MakeEphemeral makes the inline ephemeral volume of an owner, with the file
// system type (that of the node by default), or returns the one that is there.
//
// InvalidArgument: attributes that are not known, or not good. AlreadyExists: a
// volume of that id is there and is another's, or not as asked. All else is as
// for CreateVolume.
func (s *Server) MakeEphemeral(ctx context.Context, id string, attributes map[string]string, fsType string, owner pool.Owner) (pool.Volume, error) {
	want, err := s.ephemeral(attributes, fsType)
	if err != nil {
		return want, fmt.Errorf("volume %s: %w", id, err)
	}
	want.ID, want.Ephemeral = id, &owner // without a name: CreateVolume never gives it to a claim
	return s.Pool.Create(ctx, want)
}

func (s *Server) ephemeral(attributes map[string]string, fsType string) (pool.Volume, error) {
	parameters := maps.Clone(attributes)
	delete(parameters, sizeKey)
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		if _, known := values[key]; !known && !strings.HasPrefix(key, kubernetesPrefix) {
			return pool.Volume{}, state.Errorf(state.InvalidArgument, "attribute %.200q is not known; there are %s: as 500Mi or 1Gi (default); %s",
				key, sizeKey, manual(provisioningKey, sectorSizeKey))
		}
	}
	v, err := parse(parameters)
	switch {
	case err != nil:
		return v, err
	case v.OvercommitPercent != pool.NoOvercommit:
		return v, state.Errorf(state.InvalidArgument, "attribute %s: whoever writes a pod cannot overcommit the pool; a StorageClass can", overcommitKey)
	}
	var bytes int64
	if text, given := attributes[sizeKey]; given {
		q, err := resource.ParseQuantity(text)
		if err != nil || q.Sign() <= 0 || q.Cmp(*resource.NewQuantity(largestSize, resource.BinarySI)) > 0 {
			return v, state.Errorf(state.InvalidArgument, "attribute %s: %.200q is not a size as 500Mi or 1Gi", sizeKey, text)
		}
		bytes = q.Value()
	}
	v.FSType = cmp.Or(fsType, s.Filesystems.Default(cmp.Or(bytes, defaultSize)))
	v.Bytes, err = sizeOf(&csi.CapacityRange{RequiredBytes: bytes}, v.FSType, s.smallest(v.FSType))
	return v, err
}
