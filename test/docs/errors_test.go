package docs

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// foreign are the errors of Kubernetes itself that troubleshoot.md explains, with the place in
// k8s.io/kubernetes v1.36.3 that has them.
var foreign = map[string]string{
	"insufficient quota to match these scopes":         "k8s.io/apiserver/pkg/admission/plugin/resourcequota/controller.go",
	"Waiting for a volume to be created":               "pkg/controller/volume/persistentvolume/pv_controller.go",
	"waiting for first consumer":                       "pkg/controller/volume/persistentvolume/pv_controller.go",
	"no CSIDriver object":                              "pkg/volume/csi/csi_plugin.go",
	"did not have enough free storage":                 "pkg/scheduler/framework/plugins/volumebinding/volume_binding.go; test/e2e asks for it",
	"didn't find available persistent volumes to bind": "pkg/scheduler/framework/plugins/volumebinding/volume_binding.go",
	"violates PodSecurity":                             "k8s.io/pod-security-admission/admission/admission.go",
}

// infeasible is what external-provisioner v6.3.0 writes before an answer that no retry will change; test/e2e asks for it.
const infeasible = "Volume provisioning failed with infeasible error. Retries will be delayed. "

// quoted returns the errors that troubleshoot.md explains: its headings in code, each as its fixed
// parts, between the dots.
func quoted(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, h := range pageNamed(t, "docs/troubleshoot.md").headings {
		for _, m := range codeSpan.FindAllStringSubmatch(h.text, -1) {
			var parts []string
			for part := range strings.SplitSeq(m[1], "…") {
				if part = strings.TrimSpace(part); part != "" {
					parts = append(parts, part)
				}
			}
			all[m[1]] = parts
		}
	}
	if len(all) < 30 {
		t.Fatalf("troubleshoot.md quotes only %q", all)
	}
	return all
}

// literals returns the strings in the source of the product, with those that a plus joins put together.
func literals(t *testing.T) []string {
	t.Helper()
	var all []string
	var joined func(e ast.Expr) string
	joined = func(e ast.Expr) string {
		switch e := e.(type) {
		case *ast.BasicLit:
			if text, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
				return text
			}
		case *ast.BinaryExpr:
			return joined(e.X) + joined(e.Y)
		}
		return ""
	}
	for _, dir := range []string{"pkg", "cmd"} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if e, is := n.(ast.Expr); is {
					if text := joined(e); text != "" {
						all = append(all, text)
					}
				}
				return true
			})
			return nil
		}))
	}
	return all
}

// codes are words of gRPC, which stand for themselves.
var codes = regexp.MustCompile(`^[A-Z][A-Za-z]+$`)

// TestQuotedErrorsAreReal: what troubleshoot.md quotes stands in one text of the product, in that order, or is one of
// Kubernetes.
func TestQuotedErrorsAreReal(t *testing.T) {
	texts := literals(t)
	used := map[string]bool{}
	for name, parts := range quoted(t) {
		if foreign[name] != "" || codes.MatchString(name) {
			used[name] = true
			continue
		}
		if !slices.ContainsFunc(texts, func(text string) bool { return says(text, parts) }) {
			t.Errorf("no text of the product says %q", name)
		}
	}
	for name := range foreign {
		if !used[name] {
			t.Errorf("troubleshoot.md does not quote %q", name)
		}
	}
}

// says reports whether a text has all parts, in their order.
func says(text string, parts []string) bool {
	for _, part := range parts {
		_, after, found := strings.Cut(text, part)
		if !found {
			return false
		}
		text = after
	}
	return true
}

// events returns the events that troubleshoot.md shows, each in one line.
func events(t *testing.T) (all []string) {
	t.Helper()
	for _, b := range pageNamed(t, "docs/troubleshoot.md").blocks {
		if b.language == "text" {
			all = append(all, strings.Join(strings.Fields(b.text), " "))
		}
	}
	if len(all) < 8 {
		t.Fatalf("troubleshoot.md shows only the events %q", all)
	}
	return all
}

var (
	answerText  = regexp.MustCompile("rpc error: code = [^`]*")
	volumeNamed = regexp.MustCompile(`(desc = volume |/volumes/|/csi-node.local/|clear-device |manifest )[a-z]+`)
	loopNumber  = regexp.MustCompile(`/dev/loop[0-9]+`)
	poolSize    = regexp.MustCompile(`(/pool) \([0-9.]+[KMGTP]i\)`)
)

