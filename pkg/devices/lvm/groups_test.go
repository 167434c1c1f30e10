package lvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// reportOf is what lvm prints of the group vg0 with so many thick volumes of the driver d.
func reportOf(t *testing.T, volumes int) []byte {
	t.Helper()
	var rows []row
	for i := range volumes {
		rows = append(rows, row{fmt.Sprintf("pvc-%d", i), fmt.Sprintf("v%031d", i), 1, fmt.Sprintf("csi-node.driver=d,csi-node.name=pvc-%d", i)})
	}
	return reportWith(t, 7, rows)
}

// row is a thick volume in a report.
type row struct {
	name, uuid string
	extents    int64
	tags       string
}

// reportWith is what lvm prints of the group vg0 with those volumes.
func reportWith(t *testing.T, sequence int, volumes []row) []byte {
	t.Helper()
	var lvs, segs []string
	for _, v := range volumes {
		lvs = append(lvs, fmt.Sprintf(`{"lv_name":%q, "lv_uuid":%q, "lv_size":"%d", "lv_attr":"-wi-------", "lv_active":"", "lv_autoactivation":"", "lv_suspended":"", "lv_tags":%q, "lv_layout":"linear", "pool_lv":"", "data_percent":"", "metadata_percent":"", "copy_percent":"", "lv_health_status":""}`, v.name, v.uuid, v.extents<<22, v.tags))
		segs = append(segs, fmt.Sprintf(`{"lv_uuid":%q, "segtype":"linear", "stripes":"1", "stripe_size":"0"}`, v.uuid))
	}
	text := fmt.Sprintf(`{"report": [{"vg": [{"vg_name":"vg0", "vg_uuid":%q, "vg_seqno":"%d", "vg_extent_size":"4194304", "vg_extent_count":"1000", "vg_free_count":"500", "vg_missing_pv_count":"0"}],
		"pv": [{"pv_name":"/dev/sdb", "pv_pe_count":"1000", "pv_pe_alloc_count":"500", "pv_allocatable":"allocatable", "pv_missing":""}],
		"lv": [%s], "seg": [%s]}]}`, group, sequence, strings.Join(lvs, ","), strings.Join(segs, ","))
	if !json.Valid([]byte(text)) {
		t.Fatal(text)
	}
	return []byte(text)
}

// newFake returns a backend of the group vg0, and others, that runs no lvm, but counts what it would run.
func newFake(t *testing.T, env devices.Environment, lockDir string, report []byte, groups ...string) (b *Backend, ran *atomic.Int64) {
	t.Helper()
	b, err := New(strings.Join(append([]string{"vg0"}, groups...), ","), env)
	require.NoError(t, err)
	ran = &atomic.Int64{}
	b.lockDir, b.flush = lockDir, func([]string) error { return nil }
	b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
		if ran.Add(1); args[0] != "fullreport" {
			return nil, fmt.Errorf("nobody has asked for lvm %q", args)
		}
		return report, nil
	}
	b.disks = func(context.Context) ([]disk, error) {
		return []disk{{path: "/dev/sdb", label: label{uuid: "disk", group: "vg0", groupUUID: group, members: []string{"disk"}}}}, nil
	}
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b, ran
}

// All volumes of a group are looked at by one report, however many look at once, and
// those that are at rest by none.
func TestOneReportForAll(t *testing.T) {
	const volumes = 500
	report, lockDir, stateDir := reportOf(t, volumes), t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		b, ran := newFake(t, devices.Environment{DriverName: "d", StateDir: stateDir}, lockDir, report)
		ctx := t.Context()
		findAll := func() {
			t.Helper()
			found := make(chan error)
			for i := range volumes {
				go func() {
					d, err := b.Find(ctx, devices.Volume{ID: volumeID{group, fmt.Sprintf("pvc-%d", i)}.String()})
					if d.Missing || d.Err != nil || d.Capacity != 4<<20 || d.State != state.DeviceAbsent {
						err = errors.Join(err, fmt.Errorf("volume %d: %+v", i, d))
					}
					found <- err
				}()
			}
			for range volumes {
				if err := <-found; err != nil {
					t.Error(err)
				}
			}
		}
		findAll()
		if ran.Load() != 1 {
			t.Errorf("to find %d volumes, lvm was run %d times", volumes, ran.Load())
		}
		attached, err := b.Attached(ctx)
		ids, listErr := b.ListVolumes(ctx)
		_, measureErr := b.Measure(ctx)
		if err := errors.Join(err, listErr, measureErr, b.Check(ctx)); err != nil || len(attached) != 0 || len(ids) != volumes {
			t.Errorf("%d attached, %d volumes (%v)", len(attached), len(ids), err)
		}
		time.Sleep(24 * time.Hour)
		findAll()
		if ran.Load() != 1 {
			t.Errorf("of volumes at rest, lvm was run %d times", ran.Load()-1)
		}
		_, err = b.ListVolumes(ctx) // as others may have made some
		if err != nil || ran.Load() != 2 {
			t.Errorf("to list the volumes, lvm was run %d times (%v)", ran.Load()-1, err)
		}
	})
}

