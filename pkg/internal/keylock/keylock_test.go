package keylock

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

func TestLockSerialisesOneKey(t *testing.T) {
	var m Map
	var group sync.WaitGroup
	count := 0 // the race detector tells if the lock does not serialise
	for range 32 {
		group.Go(func() {
			unlock, err := m.Lock(context.Background(), "a")
			if err != nil {
				t.Error(err)
				return
			}
			count++
			unlock()
		})
	}
	group.Wait()
	if count != 32 || len(m.locks) != 0 {
		t.Errorf("count %d, %d locks left; want 32 and 0", count, len(m.locks))
	}
}

func TestLockOfAnotherKeyDoesNotWait(t *testing.T) {
	var m Map
	unlock, err := m.Lock(context.Background(), "a")
	require.NoError(t, err)
	defer unlock()
	other, err := m.Lock(context.Background(), "b")
	require.NoError(t, err)
	other()
}

func TestLockEndsWithContext(t *testing.T) {
	var m Map
	unlock, err := m.Lock(context.Background(), "a")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	waiting := make(chan error)
	go func() {
		_, err := m.Lock(ctx, "a")
		waiting <- err
	}()
	cancel()
	if err := <-waiting; !errors.Is(err, context.Canceled) {
		t.Errorf("Lock: %v, want context.Canceled", err)
	}
	unlock()
	if len(m.locks) != 0 {
		t.Errorf("%d locks left", len(m.locks))
	}
}
