"""Panels as matplotlib figures: lines with shadows, grouped bars, stacked bars."""

import io
import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dualpath.model.evaluation.report import Panel
from dualpath.model.evaluation.style import LINE_STYLES, SERIES_COLOURS, STYLE

_PANEL_INCHES = (5.6, 3.6)
_COLUMNS = 3
_DOTS_PER_INCH = 90
_PAD_INCHES = 0.12
_LEGEND_CHARACTERS = 72
#: More names than this below bars would run into each other.
_MOST_NAMES = 10
#: A PNG is drawn with the font that matplotlib brings along: the same bytes on every machine.
_PNG_STYLE: dict[Any, Any] = {**STYLE, "font.sans-serif": ["DejaVu Sans"]}


def panel_figure(panel: Panel) -> Figure:
    """Return one panel alone."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_PANEL_INCHES, layout="constrained")
        _draw(figure.add_subplot(), panel)
    return figure


def png(panels: Sequence[Panel]) -> bytes:
    """Return all panels of a report as one picture, without dates or versions inside."""
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


def _draw(axes: Axes, panel: Panel) -> None:
    {"lines": _lines, "grouped": _grouped, "stacked": _stacked}[panel.kind](axes, panel)
    if panel.from_zero:
        axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)
    if panel.limit_y is not None:
        axes.axhline(panel.limit_y, color=STYLE["text.color"], linewidth=1, linestyle=":")
        axes.set_ylim(top=panel.limit_y * 1.5)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="both" if panel.kind == "lines" else "y")
    columns = _legend_columns(panel)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=10)


def _legend_columns(panel: Panel) -> int:
    """As many names in a row as fit above the panel."""
    longest = max(len(series.name) for series in panel.series)
    return max(1, min(len(panel.series), _LEGEND_CHARACTERS // (longest + 6)))


def _legend_rows(panel: Panel) -> int:
    return math.ceil(len(panel.series) / _legend_columns(panel))


def _lines(axes: Axes, panel: Panel) -> None:
    styles = zip(panel.series, cycle(SERIES_COLOURS), cycle(LINE_STYLES), strict=False)
    for series, colour, line_style in styles:
        x, y = _numbers(series.x), _numbers(series.y)
        marker = "o" if len(x) <= 30 else ""
        axes.plot(x, y, label=series.name, color=colour, linestyle=line_style, marker=marker)
        if series.low and series.high:
            low, high = _numbers(series.low), _numbers(series.high)
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _grouped(axes: Axes, panel: Panel) -> None:
    names = [str(name) for name in panel.series[0].x]
    width = 0.8 / len(panel.series)
    places = np.arange(len(names))
    for index, (series, colour) in enumerate(
        zip(panel.series, cycle(SERIES_COLOURS), strict=False)
    ):
        shift = (index - (len(panel.series) - 1) / 2) * width
        axes.bar(places + shift, _numbers(series.y), width, label=series.name, color=colour)
    _name_bars(axes, names)


def _stacked(axes: Axes, panel: Panel) -> None:
    names = [str(name) for name in panel.series[0].x]
    places = np.arange(len(names))
    bottom = np.zeros(len(names))
    for series, colour in zip(panel.series, cycle(SERIES_COLOURS), strict=False):
        heights = _numbers(series.y)
        axes.bar(places, heights, 0.7, bottom=bottom, label=series.name, color=colour)
        bottom += heights
    _name_bars(axes, names)


def _name_bars(axes: Axes, names: list[str]) -> None:
    every = math.ceil(len(names) / _MOST_NAMES)
    axes.set_xticks(range(0, len(names), every), names[::every])


def _numbers(values: tuple[Any, ...]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
