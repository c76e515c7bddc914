"""Draws panels with matplotlib: all in one PNG, or each as SVG in the colours of its page.

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
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from dualpath.report.model import Panel
from dualpath.report.style import SeriesStyle, series_styles

_PANEL_INCHES = (5.6, 3.6)
_COLUMNS = 3
_DOTS_PER_INCH = 90
_PAD_INCHES = 0.12
_LEGEND_CHARACTERS = 60
#: Most names below bars that do not overlap.
_MAX_NAMES = 10
#: Most bars that are labelled with their values.
_MAX_VALUES = 24
#: Values from here on are written with an SI prefix: 100M, not 1e8 at the corner.
_LARGE = 1e5
#: With a limit line, the y-axis extends at least to the first multiple of the limit and at most to
#: the second; higher bars are cut off and labelled.
_LIMIT_HEIGHT, _MAX_LIMIT_HEIGHT = 1.5, 3.0
#: More curves than this are drawn thin and without markers.
_FEW_CURVES = 4
#: Curves with more points than this have no markers.
_MAX_MARKERS = 30
#: Placeholder of ``currentColor``, which matplotlib does not support.
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
    "axes.labelpad": 8,
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
#: PNGs use matplotlib's own font, so that their bytes are the same on every machine.
_PNG_STYLE = {**_STYLE, "font.sans-serif": ["DejaVu Sans"]}


def png(panels: Sequence[Panel]) -> bytes:
    """Return all panels as one picture, without dates or versions inside."""
    # Four panels are arranged two by two.
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
    """Return an ``<svg>`` element in the page's colour and with its container's width.

    Its ids are derived from ``name``, which must be unique on the page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=_PANEL_INCHES, layout="constrained")
        _draw(figure.add_subplot(), panel)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_PAGE_COLOUR, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Group ids are not unique across plots, and nothing refers to them.
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
        room = 1.15 if _shows_values(panel) else 1.05
        axes.set_ylim(0, room * axes.dataLim.y1 or 1)
    if panel.limit_y is not None:
        axes.axhline(panel.limit_y, color=_PAGE_COLOUR, linewidth=1, linestyle=":")
        top = max(_LIMIT_HEIGHT * panel.limit_y, 1.15 * axes.dataLim.y1)
        axes.set_ylim(top=min(top, _MAX_LIMIT_HEIGHT * panel.limit_y))
    if _counts(panel):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_ylim()[1] >= _LARGE:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _mark_cut(axes, panel)
    if panel.kind == "steps":
        axes.set_xlim(left=0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="y" if panel.kind in ("grouped", "stacked") else "both")
    columns = _legend_columns(panel)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=10)


def _counts(panel: Panel) -> bool:
    """Whether all values are integers."""
    values = [value for series in panel.series for value in series.y if value is not None]
    return all(float(value).is_integer() for value in values)


def _shows_values(panel: Panel) -> bool:
    """Whether bars are few enough to be labelled with their values."""
    if panel.kind not in ("grouped", "stacked"):
        return False
    bars = len(panel.series[0].x) * (len(panel.series) if panel.kind == "grouped" else 1)
    return bars <= _MAX_VALUES


def _mark_cut(axes: Axes, panel: Panel) -> None:
    """Label bars that extend beyond the axes with their height."""
    if panel.kind not in ("grouped", "stacked"):
        return
    top = axes.get_ylim()[1]
    for bar in axes.patches:
        if isinstance(bar, Rectangle) and bar.get_y() + bar.get_height() > top:
            words = f"▲{bar.get_y() + bar.get_height():,.3g}"
            middle = bar.get_x() + bar.get_width() / 2
            axes.text(middle, top, words, ha="center", va="top", fontsize=8)


