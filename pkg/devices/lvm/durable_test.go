package lvm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// media is the group vg0, whose disk loses what is not flushed when the power goes.
type media struct {
	t                 *testing.T
	volumes           []row
	sequence, durable int
	fails             bool // each flush
	killed            bool // lvm is, when it has made a change
	flushes           int
}

// errFlush is what a disk says.
var errFlush = errors.New("the disk did not flush")

// backend returns a plugin's, as after a start of it.
func (m *media) backend(env devices.Environment, lockDir string) *Backend {
	b, _ := newFake(m.t, env, lockDir, nil)
	b.lvm, b.flush = m.lvm, m.flush
	return b
}

func (m *media) flush(paths []string) error {
	if !slices.Equal(paths, []string{"/dev/sdb"}) {
		m.t.Errorf("what is flushed is %q", paths)
	}
	if m.flushes++; m.fails {
		return errFlush
	}
	m.durable = m.sequence
	return nil
}

// lvm does what a command asks for.
func (m *media) lvm(_ context.Context, args ...string) ([]byte, error) {
	if args[0] == "fullreport" {
		return reportWith(m.t, m.sequence, m.volumes), nil
	}
	m.sequence++
	options := map[string]string{} // the last of each
	var added, removed []string
	for i, arg := range args[:len(args)-1] {
		switch options[arg] = args[i+1]; arg {
		case "--addtag":
			added = append(added, args[i+1])
		case "--deltag":
			removed = append(removed, args[i+1])
		}
	}
	name := strings.TrimPrefix(args[len(args)-1], "vg0/")
	at := slices.IndexFunc(m.volumes, func(v row) bool { return v.name == name })
	extents, _ := strconv.ParseInt(options["--extents"], 10, 64)
	switch args[0] {
	case "lvcreate":
		m.volumes = append(m.volumes, row{options["--name"], fmt.Sprintf("v%031d", m.sequence), extents, strings.Join(added, ",")})
	case "lvremove":
		m.volumes = slices.Delete(m.volumes, at, at+1)
	case "lvextend":
		m.volumes[at].extents += extents
	case "lvchange":
		left := slices.DeleteFunc(strings.Split(m.volumes[at].tags, ","), func(tag string) bool { return slices.Contains(removed, tag) })
		m.volumes[at].tags = strings.Join(append(left, added...), ",")
	}
	if m.killed {
		return nil, state.Errorf(state.DeadlineExceeded, "it had not ended")
	}
	return nil, nil
}

// What is done is told as done only when it is durable: whoever finds that an earlier call,
// or an earlier process, has done it flushes it first.
func TestNothingIsToldBeforeItIsFlushed(t *testing.T) {
	v := devices.Volume{ID: volumeID{group, "pvc-0"}.String()}
	tagged := func(tags string) []row {
		return []row{{"pvc-0", "v0", 1, "csi-node.driver=d,csi-node.name=pvc-0" + tags}}
	}
	for name, c := range map[string]struct {
		volumes []row
		do      func(context.Context, *Backend) error
	}{
		"created": {nil, func(ctx context.Context, b *Backend) error {
			_, err := b.CreateVolume(ctx, devices.CreateRequest{Name: "pvc-0", Size: devices.SizeRange{Required: 1}})
			return err
		}},
		"deleted":          {tagged(""), func(ctx context.Context, b *Backend) error { return b.DeleteVolume(ctx, v) }},
		"a format begun":   {tagged(",csi-node.fresh"), func(ctx context.Context, b *Backend) error { return b.BeginFormat(ctx, v) }},
		"a format ended":   {tagged(",csi-node.formatting"), func(ctx context.Context, b *Backend) error { return b.EndFormat(ctx, v, "ext4") }},
		"published as raw": {tagged(",csi-node.fresh"), func(ctx context.Context, b *Backend) error { return b.BeginRaw(ctx, v) }},
		"grown":            {tagged(",csi-node.unzeroed"), func(ctx context.Context, b *Backend) error { return b.Grow(ctx, v, 8<<20) }},
	} {
		for _, killed := range []bool{false, true} {
			for _, restarted := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, lvm killed %t, restarted %t", name, killed, restarted), func(t *testing.T) {
					env, lockDir := devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir()
					m := &media{t: t, volumes: slices.Clone(c.volumes), sequence: 7}
					b := m.backend(env, lockDir)
					_, err := b.ListVolumes(t.Context()) // so that a report is at hand
					require.NoError(t, err)
					m.fails, m.killed = true, killed
					require.Words(t, c.do(t.Context(), b))
					m.killed = false
					if m.durable == m.sequence {
						t.Fatal("nothing was done")
					}
					if restarted {
						b = m.backend(env, lockDir)
					}
					for range 2 {
						require.Words(t, c.do(t.Context(), b), errFlush.Error())
						if d, err := b.Find(t.Context(), v); err != nil || d.Err == nil {
							t.Errorf("what may be undone is told: %+v (%v)", d, err)
						}
					}
					m.fails = false
					if err := c.do(t.Context(), b); err != nil || m.durable != m.sequence {
						t.Errorf("of %d changes %d are durable (%v)", m.sequence, m.durable, err)
					}
				})
			}
		}
	}
}

