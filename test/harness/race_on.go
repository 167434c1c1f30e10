//go:build race

package harness

// The binaries are built with the race detector where the tests are.
var raceFlags = []string{"-race"}
