"""The calls that an engine's HTTP server has, as it reports them to the router's inquiries.

A server that hangs does not answer at all.  The report shows whether one call has got lost on its
way, in either direction, while the server lives.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote, unquote

import msgspec

#: The route that answers with the open calls.
OPEN_CALLS_PATH = "/dualpath/v1/calls"
#: Header of a call to the token API that has its name, percent-encoded.
CALL_HEADER = "X-DualPath-Call"


class OpenCallsAnswer(msgspec.Struct):
    """The body: by name, for how many seconds the server has sent nothing of a call's answer.

    None: it has the whole request and has sent nothing yet.
    """

    calls: dict[str, float | None]


class OpenCallList:
    """The calls of one server; belongs to its event loop.  ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_s: dict[str, float | None] = {}

    @contextmanager
    def open(self, call_id: str) -> Iterator[Callable[[], None]]:
        """List a call until the context ends; the returned function is called at each sending."""

        def sent() -> None:
            self._sent_s[call_id] = self._clock()

        self._sent_s[call_id] = None
        try:
            yield sent
        finally:
            self._sent_s.pop(call_id, None)

    def listed(self) -> Mapping[str, float | None]:
        """Return the calls, as ``OpenCallsAnswer`` has them."""
        now_s = self._clock()
        return {
            call_id: None if sent_s is None else now_s - sent_s
            for call_id, sent_s in self._sent_s.items()
        }

    def body(self, without: Collection[str] = ()) -> bytes:
        """Return the JSON body of an answer, ``without`` calls that the engine has lost."""
        listed = self.listed()
        return msgspec.json.encode({"calls": {c: listed[c] for c in listed if c not in without}})


def call_header(call_id: str) -> dict[str, str]:
    """Return the header that names a call."""
    return {CALL_HEADER: quote(call_id)}


def named_call(header: bytes) -> str:
    """Return the name of a call from its header's value."""
    return unquote(header.decode("latin-1"))
