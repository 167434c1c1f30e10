// Package reconciler makes the kernel match the desired state. It is the only package
// that decides to change what is mounted or attached.
//
//	Ensure ──edit──> store ──> queue ──> worker: observe ──> MakePlan ──> one step ──> observe …
//	   ^                                    │
//	   └── settled · failed · superseded ───┘
//
// Read plan.go first, then worker.go, which runs a volume's plan, and waiter.go, which
// answers the callers. The plan_*.go files hold the rules of each part.
//
// MakePlan is pure and holds all policy. A volume has at most one worker, and none
// while it is at rest; a worker that hangs holds up only its own volume. A caller waits
// for its own part of the volume: its target, the stage or the size. What an operator
// asks for runs in the volume's worker, between two passes (Exclusive, Retry).
//
// wake.go says when a volume is queued, repair.go whether what was lost is repaired, and
// backoff.go when a failed step is tried again. Package report renders the facts of
// report.go for operators and kubelet; orphans.go finds devices and mounts that no record
// explains; trace.go tells OpenTelemetry what was done for which call.
package reconciler
