package docs

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"
)

// types are those that manifests may name. A nil one is not Kubernetes's own: it need only be YAML.
var types = map[string]func() any{
	"v1 Namespace":             func() any { return new(corev1.Namespace) },
	"v1 ServiceAccount":        func() any { return new(corev1.ServiceAccount) },
	"v1 Pod":                   func() any { return new(corev1.Pod) },
	"v1 PersistentVolume":      func() any { return new(corev1.PersistentVolume) },
	"v1 PersistentVolumeClaim": func() any { return new(corev1.PersistentVolumeClaim) },
	"v1 Secret":                func() any { return new(corev1.Secret) },
	"v1 ResourceQuota":         func() any { return new(corev1.ResourceQuota) },
	"apps/v1 DaemonSet":        func() any { return new(appsv1.DaemonSet) },
	"apps/v1 StatefulSet":      func() any { return new(appsv1.StatefulSet) },
	"rbac.authorization.k8s.io/v1 ClusterRole":      func() any { return new(rbacv1.ClusterRole) },
	"rbac.authorization.k8s.io/v1 Role":             func() any { return new(rbacv1.Role) },
	"rbac.authorization.k8s.io/v1 RoleBinding":      func() any { return new(rbacv1.RoleBinding) },
	"storage.k8s.io/v1 CSIDriver":                   func() any { return new(storagev1.CSIDriver) },
	"storage.k8s.io/v1 StorageClass":                func() any { return new(storagev1.StorageClass) },
	"storage.k8s.io/v1 CSIStorageCapacity":          func() any { return new(storagev1.CSIStorageCapacity) },
	"kustomize.config.k8s.io/v1beta1 Kustomization": nil,
	"monitoring.coreos.com/v1 PodMonitor":           nil,
	"monitoring.coreos.com/v1 PrometheusRule":       nil,
	"rbac.authorization.k8s.io/v1 ClusterRoleBinding": func() any {
		return new(rbacv1.ClusterRoleBinding)
	},
}

// decode reads each document strictly, as the type that it names, and returns how many there are.
func decode(t *testing.T, where, text string) (n int) {
	t.Helper()
	for document := range strings.SplitSeq("\n"+text, "\n---\n") {
		var kind struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
			t.Errorf("%s: %v", where, err)
			continue
		}
		n++
		name := kind.APIVersion + " " + kind.Kind
		object, known := types[name]
		if !known {
			t.Errorf("%s: the type %q is not known here: add it", where, name)
			continue
		}
		into := any(new(map[string]any))
		if object != nil {
			into = object()
		}
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Errorf("%s: %s: %v", where, name, err)
		}
	}
	return n
}

// TestManifests: each manifest in the pages is what its type allows, and names nothing else. Those in deploy are
// read by test/deploy.
func TestManifests(t *testing.T) {
	found := 0
	for _, p := range pages(t) {
		for _, b := range p.blocks {
			if p.name == chartPage { // values, which test/deploy renders
				continue
			}
			if b.language == "yaml" {
				found += decode(t, p.name, b.text)
			}
		}
	}
	if found < 3 {
		t.Errorf("found only %d manifests", found)
	}
}
