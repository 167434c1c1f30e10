//go:build !faults

package main

import "testing"

func TestReleaseHasNoHook(t *testing.T) {
	t.Setenv("CSI_NODE_FAULT", "before:format=fail")
	if hook() != nil {
		t.Error("a release build has a hook around its steps")
	}
}
