package node

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// A wrong setup ends the plugin before it serves, with one line that says what
// is wrong and what to do.
func TestWrongSetupEndsThePlugin(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		setup func(t *testing.T, p *harness.Plugin) (flags, env []string)
		told  []string
	}{
		{"a flag that there is not", flags("--nonsense"), []string{"--nonsense", "--help"}},
		{"a relative endpoint", flags("--endpoint", "csi.sock"), []string{"--endpoint", "unix:///"}},
		{"a relative endpoint of unix", flags("--endpoint", "unix://csi.sock"), []string{"--endpoint", "absolute"}},
		{"an endpoint of TCP", flags("--endpoint", "tcp://127.0.0.1:1"), []string{"--endpoint", "unix:///"}},
		{"an HTTP endpoint that is none", flags("--http-endpoint", "nonsense"), []string{"--http-endpoint", "nonsense"}},
		{"an endpoint in a missing directory", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			return []string{"--endpoint", "unix://" + filepath.Join(p.Dir, "missing", "csi.sock")}, nil
		}, []string{"--endpoint", "missing", "directory must exist"}},
		{"an endpoint in the environment", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			return nil, []string{"CSI_ENDPOINT=tcp://nonsense"} // and not in the flags, see below
		}, []string{"tcp://nonsense", "unix:///"}},
		{"an endpoint that another process serves", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			listener, err := net.Listen("unix", p.Socket)
			must(t, err)
			t.Cleanup(func() { _ = listener.Close() })
			return nil, nil
		}, []string{"another process", "stop"}},
		{"an endpoint that is a file", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			write(t, p.Socket, "not a socket")
			return nil, nil
		}, []string{"not a socket", "remove"}},
		{"no mkfs.xfs", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			return nil, []string{"PATH=" + pathWithout(t, p, "mkfs.xfs")}
		}, []string{"mkfs.xfs", "xfsprogs"}},
		{"no mkfs.btrfs", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			return nil, []string{"PATH=" + pathWithout(t, p, "mkfs.btrfs")}
		}, []string{"mkfs.btrfs", "btrfs-progs"}},
		{"no mkfs.ext4", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			return nil, []string{"PATH=" + pathWithout(t, p, "mkfs.ext4")}
		}, []string{"mkfs.ext4", "e2fsprogs"}},
		{"no kubelet directory", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			return []string{"--kubelet-dir", filepath.Join(p.Dir, "missing")}, nil
		}, []string{"--kubelet-dir", "missing"}},
		{"a state directory that is a file", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			write(t, p.StateDir, "not a directory")
			return nil, nil
		}, []string{"--state-dir", "state"}},
		{"a pool whose disk is not mounted", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			p.Start(harness.Options{})
			p.Terminate()
			must(t, os.RemoveAll(p.PoolDir))
			makeDir(t, p.PoolDir)
			return nil, nil
		}, []string{"--pool-dir", "mount"}},
		{"a pool among other files", func(t *testing.T, p *harness.Plugin) ([]string, []string) {
			makeDir(t, p.PoolDir)
			write(t, filepath.Join(p.PoolDir, "precious"), "data")
			return nil, nil
		}, []string{"--pool-dir", "pool"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := harness.New(t)
			more, env := row.setup(t, p)
			args := append([]string{"serve"}, p.Flags()...)
			if len(env) > 0 && strings.HasPrefix(env[0], "CSI_ENDPOINT=") {
				args = append(args[:1], args[3:]...)
			}
			result := harness.Run(t, env, harness.Binary(t), append(args, more...)...)
			if result.Code == 0 {
				t.Error("exit code 0")
			}
			var lines []string
			for _, line := range strings.Split(strings.TrimRight(result.Stderr, "\n"), "\n") {
				if !logLine.MatchString(line) {
					lines = append(lines, line)
				}
			}
			if len(lines) != 1 || !strings.HasPrefix(lines[0], "csi-node: ") {
				t.Fatalf("on stderr, want one line that starts with csi-node:\n%s", result.Stderr)
			}
			for _, word := range row.told {
				if !strings.Contains(lines[0], word) {
					t.Errorf("it does not say %q: %s", word, lines[0])
				}
			}
			if mounts, loops := p.Mounts(), p.Loops(); len(mounts)+len(loops) > 0 {
				t.Errorf("left: %q, %+v", mounts, loops)
			}
		})
	}
}

// logLine is how klog begins a line.
var logLine = regexp.MustCompile(`^[IWEF]\d{4} `)

func flags(more ...string) func(*testing.T, *harness.Plugin) ([]string, []string) {
	return func(*testing.T, *harness.Plugin) ([]string, []string) { return more, nil }
}

// pathWithout is a PATH of everything that the plugin runs but one program.
func pathWithout(t *testing.T, p *harness.Plugin, missing string) string {
	t.Helper()
	dir := filepath.Join(p.Dir, "bin")
	makeDir(t, dir)
	for _, name := range []string{"mkfs.ext4", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs"} {
		if name == missing {
			continue
		}
		path, err := exec.LookPath(name)
		must(t, err)
		must(t, os.Symlink(path, filepath.Join(dir, name)))
	}
	return dir
}
