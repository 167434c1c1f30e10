package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestManifests: what deploy/ describes is valid to the API server.
func TestManifests(t *testing.T) {
	files, err := filepath.Glob("../../deploy/overlays/*/kustomization.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no overlays", err)
	}
	for _, file := range append(files, "../../deploy/base/kustomization.yaml") {
		dir := filepath.Dir(file)
		if out, err := try("", "apply", "--dry-run=server", "--validate=strict", "--kustomize", dir); err != nil {
			t.Errorf("%s: %v\n%s", dir, err, out)
		}
	}
	if out, err := try("", "apply", "--dry-run=server", "--validate=strict", "--filename=../../deploy/examples"); err != nil {
		t.Errorf("examples: %v\n%s", err, out)
	}
}

// TestLeastPrivilege: the API server's token is only where it is used, and a sidecar has none of root's capabilities.
func TestLeastPrivilege(t *testing.T) {
	deployed(t)
	for program, sidecar := range map[string]bool{"/usr/local/bin/csi-node": false, "/csi-provisioner": true, "/csi-resizer": true} {
		pid, err := the.pidOf(program)
		if err != nil {
			t.Error(err)
			continue
		}
		mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
		if err != nil || sidecar != strings.Contains(string(mounts), "/secrets/kubernetes.io/serviceaccount ") { // /var/run may be /run
			t.Errorf("%s: sidecar %t, and of a token in its mounts (%v):\n%s", program, sidecar, err, mounts)
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Error(err)
		}
		for _, line := range []string{"CapPrm:\t0000000000000000\n", "CapBnd:\t0000000000000000\n", "NoNewPrivs:\t1\n", "Seccomp:\t2\n"} {
			if sidecar != strings.Contains(string(status), line) {
				t.Errorf("%s: sidecar %t, and of %q in its status:\n%s", program, sidecar, line, status)
			}
		}
		written := fmt.Sprintf("/proc/%d/root/written", pid)
		if err := os.WriteFile(written, nil, 0o600); !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s: its root file system can be written: %v", program, err)
		}
	}
}

// registered tells whether kubelet has the plugin, in CSINode and by the plugin's own account.
func registered(t testing.TB, since time.Time) error {
	t.Helper()
	var node struct {
		Spec struct {
			Drivers []struct {
				Name, NodeID string
				TopologyKeys []string
				Allocatable  struct{ Count int }
			}
		}
	}
	out, err := try("", "get", "csinode", nodeName, "--output=json")
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), &node); err != nil {
		return err
	}
	if len(node.Spec.Drivers) != 1 {
		return fmt.Errorf("CSINode has %d drivers", len(node.Spec.Drivers))
	}
	d := node.Spec.Drivers[0]
	if d.Name != "csi-node.local" || d.NodeID != nodeName || d.Allocatable.Count != 60 || !slices.Equal(d.TopologyKeys, []string{"topology.csi-node.local/node"}) {
		return fmt.Errorf("CSINode says %+v", d)
	}
	var report struct {
		Registration struct {
			Registered bool
			Since      time.Time
		}
	}
	out, err = try("", "exec", "--namespace=csi-node", "daemonset/csi-node", "--container=csi-node", "--", "csi-node", "status", "--output=json")
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		return err
	}
	if r := report.Registration; !r.Registered || !r.Since.After(since) {
		return fmt.Errorf("the plugin says registered: %t since %s, want it since %s", r.Registered, r.Since, since)
	}
	return nil
}

// TestRegistration: CSINode has the plugin with topology and limit, also after kubelet or plugin was restarted.
func TestRegistration(t *testing.T) {
	await(t, "registration", func() error { return registered(t, time.Time{}) })
	if got := kubectl(t, "get", "node", nodeName, `--output=jsonpath={.metadata.labels.topology\.csi-node\.local/node}`); got != nodeName {
		t.Errorf("the node's label is %q, want %q", got, nodeName)
	}

	restarted := time.Now()
	restartKubelet(t, syscall.SIGKILL, func() {})
	await(t, "registration after kubelet's restart", func() error { return registered(t, restarted) })

	restarted = time.Now()
	kubectl(t, "delete", "pod", "--namespace=csi-node", "--selector=app.kubernetes.io/name=csi-node")
	deployed(t)
	await(t, "registration after the plugin's restart", func() error { return registered(t, restarted) })
}

