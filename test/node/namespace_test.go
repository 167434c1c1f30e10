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
)

// A pod that holds the kubelet directory in a mount namespace of its own keeps
// a copy of the stage: unstaging frees that, and waits for files that are open.
func TestUnstageFreesOtherNamespaces(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))

	must(t, v.stage(ctx))
	idle := startElsewhere(t, "")
	must(t, v.unstage(ctx))
	if loops := p.Loops(); len(loops) > 0 {
		t.Errorf("attached after NodeUnstageVolume: %+v", loops)
	}
	idle.end()

	must(t, v.stage(ctx))
	file := filepath.Join(v.staging, "file")
	write(t, file, "kept")
	reader := startElsewhere(t, file)
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := v.unstage(short)
	if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
		t.Fatalf("while a file is open in another namespace NodeUnstageVolume answers %v", err)
	}
	mustRefuse(t, err, status.Code(err), v.id, strconv.Itoa(reader.cmd.Process.Pid))
	reader.end()
	must(t, v.unstage(ctx))
	v.end()
}

// elsewhere is a process in a mount namespace of its own.
type elsewhere struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.Closer
}

// startElsewhere starts one that reads a file, if one is named, and keeps it open.
func startElsewhere(t *testing.T, file string) *elsewhere {
	t.Helper()
	script := `if [ -n "$1" ]; then exec 3<"$1"; fi; echo ready; read -r _`
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", file)
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
