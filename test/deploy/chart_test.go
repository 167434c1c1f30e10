package deploy

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"helm.sh/helm/v3/pkg/strvals"

	"github.com/csi-node/csi-node/test/harness"
)

// TestChartIsKustomize: the chart makes the objects of deploy/base, and with an overlay's values.yaml those of the
// overlay. Helm makes no namespace, and labels each object.
func TestChartIsKustomize(t *testing.T) {
	same(t, "base", kustomize(t, filepath.Join(root, "base")), helm(t, usual, ""))
	for name, dir := range overlays(t) {
		same(t, name, kustomize(t, dir), helm(t, usual, read(t, filepath.Join(dir, "values.yaml"))))
	}
	both := "kubeletDir: /var/lib/k0s/kubelet\nselfRegistration: true"
	same(t, "kubelet-root over self-registration", kustomize(t, over(t, "kubelet-root", "self-registration")), helm(t, usual, both))
	added := slices.DeleteFunc(helm(t, usual, monitored), func(o object) bool {
		return slices.ContainsFunc(helm(t, usual, ""), func(p object) bool { return o.key() == p.key() })
	})
	same(t, "monitoring", kustomize(t, filepath.Join(root, "monitoring")), added)
}

const monitored = `metrics: {podMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboard: {enabled: true}}`

// same compares objects by kind and name.
func same(t *testing.T, title string, want, have []object) {
	t.Helper()
	wanted, had := map[string]string{}, map[string]string{}
	for _, o := range want {
		if o["kind"] != "Namespace" {
			wanted[o.key()] = plain(t, o)
		}
	}
	for _, o := range have {
		if o.at("metadata", "annotations", "helm.sh/hook") == nil { // what `helm test` makes
			had[o.key()] = plain(t, o)
		}
	}
	if len(wanted) == 0 {
		t.Errorf("%s: kustomize makes nothing", title)
	}
	for key, text := range wanted {
		if had[key] != text {
			t.Errorf("%s: %s\nkustomize makes\n%s\nand Helm\n%s", title, key, text, had[key])
		}
	}
	for key := range had {
		if wanted[key] == "" {
			t.Errorf("%s: Helm makes %s, and kustomize does not", title, key)
		}
	}
}

// plain returns an object without the labels that Helm's charts put on all of theirs.
func plain(t *testing.T, o object) string {
	t.Helper()
	if metadata, ok := o["metadata"].(map[string]any); ok {
		if labels, ok := metadata["labels"].(map[string]any); ok {
			for label := range labels {
				if strings.HasPrefix(label, "app.kubernetes.io/") || label == "helm.sh/chart" {
					delete(labels, label)
				}
			}
			if len(labels) == 0 {
				delete(metadata, "labels")
			}
		}
	}
	text, err := json.MarshalIndent(o, "", " ")
	must(t, err)
	return string(text)
}

// TestVersions: chart and kustomize name the image by one version, and no image floats.
func TestVersions(t *testing.T) {
	metadata := loadChart(t).Metadata
	if metadata.AppVersion != "v"+metadata.Version {
		t.Errorf("the chart's version %s is not that of its app, %s", metadata.Version, metadata.AppVersion)
	}
	for _, c := range containers(t, helm(t, usual, "")) {
		_, tag, _ := strings.Cut(c["image"].(string), ":")
		if tag == "" || tag == "latest" {
			t.Errorf("container %s has the image %s", c["name"], c["image"])
		}
	}
}

// containers returns those of the only DaemonSet.
func containers(t testing.TB, objects []object) (all []map[string]any) {
	t.Helper()
	list, ok := daemonSet(t, objects).at("spec", "template", "spec", "containers").([]any)
	if !ok {
		t.Fatal("a DaemonSet without containers")
	}
	for _, c := range list {
		all = append(all, c.(map[string]any))
	}
	return all
}

func daemonSet(t testing.TB, objects []object) object {
	t.Helper()
	i := slices.IndexFunc(objects, func(o object) bool { return o["kind"] == "DaemonSet" })
	if i < 0 {
		t.Fatal("no DaemonSet")
	}
	return objects[i]
}

