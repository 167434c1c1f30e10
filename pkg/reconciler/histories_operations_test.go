package reconciler

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// An operation of a history is a line of words: the verb and its arguments.
//
//	volume a ext4            there is a volume, blank or with that file system
//	stage a ext4 ro in=5s    a call, which the next operation does not wait for
//	umount a 1               somebody unmounts what is at target 1; at 0 is the stage
//	fault bind a 1 fails 2   the next two binds at target 1 fail
type operation []string

func (o operation) String() string { return strings.Join(o, " ") }

// script is a history as text: its operations with "; " between them.
func script(history []operation) string {
	lines := make([]string, len(history))
	for i, o := range history {
		lines[i] = o.String()
	}
	return strings.Join(lines, "; ")
}

// parse reads a script; operations may also stand on lines of their own.
func parse(text string) ([]operation, error) {
	var history []operation
	for line := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ';' || r == '\n' }) {
		o := operation(strings.Fields(line))
		if len(o) == 0 {
			continue
		}
		if err := o.check(); err != nil {
			return nil, fmt.Errorf("operation %q: %w", o, err)
		}
		history = append(history, o)
	}
	return history, nil
}

// check says what is wrong with an operation.
func (o operation) check() error {
	g, known := grammar()[o[0]]
	if !known {
		return fmt.Errorf("unknown verb %q", o[0])
	}
	words := o[1:]
	for _, kind := range g.args {
		if kind == hows || kind == natures {
			for _, w := range words {
				if !kind.is(w) {
					return fmt.Errorf("unknown argument %q", w)
				}
			}
			return nil
		}
		if len(words) == 0 || !kind.is(words[0]) {
			return fmt.Errorf("a %s is missing", kind)
		}
		words = words[1:]
	}
	if len(words) > 0 {
		return fmt.Errorf("too many arguments: %q", words)
	}
	return nil
}

// argument is a kind of word.
type argument string

const (
	volumes   argument = "volume"
	places    argument = "place" // 0 is the staging path, 1 to 3 are targets
	targets   argument = "target"
	durations argument = "duration"
	numbers   argument = "number"
	contents  argument = "content"
	natures   argument = "list of natures" // none or more, the last argument
	calls     argument = "call"
	modes     argument = "mode"
	hows      argument = "list of words for how" // none or more, the last argument
)

func (a argument) is(word string) bool {
	switch a {
	case volumes:
		return word == "a" || word == "b"
	case places:
		return word == "0" || word == "1" || word == "2" || word == "3"
	case targets:
		return word != "0" && places.is(word)
	case durations:
		_, err := time.ParseDuration(word)
		return err == nil
	case numbers:
		_, err := strconv.ParseUint(word, 10, 64)
		return err == nil
	case contents:
		return slices.Contains([]string{"blank", "ext4", "xfs", "other"}, word)
	case natures:
		return slices.Contains([]string{"layer", "source", "shared", "exclusive", "noted"}, word)
	case calls:
		return slices.Contains(slices.Concat(mutators(), lookers(), trials()), op(word))
	case modes:
		return slices.Contains(faultModes, word)
	}
	key, value, given := strings.Cut(word, "=")
	switch key {
	case "in", "cancel":
		return given && durations.is(value)
	case "ext4", "xfs", "block", "open", "ro", "single", "noatime", "nokey", "badkey":
		return !given
	}
	return false
}

// faultModes: a look that "idles" comes back with nothing known; "final" fails with a class that kubelet takes for the end, "late"
// hangs as a system call does, and has its effect though the process was killed.
var faultModes = []string{"works", "fails", "final", "halfway", "idles", "crashes", "hangs", "late"}

// sentence is what one verb takes, and what it does to a run.
type sentence struct {
	args []argument
	do   func(y *history, o operation)
}

// grammar is the whole language, with onPlaces and onVolumes.
func grammar() map[string]sentence {
	all := map[string]sentence{
		"delays": {[]argument{numbers}, (*history).delays},
		"heal":   {[]argument{numbers}, (*history).heal}, // 0: --heal=false
		"reuse":  {nil, (*history).reuse},
		"volume": {[]argument{volumes, contents, natures}, (*history).add},

		"stage":     {[]argument{volumes, hows}, (*history).callVolume},
		"unstage":   {[]argument{volumes, hows}, (*history).callVolume},
		"publish":   {[]argument{volumes, targets, hows}, (*history).callTarget},
		"unpublish": {[]argument{volumes, targets, hows}, (*history).callTarget},
		"grow":      {[]argument{volumes, numbers, hows}, (*history).callSize}, // in GiB
		"retry":     {[]argument{volumes}, (*history).retry},
		"sleep":     {[]argument{durations}, (*history).pause},
		"await":     {nil, (*history).await}, // the answers to all calls

		"others":   {[]argument{numbers}, (*history).otherDevices}, // so many devices are those of other processes
		"umount-r": {[]argument{volumes}, (*history).umountAll},
		"pod-gone": {[]argument{places}, (*history).podGone},
		"pod-back": {[]argument{places}, (*history).podBack},

		"fault":      {[]argument{calls, volumes, places, modes, numbers, durations}, (*history).addFault},
		"unwritable": {[]argument{numbers}, (*history).unwritable}, // so many commits of the store fail
		"mend":       {nil, (*history).mend},
		"kill":       {nil, (*history).kill9},
		"stop":       {nil, (*history).terminate},
		"start":      {nil, (*history).up},
		"lose-store": {nil, (*history).loseStore}, // of a process that is down
		"reboot":     {nil, (*history).reboot},
	}
	for verb, change := range onPlaces {
		all[verb] = sentence{[]argument{volumes, places}, func(y *history, o operation) {
			y.tamper(o.volume(), func(*fakeVolume) []string { return change(y, o.path(2)) })
		}}
	}
	for verb, change := range onVolumes {
		all[verb] = sentence{[]argument{volumes}, func(y *history, o operation) {
			y.tamper(o.volume(), func(v *fakeVolume) []string { change(y, v); return nil })
		}}
	}
	return all
}

