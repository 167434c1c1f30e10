package node

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// badRequest is a request and the codes that may answer it.
type badRequest struct {
	name  string
	req   any
	codes []codes.Code
}

// Every bad request is refused with its code, changes nothing, and leaves no
// record; so does every request that finds nothing to do.
func TestInvalidRequestsAreRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	v.Target("pod") // its directories
	rows := append(badStages(v), badUnstages(v)...)
	rows = append(rows, badPublishes(v)...)
	rows = append(rows, badUnpublishes(v)...)
	rows = append(rows, badQuestions(v)...)
	before := snapshot(t, p)
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			err := call(t, p, row.req)
			want := row.codes[0]
			if len(row.codes) == 2 && status.Code(err) == row.codes[1] { // the spec leaves it open
				want = row.codes[1]
			}
			mustRefuse(t, err, want)
			if details := status.Convert(err).Details(); len(details) > 0 {
				t.Errorf("status.details must stay empty: %v", details)
			}
			mustEqual(t, before, snapshot(t, p))
			mustHaveNoRecord(t, p)
		})
	}
	must(t, v.Stage(t.Context()))
	v.End()
}

// call makes the call that takes a request.
func call(t *testing.T, p *harness.Plugin, req any) error {
	t.Helper()
	node := reflect.ValueOf(p.Node)
	for i := range node.NumMethod() {
		if node.Method(i).Type().In(1) == reflect.TypeOf(req) {
			answer := node.Method(i).Call([]reflect.Value{reflect.ValueOf(t.Context()), reflect.ValueOf(req)})
			err, _ := answer[1].Interface().(error) // nil is none
			return err
		}
	}
	t.Fatalf("no call takes %T", req)
	return nil
}

var (
	fine         = []codes.Code{codes.OK}
	invalid      = []codes.Code{codes.InvalidArgument}
	notFound     = []codes.Code{codes.NotFound}
	precondition = []codes.Code{codes.FailedPrecondition}
)

// badPaths are paths that no request may name. One that is missing has a row
// of its own, because not every RPC makes the same of it.
func badPaths(v *volume) map[string]string {
	return map[string]string{
		"a relative path":                 "relative/path",
		"a path with dots":                v.KubeletDir + "/pods/../stage",
		"a path with a slash at its end":  v.KubeletDir + "/stage/",
		"a path with two slashes":         v.KubeletDir + "//stage",
		"a path with a NUL":               v.KubeletDir + "/stage\x00",
		"a path outside the kubelet dir":  filepath.Join(v.Dir, "elsewhere"),
		"the kubelet dir itself":          v.KubeletDir,
		"a path with too long a name":     v.KubeletDir + "/" + strings.Repeat("n", 256),
		"a path beyond PATH_MAX":          v.KubeletDir + strings.Repeat("/"+strings.Repeat("n", 200), 21),
		"a neighbour of the kubelet dir ": v.KubeletDir + "-2/stage",
	}
}

var badIDs = map[string]string{
	"no volume_id":              "",
	"a volume_id that climbs":   "../volume",
	"a volume_id with a slash":  "a/b",
	"a volume_id of dots":       "..",
	"a volume_id with a NUL":    "a\x00b",
	"a volume_id too long":      strings.Repeat("v", 256),
	"a volume_id with a space":  "a b",
	"a volume_id that is a dot": ".",
}

// badCapabilities are the capabilities that no call takes.
func badCapabilities() map[string]*csi.VolumeCapability {
	grouped := mountAs("ext4", multiWriter)
	grouped.GetMount().VolumeMountGroup = "1000"
	return map[string]*csi.VolumeCapability{
		"no volume_capability":        nil,
		"no access_mode":              {AccessType: mountAs("ext4", multiWriter).AccessType},
		"no access_type":              {AccessMode: mountAs("ext4", multiWriter).AccessMode},
		"access mode UNKNOWN":         mountAs("ext4", csi.VolumeCapability_AccessMode_UNKNOWN),
		"an access mode of tomorrow":  mountAs("ext4", 99),
		"an fs_type that is not made": mountAs("ntfs", multiWriter),
		"volume_mount_group":          grouped,
		"a flag that is an operation": mountAs("ext4", multiWriter, "bind"),
		"a flag with a NUL":           mountAs("ext4", multiWriter, "no\x00atime"),
	}
}

func badStages(v *volume) (rows []badRequest) {
	add := func(name string, want []codes.Code, change func(*csi.NodeStageVolumeRequest)) {
		req := v.StageRequest()
		change(req)
		rows = append(rows, badRequest{"stage/" + name, req, want})
	}
	for name, id := range badIDs {
		add(name, invalid, func(r *csi.NodeStageVolumeRequest) { r.VolumeId = id })
	}
	for name, path := range badPaths(v) {
		add(name, invalid, func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = path })
	}
	for name, c := range badCapabilities() {
		add(name, invalid, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = c })
		add(name+" of an unknown volume", invalid, func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability, r.VolumeId = c, "unknown" })
	}
	add("no staging_target_path", invalid, func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = "" })
	add("an unknown volume", notFound, func(r *csi.NodeStageVolumeRequest) { r.VolumeId = "unknown" })
	add("a context that is neither true nor false", invalid, func(r *csi.NodeStageVolumeRequest) {
		r.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "perhaps"}
	})
	return rows
}

func badUnstages(v *volume) (rows []badRequest) {
	add := func(name, id, path string, want []codes.Code) {
		rows = append(rows, badRequest{"unstage/" + name, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: path}, want})
	}
	for name, id := range badIDs {
		add(name, id, v.Staging, invalid)
	}
	for name, path := range badPaths(v) {
		add(name, v.ID, path, invalid)
	}
	add("no staging_target_path", v.ID, "", invalid)
	add("an unknown volume", "unknown", v.Staging, fine)
	add("nothing staged", v.ID, v.Staging, fine)
	return rows
}

