// Mutants shows that the tests would notice if the plugin were a little wrong.
// It makes each small fault of the lists in list/, one at a time, and runs the
// tests that must fail then: a mutant that no test kills is a test that is
// missing.
//
//	make test-mutants                          all of them, as root
//	go run ./test/mutants [-all] [word ...]    those whose name holds a word
//
// A mutant looks like a diff. Its lines are found wherever they stand in the
// file, whatever their indentation, and may be parts of lines:
//
//	mutant  formats without looking at the device
//	why     data would be erased
//	file    pkg/filesystem/format.go
//	tests   TestFormatRefuses TestGuard
//	-	if p.found != "" {
//	+	if false {
//
// The tests are those of the file's package, unless a path ("./test/node")
// stands before them; TestGuard/swap is one with its subtests. Naming the fewest
// keeps the whole fast. With -all, every test of the package runs, and all that
// fail are named. What must be found exactly once and is not, does not compile,
// or names a test that is not there, is an error of the list; go test checks all
// but the compiling.
//
// Nothing is written to the source: go test -overlay takes it from a scratch
// directory. All mutants of a package sleep in one test program, and the
// environment wakes one at a time (see weave), so most take no more than their
// test. The tests pass once with all asleep, or else everything would look killed.
//
// The tests run in a mount namespace of their own, so no mount outlives them,
// and a loop device over a file of theirs is detached. A mutant must not reach
// for anything else: one that takes every loop device for its own has no place
// here. Nor has one that changes nothing that can be seen, because two checks
// refuse the same. Nor has one that makes things only slower, or later by no more
// than a back-off or a resync, or changes words, logs, traces and counters: a mutant
// loses data, breaks the contract with the CO, tells a secret, leaks or hangs.
package main
