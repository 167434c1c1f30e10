package bench

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// memoryPurposes are for what the plugin needs memory while it holds a volume.
var memoryPurposes = []purpose{
	{"what was last seen of it", []string{"(*Reconciler).lookAgain"}},
	{"the index of its paths", []string{"pkg/state/store.(*places)"}},
	{"what was asked, and the record of it", []string{"pkg/state.", "pkg/state/store.", "google.golang.org/", "pkg/nodeserver."}},
	{"its mounts, to notice a change", []string{"pkg/mounts."}},
	{"its device, and its directory in the pool", []string{"pkg/loop.", "pkg/devices"}},
	{"its worker, when it runs again, and what it does", []string{"pkg/reconciler."}},
}

// profileMemory tells for what the plugin needs memory with the middle number of volumes
// held, each staged and published.
func profileMemory(t *testing.T, r *report) {
	n, samples := startProfiled(t, "BENCH_MEMORY=1")
	profiles := 0
	add := func(sign int64) {
		n.AwaitRest()
		require.NoError(t, syscall.Kill(n.PID(), syscall.SIGUSR1))
		path := fmt.Sprint(samples, profiles)
		profiles++
		for _, s := range readProfile(t, path).Sample {
			r.memory[purposeOf(s, memoryPurposes, "other")] += sign * s.Value[len(s.Value)-1] // bytes in use
		}
		text, err := os.ReadFile(path + ".holes")
		require.NoError(t, err)
		holes, err := strconv.ParseInt(string(text), 10, 64)
		require.NoError(t, err)
		r.memoryHoles += sign * holes
	}
	hold := func(name string, count int) (made []*harness.Volume) {
		for i := range count {
			made = append(made, n.volume(fmt.Sprint(name, "-", i), "ext4"))
		}
		n.must(parallel(made, func(v *harness.Volume) error {
			return newSamples().run(t.Context(), life(v, v.Target("pod"))[:3])
		}))
		return made
	}
	r.memory, r.memoryOf = map[string]int64{}, r.held[len(r.held)/2]
	first := hold("first", 8) // what the first volumes need is not for each
	add(-1)
	volumes := hold("held", r.memoryOf)
	add(1)
	if r.memoryOf > 100 && len(r.memory) <= len(memoryPurposes) {
		t.Errorf("of all %d purposes only %v have a part: does the code have other names now?", len(memoryPurposes), r.memory)
	}
	n.must(parallel(append(first, volumes...), takeDown))
}

// Memory is the table of what the plugin needs memory for.
func (r *report) Memory() string {
	t := table{{"for", "bytes a volume"}}
	all := int64(0)
	row := func(name string, bytes int64) { t = append(t, []string{name, fmt.Sprint(bytes / int64(r.memoryOf))}) }
	for _, name := range mostFirst(r.memory) {
		row(name, r.memory[name])
		all += r.memory[name]
	}
	row("**live in all**", all)
	row("holes between them, in pages of Go's heap that are in use", r.memoryHoles)
	return t.String()
}

// MemoryOf is with how many volumes held the memory was profiled.
func (r *report) MemoryOf() int { return r.memoryOf }
