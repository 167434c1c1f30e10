package bench

import (
	"bufio"
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/require"
)

// kernelProfile is what a cycle of a formatted volume asks of processor and kernel.
type kernelProfile struct {
	name         string
	took         time.Duration // for the caller
	user, system time.Duration
	ready        time.Duration      // that its threads could run, and had no processor
	calls        map[string]float64 // system calls, by name
}

// profileCycles tells for what the drivers need their time: the processor time of each in
// user and kernel mode, the wait for a processor, and the system calls, which strace counts
// in other cycles.
func profileCycles(t *testing.T, r *report) {
	for _, name := range []string{floorName, oursName, usualName} {
		n := start(t, name)
		v := n.formatted("profiled", "ext4")
		target := v.Target("pod")
		cycles := func() {
			for range r.profiled {
				n.must(newSamples().run(t.Context(), pod(v, target)))
			}
		}
		cycles() // which finds what later ones remember
		count := time.Duration(r.profiled)
		before, ready, began := n.ticks(), n.ready(), time.Now()
		cycles()
		p := kernelProfile{name: name, took: time.Since(began) / count}
		after := n.ticks()
		p.user, p.system, p.ready = (after[0]-before[0])/count, (after[1]-before[1])/count, (n.ready()-ready)/count
		p.calls = strace(t, n.PID(), cycles)
		for call := range p.calls {
			p.calls[call] /= float64(r.profiled)
		}
		r.profiles = append(r.profiles, p)
		n.must(v.Delete(t.Context()))
	}
}

// ready is how long the threads of the driver have been ready to run so far, and had no
// processor (/proc/PID/schedstat; Documentation/scheduler/sched-stats.rst of Linux).
func (n *node) ready() (sum time.Duration) {
	n.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", n.PID()))
	require.NoError(n.t, err)
	for _, thread := range threads {
		raw, err := os.ReadFile(thread)
		require.NoError(n.t, err)
		fields := strings.Fields(string(raw)) // on a processor, ready, turns
		waited, err := strconv.ParseInt(fields[1], 10, 64)
		require.NoError(n.t, err)
		sum += time.Duration(waited)
	}
	return sum
}

// strace counts the system calls of a process and of the programs that it starts, while
// work is done.
func strace(t *testing.T, pid int, work func()) map[string]float64 {
	t.Helper()
	summary := filepath.Join(t.TempDir(), "summary")
	cmd := exec.Command("strace", "-f", "-c", "-o", summary, "-p", strconv.Itoa(pid))
	told, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(told)
	for lines.Scan() && !strings.Contains(lines.Text(), " attached") {
		t.Log(lines.Text())
	}
	work()
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	for lines.Scan() { // else it waits for a reader
	}
	_ = cmd.Wait() // it ends by the signal
	text, err := os.ReadFile(summary)
	require.NoError(t, err)
	calls := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		// % time, seconds, usecs/call, calls, errors if there were any, syscall
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[len(fields)-1] == "total" {
			continue
		}
		if count, err := strconv.ParseFloat(fields[3], 64); err == nil {
			calls[fields[len(fields)-1]] += count
		}
	}
	if len(calls) == 0 {
		t.Fatalf("strace counted nothing: %s", text)
	}
	return calls
}

// profiledCalls is how many system calls have a row of their own.
const profiledCalls = 24

// Profile is the table of what a cycle asks of processor and kernel; the system calls are
// those of which the plugin makes most.
func (r *report) Profile() string {
	took, user, system := []string{"from the first call to the last answer, ms"}, []string{"own processor in user mode, ms"}, []string{"own processor in the kernel, ms"}
	ready, others := []string{"own threads ready, without a processor, ms"}, []string{"other system calls"}
	t := table{{"a cycle of a formatted volume"}, nil, nil, nil, nil}
	var most []string
	for _, p := range r.profiles {
		t[0], took, ready = append(t[0], p.name), append(took, ms(p.took)), append(ready, ms(p.ready))
		user, system = append(user, ms(p.user)), append(system, ms(p.system))
		if p.name == oursName {
			most = slices.SortedFunc(maps.Keys(p.calls), func(a, b string) int {
				return cmp.Or(cmp.Compare(p.calls[b], p.calls[a]), cmp.Compare(a, b))
			})
		}
	}
	t[1], t[2], t[3], t[4], most = took, user, system, ready, most[:min(len(most), profiledCalls)]
	for _, call := range most {
		row := []string{"`" + call + "`"}
		for _, p := range r.profiles {
			row = append(row, fmt.Sprintf("%.1f", p.calls[call]))
		}
		t = append(t, row)
	}
	for _, p := range r.profiles {
		rest := 0.0
		for call, count := range p.calls {
			if !slices.Contains(most, call) {
				rest += count
			}
		}
		others = append(others, fmt.Sprintf("%.1f", rest))
	}
	return append(t, others).String()
}