// TestDynamicVolume: a claim gets a volume when its first pod comes, the data is there for the next pod, and with the claim all goes.
func TestDynamicVolume(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("first", "data", idle))
	s.ready("first")
	s.holds("first", "echo kept | dd of=/data/file conv=fsync 2>/dev/null && grep ' /data ' /proc/mounts | cut -d' ' -f3", "ext4")
	s.refusesDiscards(s.sh("first", "grep ' /data ' /proc/mounts | cut -d' ' -f1"))
	s.remove("pod/first")

	s.apply(pod("second", "data", idle))
	s.ready("second")
	s.holds("second", "cat /data/file", "kept")
	s.remove("pod/second", "persistentvolumeclaim/data")
	assertNothingLeft(t)
}

// refusesDiscards checks that the device of a thick volume does, and that this is the plugin's doing: a device may have
// refused them before, and then goes on. So the plugin must be able to tell it.
func (s *space) refusesDiscards(device string) {
	s.Helper()
	file := filepath.Join("/sys/block", filepath.Base(device), "queue/discard_max_bytes")
	if limit, err := os.ReadFile(file); err != nil || string(limit) != "0\n" {
		s.Errorf("%s discards up to %q bytes (%v)", device, limit, err)
	}
	pid, err := the.pidOf(pluginProgram)
	if err != nil {
		s.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(pid), "root", file), os.O_WRONLY, 0)
	if err != nil {
		s.Fatalf("the plugin cannot have discards refused: %v", err)
	}
	f.Close()
}

// writer writes, syncs, and reads from the disk what it wrote, until something is not as it should be, and then ends: a pod
// with restartPolicy Never that runs has not seen a failure.
var writer = writerTo("/data/block")

// writerTo is a writer of a block of a file or device. It counts what it wrote in /data/log.
func writerTo(block string) string {
	return strings.ReplaceAll(`mkdir -p /data; content() { yes $i | head -c 65536; }; i=0
while echo $i | dd of=/data/log oflag=append conv=notrunc,fsync 2>/tmp/error && content | dd of=BLOCK bs=64k iflag=fullblock conv=notrunc,fsync 2>/tmp/error &&
[ "$(dd if=BLOCK bs=64k count=1 iflag=direct 2>/tmp/error | md5sum)" = "$(content | md5sum)" ]; do i=$((i+1)); usleep 200000; done
cat /tmp/error; echo block $i is not what was written; exit 1`, "BLOCK", block)
}

// wrote checks that a writer has never failed, goes on, and has lost nothing.
func (s *space) wrote(pod string) {
	s.Helper()
	before := s.sh(pod, "wc -l < /data/log")
	await(s, "writer "+pod, func() error {
		out, err := s.try("exec", pod, "--", "sh", "-c", "wc -l < /data/log")
		if err == nil && strings.TrimSpace(out) == before {
			err = errors.New("writes no more")
		}
		return err
	})
	if got := s.kubectl("get", "pod", pod, "--output=jsonpath={.status.phase} {.status.containerStatuses[0].restartCount}"); got != "Running 0" {
		s.Fatalf("writer %s: %s, want it Running and never restarted", pod, got)
	}
	s.holds(pod, "awk '$1 != NR-1 {print \"line \" NR \" is \" $1; exit}' /data/log", "")
}

// mebibytes returns the size of a pod's file system.
func (s *space) mebibytes(pod string) (n int) {
	s.Helper()
	if _, err := fmt.Sscan(s.sh(pod, "df -m /data | tail -n 1 | awk '{print $2}'"), &n); err != nil {
		s.Fatal(err)
	}
	return n
}

