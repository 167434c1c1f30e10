package pool

import (
	"context"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// What a call finds done is durable before it is answered: the sync of the call that did it may have failed, or its
// process may have been killed before. Once that is known no further sync is made.
func TestWhatIsFoundDoneIsDurable(t *testing.T) {
	lost := errors.New("the sync failed")
	calls := map[string]func(ctx context.Context, p *Pool) error{
		"Create": func(ctx context.Context, p *Pool) error {
			_, err := p.Create(ctx, volume("v", mib, Thin))
			return err
		},
		"Grow":     func(ctx context.Context, p *Pool) error { return p.Grow(ctx, "v", 2*mib) },
		"BeginRaw": func(ctx context.Context, p *Pool) error { return p.BeginRaw(ctx, "v") },
		"EndFormat and Get": func(ctx context.Context, p *Pool) error {
			if v, err := p.Get(ctx, "v"); err != nil || v.Formatted != "" {
				return err
			}
			return errors.Join(p.BeginFormat(ctx, "v"), p.EndFormat(ctx, "v", "ext4"))
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			p := open(t, newDir(t))
			var failing, synced int // syncs that are to fail before they do anything, and that were made
			count := func(string) error {
				if failing--; failing >= 0 {
					return lost
				}
				synced++
				return nil
			}
			p.durable.fail = count
			if name != "Create" {
				create(t, p, "v", mib, Thin)
			}
			first := call
			switch failing = 1; name {
			case "Create":
				failing = 2 // else it leaves nothing
			case "EndFormat and Get":
				failing = 0
				ok(t, p.BeginFormat(t.Context(), "v"))
				failing = 1
				first = func(ctx context.Context, p *Pool) error { return p.EndFormat(ctx, "v", "ext4") }
			}
			if err := first(t.Context(), p); !errors.Is(err, lost) {
				t.Fatalf("a sync fails, and the call says: %v", err)
			}
			failing = 1
			if err := call(t.Context(), p); !errors.Is(err, lost) {
				t.Errorf("it was done and is not durable, and the next call says: %v", err)
			}
			ok(t, call(t.Context(), p))
			synced = 0
			ok(t, call(t.Context(), p))
			if synced != 0 {
				t.Errorf("what is known to be durable was synced %d times", synced)
			}
			if name == "EndFormat and Get" {
				return // whatever is written after the mount is behind it in the journal
			}
			p = open(t, p.dir) // as if the process had been killed
			p.durable.fail = count
			failing = 1
			if err := call(t.Context(), p); !errors.Is(err, lost) {
				t.Errorf("whether it is durable is not known after a start, and the call says: %v", err)
			}
			for _, want := range []bool{true, false} {
				synced = 0
				ok(t, call(t.Context(), p))
				if (synced > 0) != want {
					t.Errorf("%d syncs after a start, some are wanted: %t", synced, want)
				}
			}
		})
	}
}

// A volume that is not quite what is asked for may do, and is as durable then.
func TestOtherVolumeThatExistsIsDurable(t *testing.T) {
	dir, lost := newDir(t), errors.New("lost")
	create(t, open(t, dir), "v", mib, Thin)
	p, synced := open(t, dir), 0 // as if the process had been killed
	p.durable.fail = func(string) error {
		if synced++; synced == 1 {
			return lost
		}
		return nil
	}
	if _, err := p.Create(t.Context(), volume("v", 2*mib, Thin)); !errors.Is(err, lost) {
		t.Errorf("whether it is durable is not known after a start, and the call says: %v", err)
	}
	if _, err := p.Create(t.Context(), volume("v", 2*mib, Thin)); state.ClassOf(err) != state.AlreadyExists || synced < 2 {
		t.Errorf("%v, after %d syncs", err, synced)
	}
}

// A full pool says what to do, also where its file system finds first that it is full.
func TestNoRoomSaysWhatToDo(t *testing.T) {
	for _, full := range []error{unix.ENOSPC, unix.EDQUOT} {
		err := noRoom(full)
		if state.ClassOf(err) != state.ResourceExhausted || !errors.Is(err, full) || !strings.Contains(err.Error(), "delete volumes or data, or enlarge the pool") {
			t.Errorf("%v: %v", full, err)
		}
	}
}
