package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

// report is all that was measured.
type report struct {
	scale
	machine     string
	calls       rounds
	busy        busyRounds
	programs    []programs
	profiles    []kernelProfile
	purposes    map[string]time.Duration // of the plugin's processor time in a cycle
	purposesOf  int                      // by so many callers
	memory      map[string]int64         // bytes that are live for volumes held, by purpose
	memoryOf    int                      // with so many of them
	memoryHoles int64                    // bytes between them
	crowd       crowdRounds
	heldCosts   []held
}

// rounds are the times of calls, by driver; a round each.
type rounds map[string][]*samples

func (r *rounds) add(name string, s *samples) {
	if *r == nil {
		*r = rounds{}
	}
	(*r)[name] = append((*r)[name], s)
}

// crowdRounds are rounds by where they were made.
type crowdRounds struct {
	places []string
	rounds map[string]rounds
}

func (c *crowdRounds) add(name, where string, s *samples) {
	if c.rounds == nil {
		c.rounds = map[string]rounds{}
	}
	if !slices.Contains(c.places, where) {
		c.places, c.rounds[where] = append(c.places, where), rounds{}
	}
	all := c.rounds[where]
	all.add(name, s)
}

// busyKey is a driver, a kind of cycle and a number of callers.
type busyKey struct {
	name, kind string
	callers    int
}

type busyRounds map[busyKey][]cost

func (b *busyRounds) add(name, kind string, callers int, c cost) {
	if *b == nil {
		*b = busyRounds{}
	}
	key := busyKey{name, kind, callers}
	(*b)[key] = append((*b)[key], c)
}

// programs are those that a cycle of a driver starts.
type programs struct{ name, cycle, started string }

// quantile returns the time within which so many of all are.
func quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// all are the times of a call in every round.
func all(of []*samples, call string) (times []time.Duration) {
	for _, s := range of {
		times = append(times, s.times[call]...)
	}
	return times
}

// spread is the median of some ratios, and their extremes.
func spread(ratios []float64) string {
	if len(ratios) == 0 {
		return "–"
	}
	slices.Sort(ratios)
	return fmt.Sprintf("%.2f (%.2f–%.2f)", median(ratios), ratios[0], ratios[len(ratios)-1])
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// ratios compares the medians of a call, round by round.
func ratios(a, b []*samples, call string) (of []float64) {
	for i := range min(len(a), len(b)) {
		if x, y := quantile(a[i].times[call], 0.5), quantile(b[i].times[call], 0.5); y > 0 {
			of = append(of, float64(x)/float64(y))
		}
	}
	return of
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/float64(time.Millisecond)) }

// brief is ms in at most four characters, up to 999 ms.
func brief(d time.Duration) string {
	text := ms(d)
	return strings.TrimSuffix(text[:min(len(text), 4)], ".")
}

var callNames = []string{"create", "stage, blank ext4", "stage, formatted ext4", "stage, formatted xfs", "publish", "publish, read-only",
	"publish again", "stats", "unpublish", "unstage", "unstage xfs", "delete"}

// podCalls are those that are measured in every crowd.
var podCalls = []string{"stage, formatted ext4", "publish", "publish, read-only", "publish again", "stats", "unpublish", "unstage"}

// Calls is the table of each call by one caller.
func (r *report) Calls() string {
	t := table{{"call", "floor", oursName, "usual", oursName + " / floor", oursName + " / usual"}}
	for _, call := range callNames {
		row := []string{call}
		for _, name := range []string{floorName, oursName, usualName} {
			times := all(r.calls[name], call)
			row = append(row, fmt.Sprintf("%s/%s/%s", brief(quantile(times, 0.5)), brief(quantile(times, 0.9)), brief(quantile(times, 0.99))))
		}
		row = append(row, spread(ratios(r.calls[oursName], r.calls[floorName], call)), spread(ratios(r.calls[oursName], r.calls[usualName], call)))
		t = append(t, row)
	}
	return t.String()
}

func (r *report) rate(name, kind string, callers int) float64 {
	var rates []float64
	for _, c := range r.busy[busyKey{name, kind, callers}] {
		rates = append(rates, c.rate())
	}
	return median(rates)
}

