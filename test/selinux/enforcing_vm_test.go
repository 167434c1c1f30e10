//go:build vm

package selinux

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

const (
	labelOfFiles = "system_u:object_r:container_file_t:s0:" // and the categories of a pod
	labelOfPods  = "system_u:system_r:container_t:s0:"
	mine, others = "c1,c2", "c3"
)

//go:embed policy.cil
var policy []byte

func TestMain(m *testing.M) {
	if err := enforce(); err != nil {
		fmt.Fprintln(os.Stderr, "SELinux cannot be made to enforce:", err)
		os.Exit(1)
	}
	harness.Main(m)
}

// enforce loads the policy: the kernel asks it from then on.
func enforce() error {
	dir, err := os.MkdirTemp("", "policy-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // the machine goes, too
	source, compiled := filepath.Join(dir, "policy.cil"), filepath.Join(dir, "policy")
	if err := os.WriteFile(source, policy, 0o600); err != nil {
		return err
	}
	if out, err := exec.Command("secilc", "--output", compiled, "--filecontext", "/dev/null", source).CombinedOutput(); err != nil {
		return fmt.Errorf("secilc: %w: %s", err, out)
	}
	text, err := os.ReadFile(compiled)
	if err != nil {
		return err
	}
	const selinux = "/sys/fs/selinux"
	return errors.Join(unix.Mount("selinuxfs", selinux, "selinuxfs", 0, ""), os.WriteFile(selinux+"/load", text, 0), os.WriteFile(selinux+"/enforce", []byte("1"), 0))
}

// asPod runs a shell script as a container of a pod with such categories does.
func asPod(t *testing.T, categories, script string) (string, error) {
	t.Helper()
	const become = `printf %s "$0" >/proc/self/attr/exec && exec sh -c "$1"`
	out, err := exec.Command("sh", "-c", become, labelOfPods+categories, script).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func mustAsPod(t *testing.T, script, want string) {
	t.Helper()
	if out, err := asPod(t, mine, script); err != nil || out != want {
		t.Fatalf("a pod that runs %q is told %q (%v)", script, out, err)
	}
}

// mustRefuse checks that a pod with other categories is refused, and that the kernel's log names both labels.
func mustRefuse(t *testing.T, script, categories, label string) {
	t.Helper()
	if out, err := asPod(t, categories, script); err == nil || !strings.Contains(out, "Permission denied") {
		t.Errorf("a pod that runs %q as %s is told %q (%v)", script, categories, out, err)
	}
	want := "scontext=" + labelOfPods + categories + " tcontext=" + label + " "
	if log := harness.Command(t, "dmesg"); !strings.Contains(log, "avc:  denied") || !strings.Contains(log, want) {
		t.Errorf("the kernel's log does not have %q:\n%s", want, log)
	}
}

// newVolume makes a volume with the label of a pod's files, as kubelet asks for it, or without any.
func newVolume(t *testing.T, p *harness.Plugin, fsType, categories string) *harness.Volume {
	t.Helper()
	v := harness.NewVolume(t, p, "volume", harness.Shared(fsType))
	if categories != "" {
		v.Capability = harness.MountAs(fsType, csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, `context="`+labelOfFiles+categories+`"`)
	}
	require.NoError(t, v.Create(t.Context(), 320<<20, "thin"))
	return v
}

// TestVolumeHasTheLabelOfItsPod: a volume that is mounted with the label of its pod can be used by that pod and by no
// other; so it is after a mount was lost, a plugin killed, and its store lost.
func TestVolumeHasTheLabelOfItsPod(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			ctx := t.Context()
			p := harness.Start(t, harness.Options{})
			v := newVolume(t, p, fsType, mine)
			pod := v.Target("pod")
			require.NoError(t, v.Up(ctx, pod))
			file := filepath.Join(pod, "file")
			mustAsPod(t, "echo mine >"+file+" && cat "+file, "mine")
			mustRefuse(t, "cat "+file, others, labelOfFiles+mine)

			mounts := len(p.Mounts())
			for _, path := range []string{pod, v.Staging} {
				require.NoError(t, unix.Unmount(path, unix.MNT_DETACH))
				harness.Eventually(t, "the mount is back", func() bool { return len(p.Mounts()) == mounts && v.Unsettled() == "" })
				mustAsPod(t, "cat "+file, "mine")
				mustRefuse(t, "cat "+file, others, labelOfFiles+mine)
			}
			p.Kill()
			p.Start(harness.Options{})
			require.NoError(t, v.Up(ctx, pod))
			p.Kill()
			require.NoError(t, os.RemoveAll(p.StateDir))
			p.Start(harness.Options{})
			require.NoError(t, v.Up(ctx, pod))
			if unsettled := v.Unsettled(); unsettled != "" {
				t.Errorf("after the loss of the store: %s", unsettled)
			}
			mustAsPod(t, "echo more >>"+file+" && cat "+file, "mine\nmore")
			v.End(pod)
		})
	}
}

