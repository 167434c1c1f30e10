package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/test/harness"
)

// environment is that of a person who has set it up for the plugin, with the
// built csi-node in the PATH.
func environment(t *testing.T, p *harness.Plugin) []string {
	t.Helper()
	return []string{
		"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + os.Getenv("PATH"),
		"CSI_ENDPOINT=unix://" + p.Socket, "CSI_NODE_STATE_DIR=" + p.StateDir, "CSI_NODE_KUBELET_DIR=" + p.KubeletDir,
	}
}

// shell runs a command line as it is typed.
func shell(t *testing.T, p *harness.Plugin, line string) harness.Result {
	t.Helper()
	return harness.Run(t, environment(t, p), "sh", "-c", line)
}

// typed runs a command line that must succeed, and reads its JSON.
func typed(t *testing.T, p *harness.Plugin, line string, into any) {
	t.Helper()
	result := shell(t, p, line+" --output json")
	if result.Code != 0 || result.Stderr != "" {
		t.Fatalf("%s: exit code %d: %s", line, result.Code, result.Stderr)
	}
	if err := json.Unmarshal([]byte(result.Stdout), into); err != nil {
		t.Fatalf("%s: %v in %s", line, err, result.Stdout)
	}
}

// refused runs a command line that must fail with the exit code and all words.
func refused(t *testing.T, p *harness.Plugin, code int, line string, words ...string) {
	t.Helper()
	result := shell(t, p, line)
	if result.Code != code {
		t.Fatalf("%s: exit code %d, want %d: %s%s", line, result.Code, code, result.Stdout, result.Stderr)
	}
	for _, word := range words {
		if !strings.Contains(result.Stderr, word) {
			t.Errorf("%s does not say %q: %s", line, word, result.Stderr)
		}
	}
}

// typedOutcome is what most commands print.
type typedOutcome struct {
	VolumeID          string
	StagingTargetPath string
	TargetPath        string
	Result            string
}

// A volume's life, typed.
func TestVolumeCommandsThroughALife(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	var created struct {
		Volume struct {
			VolumeID      string
			CapacityBytes int64 `json:",string"`
		}
	}
	typed(t, p, "csi-node volume create typed --size 320Mi --fs-type xfs --parameter provisioning=thin", &created)
	if created.Volume.VolumeID != "typed" || created.Volume.CapacityBytes != 320*mib {
		t.Fatalf("created %+v", created)
	}
	var staged, published typedOutcome
	for range 2 { // a repeat joins
		typed(t, p, "csi-node volume stage typed --fs-type xfs", &staged)
	}
	if staged.Result != "staged" || mountsAt(p, staged.StagingTargetPath) != 1 || !strings.HasPrefix(staged.StagingTargetPath, p.KubeletDir+"/plugins/kubernetes.io/csi/csi-node.local/") {
		t.Fatalf("staged %+v", staged)
	}
	typed(t, p, "csi-node volume publish typed --fs-type xfs", &published)
	if published.Result != "published" || mountsAt(p, published.TargetPath) != 1 {
		t.Fatalf("published %+v", published)
	}
	write(t, filepath.Join(published.TargetPath, "file"), "text")

	type stats struct {
		VolumePath string
		Usage      []struct {
			Unit  string
			Total int64 `json:",string"`
		}
	}
	var before, after stats
	typed(t, p, "csi-node volume stats typed", &before)
	var grown struct {
		CapacityBytes int64 `json:",string"`
	}
	typed(t, p, "csi-node volume expand typed --size 400Mi", &grown)
	if grown.CapacityBytes != 400*mib {
		t.Errorf("grown to %d bytes", grown.CapacityBytes)
	}
	typed(t, p, "csi-node volume stats typed", &after)
	if before.VolumePath != published.TargetPath || len(before.Usage) != 2 || len(after.Usage) != 2 || after.Usage[0].Total <= before.Usage[0].Total {
		t.Errorf("stats were %+v and are %+v", before, after)
	}
	refused(t, p, 1, "csi-node volume unstage typed", "FailedPrecondition", published.TargetPath, "put that right")
	refused(t, p, 1, "csi-node volume clear-device typed", "in use", published.TargetPath)
	refused(t, p, 1, "csi-node volume delete typed", "FailedPrecondition")
	refused(t, p, 1, "csi-node volume stage nobody", "NotFound", "nobody")
	refused(t, p, 2, "csi-node volume stage", "VOLUME", "--help")
	refused(t, p, 1, "csi-node volume stage typed --endpoint unix://"+p.Dir+"/none.sock", "there is no socket", "is the plugin running")

	var out typedOutcome
	for range 2 { // what is gone stays gone
		typed(t, p, "csi-node volume unpublish typed", &out)
	}
	mustBeGone(t, published.TargetPath)
	typed(t, p, "csi-node volume unstage typed", &out)
	mustBeGone(t, filepath.Dir(staged.StagingTargetPath))
	typed(t, p, "csi-node volume delete typed", &out)
	if out.Result != "deleted" {
		t.Errorf("deleted: %+v", out)
	}
	mustBeGone(t, filepath.Join(p.PoolDir, "volumes", "typed"))
	mustHaveNoRecord(t, p)
	mustHaveNoLoop(t, p)
}