func (c cost) rate() float64 { return float64(c.cycles) / c.time.Seconds() }

func (c cost) per(d time.Duration) float64 {
	return float64(d) / float64(time.Millisecond) / float64(c.cycles)
}

// compare returns how a figure of the plugin stands to a peer's, with its spread over the rounds.
func (r *report) compare(peer, kind string, callers int, figure func(cost) float64) string {
	ours, peers := r.busy[busyKey{oursName, kind, callers}], r.busy[busyKey{peer, kind, callers}]
	var of []float64
	for i := range min(len(ours), len(peers)) {
		if y := figure(peers[i]); y > 0 {
			of = append(of, figure(ours[i])/y)
		}
	}
	return spread(of)
}

// Cycles is the table of cycles by many callers.
func (r *report) Cycles() string {
	t := table{{"cycles/s", "callers", "floor", "bare", oursName, "usual", oursName + " / floor", oursName + " / bare", oursName + " / usual"}}
	for _, kind := range []string{"formatted", "whole"} {
		for _, callers := range r.callers {
			row := []string{kind, fmt.Sprint(callers)}
			for _, name := range []string{floorName, bareName, oursName, usualName} {
				row = append(row, fmt.Sprintf("%.0f", r.rate(name, kind, callers)))
			}
			for _, peer := range []string{floorName, bareName, usualName} {
				row = append(row, r.compare(peer, kind, callers, cost.rate))
			}
			t = append(t, row)
		}
	}
	return t.String()
}

// Processor is the table of the processor time of a cycle.
func (r *report) Processor() string {
	t := table{{"ms of processor per cycle: own + programs", "callers", "floor", "bare", oursName, "usual", "own: " + oursName + " / bare"}}
	for _, kind := range []string{"formatted", "whole"} {
		for _, callers := range r.callers {
			row := []string{kind, fmt.Sprint(callers)}
			for _, name := range []string{floorName, bareName, oursName, usualName} {
				var own, programs []float64
				for _, c := range r.busy[busyKey{name, kind, callers}] {
					own, programs = append(own, c.per(c.own)), append(programs, c.per(c.helpers))
				}
				row = append(row, fmt.Sprintf("%.1f + %.1f", median(own), median(programs)))
			}
			t = append(t, append(row, r.compare(bareName, kind, callers, func(c cost) float64 { return c.per(c.own) })))
		}
	}
	return t.String()
}

// Programs is the table of the programs that a cycle starts.
func (r *report) Programs() string {
	t := table{{"a cycle", "driver", "starts"}}
	for _, p := range r.programs {
		started := p.started
		if started == "" {
			started = "none"
		}
		t = append(t, []string{p.cycle, p.name, started})
	}
	return t.String()
}

// Crowd is the table of how much slower calls are on a crowded node.
func (r *report) Crowd() string {
	none := r.crowd.rounds[r.crowd.places[0]]
	t := table{{"call, over the same with no others", "driver"}}
	t[0] = append(t[0], r.crowd.places[1:]...)
	for _, call := range podCalls {
		for _, name := range []string{oursName, floorName} {
			row := []string{call, name}
			base := quantile(all(none[name], call), 0.5)
			for _, place := range r.crowd.places[1:] {
				row = append(row, fmt.Sprintf("%.2f", float64(quantile(all(r.crowd.rounds[place][name], call), 0.5))/float64(base)))
			}
			t = append(t, row)
		}
	}
	repairs := []string{repairName + ", p50 in ms", oursName}
	for _, place := range r.crowd.places[1:] {
		repairs = append(repairs, ms(quantile(all(r.crowd.rounds[place][oursName], repairName), 0.5)))
	}
	undisturbed := quantile(all(none[oursName], repairName), 0.5)
	return append(t, repairs).String() + fmt.Sprintf("\nWith no others, a stage and two binds were repaired in %s ms.\n", ms(undisturbed))
}

