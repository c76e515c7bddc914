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
#: The paper's names; each step of the ablation (§7.5) is called by what it adds.
MODE_TITLES = {
    Mode.BASIC: "Basic",
    Mode.LAYERWISE: "+ layerwise",
    Mode.ROUND_ROBIN: "+ dual path, round robin",
    Mode.DUALPATH: "DualPath",
    Mode.SPLIT: "DualPath, split read",
    Mode.ORACLE: "Oracle",
}
_MODES = (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE, Mode.LAYERWISE, Mode.ROUND_ROBIN, Mode.SPLIT)
_BY_NAME = {mode.value: look for mode, look in zip(_MODES, LOOKS, strict=True)}


def looks(names: Sequence[str]) -> list[Look]:
    """Return how each series is drawn: a mode always the same way, others in what is left."""
    taken = {_BY_NAME[name] for name in names if name in _BY_NAME}
    free = [look for look in LOOKS if look not in taken] or list(LOOKS)
    others = [name for name in names if name not in _BY_NAME]
    return [
        _BY_NAME[name] if name in _BY_NAME else free[others.index(name) % len(free)]
        for name in names
    ]
