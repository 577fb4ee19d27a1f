{{/* Paths of the manifests that the values ask for, as a JSON list. */}}
{{- define "perdure.files" -}}
{{- $paths := list "base/accounts.yaml" "base/rights.yaml" "base/prefect-server.yaml" "base/client.yaml" "base/worker.yaml" "base/keeper.yaml" "base/networks.yaml" -}}
{{- if not .Values.externalPostgresql.host -}}
{{- $paths = append $paths "base/postgres.yaml" -}}
{{- end -}}
{{- if gt (int .Values.servers) 1 -}}
{{- $paths = append $paths "overlays/two-servers/redis.yaml" -}}
{{- end -}}
{{- concat $paths (include "perdure.options" . | fromJsonArray) | toJson -}}
{{- end -}}

{{/* Likewise, of the options alone. */}}
{{- define "perdure.options" -}}
{{- $paths := list -}}
{{- range $name, $wanted := .Values.options -}}
{{- $files := $.Files.Glob (printf "options/%s/*.yaml" $name) -}}
{{- if not $files -}}
{{- fail (printf "options.%s: no such option; they are the folders of options/" $name) -}}
{{- end -}}
{{- range $path, $_ := $files -}}
{{- if and $wanted (ne (base $path) "kustomization.yaml") -}}
{{- $paths = append $paths $path -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $paths | toJson -}}
{{- end -}}

{{/* The documents of a file, as a JSON list. */}}
{{- define "perdure.documents" -}}
{{- $documents := list -}}
{{- range $text := splitList "\n---\n" (.root.Files.Get .path) -}}
{{- $document := fromYaml $text -}}
{{- if $document.kind -}}
{{- $documents = append $documents $document -}}
{{- end -}}
{{- end -}}
{{- $documents | toJson -}}
{{- end -}}

{{/* The patch that overlays/two-servers has for a document; {}: none. */}}
{{- define "perdure.patch" -}}
{{- $found := dict -}}
{{- if gt (int .root.Values.servers) 1 -}}
{{- range $patch := include "perdure.documents" (dict "root" .root "path" "overlays/two-servers/servers.yaml") | fromJsonArray -}}
{{- if and (eq $patch.kind $.document.kind) (eq $patch.metadata.name $.document.metadata.name) -}}
{{- $found = $patch -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* A document of the manifests with the values, in a namespace. */}}
{{- define "perdure.rendered" -}}
{{- $document := .document -}}
{{- $patch := include "perdure.patch" . | fromJson -}}
{{- include "perdure.set-namespace" . -}}
{{- if eq $document.kind "ServiceAccount" -}}
{{- include "perdure.set-account" . -}}
{{- else if eq $document.kind "ConfigMap" -}}
{{- include "perdure.set-settings" (merge (dict "patch" $patch) .) -}}
{{- else if has $document.kind (list "Deployment" "StatefulSet") -}}
{{- include "perdure.set-pods" (merge (dict "patch" $patch) .) -}}
{{- else if eq $document.kind "NetworkPolicy" -}}
{{- include "perdure.set-peers" . -}}
{{- end -}}
{{- $document | toYaml -}}
{{- end -}}

{{/* Namespaces of a document and of those that it gives rights to. What is outside of the release's
namespaces has its name: two releases are no obstacle to each other. */}}
{{- define "perdure.set-namespace" -}}
{{- $document := .document -}}
{{- $namespace := .namespace -}}
{{- $release := .root.Release.Namespace -}}
{{- if eq ($document.metadata.namespace | default "") "perdure" -}}
{{- $_ := set $document.metadata "namespace" $namespace -}}
{{- else -}}
{{- $_ := set $document.metadata "name" (printf "%s-%s" $document.metadata.name $release) -}}
{{- with $document.roleRef -}}
{{- $_ := set . "name" (printf "%s-%s" .name $release) -}}
{{- end -}}
{{- end -}}
{{- if $document.subjects -}}
{{- $subject := index $document.subjects 0 -}}
{{- $places := list $release -}}
{{- if eq $subject.name "perdure-supervisor" -}}
{{- $places = eq ($document.metadata.namespace | default "") $namespace | ternary (list $release $namespace) (concat $places .root.Values.namespaces) -}}
{{- end -}}
{{- $subjects := list -}}
{{- range $place := uniq $places -}}
{{- $subjects = append $subjects (merge (dict "namespace" $place) $subject) -}}
{{- end -}}
{{- $_ := set $document "subjects" $subjects -}}
{{- end -}}
{{- end -}}

