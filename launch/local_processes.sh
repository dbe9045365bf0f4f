#!/usr/bin/env bash
# Runs calyrex_jax.main as N processes on this machine, joined by jax.distributed (on CPU over gloo): what several hosts would do.
#   bash launch/local_processes.sh N --config=configs/NAME.py --workdir=DIR [--config.FIELD=VALUE ...]
#   PYTHON (.venv/bin/python where it exists, else python3)  DEVICES (1: CPU devices of each process)  PORT (a free one)
# Process 0 speaks here, the others into files; when one fails the others are ended. SIGTERM and Ctrl-C reach all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

whole='^[1-9][0-9]*$'
[[ ${1:-} =~ $whole ]] || fail "N is '${1:-}'; expected a number of processes, as in: bash launch/local_processes.sh 2 --config=..."
[[ ${DEVICES:-1} =~ $whole ]] || fail "DEVICES is '$DEVICES'; expected a number of devices of each process"
count=$1
shift
[ $# -gt 0 ] || fail "no arguments for calyrex_jax.main; expected at least --config=FILE --workdir=DIR"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
PORT=${PORT:-$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} JAX_NUM_CPU_DEVICES=${DEVICES:-1}
export JAX_NUM_PROCESSES=$count JAX_COORDINATOR_ADDRESS=127.0.0.1:$PORT JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$PORT
logs=$(mktemp -d "${TMPDIR:-/tmp}/calyrex_processes.XXXXXX")

pids=()
for ((i = 0; i < count; i++)); do
  if [ "$i" = 0 ]; then
    JAX_PROCESS_ID=0 "$PYTHON" -m calyrex_jax.main "$@" &
  else
    JAX_PROCESS_ID=$i "$PYTHON" -m calyrex_jax.main "$@" >"$logs/$i.log" 2>&1 &
  fi
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT

# The first status that is not 0 is the run's; the processes left then have a while to notice by themselves.
status=0 deadline=0 left=$count ended=()
while [ "$left" -gt 0 ]; do
  for ((i = 0; i < count; i++)); do
    if [ -z "${ended[i]:-}" ] && ! kill -0 "${pids[i]}" 2>/dev/null; then
      ended[i]=0 left=$((left - 1))
      wait "${pids[i]}" || ended[i]=$?
      if [ "${ended[i]}" != 0 ] && [ "$status" = 0 ]; then
        status=${ended[i]} deadline=$((SECONDS + ${GRACE:-20}))
        [ "$i" = 0 ] || tail -n 1 "$logs/$i.log" >&2
        say "process $i ended with status $status; output of the others: $logs"
      fi
    fi
  done
  if [ "$deadline" != 0 ] && [ "$SECONDS" -ge "$deadline" ]; then
    kill -KILL "${pids[@]}" 2>/dev/null || true
  fi
  sleep 0.2 || true
done
[ "$status" != 0 ] || rm -rf "$logs"
exit "$status"
