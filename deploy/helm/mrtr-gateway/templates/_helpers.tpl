{{- define "mrtr-gateway.name" -}}
{{- $whole := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) }}
{{- $whole | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "mrtr-gateway.selector" -}}
app.kubernetes.io/name: mrtr-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mrtr-gateway.labels" -}}
{{ include "mrtr-gateway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The name of the pods' service account; empty for the namespace's default. */}}
{{- define "mrtr-gateway.serviceAccount" -}}
{{- with .Values.serviceAccount }}{{ .name | default (ternary (include "mrtr-gateway.name" $) "" .create) }}{{ end }}
{{- end }}

{{/* The whole configuration: the user's values override the chart's. */}}
{{- define "mrtr-gateway.config" -}}
{{- $name := include "mrtr-gateway.name" . }}
{{- $config := deepCopy .Values.config }}
{{- if not (dig "security" "allowed_hosts" list $config) }}
{{- $names := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) }}
{{- $_ := mergeOverwrite $config (dict "security" (dict "allowed_hosts" (concat $names .Values.hosts))) }}
{{- end }}
{{- $keys := dict }}
{{- if not (dig "state" "keys" list $config) }}
{{- $keys = dict "keys_file" "/run/secrets/mrtr-gateway/state-keys" }}
{{- end }}
{{- $ours := dict
      "listen" "0.0.0.0:8080"
      "admin" "0.0.0.0:9464"
      "state" $keys
      "replica" (dict "id" "${POD_NAME}" "listen" "0.0.0.0:8081" "peers_dns" (printf "%s-peers:8081" $name)) }}
{{- toYaml (merge $config $ours) }}
{{- end }}

{{/* The port of an address such as 0.0.0.0:8080. */}}
{{- define "mrtr-gateway.port" -}}
{{ splitList ":" . | last }}
{{- end }}

{{/* A number of seconds. It cannot be a variable, because only the pods know its value. */}}
{{- define "mrtr-gateway.seconds" -}}
{{- if kindIs "string" .value }}{{ fail (printf "config.%s is %q: write a number, the pods' grace period is made of it" .key .value) }}{{ end }}
{{- .value }}
{{- end }}
