{{/* Pod of an engine, or of one rank of a group: (list $ ROLE settings-of-the-role UNIT). */}}
{{- define "dualpath.enginePod" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $part := index . 2 -}}{{- $unit := index . 3 -}}
metadata:
  labels: {{ include "dualpath.labels" (list $root (include "dualpath.ofUnit" (list $role $unit))) | nindent 4 }}
  annotations: {{ include "dualpath.annotations" (list $root $part) | nindent 4 }}
spec:
  {{- include "dualpath.pod" (list $root $part) | nindent 2 }}
  containers:
    - name: engine
      {{- include "dualpath.container" (list $root $part) | nindent 6 }}
      args: {{ include "dualpath.engineArguments" . | nindent 8 }}
      env: {{ include "dualpath.engineEnvironment" . | nindent 8 }}
      ports:
        - {name: http, containerPort: 8000}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: {{ div (int $part.startSeconds) 5 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      # SIGTERM drains: the router sends no new requests, and running ones end.
      resources: {{ include "dualpath.engineResources" . | nindent 8 }}
      volumeMounts:
        {{- include "dualpath.mounts" $root | nindent 8 }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if include "dualpath.storageIsPath" $root }}
        - {name: storage, mountPath: {{ $root.Values.storage.url }}}
        {{- end }}
  volumes:
    {{- include "dualpath.volumes" $root | nindent 4 }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $part.sharedMemory }}}
    {{- if include "dualpath.storageIsPath" $root }}
    - name: storage
      persistentVolumeClaim:
        claimName: {{ $root.Values.storage.claim.existing | default (printf "%s-storage" (include "dualpath.name" $root)) }}
    {{- end }}
{{- end }}

{{/* vLLM's plugin adds the other arguments that an engine needs. */}}
{{- define "dualpath.engineArguments" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $part := index . 2 -}}
{{- $extra := dict -}}
{{- if $root.Values.config }}{{ $_ := set $extra "config" "/etc/dualpath/config.toml" }}{{ end -}}
{{- $transfer := dict "kv_connector" "DualPathConnector" "kv_role" "kv_both" "kv_connector_extra_config" $extra -}}
{{- if eq $root.Values.kind "emulated" -}}
- dualpath
- emulate
- {{ $role }}
- {{ printf "--host=%s" $root.Values.listenHost | quote }}
- --port=8000
- --model={{ include "dualpath.model" $root }}
{{- if $root.Values.config }}
- --config=/etc/dualpath/config.toml
{{- end }}
{{- if gt (int $part.tensorParallel) 1 }}
- --tensor-parallel-size={{ $part.tensorParallel }}
{{- end }}
{{- with int64 $part.hbmBytes }}
- --hbm-bytes={{ . }}
{{- end }}
{{- else -}}
- python
- -m
- vllm.entrypoints.launchers.api_server.entry
- --model={{ include "dualpath.model" $root }}
- {{ printf "--host=%s" $root.Values.listenHost | quote }}
- --port=8000
- --disable-uvicorn-access-log
- --kv-transfer-config={{ $transfer | toJson }}
{{- if gt (int $part.tensorParallel) 1 }}
- --tensor-parallel-size={{ $part.tensorParallel }}
{{- end }}
{{- with int64 $part.hbmBytes }}
- --kv-cache-memory-bytes={{ . }}
{{- end }}
{{- if gt (int $part.dataParallel) 1 }}
- --enable-expert-parallel
- --data-parallel-size={{ $part.dataParallel }}
{{- if eq $part.workload "LeaderWorkerSet" }}
- --data-parallel-rank=$(LWS_WORKER_INDEX)
- --data-parallel-address=$(LWS_LEADER_ADDRESS)
- --data-parallel-rpc-port=29550
{{- end }}
{{- end }}
{{- end }}
{{- range $part.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "dualpath.engineEnvironment" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $part := index . 2 -}}{{- $unit := index . 3 -}}
{{- $name := printf "%s-%s" (include "dualpath.name" $root) (include "dualpath.ofUnit" (list $role $unit)) -}}
{{- $router := printf "%s-%s" (include "dualpath.name" $root) (include "dualpath.ofUnit" (list "router" $unit)) -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
# Engines of one machine share its storage NIC.
- name: DUALPATH_ENGINE_NODE
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if eq $part.workload "LeaderWorkerSet" }}
- name: GROUP_INDEX
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
- {name: DUALPATH_ENGINE_ENGINE_ID, value: {{ $name }}-$(GROUP_INDEX)}
{{- else }}
- {name: DUALPATH_ENGINE_ENGINE_ID, value: $(POD_NAME)}
{{- end }}
- {name: DUALPATH_ENGINE_ROLE, value: {{ $role }}}
- {name: DUALPATH_ENGINE_API_URL, value: "http://$(POD_NAME).{{ $name }}:8000"}
- {name: DUALPATH_ENGINE_ROUTER, value: "tcp://{{ $router }}:{{ $root.Values.router.controlPort }}"}
- {name: DUALPATH_ENGINE_STORAGE, value: {{ $root.Values.storage.url | quote }}}
- {name: DUALPATH_ENGINE_BUFFER_BYTES, value: {{ $part.bufferBytes | quote }}}
- {name: DUALPATH_ENGINE_DRAIN_TIMEOUT_S, value: {{ $root.Values.drainSeconds | quote }}}
{{ include "dualpath.secretVariable" (list "DUALPATH_CLUSTER_SECRET" (include "dualpath.secret" $root) "cluster-secret") }}
{{ include "dualpath.secretVariable" (list "VLLM_API_KEY" (include "dualpath.secret" $root) "engine-api-key") }}
{{- with $root.Values.storage.key.existingSecret }}
{{ include "dualpath.secretVariable" (list "DUALPATH_STORAGE_KEY" . "storage-key") }}
{{- end }}
{{- with $root.Values.storage.s3.existingSecret }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
{{ include "dualpath.secretVariable" (list . $root.Values.storage.s3.existingSecret .) }}
{{- end }}
{{- range list "AWS_SESSION_TOKEN" "AWS_ENDPOINT_URL_S3" "AWS_REGION" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef: {name: {{ $root.Values.storage.s3.existingSecret }}, key: {{ . }}, optional: true}
{{- end }}
{{- end }}
{{- with $part.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Devices of a pod: of its one rank, or of all ranks if the pod has the whole group. */}}
{{- define "dualpath.engineResources" -}}
{{- $part := index . 2 -}}
{{- $ranks := ternary 1 (int $part.dataParallel) (eq $part.workload "LeaderWorkerSet") -}}
{{- $devices := dict -}}
{{- if $part.deviceResource }}{{ $_ := set $devices $part.deviceResource (mul $ranks (int $part.tensorParallel) | toString) }}{{ end -}}
{{- mergeOverwrite (dict "limits" $devices) (deepCopy $part.resources) | toYaml }}
{{- end }}
