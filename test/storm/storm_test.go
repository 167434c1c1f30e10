// Package storm throws random calls at the built csi-node binary on the real
// kernel, many at a time, and looks at what is there whenever it is quiet.
//
//	go test ./test/storm -storm.seed 7 -storm.calls 20000
package storm

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

var (
	seedFlag  = flag.Uint64("storm.seed", 0, "seed of the storm; 0: another one each time")
	callsFlag = flag.Int("storm.calls", 1000, "calls of the storm")
)

const (
	callers = 32
	gust    = 250 // calls between two looks
)

func TestMain(m *testing.M) { harness.Main(m) }

// Whatever is asked of a node, by however many callers at once, for however
// short a time: when it is quiet, each volume is as the last answer about it
// says, its data is there, and in the end plain calls leave nothing.
func TestStorm(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-storm.seed %d -storm.calls %d", seed, *callsFlag)
	address := harness.FreeAddress(t)
	s := &storm{
		Plugin: harness.Start(t, harness.Options{Flags: []string{"--http-endpoint", address}}),
		t:      t,
		random: rand.New(rand.NewPCG(seed, 0)),
		began:  time.Now(),
	}
	s.volumes = []*volume{
		s.volume("ext4-thick", "ext4", "thick", 32*mib), s.volume("ext4-thin", "ext4", "thin", 32*mib),
		s.volume("xfs-thick", "xfs", "thick", 320*mib), s.volume("xfs-thin", "xfs", "thin", 320*mib),
		s.volume("block-thick", "", "thick", 16*mib), s.volume("block-thin", "", "thin", 16*mib),
	}
	before := s.tree()
	goroutines := func() float64 { return harness.Metrics(t, address)["go_goroutines"] }
	atFirst := goroutines()
	for left := *callsFlag; left > 0 && !t.Failed(); left -= gust {
		s.blow(min(left, gust))
		s.lastWords()
		s.AwaitRest()
		s.look()
	}
	if t.Failed() {
		return // what is left is a consequence
	}
	s.restage()
	s.takeDown()
	s.mustBeClean(before)
	harness.Eventually(t, "no more goroutines than before the storm", func() bool { return goroutines() <= atFirst })
	t.Logf("%v", s.tally())
}

// storm is one run of the test.
type storm struct {
	*harness.Plugin
	t       *testing.T
	random  *rand.Rand // of the test's own goroutine
	began   time.Time
	volumes []*volume
}

// volume is one volume and what was asked of it.
type volume struct {
	name, fsType string // fsType "": a raw block device
	provisioning string
	bytes        int64
	stagings     []string // where it may be staged, as a rule at the first
	targets      []string // the last one read-only, as a rule

	mu    sync.Mutex
	calls []call

	// What was written into it, and which of the volumes of that name it was.
	text, created string
	looked        time.Duration // when it was last looked at, since the storm began
}

func (s *storm) volume(name, fsType, provisioning string, bytes int64) *volume {
	s.t.Helper()
	v := &volume{name: name, fsType: fsType, provisioning: provisioning, bytes: bytes}
	for _, staging := range []string{"globalmount", "elsewhere"} {
		path := filepath.Join(s.KubeletDir, "plugins", name, staging)
		must(s.t, os.MkdirAll(path, 0o750)) // as kubelet does
		v.stagings = append(v.stagings, path)
	}
	for pod := range 3 {
		dir := filepath.Join(s.KubeletDir, "pods", fmt.Sprint(pod), name)
		must(s.t, os.MkdirAll(dir, 0o750))
		v.targets = append(v.targets, filepath.Join(dir, "mount"))
	}
	return v
}

func (v *volume) data(s *storm) string { return filepath.Join(s.PoolDir, "volumes", v.name, "data") }

// blow lets all callers make so many calls between them.
func (s *storm) blow(calls int) {
	var group sync.WaitGroup
	for caller := range callers {
		random := rand.New(rand.NewPCG(s.random.Uint64(), 0))
		share := (calls + caller) / callers
		group.Go(func() {
			for range share {
				v := s.volumes[random.IntN(len(s.volumes))]
				ctx, cancel := patience(s.t.Context(), random)
				s.make(ctx, v, s.draw(v, random))
				cancel()
			}
		})
	}
	group.Wait()
}

