package pool

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestLock(t *testing.T) {
	p := open(t, newDir(t))
	one, other := t.TempDir(), t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	ok(t, os.Symlink(one, link))
	var unlocks []func() error
	for _, dir := range []string{one, one, link} { // which take turns otherwise
		unlock, err := p.Lock(dir)
		ok(t, err)
		unlocks = append(unlocks, unlock)
	}
	for _, unlock := range unlocks {
		_, err := p.Lock(other)
		if err == nil || !strings.Contains(err.Error(), fmt.Sprint("process ", os.Getpid())) || !strings.Contains(err.Error(), p.dir) {
			t.Errorf("beside another: %v", err)
		}
		ok(t, unlock())
	}
	unlock, err := p.Lock(other)
	ok(t, err)
	if _, err := p.Lock(one); err == nil {
		t.Error("locked by two")
	}
	ok(t, unlock())
	if _, err := p.Lock(filepath.Join(one, "missing")); err == nil {
		t.Error("locked for a state directory that is not there")
	}
}

// TestLockByALink: a pool is one pool by whatever link it is reached.
func TestLockByALink(t *testing.T) {
	dir, links := newDir(t), t.TempDir()
	p := open(t, dir)
	one, other := t.TempDir(), t.TempDir()
	for _, name := range []string{"a", "b"} {
		ok(t, os.Symlink(dir, filepath.Join(links, name)))
	}
	a, b := open(t, filepath.Join(links, "a")), open(t, filepath.Join(links, "b"))
	for _, round := range []struct{ first, second *Pool }{{p, a}, {a, p}, {a, b}} {
		unlock, err := round.first.Lock(one)
		ok(t, err)
		if _, err := round.second.Lock(other); err == nil {
			t.Errorf("%s is locked, and so is %s", round.first.dir, round.second.dir)
		}
		ok(t, unlock())
	}
	ok(t, os.Remove(dir+seenSuffix)) // the pool was only ever used by links
	unlock, err := a.Lock(one)
	ok(t, err)
	if _, err := b.Lock(other); err == nil {
		t.Error("locked by two links")
	}
	ok(t, unlock())
	ok(t, open(t, dir).Check(t.Context()))
}

// TestLockAtOnce: of many that come at once one has it at most.
func TestLockAtOnce(t *testing.T) {
	p := open(t, newDir(t))
	for range 20 {
		var group sync.WaitGroup
		got := make(chan func() error, 8)
		for range cap(got) {
			dir := t.TempDir()
			group.Go(func() {
				if unlock, err := p.Lock(dir); err == nil {
					got <- unlock
				}
			})
		}
		group.Wait()
		close(got)
		if len(got) > 1 {
			t.Fatalf("%d have it", len(got))
		}
		for unlock := range got {
			ok(t, unlock())
		}
	}
}