// A volume whose creation was cut short is made anew when it is asked for again; one that
// somebody has had never is, whatever is seen of its parts.
func TestUnfinishedVolumeIsMadeAnew(t *testing.T) {
	made := string(reportOf(t, 1))
	_, row, _ := strings.Cut(made, `{"lv_name":"pvc-0"`)
	row, _, _ = strings.Cut(row, "}")
	for tag, want := range map[string][]string{",csi-node.unzeroed": {"lvremove", "lvcreate"}, ",csi-node.formatted=ext4": nil} {
		tagged := strings.Replace(made, "csi-node.name=pvc-0", "csi-node.name=pvc-0"+tag, 1)
		cut := strings.Replace(tagged, `{"lv_name":"pvc-0"`, `{"lv_name":"pvc-0_rmeta_0"`+row+`}, {"lv_name":"pvc-0"`, 1)
		b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
		report, ran := cut, []string(nil)
		b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
			switch args[0] {
			case "fullreport":
				return []byte(report), nil
			case "lvremove":
				report = string(reportOf(t, 0))
			case "lvcreate":
				report = tagged
			}
			ran = append(ran, args[0])
			return nil, nil
		}
		_, err := b.ListVolumes(t.Context()) // so that a report is at hand
		require.NoError(t, err)
		v, err := b.CreateVolume(t.Context(), devices.CreateRequest{Name: "pvc-0", Parameters: map[string]string{groupKey: "vg0"}, Size: devices.SizeRange{Required: 1}})
		if err != nil || v.ID != (volumeID{group, "pvc-0"}).String() || !slices.Equal(ran, want) {
			t.Errorf("%s: lvm was run for %q, and the answer is %+v, %v", tag, ran, v, err)
		}
	}
}

// A volume that names its group does not wait for another one that hangs; and what is
// wrong with that is told with what is wrong with others.
func TestHungGroupHoldsUpNoOther(t *testing.T) {
	for _, hangs := range []string{"lvm", "flush"} {
		t.Run(hangs, func(t *testing.T) { hungGroupHoldsUpNoOther(t, hangs == "flush") })
	}
}

func hungGroupHoldsUpNoOther(t *testing.T, flush bool) {
	report, lockDir, stateDir := reportOf(t, 1), t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: stateDir}, lockDir, report, "dead", "broken")
		slices.Reverse(b.names)
		answered := make(chan struct{})
		lvm := b.lvm
		b.lvm = func(ctx context.Context, args ...string) ([]byte, error) {
			switch {
			case slices.Contains(args, "dead") && !flush:
				<-answered
			case slices.Contains(args, "broken"):
				return nil, errors.New("it is broken")
			}
			return lvm(ctx, args...)
		}
		b.flush = func(paths []string) error {
			if slices.Contains(paths, "/dev/dead") {
				<-answered
			}
			return nil
		}
		b.disks = func(context.Context) (all []disk, _ error) {
			for _, name := range b.names {
				all = append(all, disk{path: "/dev/" + name, label: label{uuid: name, group: name, groupUUID: group, members: []string{name}}})
			}
			return all, nil
		}
		begin := time.Now()
		d, err := b.Find(t.Context(), devices.Volume{ID: volumeID{group, "pvc-0"}.String(), Context: map[string]string{groupKey: "vg0"}})
		if err != nil || d.Err != nil || d.Missing || time.Since(begin) != 0 {
			t.Errorf("found is %+v after %s (%v)", d, time.Since(begin), err)
		}
		require.Class(t, b.Check(t.Context()), state.DeadlineExceeded, "dead has not answered since ", "it is broken")
		b.dropReport("vg0")
		limited, end := context.WithTimeout(t.Context(), 10*time.Second)
		defer end()
		require.Class(t, b.Check(limited), state.DeadlineExceeded, "dead has not answered since ")
		_, err = b.CreateVolume(limited, devices.CreateRequest{Name: "more", Parameters: map[string]string{groupKey: "dead"}, Size: devices.SizeRange{Required: 1}})
		require.Class(t, err, state.DeadlineExceeded, "dead has not answered since ")
		if limited.Err() != nil {
			t.Error("callers are told only when they do not wait any more")
		}
		close(answered)
	})
}

