"""The plots that reports need, as matplotlib figures without pyplot: no display, no state shared with the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calyrex_jax.evals.report import INK
from calyrex_jax.evals.stats import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Plot

# told apart with every common colour blindness, and on light and dark paper
COLOURS = ("#8a93a3", "#3a86d0", "#e0861a", "#2c9f7b", "#c2589c", "#8672d6")


def new_figure(width: float = 6.2, height: float = 3.2) -> tuple[Plot, Axes]:
    """An empty figure and its axes, in inches, drawn in the page's own colour."""
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(width, height), layout="constrained")
    axes = plot.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(INK)
        spine.set_alpha(0.4)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    return plot, axes


def bars(labels: Sequence[str], series: Mapping[str, Sequence[Figure | None]], xlabel: str = "") -> Plot:
    """Horizontal bars with interval whiskers, one group a label and one colour a series.

        bars(["seen words", "controls"], {"frozen": [a, b], "adapted": [c, d]})

    A series has one figure a label; None, or a figure without items, leaves its place empty.
    """
    plot, axes = new_figure(height=0.9 + len(labels) * (0.17 + 0.22 * len(series)))
    percent = all(figure.percent for figures in series.values() for figure in figures if figure is not None)
    scale, thickness = (100 if percent else 1), 0.8 / len(series)
    for i, (name, figures) in enumerate(series.items()):
        shown = [(row, figure) for row, figure in enumerate(figures) if figure is not None and figure.n]
        rows = np.array([row for row, _ in shown]) + (i - (len(series) - 1) / 2) * thickness
        values = np.array([figure.value for _, figure in shown])
        # a bootstrap interval may lie beside its value; a whisker cannot have a negative length
        whiskers = np.array([[f.value - f.low, f.high - f.value] for _, f in shown]).reshape(-1, 2).T.clip(0)
        axes.barh(rows, values * scale, thickness * 0.92, color=COLOURS[i % len(COLOURS)], label=name)
        axes.errorbar(
            values * scale, rows, xerr=whiskers * scale, fmt="none", ecolor=INK, elinewidth=1, capsize=2, alpha=0.7
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if percent and all(f.low >= 0 for figures in series.values() for f in figures if f is not None and f.n):
        axes.set_xlim(0, 100)
    axes.set_xlabel(xlabel or ("%" if percent else ""))
    _legend(plot, axes, len(series))
    return plot


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str, ylabel: str, *, log: bool = False
) -> Plot:
    """Lines of (x, y), one colour a series; values that are not finite leave gaps."""
    plot, axes = new_figure()
    for i, (name, (x, y)) in enumerate(series.items()):
        colour = COLOURS[(i + 1) % len(COLOURS)]  # the grey is for baselines
        axes.plot(np.asarray(x, float), np.asarray(y, float), color=colour, linewidth=1.6, label=name)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _legend(plot, axes, len(series))
    return plot


def figures_against(series: Mapping[str, tuple[Sequence[float], Sequence[Figure | None]]], xlabel: str, ylabel: str) -> Plot:
    """Figures with whiskers against a number, one line a series: `{"cal": ([0, 500], [a, b])}`; None is left out."""
    plot, axes = new_figure()
    shown = {name: [(x, f) for x, f in zip(*pair) if f is not None and f.n] for name, pair in series.items()}
    percent = all(f.percent for points in shown.values() for _, f in points)
    scale, places = (100 if percent else 1), sorted({x for points in shown.values() for x, _ in points})
    for i, (name, points) in enumerate(shown.items()):
        # at equal distances, and each series a little aside, so that whiskers do not cover each other
        at = np.array([places.index(x) for x, _ in points]) + (i - (len(shown) - 1) / 2) * 0.06
        values = np.array([f.value for _, f in points])
        whiskers = np.array([[f.value - f.low, f.high - f.value] for _, f in points]).reshape(-1, 2).T.clip(0)
        colour = COLOURS[i % len(COLOURS)]
        axes.errorbar(
            at, values * scale, yerr=whiskers * scale, color=colour, label=name, marker="o", markersize=4, capsize=2
        )
    axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
    if percent:
        axes.set_ylim(-3, 103)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel + (", %" if percent else ""))
    _legend(plot, axes, len(shown))
    return plot


def _legend(plot: Plot, axes: Axes, count: int) -> None:
    """Above the axes, in one row where the names fit; none where there is but one thing to name."""
    if count > 1:
        handles, labels = axes.get_legend_handles_labels()
        plot.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=min(count, max(1, 84 // (max(map(len, labels)) + 6))),
            frameon=False,
            labelcolor=INK,
            fontsize=9,
        )


def bands(
    series: Mapping[str, tuple[Sequence[float], Sequence[Figure | None]]],
    xlabel: str,
    ylabel: str,
    *,
    marks: Sequence[float] = (),
    level: float | None = None,
) -> Plot:
    """Lines of figures with their intervals as bands, against a number; None is left out.

    marks  places on the x axis to be marked by a thin line; level: a value to be marked likewise, such as chance
    """
    plot, axes = new_figure()
    percent = all(f.percent for _, figures in series.values() for f in figures if f is not None)
    scale = 100 if percent else 1
    for mark in marks:
        axes.axvline(mark, color=INK, alpha=0.25, linewidth=1, linestyle=":")
    if level is not None:
        axes.axhline(level * scale, color=INK, alpha=0.4, linewidth=1)
    for i, (name, (places, figures)) in enumerate(series.items()):
        shown = [(x, f) for x, f in zip(places, figures) if f is not None and f.n]
        at, colour = [x for x, _ in shown], COLOURS[(i + 1) % len(COLOURS)]
        low, value, high = (np.array([getattr(f, k) for _, f in shown]) * scale for k in ("low", "value", "high"))
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, value, color=colour, linewidth=1.6, marker="o", markersize=2.5, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel + (", %" if percent else ""))
    _legend(plot, axes, len(series))
    return plot


def heat(values: np.ndarray, rows: Sequence[str], columns: Sequence[str], xlabel: str, ylabel: str, top: float) -> Plot:
    """A grid of values from 0 to `top`, darker where larger, each with its number where there is room for it."""
    upright = max(map(len, columns), default=0) <= 3
    plot, axes = new_figure(
        width=max(6.2, 1.2 + 0.24 * len(columns)), height=1.0 + 0.26 * len(rows) + (0 if upright else 0.6)
    )
    axes.imshow(values, aspect="auto", cmap=_heat_colours(), vmin=0, vmax=top, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns, rotation=0 if upright else 90)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labelsize=8)
    if len(columns) <= 16:
        for (row, column), value in np.ndenumerate(values):
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=INK)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return plot


def _heat_colours():
    """From nothing to the second colour, transparent at 0, so that it suits light and dark paper."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    red, green, blue = to_rgb(COLOURS[1])
    return LinearSegmentedColormap.from_list("heat", [(red, green, blue, 0.0), (red, green, blue, 0.9)])
