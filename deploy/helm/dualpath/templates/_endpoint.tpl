{{/* Arguments of router and front ends: (list $ settings-of-the-part). */}}
{{- define "dualpath.endpointArguments" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
{{- if $root.Values.config }}
- --config=/etc/dualpath/config.toml
{{- end }}
{{- if $root.Values.monitoring.serviceMonitor.enabled }}
- --open-metrics
{{- end }}
- --allowed-hosts=.svc,.svc.cluster.local
{{- range $part.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- if eq $root.Values.kind "vllm" }}
- --vllm-args
- --disable-uvicorn-access-log
{{- range $root.Values.router.vllmArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "dualpath.endpointEnvironment" -}}
{{- $root := index . 0 -}}{{- $part := index . 1 -}}
{{ include "dualpath.secretVariable" (list "DUALPATH_CLUSTER_SECRET" (include "dualpath.secret" $root) "cluster-secret") }}
{{ include "dualpath.secretVariable" (list "DUALPATH_ENGINE_API_KEY" (include "dualpath.secret" $root) "engine-api-key") }}
{{- with $root.Values.secrets.clients }}
{{ include "dualpath.secretVariable" (list "DUALPATH_ROUTER_API_KEYS" . "api-keys") }}
{{- end }}
{{- with $part.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Ready while there is an engine of each role; alive also without engines. */}}
{{- define "dualpath.endpointProbes" -}}
startupProbe:
  tcpSocket: {port: http}
  periodSeconds: 2
  failureThreshold: 150
livenessProbe:
  tcpSocket: {port: http}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
{{- end }}