// asInstalled returns an error of a plugin in a test as one that runs in a cluster says it, of the volume pvc-4f0c, with a
// pool of 100 GiB.
func asInstalled(p *harness.Plugin, text string) string {
	text = strings.NewReplacer(p.PoolDir, "/var/lib/csi-node/pool", p.KubeletDir, "/var/lib/kubelet").Replace(text)
	text = loopNumber.ReplaceAllString(text, "/dev/loop7")
	return poolSize.ReplaceAllString(volumeNamed.ReplaceAllString(text, "${1}pvc-4f0c"), "$1 (100.0Gi)")
}

// TestErrorsThatUsersMeet makes mistakes that users make, and finds what the plugin answers among the headings of
// troubleshoot.md.
func TestErrorsThatUsersMeet(t *testing.T) {
	t.Parallel()
	explained := quoted(t)
	p := harness.Start(t, harness.Options{})
	create := func(id string, bytes int64, c *csi.VolumeCapability, parameters map[string]string) error {
		_, err := p.Controller.CreateVolume(t.Context(), harness.NewVolume(t, p, id, c).CreateRequest(bytes, parameters))
		return err
	}
	const mib = 1 << 20
	ext4 := harness.Shared("ext4")
	v := harness.NewVolume(t, p, "volume", ext4)
	raw := harness.NewVolume(t, p, "raw", harness.Shared(""))
	foreignData := harness.NewVolume(t, p, "foreign", ext4)
	blank := harness.NewVolume(t, p, "blank", harness.MountAs("ext4", csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY))
	for _, volume := range []*harness.Volume{v, raw, foreignData, blank} {
		require.NoError(t, volume.Create(t.Context(), 32*mib, "thin"))
	}
	sealed := harness.NewVolume(t, p, "sealed", ext4)
	require.NoError(t, create("sealed", 32*mib, ext4, map[string]string{"provisioning": "thin", luks.EncryptionKey: luks.LUKS2}))
	data, err := os.OpenFile(foreignData.Data(), os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = data.WriteString("somebody's")
	require.NoError(t, errors.Join(err, data.Close()))
	rawPod := raw.Target("pod")
	require.NoError(t, raw.Up(t.Context(), rawPod))
	require.NoError(t, raw.Down(t.Context(), rawPod))
	raw.Capability = ext4
	require.NoError(t, v.Stage(t.Context()))

	unprivileged, plain := less(t, "unprivileged", "exec setpriv --bounding-set -sys_admin"), less(t, "plain", withoutMapper)
	answers := map[string]bool{}
	for what, test := range map[string]struct {
		heading string
		err     error
	}{
		"a misspelt parameter":  {"parameter … is not known", create("misspelt", 32*mib, ext4, map[string]string{"provisionning": "thin"})},
		"a wrong file system":   {"fs_type … is not one that this node can make", create("zfs", 32*mib, harness.Shared("zfs"), nil)},
		"a claim for all nodes": {"a volume of this driver is on one node and can be reached from that node alone", create("many", 32*mib, harness.MountAs("ext4", csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), nil)},
		"a claim too large":     {"the pool … has no room for … more", create("large", 1<<50, ext4, map[string]string{"provisioning": "thin"})},
		"a growth too large": {"the pool … has no room for … more", func() error {
			_, err := v.Expand(t.Context(), 1<<42)
			return err
		}()},
		"a wrong mount option": {"the kernel refuses the mount options", func() error {
			wrong := harness.NewVolume(t, p, "blank", harness.Shared("ext4", "nonsense"))
			return wrong.Stage(t.Context())
		}()},
		"SELinux asked for where it is not": {"the kernel refuses the mount options", func() error {
			labelled := harness.NewVolume(t, p, "blank", harness.Shared("ext4", `context="system_u:object_r:container_file_t:s0:c1,c2"`))
			return labelled.Stage(t.Context())
		}()},
		"a kubelet directory elsewhere": {"the path … is not below … where all mounts belong", func() error {
			elsewhere := *blank
			elsewhere.Staging = "/data/kubelet/plugins/kubernetes.io/csi/csi-node.local/blank/globalmount"
			return elsewhere.Stage(t.Context())
		}()},
		"a wrong volumeHandle": {"no such volume on this node, or its data is gone", harness.NewVolume(t, p, "nowhere", ext4).Stage(t.Context())},
		"data on the volume":   {"the volume is neither blank nor a file system that this node can mount", foreignData.Stage(t.Context())},
		"raw before":           {"the volume was published as a raw block device before", raw.Stage(t.Context())},
		"without its layer":    {"it was created with …, and is not asked for so", sealed.Stage(t.Context())},
		"blank and read-only":  {"the volume is blank and read-only access was asked for", blank.Stage(t.Context())},
		"no CAP_SYS_ADMIN":     {"needs CAP_SYS_ADMIN", stageAt(t, unprivileged, map[string]string{"provisioning": "thin"})},
		"no dm_crypt":          {"this node's kernel cannot encrypt devices", stageAt(t, plain, map[string]string{luks.EncryptionKey: luks.LUKS2})},
		"two at one path": {"two must lie apart", func() error {
			other := harness.NewVolume(t, p, "blank", ext4)
			other.Staging = v.Staging
			return other.Stage(t.Context())
		}()},
	} {
		answers[asInstalled(p, fmt.Sprint(test.err))] = true
		parts, is := explained[test.heading]
		switch message := status.Convert(test.err).Message(); {
		case !is:
			t.Errorf("%s: troubleshoot.md has no heading %q", what, test.heading)
		case test.err == nil || !says(message, parts):
			t.Errorf("%s: the plugin answers %v, and not %q", what, test.err, test.heading)
		}
	}
	for _, name := range []string{"test/node/missing_module_vm_test.go", "test/selinux/enforcing_vm_test.go"} { // of another kernel
		for _, answer := range answerText.FindAllString(read(t, name), -1) {
			answers[asInstalled(p, answer)] = true
		}
	}
	for _, event := range events(t) {
		before, answer, found := strings.Cut(event, "rpc error: ")
		if strings.Contains(before, "ProvisioningFailed") && strings.HasSuffix(before, infeasible) != strings.HasPrefix(answer, "code = InvalidArgument ") {
			t.Errorf("troubleshoot.md has the event\n%s\nand %q stands before an InvalidArgument, and only there", event, infeasible)
		}
		if !found || !answers["rpc error: "+answer] {
			t.Errorf("troubleshoot.md has the event\n%s\nand the plugin answers\n%s", event, strings.Join(slices.Sorted(maps.Keys(answers)), "\n"))
		}
	}
	require.NoError(t, v.Unstage(t.Context()))
	for _, volume := range []*harness.Volume{v, raw, foreignData, blank, sealed} {
		require.NoError(t, volume.Delete(t.Context()))
	}
}

// TestStartsThatFail: what a plugin says that cannot start is among the headings of troubleshoot.md.
func TestStartsThatFail(t *testing.T) {
	t.Parallel()
	explained := quoted(t)
	const noDevices = `mount -t tmpfs none /dev && exec "$0" "$@"`
	for heading, command := range map[string][]string{
		"this node offers no loop devices":          {"unshare", "-m", "sh", "-c", noDevices, harness.Binary(t)},
		"was not found (Debian: apt-get install …)": {"env", "PATH=/no/such", harness.Binary(t)},
		"the directory is no pool, and it holds":    {harness.Binary(t)},
	} {
		p := harness.New(t)
		if strings.HasPrefix(heading, "the directory") {
			harness.Command(t, "install", "-D", "/dev/null", filepath.Join(p.PoolDir, "precious"))
		}
		result := harness.Run(t, nil, command[0], append(append(command[1:], "serve"), p.Flags()...)...)
		parts, is := explained[heading]
		if !is || result.Code == 0 || !says(result.Stderr, parts) {
			t.Errorf("%q: heading of troubleshoot.md: %t; the plugin ends with %+v", heading, is, result)
		}
	}
}

// less is a plugin in a shell that takes something away from it.
func less(t *testing.T, what, script string) *harness.Plugin {
	t.Helper()
	p := harness.New(t)
	program := filepath.Join(p.Dir, what)
	machine.WriteProgram(t, program, fmt.Sprintf("#!/bin/sh\n%s %s \"$@\"\n", script, harness.Binary(t)))
	p.Driver = &harness.Driver{Path: program, Flags: []string{"--pool-dir", p.PoolDir, "--pool-reserve", "0"}}
	p.Start(harness.Options{})
	return p
}

// stageAt stages a volume that it makes by a class with parameters, and takes it down again.
func stageAt(t *testing.T, p *harness.Plugin, parameters map[string]string) error {
	t.Helper()
	v := harness.NewVolume(t, p, "volume", harness.Shared("ext4"))
	made, err := p.Controller.CreateVolume(t.Context(), v.CreateRequest(64<<20, parameters))
	require.NoError(t, err)
	v.Context, v.Secrets = made.GetVolume().GetVolumeContext(), map[string]string{luks.PassphraseKey: "a passphrase"}
	err = v.Stage(t.Context())
	require.NoError(t, v.Unstage(t.Context()))
	require.NoError(t, v.Delete(t.Context()))
	return err
}

// withoutMapper takes the device mapper away, for where there is one.
const withoutMapper = `exec unshare -m sh -c 'test ! -e /sys/class/misc/device-mapper || { mount -t tmpfs -o ro none /dev/mapper && mount -t tmpfs none /sys/class/misc; } && exec "$@"' sh`