// generate makes the history of a seed, of at most 50 operations, and a few more where the
// facts about formats are notes.
func generate(seed uint64) []operation {
	g := &generator{random: rand.New(rand.NewPCG(seed, 2)), staged: map[string]string{}}
	if g.one(4) != 0 {
		g.say("delays %d", 1+g.one(1<<30))
	}
	if g.one(10) == 0 {
		g.say("heal 0")
	}
	for _, id := range []string{"a", "b"}[:1+g.one(2)] {
		kind := g.among("ext4", "ext4", "xfs", "block", "block")
		content := "blank"
		if kind != "block" && g.one(3) == 0 {
			content = g.among(kind, kind, "ext4", "other")
		}
		nature := g.among("", "", "", "layer", "layer", "layer shared exclusive", "shared", "source")
		if nature == "source" {
			kind, content = "source", "blank"
		}
		g.volumes = append(g.volumes, id)
		g.staged[id] = kind
		g.say("volume %s %s %s", id, content, nature)
	}
	for left := 5 + g.one(44-len(g.history)); left > 0 && len(g.history) < 49; left-- {
		g.next()
	}
	if seed%3 == 0 {
		g.random = rand.New(rand.NewPCG(seed, 3))
		g.noted()
	}
	if seed%8 == 1 {
		g.random = rand.New(rand.NewPCG(seed, 4))
		g.changing()
	}
	return g.history
}

// insert adds operations to a history after its volumes, between all others.
func (g *generator) insert(add func(id string)) {
	first := slices.IndexFunc(g.history, func(o operation) bool { return o[0] == "volume" }) + len(g.volumes)
	rest := g.history[first:]
	g.history = slices.Clone(g.history[:first])
	for _, o := range rest {
		add(g.volumes[g.one(len(g.volumes))])
		g.history = append(g.history, o)
	}
}

// noted makes the volumes of a history disks, which may read as zeros for a while.
func (g *generator) noted() {
	for i, o := range g.history {
		if o[0] == "volume" && !slices.Contains(o, "source") {
			g.history[i] = append(o, "noted")
		}
	}
	g.insert(func(id string) {
		switch g.one(12) {
		case 0, 1:
			g.say("zeros %s", id)
		case 2:
			calls := append(trials(), opBeginFormat, opFormat, opCreateLayer, opEndFormat)
			g.say("fault %s %s 0 %s %d 0s", calls[g.one(len(calls))], id, g.among("fails", "halfway", "crashes", "crashes", "late"), 1+g.one(2))
		}
	})
}

// changing makes a node give numbers of devices again, which it loses often, and moves the
// sources of volumes.
func (g *generator) changing() {
	if len(g.volumes) == 1 {
		g.history = slices.Insert(g.history, slices.IndexFunc(g.history, func(o operation) bool { return o[0] == "volume" }), operation{"volume", "b", "blank"})
		g.volumes, g.staged["b"] = append(g.volumes, "b"), "block"
	}
	g.insert(func(id string) {
		switch g.one(12) {
		case 0, 1:
			g.say("%s %s", g.among("losetup-d", "losetup-d", "losetup-v", "layer-d"), id)
		case 2:
			g.say("others %d", g.one(3))
		case 3, 4:
			g.say("publish %s %d %s", id, 1+g.one(3), g.staged[id])
		case 5:
			g.say("stage %s %s", id, g.staged[id])
		case 6:
			g.say("move %s", id)
		}
	})
	g.history = append([]operation{{"reuse"}}, g.history...)
}

// generator makes a history up as it goes along.
type generator struct {
	random  *rand.Rand
	history []operation
	volumes []string
	staged  map[string]string // by volume: how it is used, as a rule
}

func (g *generator) one(of int) int { return g.random.IntN(of) }

func (g *generator) among(words ...string) string { return words[g.one(len(words))] }

func (g *generator) say(format string, args ...any) {
	g.history = append(g.history, strings.Fields(fmt.Sprintf(format, args...)))
}

