//go:build faults

package main

import (
	"strings"
	"testing"
)

// A build with faults takes them from the environment; faults_test.go shows what they do.
func TestFaults(t *testing.T) {
	t.Setenv("CSI_NODE_FAULT", "before:format=fail,after:mount=hang")
	hook := hook()
	if err := hook(t.Context(), "v", "before", "format"); err == nil || !strings.Contains(err.Error(), "before format of volume v") {
		t.Errorf("before format: %v", err)
	}
}