func (s *space) grow(claim, size string) {
	s.Helper()
	s.kubectl("patch", "persistentvolumeclaim", claim, "--patch", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
}

func (s *space) grown(claim, size string) {
	s.Helper()
	await(s, "growth", func() error {
		got, err := s.try("get", "persistentvolumeclaim", claim, "--output=jsonpath={.status.capacity.storage} {.status.conditions}")
		if err == nil && strings.TrimSpace(got) != size {
			err = fmt.Errorf("claim %s has %q, want %q", claim, got, size)
		}
		return err
	})
}

// expansion: a volume grows while its pod writes, and while no pod runs.
func expansion(s *space) {
	s.apply(claim("online", "csi-node-local", "320Mi"), pod("online", "online", writer, "restartPolicy: Never"),
		claim("offline", "e2e-ext4", "320Mi"), pod("offline", "offline", "echo kept > /data/file; "+idle),
		claim("offline-xfs", "csi-node-xfs", "320Mi"), pod("offline-xfs", "offline-xfs", "echo kept > /data/file; "+idle))
	s.ready("online", "offline", "offline-xfs")

	before := s.mebibytes("online")
	s.grow("online", "512Mi")
	s.grown("online", "512Mi")
	if after := s.mebibytes("online"); after < before+150 {
		s.Errorf("the mounted file system had %d MiB and has %d MiB", before, after)
	}
	s.wrote("online")

	for _, name := range []string{"offline", "offline-xfs"} {
		before := s.mebibytes(name)
		s.remove("pod/" + name)
		s.grow(name, "512Mi")
		await(s, "resizer", func() error {
			got, err := s.try("get", "persistentvolumeclaim", name, "--output=jsonpath={.status.conditions[*].type}")
			if err == nil && !strings.Contains(got, "FileSystemResizePending") {
				err = fmt.Errorf("conditions: %q", got)
			}
			return err
		})
		s.apply(pod(name, name, idle))
		s.ready(name)
		// kubelet asks for the growth when the volume is mounted already. Where that is too late for ext4 the claim says so, and the next start does it.
		if name == "offline" && !mayGrowMountedExt4(s.T) {
			await(s, "condition", func() error {
				got, err := s.try("get", "persistentvolumeclaim", name, "--output=jsonpath={.status.conditions[*].message}")
				if err == nil && !strings.Contains(got, "it grows when the volume is next staged") {
					err = fmt.Errorf("conditions: %q", got)
				}
				return err
			})
			s.remove("pod/" + name)
			s.apply(pod(name, name, idle))
			s.ready(name)
		}
		s.grown(name, "512Mi")
		if after := s.mebibytes(name); after < before+100 {
			s.Errorf("%s: the file system had %d MiB and has %d MiB", name, before, after)
		}
		s.holds(name, "cat /data/file", "kept")
	}
}

// mayGrowMountedExt4 tells whether this process, and so a privileged pod, has CAP_SYS_RESOURCE.
func mayGrowMountedExt4(t *testing.T) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "CapEff:")
	set, err := strconv.ParseUint(strings.Fields(after)[0], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return set&(1<<24) != 0
}

// TestKubeletRestart: kubelet is restarted while a pod writes; then the pod goes and nothing stays.
func TestKubeletRestart(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("writer", "data", writer, "restartPolicy: Never"))
	s.ready("writer")
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		restartKubelet(t, signal, func() {})
		s.wrote("writer")
	}
	s.apply(claim("more", "e2e-ext4", "32Mi"), pod("more", "more", idle))
	s.ready("more") // kubelet and plugin know each other again
	s.wrote("writer")
}

