// Package require holds what every package's tests require of an error.
package require

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// NoError ends the test if there is an error.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Class ends the test unless the error is of the class. It fails the test unless its text
// holds all words.
func Class(t testing.TB, err error, class state.Class, words ...string) {
	t.Helper()
	if err == nil || state.ClassOf(err) != class {
		t.Fatalf("error %v, want one of class %s", err, class)
	}
	Words(t, err, words...)
}

// Words ends the test if there is no error. It fails the test unless its text holds all words.
func Words(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one of %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not name %q", err, word)
		}
	}
}
