{{/* The name of all objects. It is also the label by which the DaemonSet selects its pods, as in deploy/base. */}}
{{- define "csi-node.name" -}}
{{- $name := .Values.nameOverride | default "csi-node" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The labels of an object: a list of the root context and of its own labels, which come before commonLabels. */}}
{{- define "csi-node.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "csi-node.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version | replace "+" "_" }}
{{- with merge dict (index . 1 | default dict) ($root.Values.commonLabels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "csi-node.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "csi-node.name" .) -}}
{{- end -}}

{{- define "csi-node.stateDir" -}}
{{- .Values.driver.stateDir | default (print "/run/" (trimSuffix ".local" .Values.driver.name)) -}}
{{- end -}}

{{- define "csi-node.libDir" -}}
{{- .Values.driver.libDir | default (print "/var/lib/" (trimSuffix ".local" .Values.driver.name)) -}}
{{- end -}}

{{- define "csi-node.poolDir" -}}
{{- .Values.pool.dir | default (print (include "csi-node.libDir" .) "/pool") -}}
{{- end -}}

{{/* An image: a list of the root context and an image's values. */}}
{{- define "csi-node.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := $root.Values.global.imageRegistry | default $root.Values.imageRegistry | default $image.registry -}}
{{- with $registry }}{{ . }}/{{ end -}}
{{- $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion -}}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- define "csi-node.pullPolicy" -}}
{{- with .Values.imagePullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{- define "csi-node.pullSecrets" -}}
{{- $secrets := list -}}
{{- range concat (.Values.global.imagePullSecrets | default list) (.Values.imagePullSecrets | default list) -}}
{{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) -}}
{{- end -}}
{{- with uniq $secrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* All classes, as JSON. */}}
{{- define "csi-node.classes" -}}
{{- concat (.Values.storageClasses | default list) (.Values.extraStorageClasses | default list) | toJson -}}
{{- end -}}

{{/* The name of a class: a list of the root context and of one of csi-node.classes. */}}
{{- define "csi-node.className" -}}
{{- $class := index . 1 -}}
{{- get $class "name" | default (printf "%s-%s" (include "csi-node.name" (index . 0)) (get $class "suffix")) -}}
{{- end -}}

{{/* All that a sidecar may. */}}
{{- define "csi-node.sidecarSecurityContext" -}}
# Only root can use the plugin's socket, so there is no runAsNonRoot.
runAsUser: 0
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
seccompProfile: {type: RuntimeDefault}
{{- with .Values.sidecarSELinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The values of a sidecar's probe. Kubernetes decides those that are null. */}}
{{- define "csi-node.timing" -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) }}
{{ $name }}: {{ int $value }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses values that do not fit together. What one value alone may be is in values.schema.json. */}}
{{- define "csi-node.check" -}}
{{- if and (include "csi-node.classes" . | fromJsonArray) (not .Values.provisioner.enabled) -}}
{{- fail "without provisioner.enabled nothing makes the volumes of classes: set storageClasses and extraStorageClasses to []" -}}
{{- end -}}
{{- $limits := list .Values.pool.reserve .Values.inline.maxSize .Values.inline.maxTotal | join " " -}}
{{- if and .Values.driver.program (or .Values.pool.dir .Values.pool.requireMount .Values.lvm.groups (ne $limits "1Gi,5% 10Gi 50%")) -}}
{{- fail "driver.program: the values of pool and lvm, inline.maxSize and inline.maxTotal are for csi-node's own program; name the flags of this one in extraArgs" -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled (not .Values.metrics.port) -}}
{{- fail "metrics.podMonitor.enabled needs a metrics.port" -}}
{{- end -}}
{{- $ports := list -}}
{{- with .Values.metrics.port }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- if not .Values.selfRegistration }}{{ $ports = append $ports (int .Values.registrar.healthPort) }}{{ end -}}
{{- range list .Values.provisioner .Values.resizer -}}
{{- if .enabled }}{{ $ports = append $ports (int .healthPort) }}{{ end -}}
{{- end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail (printf "metrics.port and the healthPort of the sidecars must differ: they are %v" $ports) -}}
{{- end -}}
{{- $dirs := list .Values.kubeletDir (include "csi-node.stateDir" .) (include "csi-node.libDir" .) -}}
{{- if ne (len $dirs) (len (uniq $dirs)) -}}
{{- fail (printf "kubeletDir, driver.stateDir and driver.libDir must differ: they are %v" $dirs) -}}
{{- end -}}
{{- $pool := include "csi-node.poolDir" . -}}
{{- $poolValue := ternary "driver.libDir" "pool.dir" (empty .Values.pool.dir) -}}
{{- if has $pool $dirs -}}
{{- fail (printf "%s: the pool would be %s itself, which is another directory of the plugin: name one that is the pool's alone" $poolValue $pool) -}}
{{- end -}}
{{- $parent := dir $pool -}}
{{- if or (has $parent (initial $dirs)) (regexMatch "^/(usr|etc|bin|sbin|lib|lib64|dev|sys|proc|csi)(/|$)" $parent) -}}
{{- fail (printf "%s: the plugin's container needs its own %s" $poolValue $parent) -}}
{{- end -}}
{{- range append (rest $dirs) $parent -}}
{{- if hasPrefix (print $.Values.kubeletDir "/") . -}}
{{- fail (printf "%s lies below kubeletDir: what a container mounts there stays on the node, twice as much with each new container; name another directory, and move there what the nodes have in it" .) -}}
{{- end -}}
{{- end -}}
{{- $name := include "csi-node.name" . -}}
{{- if regexMatch "^([0-9]+(\\.[0-9]*)?(e-?[0-9]+)?|0x[0-9a-f]+|0o[0-7]+|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|true|false|null|yes|no|on|off|y|n)$" $name -}}
{{- fail (printf "the name of all objects would be %s, which YAML takes for something else than a name: set fullnameOverride" $name) -}}
{{- end -}}
{{- end -}}