// While a disk of a group is away nothing is changed there: LVM would note it as lost. What
// an interrupted change has left is cleaned up when it is back.
func TestIncompleteGroupIsNotChanged(t *testing.T) {
	left := strings.Replace(string(reportOf(t, 1)), "csi-node.name=pvc-0", "csi-node.name=pvc-0,csi-node.formatting", 1)
	b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
	var ran []string
	b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
		if args[0] != "fullreport" {
			ran = append(ran, args[0])
		}
		return []byte(left), nil
	}
	here := disk{path: "/dev/sdb", label: label{uuid: "here", group: "vg0", groupUUID: group, members: []string{"here", "away"}}}
	away := disk{path: "/dev/sdc", label: label{uuid: "away", group: "vg0", groupUUID: group, members: []string{"here", "away"}}}
	theirs := away
	theirs.theirs = errors.New("it was a raw volume")
	ctx, v := t.Context(), devices.Volume{ID: volumeID{group, "pvc-0"}.String()}
	for _, c := range []struct {
		disks []disk
		words string
	}{
		{[]disk{here}, "lacks 1 of its disks: it is not changed"},
		{[]disk{here, {path: "/dev/sdx", silent: true}}, "lacks 1 of its disks (it may be on disks that do not answer: /dev/sdx): it is not changed"},
		{[]disk{here, theirs}, "lacks 1 of its disks (a pod's disk does not count: it was a raw volume): it is not changed"},
	} {
		b.disks = func(context.Context) ([]disk, error) { return []disk{here, away}, nil }
		_, err := b.ListVolumes(ctx) // so that the disks and a report are at hand
		require.NoError(t, err)
		b.disks = func(context.Context) ([]disk, error) { return c.disks, nil }
		require.Class(t, b.EndFormat(ctx, v, "ext4"), state.Unavailable, c.words)
		require.Class(t, b.DeleteVolume(ctx, v), state.Unavailable, c.words)
		if len(ran) > 0 {
			t.Fatalf("lvm was run for %q", ran)
		}
	}
	b.disks = func(context.Context) ([]disk, error) { return []disk{here, away}, nil }
	require.NoError(t, b.EndFormat(ctx, v, "ext4"))
	if !slices.Equal(ran, []string{"lvchange"}) {
		t.Errorf("lvm was run for %q", ran)
	}
}

// What is zeroed because of a tag has the tag now: its disks may have been used on another
// node since the last report.
func TestZeroesByTagsOfNow(t *testing.T) {
	for tag, zeroes := range map[string]func(context.Context, *Backend, devices.Volume) error{
		"csi-node.unzeroed": func(ctx context.Context, b *Backend, v devices.Volume) error { return b.Attach(ctx, v, false) },
		"csi-node.formatting": func(ctx context.Context, b *Backend, v devices.Volume) error {
			err := b.Erase(ctx, v)
			require.Class(t, err, state.FailedPrecondition, "no format was begun")
			return err
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
			report, ran := strings.Replace(string(reportOf(t, 1)), "csi-node.name=pvc-0", "csi-node.name=pvc-0,"+tag, 1), []string(nil)
			b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
				if ran = append(ran, args[0]); args[0] != "fullreport" {
					return nil, errors.New("nobody asked for that")
				}
				return []byte(report), nil
			}
			_, err := b.ListVolumes(t.Context())
			require.NoError(t, err)
			report, ran = strings.Replace(report, tag, "csi-node.formatted=ext4", 1), nil
			time.Sleep(time.Hour)
			if err := zeroes(t.Context(), b, devices.Volume{ID: volumeID{group, "pvc-0"}.String()}); err == nil || len(ran) == 0 || ran[0] != "fullreport" {
				t.Errorf("%s: lvm was run for %q (%v)", tag, ran, err)
			}
		})
	}
}

