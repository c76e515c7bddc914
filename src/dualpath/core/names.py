"""Which strings are valid names of engines, nodes, groups, process starts and requests.

Names appear in log lines, metrics, trace files and HTML pages.  A name with a newline forges a log
line, one with a direction mark is displayed as another name, and an endless one fills the log.  So
one rule is checked wherever a name enters: on the wire (``core.control``), in an engine's settings,
and where a request begins.
"""

import re
from typing import Annotated

import msgspec

LONGEST_NAME_CHARACTERS = 256
#: The name of an attempt is the name of its request and the attempt's number.
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
    """Escape and truncate a peer's text, so that it stays within one log line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])


def name_problem(name: str) -> str | None:
    """Return why a name is invalid, None if it is valid; the empty name is valid."""
    if _NAME.match(name):
        return None
    shown = ascii(name[:60])
    return (
        f"{shown} of {len(name)} characters is not a valid name: use at most "
        f"{LONGEST_NAME_CHARACTERS} printable characters"
    )
