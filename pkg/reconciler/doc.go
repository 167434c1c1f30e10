// Package reconciler makes the kernel match the desired state, and is the only
// place that acts on it.
//
//	Ensure ──edit──> store ──> queue ──> worker: observe ──> MakePlan ──> one step ──> observe …
//	   ^                                    │
//	   └── settled · failed · superseded ───┘
//
// MakePlan is pure: all policy is in it. A volume has one worker at a time and
// none while it is at rest; a worker that hangs holds up its own volume only.
// A caller waits for its own part of the volume: its target, the stage, the size.
// An operator gets hold of a volume's worker between two passes (Exclusive, Retry).
// What operators and kubelet are shown of a volume is made by package report from the
// facts in report.go; orphans.go finds what no record explains.
//
// Read plan.go first, then worker.go, which runs a volume's plan, and waiter.go, which
// answers the callers. The plan_*.go files hold the rules of each part.
package reconciler
