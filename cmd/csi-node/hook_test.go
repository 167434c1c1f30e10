//go:build faults

package main

import (
	"context"
	"errors"
	"strings"
	"testing"
)

func TestFaults(t *testing.T) {
	t.Setenv("CSI_NODE_FAULT", "before:format=fail,after:mount=hang")
	hook := hook()
	if err := hook(t.Context(), "v", "before", "format"); err == nil || !strings.Contains(err.Error(), "before format of volume v") {
		t.Errorf("before format: %v", err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := hook(gone, "v", "after", "mount"); !errors.Is(err, context.Canceled) {
		t.Errorf("a hang ends with %v", err)
	}
	for _, step := range []string{"mount", "bind", ""} {
		if err := hook(gone, "v", "before", step); err != nil {
			t.Errorf("before %s: %v", step, err)
		}
	}
}
