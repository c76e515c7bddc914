"""Refuses requests that a web page of another site makes a browser send.

A browser sends requests of any page to every address that it reaches, this machine's loopback
address included.  A server that requires API keys is safe, since a browser adds no key by itself.
Any other server compares what a page cannot choose:

- ``Host``: a page of a site that resolves its own name to our address (*DNS rebinding*) sends that
  name.  Addresses, names without a dot and a server's own names are accepted, since a stranger
  cannot register any of them.
- ``Origin``: browsers send it with all requests that change something, and with all answers that a
  page of another site could read.  It must be the server's own, or that of an allowed host.
- ``Content-Type``: a page may send a form or plain text without asking the server first (CORS
  preflight).  So a POST must be JSON, or have a header that causes a preflight.
"""

import ipaddress
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from dualpath.core.names import in_one_line

#: Headers that a page of another site may send after a preflight only; one is enough.
PREFLIGHT_HEADERS = ("authorization", "x-requested-with")
#: Methods that change nothing; browsers send PUT, PATCH and DELETE after a preflight only.
_POST = "POST"
#: Allows every host.
ANY_HOST = "*"

#: Returns all values of a header of a request, by its name in lower case.
Header = Callable[[str], Sequence[str]]


class PageRefused(NamedTuple):
    """HTTP status and reason of a refusal."""

    status: int
    reason: str


class AllowedHosts:
    """The hosts by which a server may be called.

    ``own``: names of the server, of which the part before a port counts.  ``allowed``: further
    names, also of pages that may call the server: ``.example.com`` stands for all names that end
    with it, ``*`` for all names.
    """

    def __init__(self, allowed: Collection[str] = (), own: Collection[str] = ()) -> None:
        self._allowed = tuple(name.lower().rstrip(".") for name in allowed)
        self._own = frozenset(name.lower().rstrip(".") for name in own if name)

    def refusal(self, method: str, header: Header, *, any_host: bool = False) -> PageRefused | None:
        """Return why a request is refused, None if it is not; ``any_host``: by whatever name."""
        hosts, origins = header("host"), header("origin")
        for host in () if any_host else hosts:
            if not self._is_known(_name(f"//{host}")):
                return _foreign("Host", host)
        for origin in origins:
            if not (self._is_own_page(origin, hosts) or self._is_allowed(_name(origin))):
                return _foreign("Origin", origin)
        if method == _POST and not (_is_json(header) or any(map(header, PREFLIGHT_HEADERS))):
            found = in_one_line(next(iter(header("content-type")), "none"), 80)
            return PageRefused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"the Content-Type is {found}, which any web page can make a browser send; send "
                "Content-Type: application/json (without a body, too)",
            )
        return None

    def _is_known(self, name: str) -> bool:
        return name in self._own or _is_local(name) or self._is_allowed(name)

    def _is_allowed(self, name: str) -> bool:
        return any(
            one in (ANY_HOST, name) or (one.startswith(".") and name.endswith(one))
            for one in self._allowed
        )

    @staticmethod
    def _is_own_page(origin: str, hosts: Sequence[str]) -> bool:
        """Whether a page comes from the very host and port to which it sends the request."""
        _, separator, place = origin.partition("://")
        return bool(separator) and [place.lower()] == [host.lower() for host in hosts]


def _name(url: str) -> str:
    """Return the host of a URL in lower case; "?", which no host is, if it has none."""
    try:
        return (urlsplit(url).hostname or "?").rstrip(".") or "?"
    except ValueError:
        return "?"


def _is_local(name: str) -> bool:
    """Whether no stranger can make a name resolve to our address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.replace("-", "").replace("_", "").isalnum() or name.endswith(".localhost")
    return True


def _is_json(header: Header) -> bool:
    kinds = [value.partition(";")[0].strip().lower() for value in header("content-type")]
    return bool(kinds) and all(
        kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
        for kind in kinds
    )


def _foreign(header: str, value: str) -> PageRefused:
    return PageRefused(
        HTTPStatus.FORBIDDEN,
        f"{header} is {in_one_line(value, 80)!r}, the name of another site: a web page may have "
        "sent this request; call this server by its address, allow the name with --allowed-hosts, "
        "or require a key with --api-keys",
    )