// What says that nobody has had a volume, or that its pool zeroes what it hands out, says so
// now: the group may have been used on another node since the last report, or by hand. Of
// what an old report cannot say too little, it is taken.
func TestDecidesByAReportOfNow(t *testing.T) {
	attach := func(ctx context.Context, b *Backend, v devices.Volume) error { return b.Attach(ctx, v, false) }
	begin := func(ctx context.Context, b *Backend, v devices.Volume) error { return b.BeginFormat(ctx, v) }
	const read, activate = "fullreport", "lvchange --activate y --yes vg0/pvc-0"
	for name, c := range map[string]struct {
		tag   string
		since []string // pairs: what the report says, and says in its place an hour later
		thin  bool
		do    func(context.Context, *Backend, devices.Volume) error
		words string // of the refusal
		ran   []string
	}{
		"published raw since":        {tag: "fresh", since: []string{"fresh", "raw"}, do: begin, words: "published as a raw block device", ran: []string{read}},
		"formatted since":            {tag: "fresh", since: []string{"fresh", "formatted=ext4"}, do: begin, words: "formatted as ext4 before", ran: []string{read}},
		"a format begun since":       {tag: "fresh", since: []string{"fresh", "formatting"}, do: begin, words: "not new any more", ran: []string{read}},
		"not fresh any more":         {tag: "fresh", since: []string{"fresh", "other"}, do: begin, words: "not new any more", ran: []string{read}},
		"its format ended elsewhere": {tag: "formatting", since: []string{"formatting", "formatted=ext4"}, do: begin, words: "formatted as ext4 before", ran: []string{read}},
		"fresh, attached":            {tag: "fresh", do: attach, words: "no such device", ran: []string{read, activate}},
		"a format begun, attached":   {tag: "formatting", do: attach, words: "no such device", ran: []string{read, activate}},
		"formatted, attached":        {tag: "formatted=ext4", do: attach, words: "no such device", ran: []string{activate}},
		"raw, attached":              {tag: "raw", do: attach, words: "no such device", ran: []string{activate}},
		"thin, attached":             {tag: "formatted=ext4", thin: true, do: attach, words: "no such device", ran: []string{read, activate}},
		"its pool zeroes no more":    {tag: "formatted=ext4", thin: true, since: []string{"twi---tz--", "twi---t---"}, do: attach, words: "--zero y", ran: []string{read}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
				report, ran := strings.Replace(string(reportOf(t, 1)), "csi-node.name=pvc-0", "csi-node.name=pvc-0,csi-node."+c.tag, 1), []string(nil)
				if c.thin {
					_, row, _ := strings.Cut(string(reportOf(t, 1)), `{"lv_name":"pvc-0"`)
					row, _, _ = strings.Cut(row, "}")
					row = strings.NewReplacer("v0", "p0", "-wi-------", "twi---tz--", `"linear"`, `"thin,pool"`, "csi-node.", "").Replace(row)
					report = strings.Replace(report, `"lv_layout":"linear", "pool_lv":""`, `"lv_layout":"thin,sparse", "pool_lv":"thin"`, 1)
					report = strings.Replace(report, `"lv": [`, `"lv": [{"lv_name":"thin"`+row+"},", 1)
				}
				b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
					if args[0] == read {
						ran = append(ran, read)
						return []byte(report), nil
					}
					ran = append(ran, strings.Join(append(args[:1:1], args[3:]...), " "))
					return nil, nil
				}
				_, err := b.ListVolumes(t.Context())
				require.NoError(t, err)
				report, ran = strings.NewReplacer(c.since...).Replace(report), nil
				time.Sleep(time.Hour)
				err = c.do(t.Context(), b, devices.Volume{ID: volumeID{group, "pvc-0"}.String()})
				if err == nil || !strings.Contains(err.Error(), c.words) || !slices.Equal(ran, c.ran) {
					t.Errorf("lvm was run %q, not %q (%v)", ran, c.ran, err)
				}
			})
		})
	}
}