// TestRelabelledVolume: of a volume without a label for all of it the files have labels of their own, as a container
// runtime gives them. Until then no pod can use it.
func TestRelabelledVolume(t *testing.T) {
	p := harness.Start(t, harness.Options{})
	v := newVolume(t, p, "ext4", "")
	pod := v.Target("pod")
	require.NoError(t, v.Up(t.Context(), pod))
	file := filepath.Join(pod, "file")
	mustRefuse(t, "echo mine >"+file, mine, "system_u:object_r:node_t:s0")
	require.NoError(t, unix.Setxattr(pod, "security.selinux", []byte(labelOfFiles+mine), 0))
	mustAsPod(t, "echo mine >"+file+" && cat "+file, "mine")
	require.NoError(t, v.Down(t.Context(), pod))
	require.NoError(t, v.Up(t.Context(), pod))
	mustAsPod(t, "cat "+file, "mine")
	mustRefuse(t, "cat "+file, others, labelOfFiles+mine)
	v.End(pod)
}

var loopNumber = regexp.MustCompile(`/dev/loop[0-9]+`)

// TestRefusedLabels: a label that the node's policy does not know is refused in the words of docs/troubleshoot.md, and so is
// any of a btrfs, which this kernel does not take from who mounts by file descriptors.
func TestRefusedLabels(t *testing.T) {
	p := harness.Start(t, harness.Options{})
	for fsType, tt := range map[string]struct{ label, told string }{
		"ext4":  {"system_u:object_r:nonsense_t:s0:" + mine, `rpc error: code = InvalidArgument desc = volume volume: stage: mount ext4: the kernel refuses the mount options "context": invalid argument`},
		"btrfs": {labelOfFiles + mine, `rpc error: code = InvalidArgument desc = volume volume: step mount for stage: mount btrfs of /dev/loop7 at /var/lib/kubelet/plugins/kubernetes.io/csi/csi-node.local/volume/globalmount: the kernel refuses the mount options "context": invalid argument`},
	} {
		v := newVolume(t, p, fsType, mine)
		v.Capability.GetMount().MountFlags = []string{`context="` + tt.label + `"`}
		err := v.Stage(t.Context())
		if told := loopNumber.ReplaceAllString(strings.ReplaceAll(fmt.Sprint(err), p.KubeletDir, "/var/lib/kubelet"), "/dev/loop7"); told != tt.told {
			t.Errorf("%s: it says %s, and not %s", fsType, told, tt.told)
		}
		require.NoError(t, v.Unstage(t.Context()))
		require.NoError(t, v.Delete(t.Context()))
	}
	const why = "security_context_str_to_sid (system_u:object_r:nonsense_t:s0:c1,c2) failed"
	if log := harness.Command(t, "dmesg"); !strings.Contains(log, why) {
		t.Errorf("the kernel's log does not have %q:\n%s", why, log)
	}
}