// HeldCalls is the table of the calls with volumes held.
func (r *report) HeldCalls() string {
	t := table{{"p50 in ms", "driver"}}
	for _, h := range r.heldCosts {
		t[0] = append(t[0], fmt.Sprint(h.volumes, " held"))
	}
	for _, call := range podCalls {
		ours, floor := []string{call, oursName}, []string{call, floorName}
		for _, h := range r.heldCosts {
			ours = append(ours, ms(quantile(h.calls.times[call], 0.5)))
			floor = append(floor, ms(quantile(h.floor.times[call], 0.5)))
		}
		t = append(t, ours, floor)
	}
	return t.String()
}

// Held is the table of what it costs to hold volumes.
func (r *report) Held() string {
	t := table{
		{"volumes held"}, {"own processor time per cycle, ms"}, {fmt.Sprintf("processor at rest over %s, %% of a core", r.idle)},
		{"resident memory, MiB"}, {"one stage and its two binds repaired, ms (p50, worst)"}, {"one stage repaired, whose binds were left, ms (p50, worst)"},
		{"start until ready, ms"}, {"start until all are adopted, ms"},
	}
	for _, h := range r.heldCosts {
		for i, cell := range []string{
			fmt.Sprint(h.volumes), fmt.Sprintf("%.1f", h.cycle.per(h.cycle.own)), fmt.Sprintf("%.3f", 100*h.idleCPU.Seconds()/h.idle.Seconds()),
			fmt.Sprintf("%.1f", float64(h.rss)/(1<<20)), ms(quantile(h.repair, 0.5)) + ", " + ms(slices.Max(h.repair)), ms(quantile(h.repairStage, 0.5)) + ", " + ms(slices.Max(h.repairStage)),
			ms(h.ready), ms(h.adopted),
		} {
			t[i] = append(t[i], cell)
		}
	}
	last := r.heldCosts[len(r.heldCosts)-1]
	return t.String() + fmt.Sprintf("\nWith %d held, %d stages that were torn off at once were all back after %s ms.\n",
		last.volumes, last.repairOnceCount, ms(last.repairOnce))
}

// table is rows of cells; the first is the head.
type table [][]string

func (t table) String() string {
	var b strings.Builder
	for i, row := range t {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString(strings.Repeat("| --- ", len(row)) + "|\n")
		}
	}
	return b.String()
}

// machineFacts says what the figures were measured on.
func machineFacts(t *testing.T) string {
	t.Helper()
	var name unix.Utsname
	require.NoError(t, unix.Uname(&name))
	info, err := os.ReadFile("/proc/cpuinfo")
	require.NoError(t, err)
	_, model, _ := strings.Cut(string(info), "model name")
	model, _, _ = strings.Cut(strings.TrimLeft(model, "\t :"), "\n")
	return fmt.Sprintf("Linux %s, %d processors (%s), %s", unix.ByteSliceToString(name.Release[:]), runtime.NumCPU(), model, runtime.Version())
}

var page = template.Must(template.New("").Parse(`# Performance

Measured by ` + "`make bench`" + `, which writes this page anew, on
{{.Machine}}.
All drivers were measured in one run, in turn, {{.Rounds}} rounds; a ratio is made within a round, and told as median
(least–greatest).

- **floor**: one gRPC handler a call, which does the same by bare system calls, and writes one record. What is slower
  than this is the plugin's own doing.
- **bare**: the floor without records.
- **usual**: how other drivers do it, by k8s.io/mount-utils and losetup. It attaches or detaches one device at a time.

Volumes are thin files of 10 MiB (ext4) and 300 MiB (xfs) on the disk of the machine, the records are on a tmpfs.

## Each call, one caller

p50, p90 and p99 in milliseconds.

![Each call by one caller](performance-calls.svg)

{{.Calls}}
## Many callers

A *formatted* cycle is stage, publish, unpublish and unstage of a formatted ext4 volume; a *whole* one is a new volume's
life from create to delete, mkfs included.

![Cycles per second](performance-cycles.svg)

{{.Cycles}}
{{.Processor}}
{{.Programs}}
## Where the time goes

One caller. What is left of a cycle's time is the caller's own, or a wait for the disk and the kernel. System calls are
those of the driver and of the programs that it starts, those of threads that wait for work included.

{{.Profile}}
A profile of csi-node's own processor time, in cycles of formatted volumes by {{.PurposesOf}} callers:

{{.Purposes}}
The floor has the steps and gRPC, too, and leaves the rest out: it does not look before and after, writes one record of
a call and not one before the steps and one after, hands no call over to a worker that outlives the caller, and logs
nothing. That is what stands between the two, and no one part of it is the most.

## A crowded node

p50 of a call with so many other mounts, or other loop devices, over p50 without them.

{{.Crowd}}
## Volumes held

Each is staged and published. The calls are those for one more volume, by one caller; the floor holds none.

{{.HeldCalls}}
{{.Held}}
A profile of csi-node's memory with {{.MemoryOf}} held, after a collection:

{{.Memory}}
What is live lies among what was needed for a moment when it was made, and Go moves nothing: the holes are used again,
and not given back. In the first minute of rest the plugin collects once, gives back what it can, and compares the
attributes of all mounts once. After that it is woken by changes alone, and to look at the volumes again, at most two
of them in a second.
`))

