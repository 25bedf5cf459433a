{{- define "k8e.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "k8e.controller.labels" -}}
app: agent-sandbox-controller
app.kubernetes.io/name: agent-sandbox-controller
app.kubernetes.io/part-of: agent-sandbox
{{- end }}

{{- define "k8e.router.labels" -}}
app: sandbox-router
app.kubernetes.io/name: sandbox-router
app.kubernetes.io/part-of: agent-sandbox
{{- end }}

{{- /* Where the Lease is. */}}
{{- define "k8e.leaseNamespace" -}}
{{ .Values.controller.leaderElectionNamespace | default .Values.namespace.name }}
{{- end }}

{{- /* The flags whose values are set, by the names of the values. */}}
{{- define "k8e.controller.flags" -}}
{{- $flags := dict
  "clusterDomain" "cluster-domain"
  "leaderElectionNamespace" "leader-election-namespace"
  "enableTracing" "enable-tracing"
  "enablePprof" "enable-pprof"
  "enablePprofDebug" "enable-pprof-debug"
  "pprofBlockProfileRate" "pprof-block-profile-rate"
  "pprofMutexProfileFraction" "pprof-mutex-profile-fraction"
  "kubeApiQps" "kube-api-qps"
  "kubeApiBurst" "kube-api-burst"
  "sandboxConcurrentWorkers" "sandbox-concurrent-workers"
  "sandboxClaimConcurrentWorkers" "sandbox-claim-concurrent-workers"
  "sandboxWarmPoolConcurrentWorkers" "sandbox-warm-pool-concurrent-workers"
  "sandboxTemplateConcurrentWorkers" "sandbox-template-concurrent-workers"
  "sandboxWarmPoolMaxBatchSize" "sandbox-warm-pool-max-batch-size"
  "sandboxWarmPoolReplenishDelay" "sandbox-warm-pool-replenish-delay"
  "sandboxWarmPoolMaxRefillRate" "sandbox-warm-pool-max-refill-rate"
  "sandboxWarmPoolReadinessGracePeriod" "sandbox-warm-pool-readiness-grace-period"
  "sandboxWarmPoolUnschedulableRecheckInterval" "sandbox-warm-pool-unschedulable-recheck-interval"
  "enableWarmPoolEviction" "enable-warm-pool-eviction"
  "apiConnections" "api-connections"
  "separateWatchConnection" "separate-watch-connection"
  "cacheLabelSelectors" "cache-label-selectors"
  "disableSandboxEvents" "disable-sandbox-events"
  "disableClaimEvents" "disable-claim-events"
  "disableClaimObservabilityAnnotations" "disable-claim-observability-annotations"
  "sandboxWriteBehindWindow" "sandbox-write-behind-window"
  "sandboxClaimWarmCandidateGracePeriod" "sandbox-claim-warm-candidate-grace-period"
  "enableRESTClientMetrics" "enable-rest-client-metrics" }}
{{- $values := .Values.controller }}
{{- range $name := keys $flags | sortAlpha }}
{{- $value := index $values $name }}
{{- if not (kindIs "invalid" $value) }}
{{- /* YAML makes large numbers floats: 1000000 must not become 1e+06. */}}
- --{{ index $flags $name }}={{ if kindIs "float64" $value }}{{ if eq (float64 (int64 $value)) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
