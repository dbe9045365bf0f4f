#!/usr/bin/env bash
# One worker's side of launch/tpu_pod.sh, which copies it there; all of it can be repeated.
#   bash launch/worker.sh setup            Python >= 3.11 and this package with the extra EXTRA (tpu) into .venv
#   bash launch/worker.sh mount TARGET     gs://BUCKET or HOST:/SHARE at ./pod, where all workers see the same files
#   bash launch/worker.sh start ARGS ...   calyrex_jax.main in the background, output in run.log; nothing where it runs already
#   bash launch/worker.sh status           running, none, or the exit status of the last run
#   bash launch/worker.sh stop             SIGTERM, so that it saves; SIGKILL after GRACE (120) seconds
#   bash launch/worker.sh logs             follows run.log
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

status() {
  if [ -f run.pid ] && kill -0 "$(cat run.pid)" 2>/dev/null; then
    echo running
  elif [ -f run.status ]; then
    cat run.status
  elif [ -f run.pid ]; then
    echo 137 # ended without a word: the machine was stopped, or memory ran out
  else
    echo none
  fi
}

setup() {
  if [ ! -x .venv/bin/python ]; then
    if "${PYTHON:-python3}" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "${PYTHON:-python3}" -m venv .venv
    else # TPU VM images bring Python 3.10
      python3 -m pip install -q --user uv
      python3 -m uv venv -q --seed --python 3.12 .venv
    fi
  fi
  .venv/bin/python -m pip install -q --disable-pip-version-check --editable ".[${EXTRA:-tpu}]"
  .venv/bin/python -c 'import calyrex_jax; print("calyrex_jax", calyrex_jax.__version__, "is installed")'
}

mount_shared() {
  mkdir -p pod
  ! mountpoint -q pod || return 0
  case $1 in
  gs://?*)
    if ! command -v gcsfuse >/dev/null; then
      local key=/usr/share/keyrings/cloud.google.asc packages=https://packages.cloud.google.com/apt
      curl -fsS "$packages/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
      echo "deb [signed-by=$key] $packages gcsfuse-$(lsb_release -cs) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
      sudo apt-get update -q && sudo apt-get install -q -y gcsfuse
    fi
    # no cached metadata: a worker must see what another has just written; renames of directories complete checkpoints
    gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 --rename-dir-limit=100000 "${1#gs://}" pod
    ;;
  ?*:/*)
    sudo apt-get install -q -y nfs-common
    sudo mount -t nfs "$1" pod
    ;;
  *) fail "mount: '$1' is neither gs://BUCKET nor HOST:/SHARE" ;;
  esac
}

start() {
  if [ "$(status)" = running ]; then
    say "a run is going on already; nothing was started"
    return
  fi
  rm -f run.status
  # shellcheck disable=SC1091
  [ ! -f run.env ] || . ./run.env
  # Its own session, so that it outlives the connection. The shell around it must outlive SIGTERM to note the status.
  # shellcheck disable=SC2016
  nohup setsid bash -c 'trap : TERM; .venv/bin/python -m calyrex_jax.main "$@" && rc=0 || rc=$?; echo $rc > run.status' \
    bash "$@" >run.log 2>&1 </dev/null &
  echo $! >run.pid
  say "started"
}

stop() {
  local pid deadline=$((SECONDS + ${GRACE:-120}))
  [ "$(status)" = running ] || return 0
  pid=$(cat run.pid)
  kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" 2>/dev/null || true # alone where it has only just begun
  while kill -0 "$pid" 2>/dev/null; do
    if [ "$SECONDS" -ge "$deadline" ]; then
      kill -KILL -- "-$pid" 2>/dev/null || true
    fi
    sleep 1
  done
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
setup | status | stop) "$command" ;;
mount) mount_shared "${1:-}" ;;
start) start "$@" ;;
logs) exec tail -n "${LINES_BEFORE:-100}" -F run.log ;;
*)
  usage >&2
  fail "'$command' is no command"
  ;;
esac
