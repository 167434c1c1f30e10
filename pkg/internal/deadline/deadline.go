// Package deadline says how long before its deadline a call is answered.
package deadline

import "time"

// Margin returns how long before its deadline a call is answered that has so much time
// left when it begins: a tenth of that time, two seconds at most, so that the answer
// still reaches the caller.
func Margin(left time.Duration) time.Duration { return min(left/10, 2*time.Second) }
