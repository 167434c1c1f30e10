package deploy

import (
	"io/fs"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// decode reads an object as the API server does with strict validation: of a kind that there is, without a field that
// the kind does not have.
func decode(t *testing.T, o object) (runtime.Object, error) {
	t.Helper()
	known := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, monitoring.AddToScheme} {
		must(t, add(known))
	}
	text, err := yaml.Marshal(o)
	must(t, err)
	decoded, _, err := serializer.NewCodecFactory(known, serializer.EnableStrict).UniversalDeserializer().Decode(text, nil, nil)
	return decoded, err
}

// made returns all objects that deploy/ makes, by where they come from.
func made(t *testing.T) map[string][]object {
	t.Helper()
	all := map[string][]object{
		"chart":                 helm(t, usual, ""),
		"chart with everything": helm(t, release{"other", "storage"}, everything),
		"base":                  kustomize(t, filepath.Join(root, "base")),
		"monitoring":            kustomize(t, filepath.Join(root, "monitoring")),
	}
	for name, dir := range overlays(t) {
		all[name] = kustomize(t, dir)
		all["chart as "+name] = helm(t, usual, read(t, filepath.Join(dir, "values.yaml")))
	}
	return all
}

// TestManifestsAreKnown: every object in deploy/, and all that is made of it, is one that Kubernetes or the Prometheus
// operator knows, field by field.
func TestManifestsAreKnown(t *testing.T) {
	all := made(t)
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch name := entry.Name(); {
		case err != nil:
			return err
		case entry.IsDir() && name == "chart":
			return filepath.SkipDir
		case filepath.Ext(name) == ".yaml" && name != "kustomization.yaml" && name != "values.yaml":
			all[path] = parse(t, read(t, path))
			if len(all[path]) == 0 {
				t.Errorf("%s holds nothing", path)
			}
		}
		return nil
	})
	must(t, err)
	for where, objects := range all {
		for _, o := range objects {
			if _, err := decode(t, o); err != nil {
				t.Errorf("%s: %s: %v", where, o.key(), err)
			}
		}
	}
	if _, err := decode(t, parse(t, "apiVersion: v1\nkind: Pod\nspec: {container: []}")[0]); err == nil {
		t.Error("a field that is none is not noticed")
	}
}

// TestLeastPrivilege: the plugin is privileged, because mounts for the node and loop devices need it, and nothing else
// is. The sidecars have root's name, to reach the plugin's socket, and nothing of what root may; and the API server's token
// is only with those that use it.
func TestLeastPrivilege(t *testing.T) {
	no, yes := false, true
	root := int64(0)
	sidecar := &core.SecurityContext{
		RunAsUser: &root, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
		Capabilities: &core.Capabilities{Drop: []core.Capability{"ALL"}}, SeccompProfile: &core.SeccompProfile{Type: core.SeccompProfileTypeRuntimeDefault},
	}
	rights := map[string]*core.SecurityContext{
		"csi-node":              {Privileged: &yes, ReadOnlyRootFilesystem: &yes},
		"node-driver-registrar": sidecar, "external-provisioner": sidecar, "external-resizer": sidecar,
	}
	token := map[string]bool{"external-provisioner": true, "external-resizer": true}
	for where, objects := range made(t) {
		for _, o := range objects {
			decoded, err := decode(t, o)
			must(t, err)
			if pod, is := decoded.(*core.Pod); is && pod.Annotations["helm.sh/hook"] != "" {
				checkRestricted(t, where, pod)
			}
			set, is := decoded.(*apps.DaemonSet)
			if !is {
				continue
			}
			pod := set.Spec.Template.Spec
			if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
				t.Errorf("%s: every container has the API server's token", where)
			}
			for _, c := range pod.Containers {
				if c.Name == "more" { // an operator's own
					continue
				}
				want, is := rights[c.Name]
				if where == "chart with everything" && want == sidecar { // which sets sidecarSELinuxOptions
					want = sidecar.DeepCopy()
					want.SELinuxOptions = &core.SELinuxOptions{Type: "spc_t", Level: "s0"}
				}
				if !is || !reflect.DeepEqual(c.SecurityContext, want) {
					t.Errorf("%s: container %s may %v, want %v", where, c.Name, c.SecurityContext, want)
				}
				if c.TerminationMessagePolicy != core.TerminationMessageFallbackToLogsOnError {
					t.Errorf("%s: nobody is told why container %s ended", where, c.Name)
				}
				if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
					t.Errorf("%s: container %s asks for no CPU or memory", where, c.Name)
				}
				has := false
				for _, m := range c.VolumeMounts {
					has = has || strings.HasPrefix(m.MountPath, "/var/run/secrets")
				}
				if has != token[c.Name] {
					t.Errorf("%s: container %s has a token: %t", where, c.Name, has)
				}
			}
		}
	}
}

// checkRestricted: the pod of `helm test` is nothing but a user of a volume, as Pod Security's level "restricted" wants it.
func checkRestricted(t *testing.T, where string, pod *core.Pod) {
	t.Helper()
	if all := pod.Spec.SecurityContext; !*all.RunAsNonRoot || *all.RunAsUser == 0 || all.FSGroup == nil || all.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault {
		t.Errorf("%s: the pod of the test may %v", where, all)
	}
	if *pod.Spec.AutomountServiceAccountToken || pod.Spec.HostPID || pod.Spec.HostNetwork {
		t.Errorf("%s: the pod of the test has a token, or a namespace of the node", where)
	}
	for _, c := range pod.Spec.Containers {
		if may := c.SecurityContext; *may.AllowPrivilegeEscalation || may.Privileged != nil || !*may.ReadOnlyRootFilesystem || !reflect.DeepEqual(may.Capabilities, &core.Capabilities{Drop: []core.Capability{"ALL"}}) {
			t.Errorf("%s: container %s of the test may %v", where, c.Name, may)
		}
		if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
			t.Errorf("%s: container %s of the test asks for no CPU or memory", where, c.Name)
		}
	}
}
