package node

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// Every bad request to the controller is refused with its code and leaves the
// pool as it was.
func TestInvalidControllerRequestsAreRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "there", 32*mib, mountAs("ext4", multiWriter))
	rows := append(badCreates(), badValidations(v)...)
	rows = append(rows, unserved(v)...)
	for name, id := range badIDs {
		switch id {
		case "":
			rows = append(rows, badRequest{"delete/" + name, &csi.DeleteVolumeRequest{}, invalid})
		default: // no such volume, or no volume can have it
			rows = append(rows, badRequest{"delete/" + name, &csi.DeleteVolumeRequest{VolumeId: id}, []codes.Code{codes.OK, codes.InvalidArgument}})
		}
	}
	rows = append(rows,
		badRequest{"delete/an unknown volume", &csi.DeleteVolumeRequest{VolumeId: "unknown"}, fine},
		badRequest{"capacity/an unknown parameter", &csi.GetCapacityRequest{Parameters: map[string]string{"colour": "blue"}}, fine},
		badRequest{"capacity/a bad parameter", &csi.GetCapacityRequest{Parameters: map[string]string{"provisioning": "blue"}}, fine},
		badRequest{"capacity/no access_type", &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{{AccessMode: v.Capability.AccessMode}}}, invalid},
		badRequest{"capacity/of another node", &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{Segments: map[string]string{"x/node": "y"}}}, fine},
	)
	mustRefuseAll(t, p, rows, func() {})
	must(t, v.Delete(t.Context()))
	mustBeGone(t, filepath.Dir(v.Data()))
}

func badCreates() (rows []badRequest) {
	add := func(name string, want codes.Code, change func(*csi.CreateVolumeRequest)) {
		req := &csi.CreateVolumeRequest{
			Name: "new", CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib}, Parameters: map[string]string{"provisioning": "thin"},
			VolumeCapabilities: []*csi.VolumeCapability{mountAs("ext4", multiWriter)},
		}
		change(req)
		rows = append(rows, badRequest{"create/" + name, req, []codes.Code{want}})
	}
	for name, bad := range map[string]string{"no name": "", "too long a name": strings.Repeat("n", 129), "a name with a NUL": "a\x00b", "a name with an escape": "a\x1bb"} {
		add(name, illegal, func(r *csi.CreateVolumeRequest) { r.Name = bad })
	}
	for name, c := range badCapabilities() {
		add(name, illegal, func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = []*csi.VolumeCapability{c} })
	}
	add("no capabilities", illegal, func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil })
	add("two file systems", illegal, func(r *csi.CreateVolumeRequest) {
		r.VolumeCapabilities = append(r.VolumeCapabilities, mountAs("xfs", multiWriter))
	})
	add("writers on several nodes", illegal, func(r *csi.CreateVolumeRequest) {
		r.VolumeCapabilities[0].AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	})
	add("an unknown parameter", illegal, func(r *csi.CreateVolumeRequest) { r.Parameters["colour"] = "blue" })
	add("a bad parameter", illegal, func(r *csi.CreateVolumeRequest) { r.Parameters["provisioning"] = "blue" })
	add("mutable parameters", illegal, func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} })
	add("a source", illegal, func(r *csi.CreateVolumeRequest) {
		r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "there"}}}
	})
	size := func(required, limit int64) func(*csi.CreateVolumeRequest) {
		return func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
		}
	}
	add("a negative size", illegal, size(-1, 0))
	add("a negative limit", illegal, size(0, -1))
	add("more than the limit", illegal, size(2*mib, mib))
	add("a limit below the smallest", codes.OutOfRange, size(0, 1))
	add("more than there can be", codes.OutOfRange, size(1<<63-1, 0))
	add("more than there is", codes.ResourceExhausted, size(1<<55, 0))
	add("another node", codes.ResourceExhausted, func(r *csi.CreateVolumeRequest) {
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"topology.csi-node.local/node": "node-2"}}}}
	})
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"another size":         size(64*mib, 0),
		"a smaller limit":      size(0, 24*mib),
		"another file system":  func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = mountAs("xfs", multiWriter) },
		"another provisioning": func(r *csi.CreateVolumeRequest) { r.Parameters = nil },
		"another access":       func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = blockAs(multiWriter) },
	} {
		add(name+" than what is there", codes.AlreadyExists, func(r *csi.CreateVolumeRequest) {
			r.Name = "there"
			if change(r); name == "another file system" {
				r.CapacityRange = nil
			}
		})
	}
	return rows
}

func badValidations(v *volume) (rows []badRequest) {
	add := func(name, id string, want codes.Code, capabilities ...*csi.VolumeCapability) {
		rows = append(rows, badRequest{"validate/" + name, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: capabilities}, []codes.Code{want}})
	}
	add("no volume_id", "", illegal, v.Capability)
	add("no capabilities", v.ID, illegal)
	add("no access_type", v.ID, illegal, &csi.VolumeCapability{AccessMode: v.Capability.AccessMode})
	add("no access_mode", v.ID, illegal, &csi.VolumeCapability{AccessType: v.Capability.AccessType})
	add("an unknown volume", "unknown", codes.NotFound, v.Capability)
	add("a file system that it has not", v.ID, okay, mountAs("xfs", multiWriter)) // says so in its answer
	return rows
}

// unserved are the calls that this driver does not have.
func unserved(v *volume) (rows []badRequest) {
	for name, req := range map[string]any{
		"ControllerPublishVolume":   &csi.ControllerPublishVolumeRequest{VolumeId: v.ID, NodeId: "node-1", VolumeCapability: v.Capability},
		"ControllerUnpublishVolume": &csi.ControllerUnpublishVolumeRequest{VolumeId: v.ID},
		"CreateSnapshot":            &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "snapshot"},
		"DeleteSnapshot":            &csi.DeleteSnapshotRequest{SnapshotId: "snapshot"},
		"ListSnapshots":             &csi.ListSnapshotsRequest{},
		"ControllerExpandVolume":    &csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 * mib}},
		"ControllerModifyVolume":    &csi.ControllerModifyVolumeRequest{VolumeId: v.ID},
	} {
		rows = append(rows, badRequest{"unserved/" + name, req, []codes.Code{codes.Unimplemented}})
	}
	return rows
}