func badPublishes(v *volume) (rows []badRequest) {
	add := func(name string, want []codes.Code, change func(*csi.NodePublishVolumeRequest)) {
		req := v.PublishRequest(filepath.Join(v.KubeletDir, "pods/pod/volumes/kubernetes.io~csi", v.ID, "mount"))
		change(req)
		rows = append(rows, badRequest{"publish/" + name, req, want})
	}
	for name, id := range badIDs {
		add(name, invalid, func(r *csi.NodePublishVolumeRequest) { r.VolumeId = id })
	}
	for name, path := range badPaths(v) {
		add(name, invalid, func(r *csi.NodePublishVolumeRequest) { r.TargetPath = path })
		add(name+" for staging", invalid, func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = path })
	}
	for name, c := range badCapabilities() {
		add(name, invalid, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = c })
	}
	add("no target_path", invalid, func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" })
	add("no staging_target_path", precondition, func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = "" })
	add("nothing staged", precondition, func(*csi.NodePublishVolumeRequest) {})
	add("an unknown volume", []codes.Code{codes.FailedPrecondition, codes.NotFound}, func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "unknown" })
	inline := func(r *csi.NodePublishVolumeRequest, value string, attributes ...string) {
		r.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": value}
		for i := 0; i < len(attributes); i += 2 {
			r.VolumeContext[attributes[i]] = attributes[i+1]
		}
	}
	add("ephemeral: perhaps", invalid, func(r *csi.NodePublishVolumeRequest) { inline(r, "perhaps") })
	add("ephemeral, with the id of a volume", []codes.Code{codes.AlreadyExists}, func(r *csi.NodePublishVolumeRequest) { inline(r, "true") })
	for _, attribute := range [][]string{{"size", "much"}, {"size", "-1"}, {"size", "0"}, {"size", "1e30"}, {"overcommit", "2", "provisioning", "thin"}, {"provisioning", "fat"}, {"colour", "red"}} {
		add(fmt.Sprintf("ephemeral, with %q", attribute), invalid, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeId, r.StagingTargetPath = "csi-inline", ""
			inline(r, "true", attribute...)
		})
	}
	return rows
}

func badUnpublishes(v *volume) (rows []badRequest) {
	target := filepath.Join(v.KubeletDir, "pods/pod/volumes/kubernetes.io~csi", v.ID, "mount")
	add := func(name, id, path string, want []codes.Code) {
		rows = append(rows, badRequest{"unpublish/" + name, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: path}, want})
	}
	for name, id := range badIDs {
		add(name, id, target, invalid)
	}
	for name, path := range badPaths(v) {
		add(name, v.ID, path, invalid)
	}
	add("no target_path", v.ID, "", invalid)
	add("an unknown volume", "unknown", target, fine)
	add("nothing published", v.ID, target, fine)
	add("not even a parent", v.ID, filepath.Join(v.KubeletDir, "pods/gone/volumes/mount"), fine)
	return rows
}

// badQuestions are those of stats, health and growth.
func badQuestions(v *volume) (rows []badRequest) {
	add := func(name string, req any, want []codes.Code) { rows = append(rows, badRequest{name, req, want}) }
	for name, id := range badIDs {
		add("stats/"+name, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: v.Staging}, invalid)
		add("expand/"+name, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: v.Staging}, invalid)
		add("health/"+name, &csi.NodeGetVolumeHealthRequest{VolumeId: id}, invalid)
	}
	add("stats/no volume_path", &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID}, invalid)
	add("stats/a relative path", &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: "relative"}, notFound)
	add("stats/not there", &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Staging}, notFound)
	add("stats/an unknown volume", &csi.NodeGetVolumeStatsRequest{VolumeId: "unknown", VolumePath: v.Staging}, notFound)
	for name, path := range badPaths(v) {
		want := notFound // no volume can be there
		if path != "relative/path" && path != filepath.Clean(path) || strings.Contains(path, "\x00") {
			want = invalid
		}
		add("stats/"+name, v.StatsRequest(path), want)
		if want[0] == codes.InvalidArgument {
			add("expand/"+name, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: path}, want)
			add("expand/"+name+" for staging", &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: v.Staging, StagingTargetPath: path}, want)
		}
	}
	for name, r := range map[string]*csi.CapacityRange{
		"a negative size": {RequiredBytes: -1}, "a negative limit": {LimitBytes: -1}, "more than the limit": {RequiredBytes: 2, LimitBytes: 1},
	} {
		for _, id := range []string{v.ID, "unknown"} {
			add("expand/"+name+" of "+id, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: v.Staging, CapacityRange: r}, invalid)
		}
	}
	add("health/an unknown volume", &csi.NodeGetVolumeHealthRequest{VolumeId: "unknown"}, notFound)
	add("expand/no volume_path", &csi.NodeExpandVolumeRequest{VolumeId: v.ID}, invalid)
	add("expand/a relative path", &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: "relative"}, notFound)
	add("expand/an unknown volume", &csi.NodeExpandVolumeRequest{VolumeId: "unknown", VolumePath: v.Staging}, notFound)
	add("expand/not staged", &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: v.Staging, StagingTargetPath: v.Staging, VolumeCapability: v.Capability}, precondition)
	for name, c := range badCapabilities() {
		if c != nil {
			add("expand/"+name, &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: v.Staging, VolumeCapability: c}, invalid)
		}
	}
	return rows
}