// A group that is not found may be on a disk that does not answer, or that a pod had: then
// that is told, and a volume of it is asked for again, as no event tells when that changes.
func TestGroupOnAHiddenDisk(t *testing.T) {
	b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), reportOf(t, 1))
	v := devices.Volume{ID: volumeID{group, "pvc-0"}.String()}
	b.wanted = func() []devices.Volume { return []devices.Volume{v} }
	pods := disk{path: "/dev/sdy", label: label{uuid: "disk", group: "vg0", groupUUID: group, members: []string{"disk"}}, theirs: errors.New("/dev/sdy: it was a raw volume")}
	for _, c := range []struct {
		disks []disk
		words string
	}{
		{[]disk{{path: "/dev/sdx", silent: true}}, "do not answer: /dev/sdx"},
		{[]disk{pods}, "does not count: /dev/sdy: it was a raw volume"},
		{},
	} {
		disks := c.disks
		b.disks = func(context.Context) ([]disk, error) { return disks, nil }
		attached, checked := b.Attach(t.Context(), v, false), b.Check(t.Context())
		_, measured := b.Measure(t.Context()) // or no alert would fire
		require.Class(t, attached, state.Unavailable, "no such volume group")
		require.Class(t, checked, state.Unavailable, "no such volume group")
		require.Class(t, measured, state.Unavailable, "no such volume group")
		for _, err := range []error{attached, checked, measured} {
			if !strings.Contains(err.Error(), c.words) {
				t.Errorf("of the disks %+v it says %v", disks, err)
			}
		}
		if errors.Is(attached, devices.ErrNoDevice) != (disks == nil) {
			t.Errorf("of the disks %+v it says %v", disks, attached)
		}
	}
}

// A group is one plugin's of the driver's name: neither lists, mends nor makes anything
// beside the other. One that takes over, as the store lets it, may have it at once.
func TestLock(t *testing.T) {
	report, lockDir, stateDir := reportOf(t, 1), t.TempDir(), t.TempDir()
	ctx, id := t.Context(), volumeID{group, "pvc-0"}.String()
	plugin := func(driver, stateDir string, observeOnly bool) *Backend {
		t.Helper()
		b, _ := newFake(t, devices.Environment{DriverName: driver, StateDir: stateDir, ObserveOnly: observeOnly}, lockDir, report)
		return b
	}
	list := func(b *Backend) error { _, err := b.ListVolumes(ctx); return err }
	require.NoError(t, list(plugin("d", stateDir, true)))
	if left, err := os.ReadDir(lockDir); err != nil || len(left) > 0 {
		t.Errorf("who only looks has made %v (%v)", left, err)
	}
	first, successor, other := plugin("d", stateDir, false), plugin("d", stateDir, false), plugin("d", t.TempDir(), false)
	require.NoError(t, list(first))
	require.NoError(t, list(successor))
	require.NoError(t, list(plugin("d", t.TempDir(), true)))
	require.NoError(t, list(plugin("another.driver", t.TempDir(), false)))
	for _, b := range []*Backend{first, successor} {
		words := []string{"vg0", fmt.Sprint("process ", os.Getpid()), "--driver-name", "--state-dir"}
		require.Class(t, list(other), state.Unavailable, words...)
		require.Class(t, other.Check(ctx), state.Unavailable, words...)
		_, err := other.CreateVolume(ctx, devices.CreateRequest{Name: "new", Size: devices.SizeRange{Required: 1}})
		require.Class(t, err, state.Unavailable, words...)
		require.Class(t, other.DeleteVolume(ctx, devices.Volume{ID: id}), state.Unavailable, words...)
		if attached, err := other.Attached(ctx); err != nil || len(attached) > 0 {
			t.Errorf("beside another it lists %+v (%v)", attached, err)
		}
		if d, err := other.Find(ctx, devices.Volume{ID: id}); err != nil || d.Err == nil {
			t.Errorf("beside another it finds %+v (%v)", d, err)
		}
		require.NoError(t, b.Close())
	}
	require.NoError(t, list(other))
	require.Class(t, list(plugin("d", stateDir, false)), state.Unavailable, "vg0")
}

