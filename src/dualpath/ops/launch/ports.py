"""Ports of this machine that processes about to start can have."""

import itertools
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from dualpath.core.errors import ConfigError
from dualpath.plan.traffic_class import PortRange

LOOPBACK = "127.0.0.1"

# Where Linux says which ports it gives to connections that leave the machine.
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Below are the ports that services are commonly given by hand, and from the KV-cache's own on
# (``PortRange``) a port would put a process' other messages into the KV-cache's traffic class.
_LOWEST = 10240
_END = PortRange().first
# Begins anywhere, so that two processes rarely name the same ports.
_turns = itertools.count(secrets.randbelow(1 << 15))


def claim_port(host: str = LOOPBACK, port: int = 0) -> int:
    """Return ``port`` if it is free, any free one for 0; raises ``ConfigError`` if it is taken."""
    try:
        return free_port(host, port)
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} cannot be used ({error.strerror}); choose another with "
            "--port, 0 takes any free one"
        ) from error


def free_port(host: str, port: int) -> int:
    """As ``claim_port``, but raises ``OSError``.

    The kernel gives a connection that leaves the machine any free port of its own range, so
    one of those may be gone before its process listens, or while it starts again.  For 0 the
    ports below that range are tried in turn: this process hardly names one twice.
    """
    for candidate in (port,) if port else _ports_outside_connections():
        try:
            return _bound(host, candidate)
        except OSError:
            if port:
                raise
    return _bound(host, 0)


def _ports_outside_connections() -> Iterator[int]:
    count = max(min(_END, _first_of_connections()) - _LOWEST, 0)
    return (_LOWEST + next(_turns) % count for _ in range(count))


def _first_of_connections() -> int:
    try:
        return int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: the range that IANA names
        return 49152


def _bound(host: str, port: int) -> int:
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def family_of(host: str) -> socket.AddressFamily:
    """Return the kind of sockets that an address is of."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
