"""What a run shows and keeps: metrics.jsonl, TensorBoard, progress on standard error, peak memory.

show = Metrics(workdir)
show.resume(100)                                     # drops what an interrupted run logged after step 100
with show.phase("training", 600, unit="step", initial=100) as bar:
    show.log(101, {"loss": 2.31})
    bar.update(1)
    bar.postfix(loss=2.31, tokens_per_second=532.0)
show.close()
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from calyrex_jax.core.errors import UserError

QUIET_SECONDS = 10.0  # between two lines where standard error is not a terminal
DRAW_SECONDS = 0.1  # between two drawings of the bar on a terminal


def peak_memory() -> int:
    """The most resident memory that this process has held, in bytes."""
    try:
        # A child inherits its parent's ru_maxrss over exec, so Linux' own figure for this very process comes first.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def jsonable(value: Any) -> Any:
    """`value` as JSON can hold it: arrays of one element as numbers, NaN and infinities as strings.

    >>> jsonable({"loss": float("nan"), "norm": [float("inf"), 1]})
    {'loss': 'NaN', 'norm': ['Infinity', 1]}
    """
    if isinstance(value, dict):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and jax: scalars become numbers, arrays lists
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Phase:
    """The progress of one phase: `update(n)` counts, `postfix(loss=…)` sets what is shown beside."""

    def __init__(self, show: Metrics, name: str, total: int, unit: str, initial: int):
        self.name, self.total, self.unit, self.done = name, total, unit, initial
        self._show, self._initial, self._values = show, initial, {}
        self._started = self._drawn = time.monotonic()

    def update(self, n: int = 1, **values: float) -> None:
        """`n` more are done; `values` as for `postfix`."""
        self.done += n
        self.postfix(**values)

    def postfix(self, **values: float) -> None:
        """Shows these values until they are given anew."""
        self._values |= values
        if time.monotonic() - self._drawn >= (DRAW_SECONDS if self._show.terminal else QUIET_SECONDS):
            self.draw()

    def line(self) -> str:
        """One line: share, counts, values, rate, time left."""
        seconds = time.monotonic() - self._started
        rate = (self.done - self._initial) / seconds if seconds > 0 else 0.0
        parts = [f"{self.done}/{self.total} {self.unit}".rstrip()]
        parts += [f"{'tok/s' if k == 'tokens_per_second' else k} {float(v):.4g}" for k, v in self._values.items()]
        if rate:
            left = max(self.total - self.done, 0) / rate
            parts += [f"{rate:.3g} {self.unit}/s", f"{duration(left)} left" if left else f"{duration(seconds)}"]
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        bar = f" [{'#' * round(share * 20):<20}]" if self._show.terminal else ""
        return f"{self.name}{bar} {share:4.0%} · {' · '.join(parts)}"

    def draw(self) -> None:
        """Shows the line now."""
        self._drawn = time.monotonic()
        self._show.draw(self.line())


class Metrics:
    """Writes DIR/metrics.jsonl and DIR/tensorboard, and shows progress; only process 0 does, the others are silent.

    Nothing is created until the first `log`. Raises UserError where the directory cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike, stream: IO[str] | None = None, tensorboard: bool = True):
        self.path = Path(workdir) / "metrics.jsonl"
        self._stream = sys.stderr if stream is None else stream
        self.terminal = self._stream.isatty()
        self._silent = jax.process_index() != 0
        self._file: IO[str] | None = None
        self._board: Any = None
        self._with_board = tensorboard
        self._resumed = 0
        self._phase: Phase | None = None

    def resume(self, step: int) -> None:
        """Drops what was logged after `step` (0: a fresh run), so that no step stands twice, and a half-written line."""
        self._resumed = step
        if self._silent or not self.path.exists():
            return
        kept = []
        with self._as_user_error():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    logged = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError):
                    continue  # cut short by a kill
                if logged <= step and step:
                    kept.append(line + "\n")
            part = self.path.with_suffix(".part")
            part.write_text("".join(kept), encoding="utf-8")
            os.replace(part, self.path)

    @contextlib.contextmanager
    def _as_user_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror or error}); free the disk or choose another --workdir"
            ) from error

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One JSON object, `{"step": step, **values}`, as a line that is flushed at once; numbers go to TensorBoard too."""
        if self._silent:
            return
        values = jsonable(values)
        with self._as_user_error():
            if self._file is None:
                self._open()
            self._file.write(json.dumps({"step": int(step)} | values, allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, (int, float)):
                        self._board.add_scalar(name, value, int(step))

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        if self._with_board:
            from tensorboardX import SummaryWriter  # slow to import, and not needed to score or generate

            purge = self._resumed + 1 if self._resumed else None
            self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=purge, flush_secs=10)

    @contextlib.contextmanager
    def phase(self, name: str, total: int, unit: str = "", initial: int = 0) -> Iterator[Phase]:
        """Progress of `total` units of work, `initial` of them done before: a bar, or a line about every ten seconds."""
        self._phase = Phase(self, name, total, unit, initial)
        self._phase.draw()
        try:
            yield self._phase
        finally:
            self._phase.draw()
            self._phase = None
            if self.terminal and not self._silent:
                print(file=self._stream, flush=True)

    def draw(self, line: str) -> None:
        """Shows a phase's line: over the last one on a terminal, else below it."""
        if self._silent:
            return
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """One line on standard error, above the bar where one is shown."""
        if self._silent:
            return
        print(f"\r\x1b[K{line}" if self.terminal else line, file=self._stream, flush=True)
        if self.terminal and self._phase is not None:
            self._phase.draw()

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None