// The way out of a refusal: look, destroy, stage.
func TestVolumeCommandClear(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	tool("mkfs.ext4", "-q", "-F", "-U", "6f5c1d2e-0a3b-4c4d-8e8f-909192939495")(t, v.Data())
	before := sum(t, v.Data())
	var c driver.Clearance
	result := shell(t, p, "csi-node volume clear-device volume --output json")
	must(t, json.Unmarshal([]byte(result.Stdout), &c))
	want := driver.Clearance{Volume: "volume", Backing: v.Data(), Bytes: 32 * mib, Found: "ext4 file system", UUID: "6f5c1d2e-0a3b-4c4d-8e8f-909192939495", FilesystemBytes: 32 * mib}
	if result.Code != 1 || c != want || !strings.Contains(result.Stderr, "nothing was changed") {
		t.Errorf("looking: exit code %d, %+v, %s", result.Code, c, result.Stderr)
	}
	mustHoldAsBefore(t, v.Data(), before)
	holder, err := os.Open(v.Data())
	must(t, err)
	refused(t, p, 1, "csi-node volume clear-device volume --i-understand-this-destroys-data", v.Data(), "open")
	must(t, holder.Close())
	mustHoldAsBefore(t, v.Data(), before)
	typed(t, p, "csi-node volume clear-device volume --i-understand-this-destroys-data", &c)
	want.Cleared = true
	if c != want {
		t.Errorf("cleared %+v", c)
	}
	must(t, v.Stage(t.Context()))
	v.End()

	p.Terminate()
	refused(t, p, 1, "csi-node volume clear-device volume", "no plugin runs", p.StateDir)
	refused(t, p, 1, "csi-node volume retry volume", "no plugin runs", p.StateDir)
}

// Once what stands in the way is gone, retry does not wait for the next try.
func TestVolumeCommandRetry(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	must(t, v.Stage(t.Context()))
	must(t, unix.Mount("tmpfs", v.Staging, "tmpfs", 0, "size=1m")) // over the volume
	undone := false
	t.Cleanup(func() {
		if !undone {
			_ = unix.Unmount(v.Staging, 0)
		}
	})
	if err := v.Unstage(t.Context()); err == nil {
		t.Fatal("unstaged beneath a foreign mount")
	}
	refused(t, p, 1, "csi-node volume retry volume", "stage is failing", "tmpfs")
	for range 8 { // until the next try is more than a minute away
		report, err := driver.Retry(t.Context(), p.StateDir, "volume")
		must(t, err)
		if len(report.Unsettled()) != 1 {
			t.Fatalf("reports %+v", report)
		}
	}
	must(t, unix.Unmount(v.Staging, 0))
	undone = true
	// The kernel tells of it, so nobody need ask again.
	harness.Eventually(t, "the volume is unstaged", func() bool { return len(p.Status().Volumes) == 0 })
	refused(t, p, 1, "csi-node volume retry volume", "nothing is asked")
	v.End()
}

// examples returns the example lines of a command's help.
func examples(t *testing.T, p *harness.Plugin, command string) []string {
	t.Helper()
	result := shell(t, p, command+" --help")
	_, text, found := strings.Cut(result.Stdout, "\nExamples:\n")
	if result.Code != 0 || !found {
		t.Fatalf("%s --help: %+v", command, result)
	}
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, " ") && line != "\n" {
			break // the next heading
		}
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}

// What the help of the volume commands shows works as it is, in the order in
// which `csi-node volume --help` lists the commands.
func TestHelpExamplesWork(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	result := shell(t, p, "csi-node volume --help")
	_, list, found := strings.Cut(result.Stdout, "\nAvailable Commands:\n")
	if !found {
		t.Fatalf("no commands in %s", result.Stdout)
	}
	list, _, _ = strings.Cut(list, "\n\n")
	offered := shell(t, p, "csi-node volume capabilities").Stdout
	lines := 0
	for line := range strings.Lines(list) {
		name := strings.Fields(line)[0]
		for _, example := range examples(t, p, "csi-node volume "+name) {
			want := 0
			switch {
			case name == "clear-device" && !strings.Contains(example, "--i-understand"), name == "list" && !strings.Contains(offered, "LIST_VOLUMES"):
				want = 1
			}
			if result := shell(t, p, example); result.Code != want {
				t.Errorf("%s: exit code %d: %s%s", example, result.Code, result.Stdout, result.Stderr)
			}
			lines++
		}
	}
	if lines < 15 {
		t.Errorf("only %d examples in %s", lines, list)
	}
	for _, command := range []string{"csi-node status", "csi-node version", "csi-node help", "csi-node completion", "csi-node completion bash"} {
		for _, example := range examples(t, p, command) {
			if result := harness.Run(t, environment(t, p), "bash", "-c", example); result.Code != 0 {
				t.Errorf("%s: exit code %d: %s", example, result.Code, result.Stderr)
			}
		}
	}
	mustHaveNoRecord(t, p)
}
