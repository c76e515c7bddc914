"""Titles, colours and line styles of modes, the same in all plots.

Used by demo, lab, evaluation and the comparison with other stacks.  Colours of modes are used for
modes only: paths, nodes, engines and other stacks have other colours.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dualpath.core.modes import Mode


class SeriesStyle(NamedTuple):
    """Colour and matplotlib line style, so that lines also differ without colour."""

    colour: str
    line: str | tuple[int, tuple[int, ...]]


#: Of modes: mid-tones that are visible on white and on near-black.
MODE_SERIES_STYLES = (
    SeriesStyle("#3f86c6", "-"),
    SeriesStyle("#dd7a30", "--"),
    SeriesStyle("#2f9a6b", "-."),
    SeriesStyle("#9a6cc7", ":"),
    SeriesStyle("#cf4f63", (0, (5, 1))),
    SeriesStyle("#8a8f2e", (0, (3, 1, 1, 1))),
)
#: Of all other series, in the order in which names appear.
OTHER_SERIES_STYLES = (
    SeriesStyle("#6f7b8a", "-"),
    SeriesStyle("#2fa3a8", "--"),
    SeriesStyle("#c08a14", "-."),
    SeriesStyle("#c565a3", ":"),
    SeriesStyle("#8a6244", (0, (5, 1))),
    SeriesStyle("#6470d8", (0, (3, 1, 1, 1))),
)


class ModeStyle(NamedTuple):
    """``title``: the paper's name, or for steps of the ablation (§7.5) what the step adds."""

    title: str
    series_style: SeriesStyle


MODE_STYLES = {
    Mode.BASIC: ModeStyle("Basic", MODE_SERIES_STYLES[0]),
    Mode.LAYERWISE: ModeStyle("+ layerwise", MODE_SERIES_STYLES[3]),
    Mode.ROUND_ROBIN: ModeStyle("+ dual path, round robin", MODE_SERIES_STYLES[4]),
    Mode.DUALPATH: ModeStyle("DualPath", MODE_SERIES_STYLES[1]),
    Mode.SPLIT: ModeStyle("DualPath, split read", MODE_SERIES_STYLES[5]),
    Mode.ORACLE: ModeStyle("Oracle", MODE_SERIES_STYLES[2]),
}
_BY_NAME = {
    name: style.series_style
    for mode, style in MODE_STYLES.items()
    for name in (mode.value, style.title)
}


def series_styles(names: Sequence[str]) -> list[SeriesStyle]:
    """Return the style of each series: modes (by value or title) have fixed styles, others not."""
    others = [name for name in names if name not in _BY_NAME]
    return [
        _BY_NAME.get(name) or OTHER_SERIES_STYLES[others.index(name) % len(OTHER_SERIES_STYLES)]
        for name in names
    ]