def _legend_columns(panel: Panel) -> int:
    """Return how many names fit in a row above the panel."""
    longest = max(len(series.name) for series in panel.series)
    return max(1, min(len(panel.series), _LEGEND_CHARACTERS // (longest + 8)))


def _legend_rows(panel: Panel) -> int:
    return math.ceil(len(panel.series) / _legend_columns(panel))


def _lines(axes: Axes, panel: Panel) -> None:
    steps = panel.kind == "steps"
    few = len(panel.series) <= _FEW_CURVES
    for series, style in zip(
        panel.series, series_styles([s.name for s in panel.series]), strict=True
    ):
        x, y = _numbers(series.x), _numbers(series.y)
        axes.plot(
            x,
            y,
            label=series.name,
            color=style.colour,
            linestyle=style.line,
            linewidth=2.0 if few else 1.2,
            marker="o" if few and not steps and len(x) <= _MAX_MARKERS else "",
            drawstyle="steps-post" if steps else "default",
        )
        if series.low and series.high:
            low, high = _numbers(series.low), _numbers(series.high)
            axes.fill_between(x, low, high, color=style.colour, alpha=0.2, linewidth=0)


def _bars(axes: Axes, panel: Panel) -> None:
    names = [str(name) for name in panel.series[0].x]
    places = np.arange(len(names))
    found = series_styles([series.name for series in panel.series])
    (_stacked if panel.kind == "stacked" else _grouped)(axes, panel, places, found)
    if len(names) > _MAX_NAMES and not all(_is_number(name) for name in names):
        # Numbers may be skipped on the axis, names may not.
        axes.set_xticks(places, names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
        return
    every = math.ceil(len(names) / _MAX_NAMES)
    axes.set_xticks(range(0, len(names), every), names[::every])


def _is_number(name: str) -> bool:
    return name.replace(",", "").replace(".", "").isdigit()


def _stacked(
    axes: Axes, panel: Panel, places: NDArray[np.int64], found: Sequence[SeriesStyle]
) -> None:
    bottom = np.zeros(len(places))
    for series, style in zip(panel.series, found, strict=True):
        heights = _numbers(series.y)
        axes.bar(places, heights, 0.7, bottom=bottom, label=series.name, color=style.colour)
        bottom += np.nan_to_num(heights)
    if _shows_values(panel):
        for place, height in zip(places, bottom, strict=True):
            _label(axes, place, height, height, _value_size(len(places)))


def _grouped(
    axes: Axes, panel: Panel, places: NDArray[np.int64], found: Sequence[SeriesStyle]
) -> None:
    """Draw bars side by side, with the range of each value as a thin line."""
    width = 0.8 / len(panel.series)
    size = _value_size(len(places) * len(panel.series))
    for index, (series, style) in enumerate(zip(panel.series, found, strict=True)):
        heights = _numbers(series.y)
        shift = (index - (len(panel.series) - 1) / 2) * width
        axes.bar(places + shift, heights, width, label=series.name, color=style.colour)
        if series.low and series.high:
            spread = np.abs(np.stack([_numbers(series.low), _numbers(series.high)]) - heights)
            axes.errorbar(
                places + shift, heights, spread, fmt="none", ecolor=_PAGE_COLOUR, elinewidth=1,
                capsize=2,
            )  # fmt: skip
        if _shows_values(panel):
            tops = np.fmax(heights, _numbers(series.high)) if series.high else heights
            for place, top, height in zip(places + shift, tops, heights, strict=True):
                _label(axes, place, top, height, size)


def _label(axes: Axes, place: float, top: float, value: float, size: float) -> None:
    """Write a value above a bar that ends at ``top``, if that is within the axes."""
    axes.annotate(
        _value(value), (place, top), (0, 3), textcoords="offset points", ha="center",
        fontsize=size, annotation_clip=True,
    )  # fmt: skip


def _value(height: float) -> str:
    """Return the value with three significant digits, as an integer from 100 on."""
    if math.isnan(height):
        return ""
    return f"{height:,.0f}" if abs(height) >= 100 else f"{height:.3g}"


def _value_size(bars: int) -> float:
    return 11.0 if bars <= 4 else 9.0 if bars <= 8 else 7.0


def _numbers(values: tuple[Any, ...]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
