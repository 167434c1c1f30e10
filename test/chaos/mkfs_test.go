package chaos

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// mkfsLog is what wrappers before the real mkfs programs have written: each of
// their runs, and what the pool said of the volume then.
type mkfsLog struct {
	t   testing.TB
	dir string
}

// wrapper tells of the beginning and the end of a run, each in one write. A run
// without an end was killed, with the plugin.
const wrapper = `#!/bin/bash
device=${@: -1}
backing=$(</sys/block/${device##*/}/loop/backing_file)
facts=$(tr -d '\n' <"${backing%%/data}/volume.json")
echo "begin $CHAOS_PROCESS $facts" >>%[1]q
%[2]q "$@"; code=$?
echo "end $CHAOS_PROCESS $code $facts" >>%[1]q
exit $code
`

// wrapMkfs puts wrappers into a directory for the PATH.
func wrapMkfs(t testing.TB, p *harness.Plugin) *mkfsLog {
	t.Helper()
	l := &mkfsLog{t: t, dir: filepath.Join(p.Dir, "bin")}
	must(t, os.Mkdir(l.dir, 0o750), os.WriteFile(l.file(), nil, 0o640))
	for _, name := range []string{"mkfs.ext4", "mkfs.xfs"} {
		real, err := exec.LookPath(name)
		must(t, err)
		machine.WriteProgram(t, filepath.Join(l.dir, name), fmt.Sprintf(wrapper, l.file(), real))
	}
	return l
}

func (l *mkfsLog) file() string { return filepath.Join(l.dir, "runs") }

// env puts the wrappers first and numbers a process of the plugin.
func (l *mkfsLog) env(process int) []string {
	return []string{"PATH=" + l.dir + ":" + os.Getenv("PATH"), fmt.Sprint("CHAOS_PROCESS=", process)}
}

// mkfsRun is one run of mkfs.
type mkfsRun struct {
	process string // of the plugin
	volume  facts  // when it began
	ended   bool
	code    string // the exit code of one that ended
}

// runs returns all runs by the generation of the volume, and how often each began.
func (l *mkfsLog) runs() map[string][]mkfsRun {
	l.t.Helper()
	raw, err := os.ReadFile(l.file())
	must(l.t, err)
	runs := map[string][]mkfsRun{}
	for line := range strings.Lines(string(raw)) {
		word, rest, _ := strings.Cut(line, " ")
		process, rest, _ := strings.Cut(rest, " ")
		code := ""
		if word == "end" {
			code, rest, _ = strings.Cut(rest, " ")
		}
		var f facts
		if err := json.Unmarshal([]byte(rest), &f); err != nil {
			l.t.Fatalf("the mkfs wrapper writes %q: %v", line, err)
		}
		if word == "begin" {
			runs[f.Created] = append(runs[f.Created], mkfsRun{process: process, volume: f})
			continue
		}
		last := &runs[f.Created][len(runs[f.Created])-1]
		last.ended, last.code = true, code
	}
	return runs
}

// check fails the test if a volume was formatted against the rules: without the
// mark, after a format that was completed, or twice by one process that had
// done it.
func (l *mkfsLog) check() {
	l.t.Helper()
	for created, runs := range l.runs() {
		for i, run := range runs {
			if !run.volume.Formatting || run.volume.Formatted != "" {
				l.t.Errorf("of the volume created at %s mkfs was run on %+v", created, run.volume)
			}
			if i > 0 && runs[i-1].process == run.process && runs[i-1].code == "0" {
				l.t.Errorf("of the volume created at %s a completed mkfs was repeated: %+v", created, runs)
			}
		}
	}
}
