package node

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// Who reads the log, such as a container runtime, may stop reading or end: calls are answered, and SIGTERM ends the
// plugin.
func TestLogIsReadByNobody(t *testing.T) {
	t.Parallel()
	for name, becomes := range map[string]func(reader *os.File) error{
		"it does not read": func(*os.File) error { return nil },
		"it ends":          (*os.File).Close,
	} {
		t.Run(name, func(t *testing.T) {
			p := harness.New(t)
			fifo, program := filepath.Join(p.Dir, "log"), filepath.Join(p.Dir, "program")
			must(t, unix.Mkfifo(fifo, 0o600))
			reader, err := os.OpenFile(fifo, os.O_RDWR, 0)
			must(t, err)
			t.Cleanup(func() { _ = reader.Close() }) // again, perhaps
			_, err = unix.FcntlInt(reader.Fd(), unix.F_SETPIPE_SZ, 4096)
			must(t, err)
			machine.WriteProgram(t, program, fmt.Sprintf("#!/bin/sh\nexec %s \"$@\" 2>%s\n", harness.Binary(t), fifo))
			p.Driver = &harness.Driver{Path: program, Flags: []string{"--pool-dir", p.PoolDir, "--pool-reserve", "0"}}
			p.Start(harness.Options{})
			must(t, becomes(reader))
			for range 100 { // each is a line of the log
				_, err := p.Identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
				must(t, err)
			}
			p.Terminate()
		})
	}
}
