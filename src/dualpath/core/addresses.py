"""Hosts, ports and URLs as text: the one place that reads them and that puts IPv6 in brackets.

A *host* is a name or an address, inside the project without brackets (``::1``).  URLs and ZMQ
endpoints have brackets (``http://[::1]:8000``, ``tcp://[::1]:5700``).
"""

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from dualpath.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_HIGHEST_PORT = 65535
#: Wildcard addresses, each with the address at which this machine itself reaches their listeners.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class HostPort(NamedTuple):
    """A host without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``HOST:PORT``, IPv6 in brackets."""
        return f"{bracketed(self.host)}:{self.port}"


def is_ipv6(host: str) -> bool:
    """Whether a host is an IPv6 address."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """Return a host as URLs and endpoints write it."""
    return f"[{host}]" if is_ipv6(host) else host


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of an HTTP server, without a slash at its end."""
    return f"{'https' if tls else 'http'}://{HostPort(host, port)}"


def tcp_endpoint(host: str, port: int) -> str:
    """Return a ZMQ endpoint."""
    return f"tcp://{HostPort(host, port)}"


def seen_from_here(host: str) -> str:
    """Return the host at which this machine reaches a listener on ``host``: no wildcard."""
    return _WILDCARDS.get(host, host)


def plain_host(text: str) -> str:
    """Return a typed host without brackets; raises ``ValueError`` with the remedy."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_ipv6(host):
        return host
    if not host or host == "*":
        raise ValueError("no host; write 127.0.0.1, or 0.0.0.0 or :: for every address")
    if "://" in host or "/" in host:
        raise ValueError("a URL, not a host; write the name or the address alone")
    if host != text or "[" in host or "]" in host or host.count(":") > 1:
        raise ValueError("no IPv6 address; correct it")
    if ":" in host:
        raise ValueError("a host with a port; write the name or the address alone")
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise ValueError("neither an address nor a name of a host; correct it")
    if host.replace(".", "").isdecimal() and not _is_ipv4(host):
        raise ValueError("no IPv4 address; correct it")
    return host


def host_and_port(text: str) -> HostPort:
    """Return the parts of ``HOST:PORT`` or ``[IPV6]:PORT``; raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if not colon or host.endswith(":") or (":" in host and not host.endswith("]")):
        if is_ipv6(host) and port.isdecimal():
            raise ValueError(f"IPv6 without brackets; write [{host}]:{port}, or [{text}]:PORT")
        if is_ipv6(text):
            raise ValueError(f"an IPv6 address without a port; write [{text}]:PORT")
        raise ValueError("not of the form HOST:PORT")
    if not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= _HIGHEST_PORT:
        raise ValueError(f"the port is {port!r}, which must be between 1 and {_HIGHEST_PORT}")
    return HostPort(plain_host(host), int(port))


def tcp_address(url: str) -> HostPort:
    """Return the parts of ``tcp://HOST:PORT``; raises ``ValueError`` with the remedy."""
    scheme, separator, place = url.partition("://")
    if scheme != "tcp" or not separator:
        raise ValueError("not of the form tcp://host:port")
    return host_and_port(place.removesuffix("/"))


def checked_tcp_address(url: str, setting: str) -> HostPort:
    """As ``tcp_address`` for the value of a setting; raises ``ConfigError`` that names it."""
    try:
        return tcp_address(url)
    except ValueError as error:
        raise ConfigError(
            f"{{{setting}}} is {url!r}: {error}; use the form tcp://host:port, or "
            "tcp://[address]:port for IPv6"
        ) from error


def checked_http_url(url: str, setting: str) -> str:
    """Return the URL of a server without a slash at its end; raises ``ConfigError``.

    ``setting`` is the name of the setting that the error names.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("not of the form http://HOST:PORT")
        place = parts.netloc.rpartition("@")[2]
        if place.endswith("]") or (":" not in place and place):
            plain_host(place)
        else:
            host_and_port(place)
        if parts.query or parts.fragment:
            raise ValueError("a URL with a query; write it without")
    except ValueError as error:
        raise ConfigError(
            f"{{{setting}}} is {url!r}: {error}; use the form http://host:port, or "
            "http://[address]:port for IPv6"
        ) from error
    return url.rstrip("/")


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False
