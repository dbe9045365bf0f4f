#!/usr/bin/env bash
# A TPU pod slice by gcloud: made, set up, trained on by all its workers, and made anew after a preemption.
#   bash launch/tpu_pod.sh COMMAND --name=pod1 --zone=us-west4-a [OPTIONS] [-- ARGUMENTS OF calyrex_jax.main]
#   create   the VMs, where none of that name stand (--type)
#   setup    copies this checkout to every worker and installs it; with --mount it mounts files that all workers share at pod/
#   run      starts training on all workers, detached; put --workdir=pod/NAME after --
#   logs     follows a worker's output (--worker=0)
#   status   of the VMs, and of the run on every worker: running, none, or its exit status
#   stop     SIGTERM: the run saves and ends
#   loop     create, setup, run, and wait; after a preemption all of it again, so that the run goes on from its last checkpoint.
#            VMs that a preemption has ended are removed first, others never
#   delete   removes the VMs
#   --name, --zone, --project, --type=v5litepod-16, --version, --mount   also as POD_NAME, ZONE, PROJECT, TPU_TYPE, TPU_VERSION, POD_MOUNT
#   --version=V    of the TPU software; by default what the type needs      --spot         cheaper, and can be preempted
#   --mount=gs://BUCKET or HOST:/SHARE (NFS)                                --env=NAME     passes on this variable (HF_TOKEN); repeatable
#   --every=60     loop: seconds between two looks                          --attempts=20  loop: failures in a row that end it
#   --dry-run      prints the commands and runs none of them
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
. launch/common.sh
export COPYFILE_DISABLE=1 # macOS: tar without resource forks

name=${POD_NAME:-} zone=${ZONE:-} project=${PROJECT:-} type=${TPU_TYPE:-v5litepod-16} version=${TPU_VERSION:-} mount=${POD_MOUNT:-}
worker=0 every=60 attempts=20 spot='' dry_run='' variables=()
command=${1:-}
[ $# -eq 0 ] || shift
case $command in
create | setup | run | logs | status | stop | loop | delete) ;;
help | --help | -h)
  usage
  exit 0
  ;;
'') fail "no command; expected create, setup, run, logs, status, stop, loop or delete" ;;
*) fail "'$command' is no command; expected create, setup, run, logs, status, stop, loop or delete" ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
  --name=*) name=${1#*=} ;;
  --zone=*) zone=${1#*=} ;;
  --project=*) project=${1#*=} ;;
  --type=*) type=${1#*=} ;;
  --version=*) version=${1#*=} ;;
  --mount=*) mount=${1#*=} ;;
  --worker=*) worker=${1#*=} ;;
  --every=*) every=${1#*=} ;;
  --attempts=*) attempts=${1#*=} ;;
  --env=*) variables+=("${1#*=}") ;;
  --spot) spot=1 ;;
  --dry-run) dry_run=1 ;;
  --)
    shift
    break
    ;;
  *) fail "'$1' is not understood; options look like --zone=us-west4-a, and arguments of calyrex_jax.main come after --" ;;
  esac
  shift
done
need_name --name "$name" "name the pod, as in --name=pod1"
need --zone "$zone" "name the zone, as in --zone=us-west4-a"
need_number --every "$every"
need_number --attempts "$attempts"
case $worker in all | 0 | [1-9]*) ;; *) fail "--worker is '$worker'; expected a number, or all" ;; esac
case $command in run | loop) [ $# -gt 0 ] || fail "no arguments for calyrex_jax.main; put them after --, as in: -- --config=configs/llama8b_late8th.py --workdir=pod/llama8b" ;; esac
for variable in ${variables[@]+"${variables[@]}"}; do
  [[ $variable =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env is '$variable'; expected the name of a variable"
  [ -n "${!variable:-}" ] || fail "--env=$variable: the variable is not set here"
done
if [ -z "$version" ]; then
  case $type in
  v6e-*) version=v2-alpha-tpuv6e ;;
  v5p-*) version=v2-alpha-tpuv5 ;;
  v5litepod-*) version=v2-alpha-tpuv5-lite ;;
  v4-* | v3-* | v2-*) version=tpu-ubuntu2204-base ;;
  *) fail "--type is '$type'; expected one such as v5litepod-16, v5p-32 or v6e-16, or give --version beside it" ;;
  esac
fi
[ -n "$dry_run" ] || command -v gcloud >/dev/null || fail "gcloud is not installed; see https://cloud.google.com/sdk/docs/install"
where=("--zone=$zone")
[ -z "$project" ] || where+=("--project=$project")
folder=calyrex_jax

vm() { call gcloud compute tpus tpu-vm "$@"; }

on_workers() { # on_workers WORKER ARGS ...: launch/worker.sh ARGS there
  local on=$1
  shift
  vm ssh "$name" "${where[@]}" "--worker=$on" "--command=cd $folder && $(quoted bash launch/worker.sh "$@")"
}

