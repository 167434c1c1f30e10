package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/pprof/profile"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// profiler is compiled into a plugin that is to be profiled: SIGUSR1 begins and SIGUSR2
// ends a profile of its processor time. With BENCH_MEMORY each SIGUSR1 writes one of what
// is live in its memory. The file appears when it is whole.
const profiler = `package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/pprof"
	"syscall"
)

func init() {
	path := os.Getenv("BENCH_PROFILE")
	begin, end := make(chan os.Signal, 1), make(chan os.Signal, 1)
	if os.Getenv("BENCH_MEMORY") != "" {
		runtime.MemProfileRate = 4096
		signal.Notify(begin, syscall.SIGUSR1)
		go profileMemory(path, begin)
		return
	}
	signal.Notify(begin, syscall.SIGUSR1)
	signal.Notify(end, syscall.SIGUSR2)
	go func() {
		<-begin
		f, err := os.Create(path + ".part")
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			panic(err)
		}
		<-end
		pprof.StopCPUProfile()
		if err := os.Rename(path+".part", path); err != nil {
			panic(err)
		}
	}()
}

func profileMemory(path string, asked <-chan os.Signal) {
	for i := 0; ; i++ {
		<-asked
		runtime.GC()
		var heap runtime.MemStats
		runtime.ReadMemStats(&heap)
		err := os.WriteFile(fmt.Sprint(path, i, ".holes"), []byte(fmt.Sprint(heap.HeapInuse-heap.HeapAlloc)), 0o600)
		if err != nil {
			panic(err)
		}
		f, err := os.Create(path + ".part")
		if err == nil {
			err = pprof.Lookup("heap").WriteTo(f, 0)
		}
		if err == nil {
			err = os.Rename(path+".part", fmt.Sprint(path, i))
		}
		if err != nil {
			panic(err)
		}
	}
}
`

// purpose is for what the plugin needs something. A sample of a profile counts for the first
// one of which a text is in the name of a function on its stack.
type purpose struct {
	name      string
	functions []string
}

// purposes are for what the plugin needs the processor.
var purposes = []purpose{
	{"memory: to allocate and to collect it", []string{"runtime.mallocgc", "runtime.growslice", "runtime.gcBgMarkWorker", "runtime.gcAssist", "runtime.bgsweep", "runtime.bgscavenge"}},
	{"the log", []string{"k8s.io/klog"}},
	{"records: what is asked and begun, and seen to hold", []string{"pkg/state/store."}},
	{"to plan", []string{"reconciler.MakePlan", "reconciler.makePlan"}},
	{"to look: device, mounts, file system", []string{"(*Reconciler).lookAgain"}},
	{"steps: attach, mount, bind, and back", []string{"(*Reconciler).run"}},
	{"events of the kernel", []string{"pkg/mounts.(*Watcher)", "pkg/mounts.(*fanotify)", "pkg/uevents."}},
	{"the reconciler around these", []string{"pkg/reconciler."}},
	{"to check a request", []string{"pkg/nodeserver.", "pkg/driver."}},
	{"gRPC", []string{"google.golang.org/grpc"}},
}

const otherPurpose = "the scheduler of Go, and the rest"

// purposeOf returns what a sample counts for: one of some purposes, or other.
func purposeOf(s *profile.Sample, purposes []purpose, other string) string {
	for _, p := range purposes {
		for _, location := range s.Location {
			for _, line := range location.Line {
				if slices.ContainsFunc(p.functions, func(part string) bool { return strings.Contains(line.Function.Name, part) }) {
					return p.name
				}
			}
		}
	}
	return other
}

// profileProcessor tells for what the plugin needs the processor in a cycle of a formatted
// volume, by the middle number of callers.
func profileProcessor(t *testing.T, r *report) {
	n, samples := startProfiled(t)
	callers := r.callers[len(r.callers)/2]
	each := max(1, r.profiled*4/callers)
	volumes := func(caller int) func(int) []step {
		v := n.volume(fmt.Sprint("caller-", caller), "ext4")
		return func(int) []step { return pod(v, v.Target("pod")) }
	}
	for caller := range callers {
		n.formatted(fmt.Sprint("caller-", caller), "ext4")
	}
	require.NoError(t, syscall.Kill(n.PID(), syscall.SIGUSR1))
	n.busy(callers, each, volumes, nil)
	require.NoError(t, syscall.Kill(n.PID(), syscall.SIGUSR2))
	r.purposes, r.purposesOf = map[string]time.Duration{}, callers
	all := readProfile(t, samples).Sample
	for _, s := range all {
		r.purposes[purposeOf(s, purposes, otherPurpose)] += time.Duration(s.Value[1]) / time.Duration(callers*each)
	}
	if len(all) > 1000 && len(r.purposes) <= len(purposes) {
		t.Errorf("of all %d purposes only %v have a part: does the code have other names now?", len(purposes), r.purposes)
	}
	for caller := range callers {
		n.must(n.volume(fmt.Sprint("caller-", caller), "ext4").Delete(t.Context()))
	}
}

// startProfiled starts the plugin with the profiler in it, and returns where profiles appear.
func startProfiled(t *testing.T, env ...string) (n *node, samples string) {
	t.Helper()
	dir := t.TempDir()
	binary := profiledBinary(t, dir)
	samples = filepath.Join(dir, "samples")
	n = start(t, oursName) // for its directories
	n.Terminate()
	n.Driver = &harness.Driver{Path: binary, Flags: []string{"--pool-dir", n.PoolDir, "--pool-reserve", "0"}}
	n.Start(harness.Options{Env: append(env, "BENCH_PROFILE="+samples), Flags: []string{"--v", "2"}})
	return n, samples
}

// profiledBinary builds the plugin with the profiler in it.
func profiledBinary(t *testing.T, dir string) string {
	t.Helper()
	source, overlay, binary := filepath.Join(dir, "profiler.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "csi-node")
	require.NoError(t, os.WriteFile(source, []byte(profiler), 0o600))
	place, err := filepath.Abs("../../cmd/csi-node/bench_profiler.go")
	require.NoError(t, err)
	replaced, err := json.Marshal(map[string]any{"Replace": map[string]string{place: source}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(overlay, replaced, 0o600))
	if out, err := exec.Command("go", "build", "-overlay", overlay, "-o", binary, "../../cmd/csi-node").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return binary
}

// readProfile reads a profile as soon as it is whole.
func readProfile(t *testing.T, path string) (p *profile.Profile) {
	t.Helper()
	harness.Eventually(t, "a profile is written", func() bool {
		f, err := os.Open(path)
		if err != nil {
			return false
		}
		defer f.Close()
		p, err = profile.Parse(f)
		return err == nil
	})
	return p
}

// Purposes is the table of what the plugin needs the processor for.
func (r *report) Purposes() string {
	all := time.Duration(0)
	for _, took := range r.purposes {
		all += took
	}
	t := table{{"for", "ms a cycle", "%"}}
	for _, name := range mostFirst(r.purposes) {
		t = append(t, []string{name, ms(r.purposes[name]), fmt.Sprintf("%.0f", 100*float64(r.purposes[name])/float64(max(1, all)))})
	}
	return t.String()
}

// mostFirst returns names in the order of what they need.
func mostFirst[N cmp.Ordered](needs map[string]N) []string {
	return slices.SortedFunc(maps.Keys(needs), func(a, b string) int { return cmp.Compare(needs[b], needs[a]) })
}