// A name that anything else of the group has, such as a thin pool, is not to be had: the
// provisioner need not ask again.
func TestNameOfAThinPool(t *testing.T) {
	report := strings.Replace(string(reportOf(t, 1)), `"lv_layout":"linear"`, `"lv_layout":"thin,pool"`, 1)
	b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), []byte(report))
	_, err := b.CreateVolume(t.Context(), devices.CreateRequest{Name: "pvc-0", Size: devices.SizeRange{Required: 1}})
	require.Class(t, err, state.AlreadyExists, "vg0/pvc-0")
}

// Whoever is killed while it makes or zeroes a volume may leave one that udev activates,
// or that is active though nobody has it. The next look at the group ends that.
func TestInterruptedCreate(t *testing.T) {
	const keep, deactivate = "lvchange --setautoactivation n vg0/pvc-0", "lvchange --activate n vg0/pvc-0"
	for name, c := range map[string]struct {
		is          []string // pairs: what the report says, and says in its place
		volumes     int
		observeOnly bool
		want        []string
	}{
		"at rest":         {},
		"two at once":     {volumes: 2, is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`}, want: []string{keep + " vg0/pvc-1"}},
		"to be activated": {is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`}, want: []string{keep}},
		"being zeroed":    {is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`, `"lv_active":""`, `"lv_active":"active"`, `driver=d`, `driver=d,csi-node.unzeroed`}, want: []string{keep, deactivate}},
		"half a mirror":   {is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`, `"lv_active":""`, `"lv_active":"active"`, `driver=d`, `driver=d,csi-node.unzeroed`, `"segtype":"linear", "stripes":"1"`, `"segtype":"raid1", "stripes":"2"`}, want: []string{deactivate}},
		"a mirror":        {is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`, `"segtype":"linear", "stripes":"1"`, `"segtype":"raid1", "stripes":"2"`}, want: []string{keep}},
		"in use":          {is: []string{`"lv_active":""`, `"lv_active":"active"`}},
		"another's":       {is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`, `driver=d`, `driver=e`}},
		"only looked at":  {is: []string{`"lv_autoactivation":""`, `"lv_autoactivation":"enabled"`}, observeOnly: true},
	} {
		t.Run(name, func(t *testing.T) {
			report := strings.NewReplacer(c.is...).Replace(string(reportOf(t, max(c.volumes, 1))))
			b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir(), ObserveOnly: c.observeOnly}, t.TempDir(), nil)
			ran := recorded(t, b, &report)
			_, err := b.ListVolumes(t.Context())
			require.NoError(t, err)
			if !slices.Equal(*ran, c.want) {
				t.Errorf("lvm was run %q, not %q", *ran, c.want)
			}
		})
	}
}

// recorded has a backend write down what it runs, but for reports, which it gets as they
// are by then.
func recorded(t *testing.T, b *Backend, report *string) (ran *[]string) {
	t.Helper()
	ran = &[]string{}
	b.lvm = func(_ context.Context, args ...string) ([]byte, error) {
		if args[0] != "fullreport" {
			*ran = append(*ran, strings.Join(append(args[:1:1], args[3:]...), " ")) // without --config
		}
		return []byte(*report), nil
	}
	return ran
}

// lvremove takes whatever has the name, and its snapshots: a volume is looked at again
// before it is removed, whatever was known of it.
func TestDeleteLooksAgain(t *testing.T) {
	for name, c := range map[string]struct {
		since []string // pairs: what the report says, and says in its place when the volume is deleted
		class state.Class
		words string
		ran   []string
	}{
		"as it was":                   {ran: []string{"lvremove --yes vg0/pvc-0"}},
		"another's has its name":      {since: []string{`csi-node.driver=d,csi-node.name=pvc-0`, ``}},
		"it is not there":             {since: []string{`"lv_name":"pvc-0"`, `"lv_name":"renamed"`}},
		"it has snapshots":            {since: []string{`"lv_attr":"-wi`, `"lv_attr":"owi`}, class: state.FailedPrecondition, words: "vg0/pvc-0 has snapshots"},
		"a snapshot is merged to it":  {since: []string{`"lv_attr":"-wi`, `"lv_attr":"Owi`}, class: state.FailedPrecondition, words: "vg0/pvc-0 has snapshots"},
		"its group is another one by": {since: []string{group, strings.Repeat("Z", len(group))}, class: state.Unavailable, words: "another one"},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
			report := string(reportOf(t, 1))
			ran := recorded(t, b, &report)
			_, err := b.ListVolumes(t.Context())
			require.NoError(t, err)
			report = strings.NewReplacer(c.since...).Replace(report)
			err = b.DeleteVolume(t.Context(), devices.Volume{ID: volumeID{group, "pvc-0"}.String()})
			if c.words == "" {
				require.NoError(t, err)
			} else {
				require.Class(t, err, c.class, c.words)
			}
			if !slices.Equal(*ran, c.ran) {
				t.Errorf("lvm was run %q, not %q", *ran, c.ran)
			}
		})
	}
}

