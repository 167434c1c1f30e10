package process

import (
	"slices"
	"testing"
	"time"
)

// A search that hangs is left behind, with what it has found.
func TestCollectLeavesASearchThatHangs(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	found, complete := Collect(t.Context(), time.Second, t.Name(), func(yield func(string) bool) {
		if yield("first") {
			<-release
		}
	})
	if complete || !slices.Equal(found, []string{"first"}) {
		t.Errorf("%q, complete %t", found, complete)
	}
}

// A search is over when it has as many names as an error text should have.
func TestCollectIsBounded(t *testing.T) {
	found, complete := Collect(t.Context(), time.Second, t.Name(), func(yield func(string) bool) {
		for yield("again") {
		}
	})
	if !complete || len(found) != NameLimit {
		t.Errorf("%d names, complete %t", len(found), complete)
	}
}
