#!/usr/bin/env bash
# TPU slices on Google Kubernetes Engine, one or several (multislice), as a JobSet that starts again after a preemption.
#   bash launch/gke_jobset.sh COMMAND --name=run1 --image=IMAGE --topology=4x4 [OPTIONS] [-- ARGUMENTS OF calyrex_jax.main]
#   manifest  prints the JobSet        apply   hands it to the cluster of kubectl's context
#   status    of its pods              logs    follows process 0's output         delete  removes it
#   --name, --image, --topology, --namespace=default, --bucket, --service-account   also as JOB_NAME, IMAGE, TOPOLOGY, NAMESPACE, BUCKET,
#                                 SERVICE_ACCOUNT; status, logs and delete need the name alone
#   --slices=1                    slices; config.mesh.data divides over them
#   --accelerator=tpu-v5-lite-podslice   the node label cloud.google.com/gke-tpu-accelerator; v5p: tpu-v5p-slice, v6e: tpu-v6e-slice
#   --chips-per-host=4            TPU chips of one node
#   --bucket=BUCKET               gs://BUCKET stands at /pod in every pod: put --workdir=/pod/NAME after --
#   --service-account=ACCOUNT     the Kubernetes account that may read and write it
#   --secret=NAME                 variables from this Kubernetes secret (HF_TOKEN)
#   --spot                        on spot nodes         --restarts=10  times it starts again
#   --dry-run                     prints what apply and the others would call
# The image is built by launch/Dockerfile. The cluster needs JobSet, and for --bucket its Cloud Storage FUSE driver.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

name=${JOB_NAME:-} image=${IMAGE:-} topology=${TOPOLOGY:-} namespace=${NAMESPACE:-default} bucket=${BUCKET:-} account=${SERVICE_ACCOUNT:-}
slices=1 accelerator=tpu-v5-lite-podslice chips=4 secret='' spot='' restarts=10 dry_run=''
command=${1:-}
[ $# -eq 0 ] || shift
case $command in
manifest | apply | status | logs | delete) ;;
help | --help | -h)
  usage
  exit 0
  ;;
*) fail "'$command' is no command; expected manifest, apply, status, logs or delete" ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
  --name=*) name=${1#*=} ;;
  --image=*) image=${1#*=} ;;
  --topology=*) topology=${1#*=} ;;
  --namespace=*) namespace=${1#*=} ;;
  --slices=*) slices=${1#*=} ;;
  --accelerator=*) accelerator=${1#*=} ;;
  --chips-per-host=*) chips=${1#*=} ;;
  --bucket=*) bucket=${1#*=} ;;
  --service-account=*) account=${1#*=} ;;
  --secret=*) secret=${1#*=} ;;
  --restarts=*) restarts=${1#*=} ;;
  --spot) spot=1 ;;
  --dry-run) dry_run=1 ;;
  --)
    shift
    break
    ;;
  *) fail "'$1' is not understood; options look like --name=run1, and arguments of calyrex_jax.main come after --" ;;
  esac
  shift
done
need_name --name "$name" "name the JobSet, as in --name=run1"
need_name --namespace "$namespace" "name a namespace of the cluster"

hosts_of_slice() { # chips of the topology over chips of a host
  local total=1 side rest=$topology
  while [ -n "$rest" ]; do
    side=${rest%%x*}
    total=$((total * side))
    case $rest in *x*) rest=${rest#*x} ;; *) rest='' ;; esac
  done
  [ $((total % chips)) = 0 ] || fail "--topology=$topology has $total chips, which --chips-per-host=$chips does not divide; give what a node has"
  hosts=$((total / chips))
}

yaml() { # one word as a YAML string
  local word=${1//\\/\\\\}
  case $word in *$'\n'*) fail "an argument has a line break, which the manifest cannot hold: $(quoted "$1")" ;; esac
  printf '"%s"' "${word//\"/\\\"}"
}

if [ "$command" = manifest ] || [ "$command" = apply ]; then
  need --image "$image" "name the image that launch/Dockerfile built, as in --image=us-docker.pkg.dev/PROJECT/REPOSITORY/calyrex"
  need --topology "$topology" "give the slice's shape, as in --topology=4x4"
  [[ $topology =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || fail "--topology is '$topology'; expected a shape such as 4x4 or 2x2x4"
  need_number --slices "$slices"
  need_number --chips-per-host "$chips"
  need_number --restarts "$restarts"
  hosts_of_slice
  [ $# -gt 0 ] || fail "no arguments for calyrex_jax.main; put them after --, as in: -- --config=configs/llama8b_late8th.py --workdir=/pod/llama8b"
  arguments=''
  for word in -m calyrex_jax.main "$@"; do arguments="$arguments${arguments:+, }$(yaml "$word")"; done
fi

manifest() {
  cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  namespace: $namespace
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $restarts
    rules:
    - action: FailJobSet # exit 2 is a user's mistake: trying again does not mend it
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: slice
    replicas: $slices
    template:
      spec:
        parallelism: $hosts
        completions: $hosts
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: train, operator: In, values: [2]}
        template:
          metadata:
            annotations: {gke-gcsfuse/volumes: "${bucket:+true}"}
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120 # SIGTERM: the run saves
            ${account:+serviceAccountName: $(yaml "$account")}
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $(yaml "$accelerator")
              cloud.google.com/gke-tpu-topology: $(yaml "$topology")
              ${spot:+cloud.google.com/gke-spot: \"true\"}
            containers:
            - name: train
              image: $(yaml "$image")
              command: ["python", $arguments]
              env:
              - {name: CALYREX_DISTRIBUTED, value: "1"}
              ${secret:+envFrom: [{secretRef: {name: $(yaml "$secret")\}\}]}
              ports: [{containerPort: 8482}, {containerPort: 8471}, {containerPort: 8431}]
              resources:
                limits: {google.com/tpu: $chips}
YAML
  [ -z "$bucket" ] || cat <<YAML
              volumeMounts:
              - {name: pod, mountPath: /pod}
            volumes:
            - name: pod
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes:
                  bucketName: $(yaml "${bucket#gs://}")
                  # no cached metadata: a worker must see what another has just written
                  mountOptions: "implicit-dirs,rename-dir-limit=100000,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
YAML
}

if [ "$command" != manifest ] && [ -z "$dry_run" ]; then
  command -v kubectl >/dev/null || fail "kubectl is not installed; see https://kubernetes.io/docs/tasks/tools"
fi
case $command in
manifest) manifest ;;
apply)
  if [ -n "$dry_run" ]; then
    call kubectl apply -f -
    manifest
  else
    manifest | kubectl apply -f -
  fi
  ;;
status) call kubectl get pods "--namespace=$namespace" "--selector=jobset.sigs.k8s.io/jobset-name=$name" --output=wide ;;
logs)
  call kubectl logs "--namespace=$namespace" \
    "--selector=jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0" \
    --container=train --follow --tail=100
  ;;
delete) call kubectl delete jobset "$name" "--namespace=$namespace" --ignore-not-found ;;
esac