// TestLint: what `helm lint --strict` says, with the defaults and with each overlay's values.
func TestLint(t *testing.T) {
	values := map[string]string{"defaults": "", "everything": everything}
	for name, dir := range overlays(t) {
		values[name] = read(t, filepath.Join(dir, "values.yaml"))
	}
	for name, text := range values {
		for _, m := range lint.AllWithKubeVersion(filepath.Join(root, "chart"), parseOne(t, text), "csi-node", nil).Messages {
			if m.Severity >= support.WarningSev {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

func parseOne(t testing.TB, text string) map[string]any {
	t.Helper()
	if all := parse(t, text); len(all) == 1 {
		return all[0]
	}
	return map[string]any{}
}

// TestSchema: values that the chart does not know, or that cannot be, are refused before anything is installed.
func TestSchema(t *testing.T) {
	for _, values := range []string{
		"replicas: 3",
		"podLabels: {app.kubernetes.io/name: other}",
		"storageClasses: [{suffix: Local_X}]",
		"image: {repo: x}",
		"image: {digest: sha256:12}",
		"driver: {name: Upper.local}",
		"driver: {logLevel: much}",
		"driver: {loggingFormat: xml}",
		"driver: {stateDir: run/x}",
		"kubeletDir: var/lib/kubelet",
		"kubeletDir: /var/lib/kubelet/",
		`kubeletDir: ""`,
		"pool: {size: 1Gi}",
		"pool: {reserve: much}",
		"pool: {reserve: 5percent}",
		"pool: {reserve: 10GB}",
		"pool: {reserve: 101%}",
		`pool: {reserve: "1Gi, 5%"}`,
		"pool: {reserve: '1Gi,2Gi'}", // one of each kind
		"pool: {reserve: '5%,5%'}",
		"pool: {reserve: '1Gi,0'}",
		"pool: {reserve: null}", // that would switch off what the default protects
		"inline: {enabled: null}",
		"inline: {maxSize: null}",
		"inline: {maxTotal: null}",
		"driver: {heal: null}",
		"driver: {logLevel: null}",
		"csiDriver: {create: null}",
		"tracing: {samplingRatePerMillion: null}",
		"inline: {maxSize: 10g}",
		"inline: {maxSize: 10737418240}", // Helm would write it as 1.073741824e+10
		"pool: {dir: mnt/fast}",
		"pool: {dir: /data}", // its parent would be mounted over the container's root
		"pool: {dir: /data/..}",
		"pool: {dir: /./data}",
		"pool: {dir: /mnt/fast/}",
		"storageClasses: [{parameters: {}}]",
		"storageClasses: [{name: a, suffix: b}]",
		"storageClasses: [{name: a, reclaimPolicy: Keep}]",
		"extraStorageClasses: {name: a}",
		"extraStorageClasses: [{parameters: {}}]",
		"extraStorageClasses: [{name: a, provisioner: other.example}]", // it is always the driver
		"sidecarSELinuxOptions: {type: 1}",
		"sidecarSELinuxOptions: {label: spc_t}",
		"imagePullPolicy: Sometimes",
		"imagePullSecrets: [1]",
		"metrics: {port: 99999}",
		"metrics: {serviceMonitor: {enabled: true}}",
		"registrar: {resource: {}}",
		"lvm: {groups: vg0}",
		"lvm: {groups: [--vg0]}",
		"lvm: {groups: ['vg0,vg1']}",
		"tracing: {endpoint: http://collector:4317}",
		"tracing: {samplingRatePerMillion: 1000001}",
		"livenessProbe: {httpGet: {port: http}}",
		"livenessProbe: {timeoutSeconds: 2}", // nothing would be left for the answer
		"readinessProbe: {timeoutSeconds: 1}",
		"readinessProbe: {timeoutSeconds: null}",
		"dnsPolicy: None", // that needs nameservers
		"{dnsPolicy: None, dnsConfig: {searches: [a.example]}}",
		"registrar: {healthPort: 0}",
		"registrar: {livenessProbe: {httpGet: {port: http}}}",
		"registrar: {readinessProbe: {periodSeconds: 1}}",
		"provisioner: {livenessProbe: {timeoutSeconds: 0}}",
		"resizer: {livenessProbe: {periodSeconds: 10s}}",
		"tolerations: {operator: Exists}",
		"daemonSetAnnotations: {a: 1}",
		"updateStrategy: {rollingUpdate: {maxUnavailable: most}}",
		"updateStrategy: {rollingUpdate: {maxUnavailable: 0}}",
		"updateStrategy: {rollingUpdate: {maxUnavailable: 0%}}",
		"storageClasses: [{name: a..b}]",
		"updateStrategy: {rollingUpdate: {maxSurge: 1}}", // two plugins on one node: the second waits, and is never ready
		"extraArgs: [v=4]",
		"networkPolicy: {ingress: []}",
		"nameOverride: Upper",
		"global: {imagePullSecrets: [1]}",
		"inline: {enabled: perhaps}",
		"provisioner: {healthPort: 99999}",
		"resizer: {extraEnv: {A: b}}",
		"test: {size: large}",
		"test: {pod: {}}",
		"commonLabels: {app.kubernetes.io/name: x}", // it is there already
		"csiDriver: {labels: {helm.sh/chart: x}}",
	} {
		if text, err := tryHelm(t, usual, values); err == nil {
			t.Errorf("%s is not refused, and makes\n%s", values, text)
		} else if !strings.Contains(err.Error(), "schema") {
			t.Errorf("%s is refused, and not by the schema: %v", values, err)
		}
	}
}

// TestLimits: the schema takes amounts as the plugin does.
func TestLimits(t *testing.T) {
	for _, limit := range []string{
		"10Gi", "5%", "1Gi,5%", "5%,1Gi", "100%", "1.5Gi", "1500M", "1e9", "9e17", "8.25E", "7Ei", "10000Pi", "999P", "0.5E", "0,5%", "5%,0", "0%", "999999999999999999",
	} {
		text, err := tryHelm(t, usual, fmt.Sprintf("pool: {reserve: '%s'}", limit))
		if err != nil || !strings.Contains(text, "--pool-reserve="+limit+"\n") {
			t.Errorf("with the limit %s Helm says %v and makes\n%s", limit, err, text)
		}
	}
}

// TestProgramWithTheDefaults: a driver.program needs no values beside it, so the check knows the defaults of the limits.
// Its own defaults are not those of the chart, and it is told all that the other objects name.
func TestProgramWithTheDefaults(t *testing.T) {
	text, err := tryHelm(t, usual, "driver: {program: /bin/acme}")
	if err != nil {
		t.Fatal(err)
	}
	for _, told := range []string{"--driver-name=csi-node.local", "--lib-dir=/var/lib/csi-node", "{name: CSI_NODE_STATE_DIR, value: /run/csi-node}"} {
		if !strings.Contains(text, told) {
			t.Errorf("the program is not told %s", told)
		}
	}
}

// TestEveryValueIsInTheSchema: values.yaml says of each value what it is, and values.schema.json what it may be.
func TestEveryValueIsInTheSchema(t *testing.T) {
	c := loadChart(t)
	schema := parseOne(t, string(c.Schema))
	var compare func(path string, values map[string]any, schema map[string]any)
	compare = func(path string, values map[string]any, s map[string]any) {
		if ref, _ := s["$ref"].(string); ref != "" {
			s = object(schema).at("$defs", filepath.Base(ref)).(map[string]any)
		}
		properties, _ := s["properties"].(map[string]any)
		if properties == nil {
			return // an object of Kubernetes, or labels
		}
		for name := range properties {
			if _, is := values[name]; !is {
				t.Errorf("values.yaml does not tell of %s%s", path, name)
			}
		}
		for name, value := range values {
			if below, is := value.(map[string]any); is {
				property, _ := properties[name].(map[string]any)
				compare(path+name+".", below, property)
			}
		}
	}
	compare("", c.Values, schema)
}

// TestNulls: a value that is null is not there. The schema names it if the chart needs it.
func TestNulls(t *testing.T) {
	var try func(path []string, value any)
	try = func(path []string, value any) {
		below, _ := value.(map[string]any)
		for name, value := range below {
			try(append(slices.Clone(path), name), value)
		}
		if len(path) == 0 {
			return
		}
		values := strings.Join(path, ": {") + ": null" + strings.Repeat("}", len(path)-1)
		text, err := tryHelm(t, usual, values)
		if err != nil && !strings.Contains(err.Error(), "missing propert") && !strings.Contains(err.Error(), "set storageClasses") {
			t.Errorf("with %s Helm says %v", values, err)
		}
		for _, o := range parse(t, text) {
			if _, err := decode(t, o); err != nil {
				t.Errorf("with %s Helm makes a %s that Kubernetes does not know: %v", values, o["kind"], err)
			}
		}
	}
	try(nil, loadChart(t).Values)
}

// everything sets every value that changes what is made.
const everything = `
image: {registry: r.example, repository: x/csi-node, tag: v9, digest: "sha256:` + "0000000000000000000000000000000000000000000000000000000000000000" + `"}
imagePullPolicy: Always
global: {imagePullSecrets: [all-charts, {name: registry}]}
imagePullSecrets: [{name: registry}]
nameOverride: storage
commonLabels: {team: storage}
driver: {name: fast.example, maxVolumesPerNode: 1000000, heal: false, logLevel: 4, loggingFormat: json}
csiDriver: {labels: {team: drivers}, annotations: {why: policy}}
kubeletDir: /data/kubelet
selfRegistration: true
pool: {dir: /mnt/fast, requireMount: true, reserve: 1%}
inline: {enabled: false, maxSize: 0, maxTotal: "0"}
storageClasses:
  - {name: fast, parameters: {provisioning: thin, overcommit: 1.5}, mountOptions: [noatime], allowVolumeExpansion: false, volumeBindingMode: Immediate,
     reclaimPolicy: Retain, labels: {a: b}, annotations: {c: d}, allowedTopologies: [{matchLabelExpressions: [{key: k, values: [v]}]}]}
extraStorageClasses: [{suffix: kept, reclaimPolicy: Retain}, {name: loose, parameters: {overcommit: 2.5}, labels: {m: q}, annotations: {o: p}, mountOptions: [nodiratime]}]
defaultStorageClass: fast
lvm: {groups: [vg0, vg1]}
tracing: {endpoint: "collector.example:4317", samplingRatePerMillion: 1000000}
livenessProbe: {timeoutSeconds: 20, failureThreshold: 9}
readinessProbe: {timeoutSeconds: 15, periodSeconds: 20}
dnsPolicy: ClusterFirstWithHostNet
dnsConfig: {options: [{name: ndots, value: "2"}]}
extraArgs: [--v=5]
extraEnv: [{name: GOGC, value: "50"}]
extraVolumes: [{name: extra, emptyDir: {}}]
extraVolumeMounts: [{name: extra, mountPath: /extra}]
provisioner: {healthPort: 9001, livenessProbe: {initialDelaySeconds: 0, timeoutSeconds: 31}, extraArgs: [--v=4], extraEnv: [{name: HTTPS_PROXY, value: "a:1"}], extraVolumeMounts: [{name: extra, mountPath: /extra-p}]}
sidecarSELinuxOptions: {type: spc_t, level: s0}
resizer: {healthPort: 9002, livenessProbe: {periodSeconds: 121, failureThreshold: 7}, extraArgs: [--v=4], extraEnv: [{name: HTTPS_PROXY, value: "b:1"}], extraVolumeMounts: [{name: extra, mountPath: /extra-r}]}
test: {image: {registry: t.example}, storageClass: slow, size: 1Gi, nodeSelector: {kubernetes.io/hostname: one}}
initContainers: [{name: first, image: "x:1"}]
extraContainers: [{name: more, image: "x:1"}]
nodeSelector: {disk: fast}
tolerations: []
priorityClassName: ""
updateStrategy: {rollingUpdate: {maxUnavailable: 3}}
minReadySeconds: 5
terminationGracePeriodSeconds: 60
revisionHistoryLimit: 0
hostNetwork: true
daemonSetAnnotations: {r: s}
podLabels: {e: f}
podAnnotations: {g: h}
serviceAccount: {name: storage, annotations: {i: j}}
metrics:
  port: 9000
  podMonitor: {enabled: true, namespace: monitors, labels: {release: prometheus}, interval: 30s, scrapeTimeout: 10s, relabelings: [{targetLabel: cluster, replacement: c}], metricRelabelings: [{action: drop, sourceLabels: [__name__], regex: go_.*}]}
  prometheusRule: {enabled: true, namespace: rules, labels: {release: prometheus}}
  dashboard: {enabled: true, annotations: {k: l}, namespace: grafana}
networkPolicy: {enabled: true, from: [{podSelector: {}}], egress: [{ports: [{port: 443}]}]}
`

// TestValues: what a value is for is in what the chart makes.
func TestValues(t *testing.T) {
	for _, test := range []struct {
		values    string
		want, not []string
	}{
		{"imageRegistry: mirror.example:5000", []string{
			"image: mirror.example:5000/csi-node/csi-node:v", "image: mirror.example:5000/sig-storage/csi-resizer:v"}, []string{"registry.k8s.io", "ghcr.io"}},
		{"global: {imageRegistry: global.example}\nimageRegistry: mirror.example:5000", []string{
			"image: global.example/csi-node/csi-node:v", "image: global.example/library/busybox:1"}, []string{"mirror.example"}},
		{`podAnnotations: {prometheus.io/scrape: "false"}`, []string{`prometheus.io/scrape: "false"`}, []string{`prometheus.io/scrape: "true"`}},
		{"commonLabels: {team: a, more: b}\ncsiDriver: {labels: {team: c}}", []string{"more: b\n    team: a\n", "more: b\n    team: c\n"}, nil},
		{"extraStorageClasses: [{name: a, annotations: {storageclass.kubernetes.io/is-default-class: 'true'}}]\ndefaultStorageClass: a", []string{"is-default-class"}, nil},
		{"{dnsPolicy: None, dnsConfig: {nameservers: [10.0.0.10]}}", []string{"dnsPolicy: None", "10.0.0.10"}, nil},
		{"registrar: {extraEnv: [{name: A, value: b}], extraVolumeMounts: [{name: extra, mountPath: /extra}]}", []string{"name: A\n", "mountPath: /extra\n"}, nil},
		{"registrar: {livenessProbe: {failureThreshold: 4}}", []string{"port: registrar}\n            failureThreshold: 4\n            initialDelaySeconds: 10\n"}, nil},
		{"registrar: {livenessProbe: {periodSeconds: null}}", []string{"port: registrar}\n            initialDelaySeconds: 10\n            timeoutSeconds: 5\n"}, nil},
		{"extraStorageClasses: [{suffix: more}]\ndefaultStorageClass: csi-node-more", []string{"name: csi-node-local\n", "name: csi-node-more\n", "is-default-class", "storageClassName: csi-node-local\n"}, []string{"seLinuxOptions"}},
		{"storageClasses: []\nextraStorageClasses: [{name: only}]", []string{"storageClassName: only\n"}, []string{"csi-node-local"}},
		{"test: {tolerations: [{key: dedicated}]}", []string{"- key: dedicated\n"}, nil},
		{"fullnameOverride: short", []string{"name: short-local\n", "kind: DaemonSet\nmetadata:\n  name: short\n", "storageClassName: short-local\n"}, nil},
		{"nameOverride: disks", []string{"name: csi-node-disks-thin\n", "name: csi-node-disks-test\n"}, nil},
		{everything, []string{
			"  annotations:\n    r: s\nspec:\n  selector:\n    matchLabels: {app.kubernetes.io/name: csi-node-storage}\n",
			"kind: DaemonSet\nmetadata:\n  name: csi-node-storage\n", "name: all-charts", "  volumeLifecycleModes:\n  - Persistent\n", "name: ndots",
			"--http-endpoint=:9001 ", "{name: provisioner, containerPort: 9001}", "--http-endpoint=:9002 ", "{name: resizer, containerPort: 9002}",
			"value: a:1", "value: b:1", "mountPath: /extra-p", "mountPath: /extra-r", "csi-node.local/driver: fast.example ",
			"image: t.example/library/busybox:1", "storageClassName: slow", "{storage: 1Gi}", "kubernetes.io/hostname: one",
			"image: r.example/x/csi-node:v9@sha256:0000", "imagePullPolicy: Always", "team: storage", "--endpoint=unix://$(CSI_NODE_KUBELET_DIR)/plugins/fast.example/csi.sock",
			"--driver-name=fast.example", "--lib-dir=/var/lib/fast.example", "--pool-dir=/mnt/fast", "mountPath: /mnt, mountPropagation: HostToContainer", "path: /mnt, type: Directory", "--max-volumes-per-node=1000000",
			"--heal=false", "--v=4", "--logging-format=json", "--v=5", "--pool-reserve=1%", "--pool-require-mount\n", "--inline-max-size=0", "--http-endpoint=:9000", "CSI_NODE_STATE_DIR, value: /run/fast.example",
			"provisioner: fast.example", `overcommit: "1.5"`, "allowVolumeExpansion: false", "volumeBindingMode: Immediate", `is-default-class: "true"`, "noatime",
			"name: first", "name: more", "disk: fast", "maxUnavailable: 3", "minReadySeconds: 5", "terminationGracePeriodSeconds: 60", "revisionHistoryLimit: 0", "hostNetwork: true",
			"--lvm-groups=vg0,vg1\n", "mountPath: /run/lock/lvm", "mountPath: /lib/modules, readOnly: true", "path: /run/lock/lvm, type: DirectoryOrCreate", "path: /lib/modules, type: Directory",
			"--tracing-endpoint=collector.example:4317\n", "--tracing-sampling-rate-per-million=1000000\n", "dnsPolicy: ClusterFirstWithHostNet",
			"probe, live, --timeout=18s]", "failureThreshold: 9", "timeoutSeconds: 20", "probe, ready, --timeout=14s]", "periodSeconds: 20",
			"port: provisioner}\n            failureThreshold: 5\n            initialDelaySeconds: 0\n            periodSeconds: 60\n            timeoutSeconds: 31\n",
			"port: resizer}\n            failureThreshold: 7\n            initialDelaySeconds: 10\n            periodSeconds: 121\n            timeoutSeconds: 10\n",
			"name: csi-node-storage-kept\n", "name: loose\n", `overcommit: "2.5"`, "nodiratime", "m: q", "o: p",
			"namespace: monitors", "namespace: rules", "team: drivers", "why: policy", "namespaceSelector: {matchNames: [csi-node]}",
			"e: f", "g: h", "name: storage, namespace: csi-node", "interval: 30s", "release: prometheus", "grafana_dashboard: \"1\"", "namespace: grafana", "policyTypes: [Ingress, Egress]", "path: /data/kubelet, type: Directory"},
			[]string{"- Ephemeral\n", "node-driver-registrar:v", "prometheus.io/scrape", "csi-node.local\n", "/var/lib/kubelet", "tolerations", "priorityClassName"}},
		{"provisioner: {enabled: false}\nstorageClasses: []", []string{"external-resizer", "leases", "persistentvolumeclaims/status"}, []string{"external-provisioner\n", "csistoragecapacities", "create, delete]", "update]}\n  - {apiGroups: [\"\"], resources: [persistentvolumeclaims/status"}},
		{"resizer: {enabled: false}", []string{"external-provisioner\n", "csistoragecapacities", "patch, create, delete]"}, []string{"external-resizer\n", "leases", "persistentvolumeclaims/status"}},
		{"{provisioner: {enabled: false}, resizer: {enabled: false}, storageClasses: []}", []string{"kind: ServiceAccount\n", "node-driver-registrar"}, []string{"external-", "kind: ClusterRole", "kind: Role"}},
		{"affinity: null\nupdateStrategy: {type: OnDelete, rollingUpdate: null}", []string{"type: OnDelete"}, []string{"affinity", "rollingUpdate"}},
		{"metrics: {port: 0}\nnetworkPolicy: {enabled: true}", []string{"policyTypes: [Ingress]\n"}, []string{"--http-endpoint=:9810", "prometheus.io", "name: http", "--tracing", "--lvm-groups", "lvm-locks", "dnsPolicy"}},
		{"csiDriver: {create: false}\nstorageClasses: []\nrbac: {create: false}\nserviceAccount: {create: false, name: given}",
			[]string{"serviceAccountName: given"}, []string{"helm.sh/hook", "kind: CSIDriver", "kind: StorageClass", "kind: ClusterRole", "kind: ServiceAccount\nmetadata"}},
	} {
		text, err := tryHelm(t, usual, test.values)
		if err != nil {
			t.Errorf("%s: %v", test.values, err)
		}
		for _, words := range test.want {
			if !strings.Contains(text, words) {
				t.Errorf("with %s there is no %q in\n%s", test.values, words, text)
			}
		}
		for _, words := range test.not {
			if strings.Contains(text, words) {
				t.Errorf("with %s there is %q in\n%s", test.values, words, text)
			}
		}
	}
}

// TestValuesThatDoNotFitTogether: they are refused, with what does not fit.
func TestValuesThatDoNotFitTogether(t *testing.T) {
	for values, says := range map[string]string{
		"defaultStorageClass: thin":                                                             "defaultStorageClass thin is not one of the classes, which are csi-node-local, csi-node-xfs, csi-node-thin",
		"{defaultStorageClass: csi-node-thin, storageClasses: []}":                              "defaultStorageClass csi-node-thin is not one of the classes",
		"storageClasses: [{name: csi-node-thin}, {suffix: thin}]":                               "have two classes csi-node-thin",
		"extraStorageClasses: [{name: csi-node-thin}]":                                          "have two classes csi-node-thin",
		"{provisioner: {enabled: false}, storageClasses: [], extraStorageClasses: [{name: a}]}": "extraStorageClasses to []",
		"provisioner: {enabled: false}":                                                         "set storageClasses and extraStorageClasses to []",
		"{driver: {program: /bin/acme}, lvm: {groups: [vg0]}}":                                  "name the flags of this one in extraArgs",
		"{driver: {program: /bin/acme}, pool: {reserve: 2Gi}}":                                  "name the flags of this one in extraArgs",
		"{driver: {program: /bin/acme}, inline: {maxSize: 0}}":                                  "name the flags of this one in extraArgs",
		"{driver: {program: /bin/acme}, inline: {maxTotal: 10%}}":                               "name the flags of this one in extraArgs",
		"metrics: {port: 0, podMonitor: {enabled: true}}":                                       "podMonitor.enabled needs a metrics.port",
		"metrics: {port: 9809}":                                                                 "must differ: they are [9809 9809 9807 9808]",
		"resizer: {healthPort: 9807}":                                                           "must differ",
		"pool: {dir: /usr/local/pool}":                                                          "pool.dir: the plugin's container needs its own /usr/local",
		"driver: {libDir: /usr/x}":                                                              "driver.libDir: the plugin's container needs its own /usr/x",
		"pool: {dir: /var/lib/kubelet/pool}":                                                    "needs its own /var/lib/kubelet",
		"pool: {dir: /run/csi-node/pool}":                                                       "needs its own /run/csi-node",
		"pool: {dir: /var/lib/kubelet/x/pool}":                                                  "/var/lib/kubelet/x lies below kubeletDir",
		"driver: {libDir: /var/lib/kubelet/csi}":                                                "/var/lib/kubelet/csi lies below kubeletDir",
		"driver: {stateDir: /var/lib/kubelet/state}":                                            "/var/lib/kubelet/state lies below kubeletDir",
		"pool: {dir: /var/lib/csi-node, requireMount: true}":                                    "pool.dir: the pool would be /var/lib/csi-node itself",
		"fullnameOverride: '123'":                                                               "the name of all objects would be 123",
		"driver: {stateDir: /var/lib/csi-node}":                                                 "must differ: they are [/var/lib/kubelet /var/lib/csi-node /var/lib/csi-node]",
	} {
		if text, err := tryHelm(t, usual, values); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("with %s Helm says %v and makes\n%s", values, err, text)
		}
	}
}

// TestNamesThatAreNoNumbers: only what YAML takes for something else than a string is refused as a name.
func TestNamesThatAreNoNumbers(t *testing.T) {
	for _, name := range []string{"e2e", "e", "1-2", "1a", "x1", "2024-x"} {
		if _, err := tryHelm(t, usual, "fullnameOverride: "+name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"1e3", "0x1f", "no", "2024-01-02"} {
		if _, err := tryHelm(t, usual, "fullnameOverride: '"+name+"'"); err == nil {
			t.Errorf("%s is not refused", name)
		}
	}
}

// TestLongName: the longest name that a release can have is one that all objects can.
func TestLongName(t *testing.T) {
	for _, o := range helm(t, usual, "fullnameOverride: "+strings.Repeat("x", 63)) {
		labels, _ := o.at("metadata", "labels").(map[string]any)
		for name, value := range labels {
			if text, _ := value.(string); len(text) > 63 {
				t.Errorf("%s %s has the label %s=%s, of more than 63 bytes", o["kind"], o.at("metadata", "name"), name, text)
			}
		}
	}
}

// TestHelmTest: what `helm test` makes is a pod with a claim of the first class, which the DaemonSet does not take for one
// of its own.
func TestHelmTest(t *testing.T) {
	objects := helm(t, usual, "")
	selected := daemonSet(t, objects).at("spec", "selector", "matchLabels", "app.kubernetes.io/name")
	tests := 0
	for _, o := range objects {
		if o.at("metadata", "annotations", "helm.sh/hook") != "test" {
			continue
		}
		tests++
		if name := o.at("metadata", "labels", "app.kubernetes.io/name"); o["kind"] != "Pod" || name == selected {
			t.Errorf("the test is a %s with the label %s, by which the DaemonSet selects its pods", o["kind"], name)
		}
		volumes, _ := o.at("spec", "volumes").([]any)
		if !slices.ContainsFunc(volumes, func(v any) bool {
			return object(v.(map[string]any)).at("ephemeral", "volumeClaimTemplate", "spec", "storageClassName") == "csi-node-local"
		}) {
			t.Errorf("the test has no claim of the class csi-node-local, but %v", volumes)
		}
	}
	if tests != 1 {
		t.Errorf("there are %d tests", tests)
	}
}

// TestValuesOfThePage: the chart's page names values that there are, in its block and in its commands.
func TestValuesOfThePage(t *testing.T) {
	page := read(t, filepath.Join(root, "chart", "README.md"))
	_, block, is := strings.Cut(page, "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	if made := helm(t, usual, block); !is || !slices.ContainsFunc(made, func(o object) bool { return o["kind"] == "PodMonitor" }) {
		t.Errorf("the block makes no PodMonitor: %v", made)
	}
	for _, set := range regexp.MustCompile(`--set (\S+)`).FindAllStringSubmatch(page, -1) {
		values, err := strvals.ToYAML(set[1])
		must(t, err)
		if _, err := tryHelm(t, usual, values); err != nil {
			t.Errorf("--set %s: %v", set[1], err)
		}
	}
}

// TestAnotherProgram: with the values of examples/acme the chart installs another driver of the engine. Its program
// knows all flags and probes that it is given, and the CSIDriver is the one that it prints.
func TestAnotherProgram(t *testing.T) {
	objects := helm(t, release{"acme", "acme"}, read(t, filepath.Join(root, "..", "examples", "acme", "values.yaml")))
	acme := filepath.Join(t.TempDir(), "acme")
	harness.Command(t, "go", "build", "-C", filepath.Join(root, ".."), "-o", acme, "./examples/acme")

	printed := object(parseOne(t, harness.Command(t, acme, "csidriver")))
	i := slices.IndexFunc(objects, func(o object) bool { return o["kind"] == "CSIDriver" })
	if spec := objects[i]["spec"]; fmt.Sprint(spec) != fmt.Sprint(printed["spec"]) || objects[i].key() != printed.key() {
		t.Errorf("the chart makes %s with %v, and the program %s with %v", objects[i].key(), spec, printed.key(), printed["spec"])
	}

	containers, _ := daemonSet(t, objects).at("spec", "template", "spec", "containers").([]any)
	plugin := object(containers[0].(map[string]any))
	commands := [][]string{append(words(plugin["command"]), words(plugin["args"])...)}
	for _, probe := range []string{"livenessProbe", "readinessProbe"} {
		commands = append(commands, words(plugin.at(probe, "exec", "command")))
	}
	for _, command := range commands {
		if command[0] != "/usr/local/bin/acme" || len(command) < 4 {
			t.Errorf("it runs %q", command)
			continue
		}
		// What is before --help is parsed first.
		harness.Command(t, acme, append(command[1:], "--help")...)
	}
}

func words(list any) (words []string) {
	all, _ := list.([]any)
	for _, word := range all {
		words = append(words, word.(string))
	}
	return words
}

// TestPodsAreFound: all pods of the plugin have the label by which `kubectl csi-node` looks for them, whatever the release.
func TestPodsAreFound(t *testing.T) {
	for where, objects := range made(t) {
		if where == "monitoring" {
			continue
		}
		if label := daemonSet(t, objects).at("spec", "template", "metadata", "labels", "app.kubernetes.io/part-of"); label != "csi-node" {
			t.Errorf("%s: the pods are part of %v", where, label)
		}
	}
}

// TestSeveralDrivers: releases of drivers with names of their own share no object, no directory and no socket.
func TestSeveralDrivers(t *testing.T) {
	first := helm(t, usual, "")
	second := helm(t, release{"fast", "csi-node"}, "driver: {name: fast.csi-node.local}")
	names := map[string]bool{}
	for _, o := range first {
		names[o.key()] = true
	}
	otherNodes := helm(t, release{"other", "csi-node"}, "csiDriver: {create: false}\nstorageClasses: []\nnodeSelector: {disk: large}")
	for _, o := range slices.Concat(second, otherNodes) {
		if names[o.key()] {
			t.Errorf("both have the %s", o.key())
		}
	}
	own := map[string]bool{"socket": true, "state": true, "pool": true}
	paths := func(objects []object) map[string]string {
		all := map[string]string{}
		for _, v := range daemonSet(t, objects).at("spec", "template", "spec", "volumes").([]any) {
			volume := object(v.(map[string]any))
			if name := fmt.Sprint(volume["name"]); own[name] {
				all[name] = fmt.Sprint(volume.at("hostPath", "path"))
			}
		}
		if len(all) != len(own) {
			t.Errorf("of %v there are %v", own, all)
		}
		return all
	}
	others := paths(second)
	for name, path := range paths(first) {
		if others[name] == path || strings.HasPrefix(others[name], path+"/") {
			t.Errorf("the volume %s of one is %s, and of the other %s", name, path, others[name])
		}
	}
	if selector := daemonSet(t, second).at("spec", "selector", "matchLabels", "app.kubernetes.io/name"); selector != "fast-csi-node" {
		t.Errorf("the second's pods are selected by %v", selector)
	}
}
