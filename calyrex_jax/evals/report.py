"""Self-contained reports: one HTML file that needs no network, one JSON file, one table for the terminal.

report = Report("Quickstart")
report.text("600 held-out conversations.")
report.table("Adherence", ["cell", "frozen", "adapted"], [["seen words", rate(frozen), rate(adapted)]])
report.plot("Loss", plots.curves({"loss": (steps, losses)}, "step", "loss"))
report.write_html(workdir / "report.html")
"""

from __future__ import annotations

import dataclasses
import html
import io
import json
import math
import os
import re
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.stats import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

# what plots draw text and axes in; the HTML replaces it by the page's own colour, so that plots follow light and dark
INK = "#010203"

Cell = Figure | str | int | float | bool | None


class Report:
    """Sections in the order in which they were added; nothing is drawn or written before `write_html`."""

    def __init__(self, title: str):
        self.title = title
        self._sections: list[tuple[str, str]] = []

    def text(self, text: str, *, title: str = "", verbatim: bool = False) -> None:
        """Paragraphs, parted by blank lines; `verbatim` keeps every space and line break, for transcripts."""
        if verbatim:
            body = f"<pre>{html.escape(text)}</pre>"
        else:
            body = "".join(f"<p>{html.escape(part.strip())}</p>" for part in re.split(r"\n\s*\n", text) if part.strip())
        self._sections.append((title, body))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "") -> None:
        """A table whose first column names the rows; figures are shown as value, interval and n.

        Raises ValueError where a row has not one cell a column.
        """
        _check(columns, rows)
        numeric = [_is_numeric(rows, i) for i in range(len(columns))]
        classes = [' class="num"' if is_number else "" for is_number in numeric]
        head = "".join(f'<th scope="col"{c}>{html.escape(name)}</th>' for c, name in zip(classes, columns))
        lines = []
        for first, *rest in rows:
            cells = "".join(f"<td{c}>{_cell_html(cell)}</td>" for c, cell in zip(classes[1:], rest))
            lines.append(f'<tr><th scope="row">{_cell_html(first)}</th>{cells}</tr>')
        body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        self._sections.append((title, body + _note(note)))

    def plot(self, title: str, plot: Plot, note: str = "") -> None:
        """A matplotlib figure as inline SVG; make it with `evals.plots`, whose ink follows the page's colours."""
        # ids are hashes salted per plot, so that the plots of one page do not use each other's clip paths
        svg = _svg(plot, salt=f"{len(self._sections)}-{title}")
        label = html.escape(title, quote=True)
        self._sections.append((title, f'<div class="plot" role="img" aria-label="{label}">{svg}</div>' + _note(note)))

    def html(self) -> str:
        """The whole page."""
        titles = [(i, title) for i, (title, _) in enumerate(self._sections) if title]
        links = "".join(f'<a href="#s{i}">{html.escape(title)}</a>' for i, title in titles)
        nav = f"<nav>{links}</nav>" if len(titles) > 3 else ""
        sections = "".join(
            f'<section id="s{i}">' + (f"<h2>{html.escape(title)}</h2>" if title else "") + body + "</section>"
            for i, (title, body) in enumerate(self._sections)
        )
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{CSS}</style></head>\n"
            f"<body><main><h1>{title}</h1>{nav}\n{sections}</main></body></html>\n"
        )

    def write_html(self, path: str | os.PathLike) -> None:
        """Writes the page; UserError where the place cannot be written."""
        write_text(path, self.html())


def write_json(path: str | os.PathLike, content: Mapping[str, Any]) -> None:
    """Writes `content` as JSON: figures as {"n", "value", "low", "high"}, NaN and infinities as null."""
    write_text(path, json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file whole or not at all (a temporary file beside it, then a rename); UserError where that fails."""
    path = Path(path)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's own mode would hide the file from everyone else
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be written ({reason}); free the disk or choose another --workdir") from error


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table for the terminal: names to the left, numbers to the right.

        >>> print(text_table(["cell", "frozen"], [["words", 0.5], ["controls", None]]))
        cell      frozen
        ────────  ──────
        words        0.5
        controls       –

    Raises ValueError where a row has not one cell a column.
    """
    _check(columns, rows)
    grid = [[str(name) for name in columns], *([_cell_text(cell) for cell in row] for row in rows)]
    widths = [max(_width(row[i]) for row in grid) for i in range(len(columns))]
    numeric = [i > 0 and _is_numeric(rows, i) for i in range(len(columns))]
    lines = []
    for row in grid:
        padded = (
            " " * (width - _width(cell)) + cell if right else cell + " " * (width - _width(cell))
            for cell, width, right in zip(row, widths, numeric)
        )
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


def _check(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells for {len(columns)} columns: {row!r}")


def _is_numeric(rows: Sequence[Sequence[Cell]], column: int) -> bool:
    cells = [row[column] for row in rows if row[column] is not None]
    return bool(cells) and not any(isinstance(cell, str) for cell in cells)


def _cell_text(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "–"
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, int | np.integer):
        return f"{cell:,}"
    if isinstance(cell, float | np.floating):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return str(cell)


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, Figure) and cell.n:
        value, interval, n = (html.escape(part) for part in cell.parts())
        return f'<b>{value}</b> <span class="interval">{interval} {n}</span>'
    return html.escape(_cell_text(cell))


def _note(note: str) -> str:
    return f'<p class="note">{html.escape(note)}</p>' if note else ""


def _width(text: str) -> int:
    """Columns that a terminal gives to `text`: two for East Asian wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _plain(value: Any) -> Any:
    """`value` in JSON's own types."""
    if isinstance(value, Figure):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _svg(plot: Plot, salt: str) -> str:
    import matplotlib

    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # text stays text: smaller, searchable, and in the page's own fonts
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        plot.savefig(out, format="svg", transparent=True, metadata=nothing)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # the width in points gives way to the page's; the view box keeps the shape
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1)


CSS = """
:root { color-scheme: light dark;
  --ink: #1d2330; --muted: #5d6678; --page: #fbfbfc; --card: #fff; --line: #dfe3ea; --accent: #2f6fb0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --muted: #9aa4b5; --page: #14171d; --card: #1b1f27; --line: #303643; --accent: #7db4ec; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 0 0 .75rem; }
nav { display: flex; flex-wrap: wrap; gap: .35rem 1rem; margin-bottom: 1.25rem; font-size: .9rem; }
a { color: var(--accent); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.1rem 1.2rem; margin: 0 0 1.1rem; }
p { margin: 0 0 .7rem; max-width: 46rem; }
p:last-child { margin-bottom: 0; }
.note { color: var(--muted); font-size: .875rem; margin-top: .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .925rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .9rem .45rem 0; text-align: left; vertical-align: baseline; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 600; font-size: .825rem; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--card); }
.num { text-align: right; white-space: nowrap; padding: .45rem 0 .45rem 1.1rem; }
.interval { color: var(--muted); font-size: .825rem; }
.plot svg { display: block; width: 100%; height: auto; max-width: 42rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
@media (max-width: 40rem) {
  main { padding: 1rem .6rem 3rem; }
  section { padding: .9rem .8rem; }
  .num { padding-left: .8rem; }
  td .interval { display: block; } }
"""
