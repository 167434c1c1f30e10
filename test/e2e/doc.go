// Package e2e proves the plugin on a real Kubernetes: etcd, the control plane,
// containerd and kubelet run on this machine, the plugin in a pod of its own
// DaemonSet, and the tests are pods that use its volumes.
//
// The test binary plays these roles, one within the other:
//
//	supervisor   builds what is missing, makes the images, starts init in new mount, pid and
//	             network namespaces, and removes what is left when it has ended
//	init         process 1 there: mounts, network, reaps orphans
//	test         brings the cluster up, deploys the plugin, runs the tests
//	node         process 1 of a second node, which is there for its tests only: it has
//	             namespaces of its own, and a veth to the first one's network
//
// With the build tag upstream the test is another one: the storage tests of Kubernetes itself.
//
// When init ends, the kernel ends all that it started, containers too, and drops
// their mounts and network. Only three kinds of things are left then: cgroup
// directories, loop devices of volumes, and the work directory. The supervisor
// removes them by name, and what a supervisor that was killed has left, the next.
package e2e