// A mirror is not activated with one leg while the disk of the other one may only be late.
func TestMirrorAwaitsItsLegs(t *testing.T) {
	b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
	report := strings.Replace(string(reportOf(t, 1)), `"segtype":"linear", "stripes":"1"`, `"segtype":"raid1", "stripes":"2"`, 1)
	ran := recorded(t, b, &report)
	leg := func(path, uuid string) disk {
		return disk{path: path, label: label{uuid: uuid, group: "vg0", groupUUID: group, members: []string{"a", "b"}}}
	}
	late, there, gone := disk{path: "/dev/late", silent: true}, leg("/dev/sdc", "b"), disk{path: "/dev/other"}
	second := &late
	b.disks = func(context.Context) ([]disk, error) { return []disk{leg("/dev/sdb", "a"), *second}, nil }
	paths := func() []string {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.groups["vg0"].paths
	}
	v := devices.Volume{ID: volumeID{group, "pvc-0"}.String()}
	require.Class(t, b.Attach(t.Context(), v, false), state.Unavailable, "vg0", "/dev/late")
	if len(*ran) > 0 {
		t.Fatalf("lvm was run %q", *ran)
	}
	for _, second = range []*disk{&there, &gone} { // it has come; it is lost
		*ran = nil
		if err := b.Attach(t.Context(), v, false); err == nil || !slices.Equal(*ran, []string{"lvchange --activate y --yes vg0/pvc-0"}) {
			t.Errorf("lvm was run %q (%v)", *ran, err) // there is no such device here
		}
		if got := paths(); (len(got) == 2) != (second == &there) {
			t.Errorf("lvm saw the disks %q", got)
		}
	}
}

// What a volume is to grow by follows from its size of now: it may have grown since the last
// report, by hand or by a command that had not ended when its caller was answered.
func TestGrowLooksAgain(t *testing.T) {
	for name, kind := range map[string][]string{
		"thick": nil,
		"thin":  {`"pool_lv":""`, `"pool_lv":"pool0"`, `"lv": [`, `"lv": [{"lv_name":"pool0", "lv_uuid":"p", "lv_size":"1073741824", "lv_attr":"twi-a-tz--", "lv_active":"active", "lv_autoactivation":"", "lv_suspended":"", "lv_tags":"", "lv_layout":"thin,pool", "pool_lv":"", "data_percent":"1", "metadata_percent":"1", "copy_percent":"", "lv_health_status":""},`},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
			report := strings.NewReplacer(kind...).Replace(string(reportOf(t, 1)))
			ran := recorded(t, b, &report)
			_, err := b.ListVolumes(t.Context())
			require.NoError(t, err)
			report = strings.Replace(report, `"lv_size":"4194304"`, `"lv_size":"8388608"`, 1)
			v := devices.Volume{ID: volumeID{group, "pvc-0"}.String()}
			require.Class(t, b.Grow(t.Context(), v, 12<<20), state.Unavailable, "vg0/pvc-0 has changed")
			if len(*ran) > 0 {
				t.Fatalf("lvm was run %q", *ran)
			}
			err = b.Grow(t.Context(), v, 12<<20)
			if len(*ran) == 0 || !strings.Contains((*ran)[0], "--extents +1 ") && !strings.Contains((*ran)[0], "--extents 1 ") {
				t.Errorf("lvm was run %q (%v)", *ran, err)
			}
		})
	}
}
