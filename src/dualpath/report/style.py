"""How modes are called and drawn: one title, colour and line each, whoever draws them.

Demo, lab, evaluation and the comparison with other stacks draw by this one table.  A colour of a
mode means nothing else: paths, nodes, engines and other stacks have colours of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dualpath.core.modes import Mode


class Look(NamedTuple):
    """Colour, and what matplotlib calls a line style, so that lines differ without colour too."""

    colour: str
    line: str | tuple[int, tuple[int, ...]]


#: Of modes: mid-tones that stand out on white and on near-black.
LOOKS = (
    Look("#3f86c6", "-"),
    Look("#dd7a30", "--"),
    Look("#2f9a6b", "-."),
    Look("#9a6cc7", ":"),
    Look("#cf4f63", (0, (5, 1))),
    Look("#8a8f2e", (0, (3, 1, 1, 1))),
)
#: Of everything else, in the order in which names appear.
OTHER_LOOKS = (
    Look("#6f7b8a", "-"),
    Look("#2fa3a8", "--"),
    Look("#c08a14", "-."),
    Look("#c565a3", ":"),
    Look("#8a6244", (0, (5, 1))),
    Look("#6470d8", (0, (3, 1, 1, 1))),
)


class ModeStyle(NamedTuple):
    """``title``: the paper's name; a step of the ablation (§7.5) is called by what it adds."""

    title: str
    look: Look


MODE_STYLES = {
    Mode.BASIC: ModeStyle("Basic", LOOKS[0]),
    Mode.LAYERWISE: ModeStyle("+ layerwise", LOOKS[3]),
    Mode.ROUND_ROBIN: ModeStyle("+ dual path, round robin", LOOKS[4]),
    Mode.DUALPATH: ModeStyle("DualPath", LOOKS[1]),
    Mode.SPLIT: ModeStyle("DualPath, split read", LOOKS[5]),
    Mode.ORACLE: ModeStyle("Oracle", LOOKS[2]),
}
_BY_NAME = {
    name: style.look for mode, style in MODE_STYLES.items() for name in (mode.value, style.title)
}


def looks(names: Sequence[str]) -> list[Look]:
    """Return how each series is drawn: a mode, by value or title, always alike, others in turn."""
    others = [name for name in names if name not in _BY_NAME]
    return [
        _BY_NAME.get(name) or OTHER_LOOKS[others.index(name) % len(OTHER_LOOKS)] for name in names
    ]
