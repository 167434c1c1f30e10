package chaos

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
)

// One mkfs that never ends holds up its own volume only: 99 others live their
// lives meanwhile, also those that are formatted.
func TestStuckAmongHealthy(t *testing.T) {
	p := harness.New(t)
	mkfs := wrapMkfs(t, p, "stuck")
	p.Start(harness.Options{Env: mkfs.env(1)})
	stuck := newVolume(t, p, "stuck", "ext4", "thin", 16*mib, 1)
	must(t, stuck.create(t.Context()))
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := stuck.Stage(short); err == nil {
		t.Fatal("staged without an mkfs")
	}
	harness.Eventually(t, "mkfs of the stuck volume runs", func() bool { return len(mkfs.runs()) == 1 })

	const healthy, callers = 99, 8
	var volumes []*volume
	for i := range healthy {
		fsType := []string{"ext4", "", ""}[i%3]
		volumes = append(volumes, newVolume(t, p, fmt.Sprint("healthy-", i), fsType, "thin", 4*mib, 2))
	}
	next := make(chan *volume)
	var group sync.WaitGroup
	for range callers {
		group.Go(func() {
			for v := range next {
				if err := v.whole(t.Context()); err != nil {
					t.Errorf("volume %s: %v", v.ID, err)
				}
			}
		})
	}
	for _, v := range volumes {
		next <- v
	}
	close(next)
	group.Wait()
	report := p.Report().Volumes
	if len(report) != 1 || report[0].Step == nil || !strings.HasPrefix(report[0].Step.Step, "format") {
		t.Errorf("while mkfs hangs the status is %+v", report)
	}

	p.Kill() // and mkfs with it
	p.Start(harness.Options{})
	must(t, harness.Insist(t.Context(), stuck.Stage))
	stuck.down()
}

// whole is the whole life of a volume.
func (v *volume) whole(ctx context.Context) error {
	err := errors.Join(v.create(ctx), harness.Insist(ctx, v.Stage))
	for _, target := range v.targets {
		err = errors.Join(err, v.publish(ctx, target))
	}
	for _, target := range v.targets {
		err = errors.Join(err, v.Unpublish(ctx, target))
	}
	return errors.Join(err, harness.Insist(ctx, v.Unstage), v.Delete(ctx))
}