state() { # of the VMs; nothing where none of that name stand
  vm list "${where[@]}" "--filter=name~\"(^|/)$name\$\"" '--format=value(state)'
}

create() {
  local found=''
  if [ -n "$dry_run" ]; then
    state
  else
    found=$(state) || return 1
  fi
  if [ -n "$found" ]; then
    say "$name stands already ($found)"
    return
  fi
  vm create "$name" "${where[@]}" "--accelerator-type=$type" "--version=$version" ${spot:+--spot}
}

copied() { # copied FILE TARGET: to all workers
  vm scp "$1" "$name:$2" "${where[@]}" --worker=all
}

# What follows is also called in conditions, where bash goes on after a failure: hence every &&.

setup() {
  local packed=$folder.tar.gz
  temporary
  call tar -czf "$scratch/$packed" --exclude=__pycache__ setup.py pyproject.toml README.md LICENSE calyrex_jax configs launch &&
    copied "$scratch/$packed" "$packed" &&
    vm ssh "$name" "${where[@]}" --worker=all "--command=mkdir -p $folder && tar -xzf $packed -C $folder" &&
    on_workers all setup &&
    { [ -z "$mount" ] || on_workers all mount "$mount"; }
}

run() {
  temporary
  [ -n "$dry_run" ] || (umask 077 && environment >"$scratch/run.env")
  copied "$scratch/run.env" "$folder/run.env" && on_workers all start "$@"
}

environment() {
  local variable
  echo 'export CALYREX_DISTRIBUTED=1' # the workers find one another
  for variable in ${variables[@]+"${variables[@]}"}; do echo "export $variable=$(quoted "${!variable}")"; done
}

temporary() { # a directory that only the caller can read, gone at exit
  if [ -n "$dry_run" ]; then
    scratch=SCRATCH
  elif [ -z "${scratch:-}" ]; then
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/tpu_pod.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
  fi
}

until_it_ends() { # waits; sets `ended` to the run's exit status, to "preempted" or to "deleted"
  local found answer
  while :; do
    sleep "$every"
    found=$(state) || continue # a failed look is no news
    case $found in
    READY) ;;
    '') ended=deleted && return ;;
    *) ended=preempted && return ;;
    esac
    answer=$(on_workers 0 status) || continue
    answer=${answer##*$'\n'}
    [ "$answer" = running ] || { ended=$answer && return; }
  done
}

ready() { # brings the VMs to where a run can start; fails where that did not work this time
  local found
  found=$(state) || return 1
  case $found in
  READY) return ;;
  PREEMPTED | TERMINATED)
    say "$name is $found; it is made anew"
    vm delete "$name" "${where[@]}" --quiet || return 1
    ;;
  '') ;;
  STOPPED | STOPPING | HIDDEN) fail "$name is $found, not by a preemption; start it or delete it" ;;
  *)
    say "$name is $found"
    return 1
    ;;
  esac
  create && setup
}

loop() {
  local failures=0 ended
  while [ "$failures" -lt "$attempts" ]; do
    ended="it could not be started"
    if ready && run "$@"; then
      say "running; to watch it: bash launch/tpu_pod.sh logs --name=$name --zone=$zone"
      until_it_ends
    fi
    if [ "$ended" = 143 ]; then # a preemption's SIGTERM comes before its state, a user's stays alone
      sleep "$every"
      [ "$(state || true)" = READY ] || ended=preempted
    fi
    case $ended in
    0)
      say "done; the VMs still stand: bash launch/tpu_pod.sh delete --name=$name --zone=$zone"
      return
      ;;
    2) fail "the run refused what it was given; it says why in: bash launch/tpu_pod.sh logs --name=$name --zone=$zone" ;;
    143) say "stopped by hand; everything is saved" && return 143 ;;
    deleted) say "$name was deleted meanwhile" && return 1 ;;
    preempted) failures=0 ;;
    *)
      failures=$((failures + 1))
      say "attempt $failures of $attempts: status $ended"
      on_workers all stop || true # workers that still wait for one that is dead
      sleep "$every"
      ;;
    esac
  done
  say "error: $attempts failures in a row; nothing was deleted"
  return 1
}

rehearse() { # what loop would call
  create && setup && run "$@"
  echo "# every $every s, until the run ends:"
  state && on_workers 0 status
  echo "# after a preemption, and then all of the above again:"
  vm delete "$name" "${where[@]}" --quiet
}

case $command in
create | setup) "$command" ;;
run) run "$@" ;;
loop) if [ -n "$dry_run" ]; then rehearse "$@"; else loop "$@"; fi ;;
logs) on_workers "$worker" logs ;;
status)
  [ -n "$dry_run" ] || say "$name is $(state)"
  on_workers all status
  ;;
stop) on_workers all stop ;;
delete) vm delete "$name" "${where[@]}" --quiet ;;
esac
