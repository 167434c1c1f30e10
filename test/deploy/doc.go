// Package deploy holds deploy/ to what it promises: the Helm chart makes the objects that kustomize makes, every
// manifest is one that Kubernetes knows, no container may more than it needs, and dashboard and alerts ask for metrics
// that the plugin has. None of it needs a cluster, or root.
package deploy
