#!/usr/bin/env bash
# Trains CAL on SmolLM2-135M-Instruct and compares it with the frozen model: environment, installation, model, training,
# evaluation. Interrupted and started again, it goes on where it stopped.
#   bash launch/quickstart.sh [--config.FIELD=VALUE ...]
#   PYTHON (python3)  VENV (.venv)  WORKDIR (runs/quickstart)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}

[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
if [ ! "$VENV/quickstart.installed" -nt setup.py ]; then
  echo "installing into $VENV ..."
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --editable .
  touch "$VENV/quickstart.installed"
fi
exec "$VENV/bin/python" -m calyrex_jax.main --config=configs/quickstart.py --workdir="${WORKDIR:-runs/quickstart}" "$@"