// TestPluginKilled: the plugin is killed while volumes are published, and again while they are unpublished. What it had
// logged until then gets into a report by the command of docs/tools.md.
func TestPluginKilled(t *testing.T) {
	s := newSpace(t)
	var manifests, pods []string
	for i := range 6 {
		name := fmt.Sprintf("p%d", i)
		manifests = append(manifests, claim(name, "e2e-ext4", "32Mi"), pod(name, name, "echo kept > /data/file; "+idle))
		pods = append(pods, name)
	}
	restarts := pluginRestarts(t)
	s.apply(manifests...)
	// The first volume is being made: the others follow while the plugin is down.
	await(t, "first volume", func() error {
		devices, err := the.volumeLoops()
		if err == nil && len(devices) == 0 {
			err = errors.New("none yet")
		}
		return err
	})
	killPlugin(t)
	s.ready(pods...)
	for _, pod := range pods {
		s.holds(pod, "cat /data/file", "kept")
	}

	s.kubectl("delete", "pod", "--all", "--wait=false")
	await(t, "first volume gone", func() error {
		devices, err := the.volumeLoops()
		if err == nil && len(devices) == len(pods) {
			err = errors.New("all are there")
		}
		return err
	})
	killPlugin(t)
	s.remove("pod", "--all")
	// Before it knows of the kill, kubelet says that all is ready, and has the log of the plugin before this one.
	await(t, "both restarts", func() error {
		if now := pluginRestarts(t); now != restarts+2 {
			return fmt.Errorf("the plugin was restarted %d times, and before the test %d", now, restarts)
		}
		return nil
	})
	deployed(t)
	report := filepath.Join(t.TempDir(), "report.tar.gz")
	follow(t, "../..", documented(t, "docs/tools.md", "It works while the plugin is down.", "POD", "daemonset/csi-node", "report.tar.gz", report)...)
	given, err := exec.Command("tar", "--extract", "--gzip", "--file", report, "--to-stdout", "--wildcards", "*log-given.txt").CombinedOutput()
	if err != nil || !strings.Contains(string(given), "Serving") {
		t.Errorf("of the log before the report has\n%s%v", given, err)
	}
}

// mountsOf returns the node's mount points that belong to a volume: the stage first, then its targets.
func mountsOf(t testing.TB, claimed string) (stage string, targets []string) {
	t.Helper()
	mounts, err := the.mountPoints()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range mounts {
		switch {
		case strings.HasSuffix(path, "/globalmount"):
			stage = path
		case strings.Contains(path, claimed) && strings.HasSuffix(path, "/mount"):
			targets = append(targets, path)
		}
	}
	return stage, targets
}

// TestTornMount: stage and target are torn off under a running pod; they come back, a new container sees its data, and the plugin tells of it.
func TestTornMount(t *testing.T) {
	s := newSpace(t)
	s.apply(claim("data", "e2e-ext4", "32Mi"), pod("pod", "data", "echo start >> /data/starts; until [ -e /tmp/end ]; do usleep 100000; done"))
	s.ready("pod")
	volume := s.volumeOf("data")
	stage, targets := mountsOf(t, s.kubectl("get", "persistentvolumeclaim", "data", "--output=jsonpath={.spec.volumeName}"))
	if stage == "" || len(targets) != 1 {
		t.Fatalf("found stage %q and targets %q", stage, targets)
	}
	for _, path := range append(targets, stage) {
		if err := syscall.Unmount(path, syscall.MNT_DETACH); err != nil {
			t.Fatalf("umount %s: %v", path, err)
		}
	}
	await(t, "repair", func() error {
		if nowStage, nowTargets := mountsOf(t, "pvc-"); nowStage != stage || !slices.Equal(nowTargets, targets) {
			return fmt.Errorf("stage %q and targets %q", nowStage, nowTargets)
		}
		return nil
	})
	s.sh("pod", "touch /tmp/end")
	await(t, "new container", func() error {
		out, err := s.try("exec", "pod", "--", "cat", "/data/starts")
		if err == nil && strings.TrimSpace(out) != "start\nstart" {
			err = fmt.Errorf("the pod sees %q", out)
		}
		return err
	})
	if told := inPlugin(t, "explain", volume); !strings.Contains(told, "lost") {
		t.Errorf("explain does not tell of the loss:\n%s", told)
	}
	if told, want := inPlugin(t, "status"), s.name+"/pod"; !strings.Contains(told, want) {
		t.Errorf("status has no %q:\n%s", want, told)
	}
}
