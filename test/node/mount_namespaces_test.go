package node

import (
	"bufio"
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// A pod that holds the kubelet directory in a mount namespace of its own keeps
// a copy of the stage: unstaging frees that, and waits for files that are open.
// It is not parallel, nor is the next, because the namespace would copy the
// stages of other tests, too, just when they unstage them.
func TestUnstageFreesOtherNamespaces(t *testing.T) {
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))

	must(t, v.Stage(ctx))
	idle := startElsewhere(t, p, "")
	must(t, v.Unstage(ctx))
	mustHaveNoLoop(t, p)
	idle.end()

	must(t, v.Stage(ctx))
	file := filepath.Join(v.Staging, "file")
	write(t, file, "kept")
	reader := startElsewhere(t, p, file)
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := v.Unstage(short)
	if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
		t.Fatalf("while a file is open in another namespace NodeUnstageVolume answers %v", err)
	}
	mustRefuse(t, err, status.Code(err), v.ID, strconv.Itoa(reader.cmd.Process.Pid))
	reader.end()
	must(t, v.Unstage(ctx))
	v.End()
}

// Killed while it frees such a copy, the plugin frees it the next time.
func TestKillWhileOtherNamespacesAreFreed(t *testing.T) {
	for _, moment := range []string{"before", "after"} {
		t.Run(moment, func(t *testing.T) {
			p := harness.Start(t, harness.Options{Faults: true, Env: []string{"CSI_NODE_FAULT=" + moment + ":release=die"}})
			v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
			must(t, v.Stage(t.Context()))
			startElsewhere(t, p, "")
			ended := story{v: v, parts: []func(context.Context) error{v.Unstage}}
			if !tell(t, p, ended) {
				t.Errorf("the plugin never came to %s release", moment)
			}
			v.End()
		})
	}
}

// elsewhere is a process in a mount namespace of its own.
type elsewhere struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.Closer
}

// startElsewhere starts one that reads a file, if one is named, and keeps it open.
func startElsewhere(t *testing.T, p *harness.Plugin, file string) *elsewhere {
	t.Helper()
	script := `if [ -n "$1" ]; then exec 3<"$1"; fi; echo ready; read -r _`
	args := machine.InNamespace("private", p.Dir, script, file)
	cmd := exec.Command(args[0], args[1:]...)
	stdin, err := cmd.StdinPipe()
	must(t, err)
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	e := &elsewhere{t: t, cmd: cmd, stdin: stdin}
	t.Cleanup(e.end)
	_, err = bufio.NewReader(stdout).ReadString('\n')
	must(t, err)
	return e
}

func (e *elsewhere) end() {
	if e.stdin == nil {
		return
	}
	_ = e.stdin.Close() // ends the read
	_ = e.cmd.Wait()    // whose failure is its exit code
	e.stdin = nil
}
