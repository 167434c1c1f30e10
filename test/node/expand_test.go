package node

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// Whatever a volume's size, shrinking is refused and repeating is not.
func TestExpandRepeatsAndNeverShrinks(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, blockAs(multiWriter))
	ctx, pod := t.Context(), v.Target("pod")
	must(t, v.Up(ctx, pod))
	gone := v.Target("gone-pod")
	for _, row := range []struct {
		name string
		req  *csi.NodeExpandVolumeRequest
		code codes.Code
		size int64
	}{
		{"no range", &csi.NodeExpandVolumeRequest{VolumePath: pod}, codes.OK, 32 * mib},
		{"less than it has", &csi.NodeExpandVolumeRequest{VolumePath: pod, CapacityRange: &csi.CapacityRange{RequiredBytes: mib}}, codes.OK, 32 * mib},
		{"a limit that it has passed", &csi.NodeExpandVolumeRequest{VolumePath: pod, CapacityRange: &csi.CapacityRange{LimitBytes: mib}}, codes.OutOfRange, 0},
		{"more than the limit", &csi.NodeExpandVolumeRequest{VolumePath: pod, CapacityRange: &csi.CapacityRange{RequiredBytes: 96 * mib, LimitBytes: 64 * mib}}, codes.InvalidArgument, 0},
		{"a negative size", &csi.NodeExpandVolumeRequest{VolumePath: pod, CapacityRange: &csi.CapacityRange{RequiredBytes: -1}}, codes.InvalidArgument, 0},
		{"a path of no relation", &csi.NodeExpandVolumeRequest{VolumePath: gone}, codes.NotFound, 0},
		{"an odd size", &csi.NodeExpandVolumeRequest{VolumePath: pod, CapacityRange: &csi.CapacityRange{RequiredBytes: 40*mib + 1}}, codes.OK, 40*mib + 4096},
		{"a gone path with the staging path", &csi.NodeExpandVolumeRequest{VolumePath: gone, StagingTargetPath: v.Staging, CapacityRange: &csi.CapacityRange{RequiredBytes: 48 * mib}}, codes.OK, 48 * mib},
		{"once more", &csi.NodeExpandVolumeRequest{VolumePath: pod, CapacityRange: &csi.CapacityRange{RequiredBytes: 48 * mib}}, codes.OK, 48 * mib},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.req.VolumeId = v.ID
			resp, err := v.Node.NodeExpandVolume(ctx, row.req)
			mustRefuse(t, err, row.code)
			if resp.GetCapacityBytes() != row.size {
				t.Errorf("%d bytes, want %d", resp.GetCapacityBytes(), row.size)
			}
		})
	}
	v.End(pod)
}
