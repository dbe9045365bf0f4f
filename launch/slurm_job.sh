#!/usr/bin/env bash
# The job that launch/slurm.sh submits; SLURM runs it on the first node, in this checkout.
set -euo pipefail

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# jax reads the count and the number of each process from SLURM's own variables; the port is free of other jobs' by its number
export JAX_COORDINATOR_ADDRESS=$first:$((20000 + SLURM_JOB_ID % 20000))
if [ "${CALYREX_GPUS_A_TASK:-1}" -gt 1 ]; then # else jax takes the GPU of the process's number on its node
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((CALYREX_GPUS_A_TASK - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi

over=''
trap 'over=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1 # --signal of launch/slurm.sh: the time is nearly over
srun --kill-on-bad-exit=1 --label "$PYTHON" -m calyrex_jax.main "$@" &
step=$!
status=0
wait "$step" || status=$?
if [ -n "$over" ]; then # the trap ended that wait, not the step
  status=0
  wait "$step" || status=$?
fi
if [ -n "$over" ] && [ "$status" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
