"""What may be a name: of an engine, a node, a group, a process start, a request.

Names stand in log lines, metrics, files of traces and pages.  One with a newline forges a log line,
one with a direction mark shows something else than it is, one without end fills the log.  So there
is one rule, asked where a name enters: at the wire (``core.control``), at an engine's settings, and
where a request begins.
"""

import re
from typing import Annotated

import msgspec

LONGEST_NAME_CHARACTERS = 256
#: An attempt at a request adds its number to the name.
_LONGEST_ON_WIRE = LONGEST_NAME_CHARACTERS + 32

#: All but control characters, line ends, marks of direction and width, lone surrogates.
_PRINTABLE = (
    r"[^\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\uffff"
    r"\ud800-\udfff]"
)
_NAME = re.compile(rf"\A{_PRINTABLE}{{0,{LONGEST_NAME_CHARACTERS}}}\Z")

#: A name on the wire.
Name = Annotated[str, msgspec.Meta(pattern=rf"\A{_PRINTABLE}*\Z", max_length=_LONGEST_ON_WIRE)]


def in_one_line(text: str, most: int = 500) -> str:
    """Return what a peer wrote so that it cannot end a line of the log, nor fill it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])


def unfit_name(name: str) -> str | None:
    """Return what is wrong with a name, None if nothing; the empty name is one."""
    if _NAME.match(name):
        return None
    shown = ascii(name[:60])
    return (
        f"{shown} of {len(name)} characters is no name: use at most {LONGEST_NAME_CHARACTERS} "
        "printable characters"
    )
