"""Panels drawn by matplotlib: one PNG of all, or each as SVG that takes its page's colours.

Needs the extra ``report``.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from dualpath.report.model import Panel
from dualpath.report.style import looks

_PANEL_INCHES = (5.6, 3.6)
_COLUMNS = 3
_DOTS_PER_INCH = 90
_PAD_INCHES = 0.12
_LEGEND_CHARACTERS = 72
#: More names than this below bars would run into each other.
_MOST_NAMES = 10
#: More points than this are not marked.
_MOST_MARKS = 30
#: Stands for ``currentColor``, which matplotlib cannot draw in.
_PAGE_COLOUR = "#010203"
#: Text and axes in the page's colour.
_STYLE: dict[Any, Any] = {
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
#: A PNG is drawn with the font that matplotlib brings along: the same bytes on every machine.
_PNG_STYLE = {**_STYLE, "font.sans-serif": ["DejaVu Sans"]}


def png(panels: Sequence[Panel]) -> bytes:
    """Return all panels as one picture, without dates or versions inside."""
    # Four panels stand two by two.
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    buffer = io.BytesIO()
    with mpl.rc_context(_PNG_STYLE):
        figure = Figure(
            figsize=(width * columns, height * rows),
            layout=ConstrainedLayoutEngine(w_pad=_PAD_INCHES, h_pad=_PAD_INCHES),
        )
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            _draw(axes, panel)
            axes.set_title(panel.title, pad=14 + 20 * _legend_rows(panel))
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def svg(panel: Panel, name: str) -> str:
    """Return an ``<svg>`` element that takes the page's colour and its container's width.

    Ids inside it are derived from ``name``, which therefore has to be unique on the page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=_PANEL_INCHES, layout="constrained")
        _draw(figure.add_subplot(), panel)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_PAGE_COLOUR, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Group ids are numbered in every plot alike, and nothing refers to them.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f"{head}>{rest}"


def _draw(axes: Axes, panel: Panel) -> None:
    match panel.kind:
        case "lines" | "steps":
            _lines(axes, panel)
        case "grouped" | "stacked":
            _bars(axes, panel)
    if panel.from_zero:
        room = 1.12 if _single_group(panel) else 1.05
        axes.set_ylim(0, room * axes.dataLim.y1 or 1)
    if panel.limit_y is not None:
        axes.axhline(panel.limit_y, color=_PAGE_COLOUR, linewidth=1, linestyle=":")
        axes.set_ylim(top=panel.limit_y * 1.5)
    if panel.kind == "steps":
        axes.set_xlim(left=0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="y" if panel.kind in ("grouped", "stacked") else "both")
    columns = _legend_columns(panel)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=10)


def _single_group(panel: Panel) -> bool:
    """Whether bars are few enough to be labelled with their values."""
    return panel.kind == "grouped" and len(panel.series[0].x) == 1


def _legend_columns(panel: Panel) -> int:
    """As many names in a row as fit above the panel."""
    longest = max(len(series.name) for series in panel.series)
    return max(1, min(len(panel.series), _LEGEND_CHARACTERS // (longest + 8)))


def _legend_rows(panel: Panel) -> int:
    return math.ceil(len(panel.series) / _legend_columns(panel))


def _lines(axes: Axes, panel: Panel) -> None:
    steps = panel.kind == "steps"
    for series, look in zip(panel.series, looks([s.name for s in panel.series]), strict=True):
        x, y = _numbers(series.x), _numbers(series.y)
        axes.plot(
            x,
            y,
            label=series.name,
            color=look.colour,
            linestyle=look.line,
            marker="" if steps or len(x) > _MOST_MARKS else "o",
            drawstyle="steps-post" if steps else "default",
        )
        if series.low and series.high:
            low, high = _numbers(series.low), _numbers(series.high)
            axes.fill_between(x, low, high, color=look.colour, alpha=0.2, linewidth=0)


def _bars(axes: Axes, panel: Panel) -> None:
    names = [str(name) for name in panel.series[0].x]
    places = np.arange(len(names))
    bottom = np.zeros(len(names))
    width = 0.7 if panel.kind == "stacked" else 0.8 / len(panel.series)
    found = looks([series.name for series in panel.series])
    for index, (series, look) in enumerate(zip(panel.series, found, strict=True)):
        heights = _numbers(series.y)
        if panel.kind == "stacked":
            axes.bar(places, heights, width, bottom=bottom, label=series.name, color=look.colour)
            bottom += heights
        else:
            shift = (index - (len(panel.series) - 1) / 2) * width
            bars = axes.bar(places + shift, heights, width, label=series.name, color=look.colour)
            if _single_group(panel):
                axes.bar_label(bars, fmt="{:,.4g}", padding=2)
    every = math.ceil(len(names) / _MOST_NAMES)
    axes.set_xticks(range(0, len(names), every), names[::every])


def _numbers(values: tuple[Any, ...]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