// Machine and Rounds are for the page.
func (r *report) Machine() string { return r.machine }

// PurposesOf is by how many callers the profile was made.
func (r *report) PurposesOf() int { return r.purposesOf }

// Rounds is how often each was measured.
func (r *report) Rounds() int { return r.rounds }

// write writes the page and its charts into a directory.
func (r *report) write(dir string) error {
	var text bytes.Buffer
	if err := page.Execute(&text, r); err != nil {
		return err
	}
	calls := chart{title: "p50 of a call by one caller, ms", series: []string{floorName, oursName, usualName}}
	for _, call := range callNames {
		bar := group{name: call}
		for _, name := range calls.series {
			bar.values = append(bar.values, float64(quantile(all(r.calls[name], call), 0.5))/float64(time.Millisecond))
		}
		calls.groups = append(calls.groups, bar)
	}
	cycles := chart{title: "cycles per second", series: []string{floorName, bareName, oursName, usualName}}
	for _, kind := range []string{"formatted", "whole"} {
		for _, callers := range r.callers {
			bar := group{name: fmt.Sprintf("%s, %d callers", kind, callers)}
			for _, name := range cycles.series {
				bar.values = append(bar.values, r.rate(name, kind, callers))
			}
			cycles.groups = append(cycles.groups, bar)
		}
	}
	for name, content := range map[string]string{
		"performance.md": text.String(), "performance-calls.svg": calls.svg(), "performance-cycles.svg": cycles.svg(),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// chart is groups of horizontal bars, a bar a series.
type chart struct {
	title  string
	series []string
	groups []group
}

type group struct {
	name   string
	values []float64
}

var colours = map[string]string{floorName: "#9aa5b1", bareName: "#c3cad2", oursName: "#2f6fde", usualName: "#e08a2e"}

// svg draws the chart. It is readable on light and on dark ground.
func (c chart) svg() string {
	const left, width, thick, gap, top = 170, 560, 11, 12, 46
	largest := 0.0
	for _, g := range c.groups {
		largest = max(largest, slices.Max(g.values))
	}
	each := thick*len(c.series) + gap
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n",
		left+width+60, top+each*len(c.groups))
	b.WriteString("<style>text{fill:#24292f}@media(prefers-color-scheme:dark){text{fill:#d0d7de}}</style>\n")
	fmt.Fprintf(&b, `<text x="8" y="18" font-size="14" font-weight="bold">%s</text>`+"\n", c.title)
	for i, name := range c.series {
		x := left + i*110
		fmt.Fprintf(&b, `<rect x="%d" y="26" width="10" height="10" fill="%s"/><text x="%d" y="35">%s</text>`+"\n", x, colours[name], x+14, name)
	}
	for i, g := range c.groups {
		y := top + i*each
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", left-8, y+thick*len(c.series)/2+4, g.name)
		for j, value := range g.values {
			long := value / largest * width
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/><text x="%.1f" y="%d" font-size="9">%s</text>`+"\n",
				left, y+j*thick, long, thick-1, colours[c.series[j]], left+long+4, y+j*thick+9, short3(value))
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// short3 writes a figure with three digits.
func short3(value float64) string {
	switch {
	case value >= 100:
		return fmt.Sprintf("%.0f", value)
	case value >= 10:
		return fmt.Sprintf("%.1f", value)
	}
	return fmt.Sprintf("%.2f", value)
}