{{- define "perdure.set-account" -}}
{{- $names := list -}}
{{- range .root.Values.imagePullSecrets -}}
{{- $names = append $names (dict "name" .) -}}
{{- end -}}
{{- if $names -}}
{{- $_ := set .document "imagePullSecrets" $names -}}
{{- end -}}
{{- end -}}

{{/* Settings of Prefect's servers and of their clients. */}}
{{- define "perdure.set-settings" -}}
{{- $data := .document.data -}}
{{- if eq .document.metadata.name "perdure-prefect-server" -}}
{{- with .root.Values.externalPostgresql -}}
{{- if .host -}}
{{- $_ := set $data "PREFECT_SERVER_DATABASE_HOST" .host -}}
{{- $_ := set $data "PREFECT_SERVER_DATABASE_PORT" (toString .port) -}}
{{- $_ := set $data "PREFECT_SERVER_DATABASE_USER" .user -}}
{{- $_ := set $data "PREFECT_SERVER_DATABASE_NAME" .database -}}
{{- end -}}
{{- end -}}
{{- else if eq .document.metadata.name "perdure-prefect-client" -}}
{{- $_ := set $data "PREFECT_API_URL" (printf "http://perdure-prefect.%s:4200/api" .root.Release.Namespace) -}}
{{- with .root.Values.store.endpoint -}}{{- $_ := set $data "AWS_ENDPOINT_URL" . -}}{{- end -}}
{{- with .root.Values.store.region -}}{{- $_ := set $data "AWS_REGION" . -}}{{- end -}}
{{- end -}}
{{- $_ := set .document "data" (mergeOverwrite $data (.patch.data | default dict)) -}}
{{- end -}}

{{/* Pods of Deployments and StatefulSets: images, priority, the second server, the claim. */}}
{{- define "perdure.set-pods" -}}
{{- $values := .root.Values -}}
{{- $spec := .document.spec -}}
{{- $pod := $spec.template.spec -}}
{{- $images := dict "postgres:16" $values.postgresImage "redis:7" $values.redisImage "perdure" $values.image -}}
{{- range $container := concat ($pod.initContainers | default list) $pod.containers -}}
{{- $_ := set $container "image" (index $images $container.image) -}}
{{- range $variable := $container.env -}}
{{- if eq $variable.name "PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES" -}}
{{- $_ := set $variable "value" (join "," (concat (list $.root.Release.Namespace) $values.namespaces)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $values.priorityClass -}}{{- $_ := set $pod "priorityClassName" . -}}{{- end -}}
{{- if .patch -}}
{{- $changed := .patch.spec.template.spec -}}
{{- $_ := set $spec "replicas" (int $values.servers) -}}
{{- $_ := set $pod "affinity" $changed.affinity -}}
{{- $container := index $pod.containers 0 -}}
{{- $_ := set $container "env" (concat $container.env (index $changed.containers 0).env) -}}
{{- end -}}
{{- range $claim := $spec.volumeClaimTemplates -}}
{{- with $values.storageClass -}}{{- $_ := set $claim.spec "storageClassName" . -}}{{- end -}}
{{- $_ := set $claim.spec.resources.requests "storage" $values.storageSize -}}
{{- end -}}
{{- end -}}

{{/* Supervisors of other namespaces may ask the Prefect servers; the keeper may ask agents there. */}}
{{- define "perdure.set-peers" -}}
{{- $others := list -}}
{{- if eq .document.metadata.name "perdure-prefect" -}}
{{- $others = .root.Values.namespaces -}}
{{- else if and (eq .document.metadata.name "perdure-agents") (ne .namespace .root.Release.Namespace) -}}
{{- $others = list .root.Release.Namespace -}}
{{- end -}}
{{- range $other := $others -}}
{{- $peer := dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" $other)) "podSelector" (dict "matchLabels" (dict "perdure.io/role" "supervisor")) -}}
{{- $rule := index $.document.spec.ingress 0 -}}
{{- $_ := set $rule "from" (append (index $rule "from") $peer) -}}
{{- end -}}
{{- end -}}

{{/* The Job of a flow run. */}}
{{- define "perdure.job-template" -}}
{{- $template := .Files.Get "base/base-job-template.json" | fromJson -}}
{{- with .Values.priorityClass -}}
{{- $_ := set $template.job_configuration.job_manifest.spec.template.spec "priorityClassName" . -}}
{{- end -}}
{{- $template | toPrettyJson -}}
{{- end -}}