// lastWords makes calls alone, as kubelet does until they are answered for
// good, so that it is known of half of the parts what they must be.
func (s *storm) lastWords() {
	for _, v := range s.volumes {
		s.word(v, ask{verb: create, bytes: v.bytes})
		if s.random.IntN(2) == 0 {
			s.word(v, ask{verb: stage, path: v.stagings[0]})
		}
		for _, path := range v.targets {
			verb := []verb{publish, unpublish, ""}[s.random.IntN(3)]
			if verb != "" {
				s.word(v, ask{verb: verb, path: path, staging: v.stagings[0], readOnly: path == v.targets[len(v.targets)-1]})
			}
		}
		if s.random.IntN(4) == 0 {
			for _, path := range v.targets {
				s.word(v, ask{verb: unpublish, path: path})
			}
			for _, path := range v.stagings {
				s.word(v, ask{verb: unstage, path: path})
			}
			if s.random.IntN(2) == 0 {
				s.word(v, ask{verb: remove})
			}
		}
	}
}

// word makes a call until its answer is final, and returns the last one.
func (s *storm) word(v *volume, a ask) (c call) {
	s.t.Helper()
	harness.Eventually(s.t, fmt.Sprintf("%s of %s at %s is answered for good", a.verb, v.name, a.path), func() bool {
		c = s.make(s.t.Context(), v, a)
		return final(c.code)
	})
	return c
}

// restage takes each volume down and up again and looks for its data.
func (s *storm) restage() {
	s.t.Helper()
	for _, v := range s.volumes {
		if v.text == "" {
			continue
		}
		s.clear(v)
		if s.generation(v) != v.created {
			continue // it is another one since the last look
		}
		for _, a := range []ask{{verb: stage, path: v.stagings[0]}, {verb: publish, path: v.targets[0], staging: v.stagings[0]}} {
			s.insist(v, a)
		}
		s.read(v, v.targets[0])
	}
}

// insist makes a call that must be answered OK in the end.
func (s *storm) insist(v *volume, a ask) {
	s.t.Helper()
	if c := s.word(v, a); c.err != nil {
		s.complain(v, "%s at %s: %v", a.verb, a.path, c.err)
	}
}

// clear takes a volume down as kubelet does.
func (s *storm) clear(v *volume) {
	s.t.Helper()
	for _, path := range v.targets {
		s.insist(v, ask{verb: unpublish, path: path})
	}
	for _, path := range v.stagings {
		s.insist(v, ask{verb: unstage, path: path})
	}
}

func (s *storm) takeDown() {
	s.t.Helper()
	for _, v := range s.volumes {
		s.clear(v)
		s.insist(v, ask{verb: remove})
	}
}

// mustBeClean fails if anything is left of the storm.
func (s *storm) mustBeClean(before []string) {
	s.t.Helper()
	if mounts, loops := s.Mounts(), s.Loops(); len(mounts)+len(loops) > 0 {
		s.t.Errorf("left: %q, %+v", mounts, loops)
	}
	if volumes := s.Status().Volumes; len(volumes) > 0 {
		s.t.Errorf("`csi-node status` still shows %+v", volumes)
	}
	if after := s.tree(); !slices.Equal(before, after) {
		s.t.Errorf("the directories are\n%q\nand were\n%q", after, before)
	}
}

// tree lists what is in the kubelet directory and in the pool.
func (s *storm) tree() []string {
	s.t.Helper()
	var all []string
	for _, root := range []string{s.KubeletDir, s.PoolDir} {
		must(s.t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			all = append(all, path)
			return err
		}))
	}
	return all
}

// tally counts the answers.
func (s *storm) tally() map[string]int {
	count := map[string]int{}
	for _, v := range s.volumes {
		for _, c := range v.calls {
			count[fmt.Sprintf("%s %s", c.verb, c.code)]++
		}
	}
	return count
}

// complain fails the test and tells what was asked of the volume lately.
func (s *storm) complain(v *volume, format string, args ...any) {
	s.t.Helper()
	s.t.Errorf("volume %s: %s\n%s", v.name, fmt.Sprintf(format, args...), v.story(60))
}

const mib = 1 << 20

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func mode(readOnly bool) *csi.VolumeCapability_AccessMode {
	if readOnly {
		return &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY}
	}
	return &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}
}
