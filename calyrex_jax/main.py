"""The command line: `python -m calyrex_jax.main --config=configs/NAME.py --workdir=DIR --mode=MODE`.

Exit status 0 when the job was done; 2 for a user's mistake, told in one line; 143 when SIGTERM ended it (all saved).
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from calyrex_jax.config import complaint
from calyrex_jax.core.errors import UserError

MODES = ("train", "score", "generate", "eval", "ablate", "analyze", "plan")
_CONFIG = config_flags.DEFINE_config_file("config", None, "A file with get_config(), such as configs/quickstart.py.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Directory of checkpoints, metrics and reports.")
_MODE = flags.DEFINE_enum("mode", "train", MODES, "What to do.")
_INPUT = flags.DEFINE_string("input", "", "score, generate: a JSONL file of conversations.")
_OUTPUT = flags.DEFINE_string("output", "", "score, generate: the JSONL file to write.")


def _parse(argv: list[str]) -> None:
    try:
        rest = flags.FLAGS(argv)
        if _CONFIG.value is not None:
            _CONFIG.value.keys()  # a file that could not be read says so only when it is touched
    # absl would exit with 1 and config files can raise anything, also SystemExit: all of it is the user's to mend
    except (Exception, SystemExit) as error:
        raise UserError(complaint(error)) from None
    if len(rest) > 1:
        raise UserError(f"command line: {rest[1]!r} is not understood; flags look like --mode=train")
    if _CONFIG.value is None:
        raise UserError("--config is missing; name a file with get_config(), such as --config=configs/quickstart.py")


def _run() -> int:
    # after the flags: --help must not wait for jax
    from calyrex_jax import ablate, analyze, curriculum, evaluate, fit, infer, plan, train
    from calyrex_jax.makers import FITTED
    from calyrex_jax.sharding import processes

    several = processes.join()
    config = _CONFIG.value
    guided = "svgt" in config and config.svgt.get("enabled") is True
    computed = "adapter" in config and config.adapter.get("name") in FITTED
    learn = fit.train if computed else curriculum.train if guided else train.train
    whole = {"train": learn, "eval": evaluate.evaluate, "ablate": ablate.ablate}
    whole |= {"analyze": analyze.analyze, "plan": plan.plan}
    if several and whole.get(_MODE.value) is not train.train:
        raise UserError(f"--mode={_MODE.value}, as configured here, serves one process; run it on one host")
    if _MODE.value in whole:
        with processes.watched():
            return whole[_MODE.value](config, _WORKDIR.value)
    return infer.run(config, _WORKDIR.value, _MODE.value, _INPUT.value, _OUTPUT.value)


def main(argv: list[str]) -> int:
    """Runs one mode; returns the exit status."""
    if "--help" in argv:
        print(__doc__, flags.FLAGS.module_help(sys.modules[__name__]), sep="\n")
        return 0
    workdir, existed = Path(), True
    try:
        _parse(argv)
        workdir = Path(_WORKDIR.value).expanduser()
        existed = workdir.exists()
        return _run()
    except UserError as error:
        if not existed and workdir.is_dir() and not any(workdir.iterdir()):
            workdir.rmdir()  # made for a run that did not begin
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