// next adds one operation: mostly a call as kubelet makes it, a pause, or
// something that goes wrong.
func (g *generator) next() {
	id := g.volumes[g.one(len(g.volumes))]
	place := func() int { return g.one(3) }
	target := func() int { return 1 + g.one(3) }
	switch n := g.one(100); {
	case n < 9:
		g.say("stage %s %s", id, g.how(id))
	case n < 24:
		g.say("publish %s %d %s", id, target(), g.how(id))
	case n < 32:
		g.say("unpublish %s %d %s", id, target(), g.patience())
	case n < 38:
		g.say("unstage %s %s", id, g.patience())
	case n < 41:
		g.say("grow %s %d %s", id, 1+g.one(4), g.patience())
	case n < 43:
		g.say("retry %s", id)
	case n < 58:
		g.say("sleep %s", g.pause())
	case n < 62:
		g.say("await")
	case n < 67:
		g.say("umount %s %d", id, place())
	case n < 68:
		g.say("umount-r %s", id)
	case n < 78:
		g.say("%s %s %d", g.among("rmdir", "litter", "cover", "cover", "uncover", "twice", "remount", "corrupt"), id, place())
	case n < 84:
		g.say("%s %s", g.among("readonly", "die", "die", "dirty", "losetup-d", "losetup-v", "layer-d", "unplug", "swap", "swap", "hold", "release", "private", "loop", "unloop"), id)
	case n < 86:
		g.say("%s %d", g.among("pod-gone", "pod-gone", "pod-back"), target())
	case n < 94:
		g.fault(id)
	case n < 95:
		g.say("unwritable %d", 1+g.one(3))
	case n < 96:
		g.say("mend")
	case n < 98:
		g.say("%s", g.among("kill", "stop"))
	case n < 99:
		g.say("%s", g.among("kill", "stop"))
		g.say("lose-store")
	default:
		g.say("reboot")
	}
}

// how is what is asked for: as a rule what the volume is used for.
func (g *generator) how(id string) string {
	how := g.staged[id]
	if g.one(15) == 0 {
		how = g.among("ext4", "xfs", "block")
	}
	if how == "source" {
		how = "open"
	}
	if g.one(6) == 0 {
		how += " ro"
	}
	if g.one(12) == 0 {
		how += " single"
	}
	if g.one(8) == 0 {
		how += " noatime"
	}
	if g.one(8) == 0 && how[0] != 'b' {
		how += " open"
	}
	if g.one(10) == 0 {
		how += g.among(" nokey", " nokey", " badkey")
	}
	return how + " " + g.patience()
}

// patience is how long a caller waits: two minutes unless it says so.
func (g *generator) patience() string {
	switch g.one(8) {
	case 0:
		return "in=" + g.pause()
	case 1:
		return "cancel=" + g.pause()
	}
	return ""
}

// pause is between some microseconds and some minutes, as likely long as short.
func (g *generator) pause() string {
	d := time.Duration(1+g.one(9)) * time.Microsecond
	for range g.one(9) {
		d *= 10
	}
	return d.String()
}

func (g *generator) fault(id string) {
	calls := append(mutators(), lookers()...)
	o := calls[g.one(len(calls))]
	mode := g.among(faultModes...)
	if o.reads() {
		mode = g.among("works", "fails", "fails", "hangs", "idles")
	}
	takes := "0s"
	if g.one(3) == 0 {
		takes = g.pause()
	}
	g.say("fault %s %s %d %s %d %s", o, id, g.one(3), mode, 1+g.one(4), takes)
}

// volume, place and the like are the arguments of an operation that is well formed.
func (o operation) volume() string { return o[1] }

func (o operation) path(at int) string {
	n, _ := strconv.Atoi(o[at])
	return pathOf(o[1], n)
}

// pathOf is the staging path, for 0, or that of a target.
func pathOf(id string, n int) string {
	if n == 0 {
		return stagePath(id)
	}
	return targetPath(id, n)
}

func (o operation) number(at int) int {
	n, _ := strconv.Atoi(o[at])
	return n
}

func (o operation) duration(at int) time.Duration {
	d, _ := time.ParseDuration(o[at])
	return d
}

// how is what a call asks for, and how long its caller waits.
type how struct {
	capability state.Capability
	readOnly   bool
	key        string // of the layer; empty: the call names none
	deadline   time.Duration
	cancel     time.Duration // after which the caller leaves; 0: never
}

func howOf(words []string) how {
	h := how{capability: mountCapability(), key: rightKey, deadline: 2 * time.Minute}
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		d, _ := time.ParseDuration(value)
		switch key {
		case "ext4", "xfs":
			h.capability.FSType = key
		case "block":
			h.capability.Access, h.capability.FSType = state.BlockAccess, ""
		case "open": // the fs type, after it was named
			h.capability.FSType = ""
		case "noatime":
			h.capability.Flags = []string{w}
		case "single":
			h.capability.Mode = "SINGLE_NODE_SINGLE_WRITER"
		case "ro":
			h.readOnly = true
		case "nokey":
			h.key = ""
		case "badkey":
			h.key = "wrong"
		case "in":
			h.deadline = d
		case "cancel":
			h.cancel = d
		}
	}
	return h
}
