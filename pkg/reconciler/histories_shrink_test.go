package reconciler

import (
	"slices"
	"time"
)

// shrinkTries bounds how many histories are played to find a shorter one.
const shrinkTries = 3000

// shrink returns a shortest history that still fails: no operation of it can be
// left out, no argument, and no pause can be much shorter. It plays at most
// shrinkTries of them.
func shrink(history []operation, fails func([]operation) bool) []operation {
	tries := 0
	still := func(h []operation) bool {
		if tries++; tries > shrinkTries {
			return false
		}
		return fails(h)
	}
	for {
		before := script(history)
		history = shrinkWhole(history, still)
		history = shrinkEach(history, still)
		if script(history) == before {
			return history
		}
	}
}

// shrinkWhole leaves operations out: halves, then smaller pieces, then single ones.
func shrinkWhole(history []operation, still func([]operation) bool) []operation {
	for piece := len(history) / 2; piece > 0; piece /= 2 {
		for from := 0; from < len(history); {
			shorter := slices.Delete(slices.Clone(history), from, min(from+piece, len(history)))
			if still(shorter) {
				history = shorter
			} else {
				from += piece
			}
		}
	}
	return history
}

// shrinkEach makes operations simpler, one at a time.
func shrinkEach(history []operation, still func([]operation) bool) []operation {
	for i := range history {
		for simpler := range simpler(history[i]) {
			changed := slices.Clone(history)
			changed[i] = simpler
			if still(changed) {
				history = changed
			}
		}
	}
	return history
}

// simpler yields what is less than an operation: one word fewer, or a number or
// a duration that is smaller.
func simpler(o operation) func(yield func(operation) bool) {
	return func(yield func(operation) bool) {
		for i := len(o) - 1; i > 0; i-- {
			if fewer := slices.Delete(slices.Clone(o), i, i+1); fewer.check() == nil && !yield(fewer) {
				return
			}
			d, err := time.ParseDuration(o[i])
			for _, word := range []string{"0s", (d / 1000).String(), (d / 10).String()} {
				less := slices.Clone(o)
				less[i] = word
				if err == nil && d > 0 && !yield(less) {
					return
				}
			}
		}
	}
}
