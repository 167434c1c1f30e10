//go:build !faults

package main

import "context"

// faults is nil in release builds: no step can be made to fail.
func faults() func(ctx context.Context, volume, moment, step string) error { return nil }
