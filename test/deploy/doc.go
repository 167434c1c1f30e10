// Package deploy holds deploy/ to what it promises: the Helm chart makes the objects that kustomize makes, every
// manifest is one that Kubernetes knows, and no container may more than it needs. The causes of the alerts are made for
// plugins on the real kernel, whose scrapes Prometheus' own engine evaluates: for these it needs root, and lvm; those that
// need the device mapper run in a virtual machine of test/vm. None of it needs a cluster. Begin with TestChartIsKustomize.
package deploy
