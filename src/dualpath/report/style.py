"""How modes are called and drawn: one title, colour and line each, whoever draws them."""

from collections.abc import Sequence
from typing import NamedTuple

from dualpath.core.modes import Mode


class Look(NamedTuple):
    """Colour, and what matplotlib calls a line style, so that lines differ without colour too."""

    colour: str
    line: str | tuple[int, tuple[int, ...]]


#: Mid-tones that stand out on white and on near-black.
LOOKS = (
    Look("#3f86c6", "-"),
    Look("#dd7a30", "--"),
    Look("#2f9a6b", "-."),
    Look("#9a6cc7", ":"),
    Look("#cf4f63", (0, (5, 1))),
    Look("#8a8f2e", (0, (3, 1, 1, 1))),
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
_BY_NAME = {mode.value: style.look for mode, style in MODE_STYLES.items()}


def looks(names: Sequence[str]) -> list[Look]:
    """Return how each series is drawn: a mode by its name always alike, others in what is left."""
    taken = {_BY_NAME[name] for name in names if name in _BY_NAME}
    free = [look for look in LOOKS if look not in taken] or list(LOOKS)
    others = [name for name in names if name not in _BY_NAME]
    return [
        _BY_NAME[name] if name in _BY_NAME else free[others.index(name) % len(free)]
        for name in names
    ]
