"""Plots as SVG text that fits both a light and a dark page.

Text and axes are drawn in ``currentColor``, so they follow the page; series have mid-tone colours
that stand out on white and on near-black, and differ in line style as well.
"""

import io
import re
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.laboratory.workload.rows import byte_keys, byte_label, labels

SERIES_COLOURS = ("#3f86c6", "#dd7a30", "#2f9a6b", "#9a6cc7", "#cf4f63", "#8a8f2e")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
#: Stands for ``currentColor``, which matplotlib cannot draw in.
_PAGE_COLOUR = "#010203"
_SIZE_INCHES = (5.6, 3.4)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "DejaVu Sans"],
    "font.size": 12,
    "text.color": _PAGE_COLOUR,
    "axes.edgecolor": _PAGE_COLOUR,
    "axes.labelcolor": _PAGE_COLOUR,
    "axes.titlecolor": _PAGE_COLOUR,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _PAGE_COLOUR,
    "ytick.color": _PAGE_COLOUR,
    "grid.color": _PAGE_COLOUR,
    "grid.alpha": 0.18,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


def all_plots(results: Sequence[ReplayResult]) -> list[tuple[str, Figure]]:
    """Return titled figures of the runs; those without data are left out."""
    drawings: list[tuple[str, Callable[[Axes, Sequence[ReplayResult]], bool]]] = [
        ("Job completion time", draw_jct),
        ("Time to first token (TTFT)", lambda a, r: draw_distribution(a, r, "ttft_s", "TTFT, ms")),
        (
            "Time per output token (TPOT)",
            lambda a, r: draw_distribution(a, r, "tpot_s", "TPOT, ms"),
        ),
        ("Turns finished over time", draw_turns),
        ("Bytes moved, by path", lambda a, r: draw_bytes(a, r, "path_bytes")),
        ("Bytes read per storage NIC", lambda a, r: draw_bytes(a, r, "snic_read_bytes")),
    ]
    plots: list[tuple[str, Figure]] = []
    for title, draw in drawings:
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
            if draw(figure.add_subplot(), results):
                plots.append((title, figure))
    return plots


def to_svg(figure: Figure, name: str) -> str:
    """Return an ``<svg>`` element that takes the page's colour and its container's width.

    Ids inside it are derived from ``name``, which therefore has to be unique on the page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_PAGE_COLOUR, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Group ids are numbered in every plot alike, and nothing refers to them.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f"{head}>{rest}"


def draw_jct(axes: Axes, results: Sequence[ReplayResult]) -> bool:
    """Draw one bar per run."""
    names = labels(results)
    values = [result.summary.jct_s for result in results]
    bars = axes.barh(names, values, color=_colours(len(names)))
    axes.bar_label(bars, [f"{value:.1f} s" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.25 or 1)
    axes.set_xlabel("JCT, s")
    axes.grid(axis="x")
    return True


def draw_distribution(axes: Axes, results: Sequence[ReplayResult], field: str, label: str) -> bool:
    """Draw the cumulative distribution of a turn's time in ms, one line per run."""
    drawn = False
    for name, result, colour, style in _series(results):
        values = np.sort([v * 1000 for t in result.turns if (v := getattr(t, field)) is not None])
        if len(values):
            share = np.arange(1, len(values) + 1) / len(values)
            axes.step(values, share, where="post", label=name, color=colour, linestyle=style)
            drawn = True
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    axes.set_ylabel("share of turns")
    axes.grid()
    if drawn:
        _legend(axes)
    return drawn


def draw_turns(axes: Axes, results: Sequence[ReplayResult]) -> bool:
    """Draw how many turns were answered by which time, one line per run."""
    drawn = False
    for name, result, colour, style in _series(results):
        ends = np.sort([t.start_s + t.latency_s for t in result.turns if t.latency_s is not None])
        if len(ends):
            times = np.concatenate([[0.0], ends])
            axes.step(
                times,
                np.arange(len(times)),
                where="post",
                label=name,
                color=colour,
                linestyle=style,
            )
            drawn = True
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time since start, s")
    axes.set_ylabel("turns answered")
    axes.grid()
    if drawn:
        _legend(axes)
    return drawn


def draw_bytes(axes: Axes, results: Sequence[ReplayResult], field: str) -> bool:
    """Draw, per run, one bar that stacks the bytes of each path or SNIC."""
    keys = byte_keys(results, field)
    counted = [(getattr(r.server, field, None) or {}) for r in results]
    if not any(value for values in counted for value in values.values()):
        return False
    names = labels(results)
    left = np.zeros(len(names))
    for key, colour in zip(keys, cycle(SERIES_COLOURS), strict=False):
        widths = np.array([values.get(key, 0) / 1e6 for values in counted])
        axes.barh(names, widths, left=left, label=byte_label(key), color=colour)
        left += widths
    axes.invert_yaxis()
    axes.set_xlim(0, left.max() * 1.05)
    axes.set_xlabel("MB")
    axes.grid(axis="x")
    _legend(axes)
    return True


def _legend(axes: Axes) -> None:
    """Put the legend above the plot, where no data is."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=11)


def _colours(count: int) -> list[str]:
    return [colour for colour, _ in zip(cycle(SERIES_COLOURS), range(count), strict=False)]


def _series(
    results: Sequence[ReplayResult],
) -> list[tuple[str, ReplayResult, str, str | tuple[int, tuple[int, ...]]]]:
    names = labels(results)
    return list(zip(names, results, _colours(len(names)), cycle(LINE_STYLES), strict=False))
