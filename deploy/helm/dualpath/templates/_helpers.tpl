{{- define "dualpath.name" -}}
{{- if contains "dualpath" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-dualpath{{ end }}
{{- end }}

{{/* Labels of a part: (list $ "router"). */}}
{{- define "dualpath.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: dualpath
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "dualpath.labels" -}}
{{- $root := index . 0 -}}
{{ include "dualpath.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* A part of a unit, as component and end of its name: (list "router" UNIT); unit 0 has no number. */}}
{{- define "dualpath.ofUnit" -}}
{{- $unit := index . 1 -}}
{{- index . 0 }}{{ if $unit }}-unit-{{ $unit }}{{ end }}
{{- end }}

{{/* The address of each scheduler for front ends, with commas. */}}
{{- define "dualpath.schedulers" -}}
{{- $found := list -}}
{{- range $unit := until (int $.Values.units) }}
{{- $found = append $found (printf "tcp://%s-%s:%v" (include "dualpath.name" $) (include "dualpath.ofUnit" (list "router" $unit)) $.Values.frontEnds.port) }}
{{- end }}
{{- join "," $found }}
{{- end }}

{{/* The component that serves clients. */}}
{{- define "dualpath.front" -}}
{{- if gt (int .Values.frontEnds.replicas) 0 }}frontend{{ else }}router{{ end }}
{{- end }}

{{- define "dualpath.secret" -}}
{{- .Values.secrets.existing | default (include "dualpath.name" .) }}
{{- end }}

{{- define "dualpath.storageIsPath" -}}
{{- if contains "://" .Values.storage.url }}{{ else }}yes{{ end }}
{{- end }}

{{/* One variable from a secret: (list NAME SECRET KEY). */}}
{{- define "dualpath.secretVariable" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ index . 1 }}, key: {{ index . 2 }}}
{{- end }}

{{/* Common part of all pods: (list $ settings-of-the-part [service-account]). */}}
{{- define "dualpath.pod" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
{{- $account := "" -}}{{- if gt (len .) 2 }}{{ $account = index . 2 }}{{ end -}}
# Otherwise a service named dualpath-router would set the variable DUALPATH_ROUTER_PORT, which is a
# setting.
enableServiceLinks: false
automountServiceAccountToken: {{ ne $account "" }}
{{- with $account }}
serviceAccountName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ add (int $root.Values.drainSeconds) 30 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What all containers have: (list $ settings-of-the-part). */}}
{{- define "dualpath.container" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag }}"
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext: {{ mergeOverwrite (dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL"))) ($part.securityContext | default dict) | toYaml | nindent 2 }}
{{- end }}

{{/* Folders of all containers; the root is read-only. */}}
{{- define "dualpath.mounts" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /home/dualpath, subPath: home}
{{- if .Values.model.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.config }}
- {name: config, mountPath: /etc/dualpath, readOnly: true}
{{- end }}
{{- end }}

{{- define "dualpath.volumes" -}}
- {name: scratch, emptyDir: {}}
{{- with .Values.model.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if .Values.config }}
- name: config
  configMap: {name: {{ include "dualpath.name" . }}}
{{- end }}
{{- end }}

{{/* Pods are replaced when their settings change. */}}
{{- define "dualpath.annotations" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
dualpath/config: {{ sha256sum $root.Values.config | trunc 16 | quote }}
{{- with $part.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The model: a folder of the claim, or a name. */}}
{{- define "dualpath.model" -}}
{{- $name := required "model.name is empty; give a folder below /models, a hub name or, for emulated engines, a catalog model" .Values.model.name -}}
{{- if .Values.model.existingClaim }}/models/{{ trimPrefix "/models/" $name }}{{ else }}{{ $name }}{{ end }}
{{- end }}
