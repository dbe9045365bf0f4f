#!/usr/bin/env bash
# Submits a training run to a SLURM cluster with GPUs: one process a GPU (or a node), joined by jax.distributed.
#   bash launch/slurm.sh --nodes=2 --gpus-per-node=8 [OPTIONS] -- --config=configs/NAME.py --workdir=SHARED_DIR [--config.FIELD=VALUE ...]
#   --nodes, --gpus-per-node, --partition, --account, --time, --name=calyrex   also as NODES, GPUS_PER_NODE, PARTITION, ACCOUNT, TIME, JOB_NAME
#   --per=gpu|node    processes: one a GPU (default), or one a node with all of its GPUs
#   --sbatch=OPTION   passed on to sbatch; repeatable (--sbatch=--mem=0 --sbatch=--exclusive)
#   --dry-run         prints the command
#   PYTHON            on the nodes (.venv/bin/python of this checkout, which must lie on a file system that they share)
# Two minutes before its time is over the job saves and queues itself again; so it does after a node's failure.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

nodes=${NODES:-} gpus=${GPUS_PER_NODE:-} partition=${PARTITION:-} account=${ACCOUNT:-} time=${TIME:-} name=${JOB_NAME:-calyrex}
per=gpu dry_run='' options=()
while [ $# -gt 0 ]; do
  case $1 in
  --nodes=*) nodes=${1#*=} ;;
  --gpus-per-node=*) gpus=${1#*=} ;;
  --partition=*) partition=${1#*=} ;;
  --account=*) account=${1#*=} ;;
  --time=*) time=${1#*=} ;;
  --name=*) name=${1#*=} ;;
  --per=*) per=${1#*=} ;;
  --sbatch=*) options+=("${1#*=}") ;;
  --dry-run) dry_run=1 ;;
  --help | -h)
    usage
    exit 0
    ;;
  --)
    shift
    break
    ;;
  *) fail "'$1' is not understood; options look like --nodes=2, and arguments of calyrex_jax.main come after --" ;;
  esac
  shift
done
need --nodes "$nodes" "say how many nodes, as in --nodes=2"
need --gpus-per-node "$gpus" "say how many GPUs a node has, as in --gpus-per-node=8"
need_number --nodes "$nodes"
need_number --gpus-per-node "$gpus"
need_name --name "$name" "name the job"
case $per in
gpu) tasks=$gpus ;;
node) tasks=1 ;;
*) fail "--per is '$per'; expected gpu or node" ;;
esac
[ $# -gt 0 ] || fail "no arguments for calyrex_jax.main; put them after --, as in: -- --config=configs/llama8b_late8th.py --workdir=runs/llama8b"
[ -n "$dry_run" ] || command -v sbatch >/dev/null || fail "sbatch is not installed; run this on a login node of the cluster"

export CALYREX_GPUS_A_TASK=$((gpus / tasks)) PYTHON=${PYTHON:-.venv/bin/python}
call sbatch "--job-name=$name" "--nodes=$nodes" "--ntasks-per-node=$tasks" "--gpus-per-node=$gpus" \
  ${partition:+"--partition=$partition"} ${account:+"--account=$account"} ${time:+"--time=$time"} \
  "--chdir=$PWD" "--output=$name-%j.log" --open-mode=append --requeue --signal=B:USR1@120 --export=ALL \
  ${options[@]+"${options[@]}"} launch/slurm_job.sh "$@"