// A predecessor's lvm, which is not killed with it, may end when the successor has read and
// flushed the group.
func TestLateChangeIsFlushed(t *testing.T) {
	env, lockDir := devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		m := &media{t: t, sequence: 7}
		b := m.backend(env, lockDir)
		_, err := b.ListVolumes(t.Context())
		require.NoError(t, err)
		_, err = m.lvm(t.Context(), "lvcreate", "--name", "pvc-0", "--extents", "1", "--addtag", "csi-node.driver=d", "--addtag", "csi-node.name=pvc-0", "vg0")
		require.NoError(t, err)
		_, err = b.CreateVolume(t.Context(), devices.CreateRequest{Name: "pvc-0", Size: devices.SizeRange{Required: 1}})
		if err != nil || len(m.volumes) != 1 || m.durable != m.sequence {
			t.Errorf("of %d changes %d are durable, and there are %+v (%v)", m.sequence, m.durable, m.volumes, err)
		}
		flushes := m.flushes // a group in which nothing changes is not flushed again
		time.Sleep(time.Hour)
		if _, err := b.ListVolumes(t.Context()); err != nil || m.flushes != flushes {
			t.Errorf("flushed %d times more (%v)", m.flushes-flushes, err)
		}
		env.ObserveOnly, m.fails = true, true // who only looks promises nothing
		_, err = m.backend(env, lockDir).ListVolumes(t.Context())
		require.NoError(t, err)
	})
}

// A disk that is away cannot be flushed: what is seen is flushed again when it is back.
func TestFlushWaitsForMissingDisks(t *testing.T) {
	b, _ := newFake(t, devices.Environment{DriverName: "d", StateDir: t.TempDir()}, t.TempDir(), nil)
	here, away := disk{path: "/dev/sdb", label: label{uuid: "here", group: "vg0", groupUUID: group, members: []string{"here", "away"}}}, disk{}
	b.disks = func(context.Context) ([]disk, error) { return []disk{here, away}, nil }
	missing := "1"
	b.lvm = func(context.Context, ...string) ([]byte, error) {
		return []byte(strings.Replace(string(reportOf(t, 1)), `"vg_missing_pv_count":"0"`, `"vg_missing_pv_count":"`+missing+`"`, 1)), nil
	}
	var flushed [][]string
	b.flush = func(paths []string) error {
		flushed = append(flushed, paths)
		return nil
	}
	look := func() {
		t.Helper()
		b.dropReport("vg0")
		_, err := b.ListVolumes(t.Context())
		require.NoError(t, err)
	}
	look()
	away, missing = here, "0"
	away.path, away.uuid = "/dev/sdc", "away"
	b.forgetDisks("vg0")
	look()
	look()
	if fmt.Sprint(flushed) != "[[/dev/sdb] [/dev/sdb /dev/sdc]]" {
		t.Errorf("flushed were %q", flushed)
	}
}
