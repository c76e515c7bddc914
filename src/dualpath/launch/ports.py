"""Finds free ports of this machine for processes about to start."""

import itertools
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from dualpath.core.errors import ConfigError
from dualpath.node.sockets import resolved
from dualpath.plan.traffic_class import PortRange

LOOPBACK = "127.0.0.1"

# The range of ephemeral ports, which Linux uses for outgoing connections.
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Ports below are commonly assigned by hand; ports from ``PortRange`` on are in KV's traffic class,
# which a process's other messages must not use.
_LOWEST = 10240
_END = PortRange().first
_TRIES = 1000
# Starts at a random offset, so that two processes rarely choose the same ports.
_offsets = itertools.count(secrets.randbelow(1 << 15))


def claim_port(host: str = LOOPBACK, port: int = 0) -> int:
    """Return ``port``, or any free port for 0; raises ``ConfigError`` if it is taken."""
    try:
        return free_port(host, port)
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} cannot be used ({error.strerror}); choose another with "
            "--port, or 0 for any free one"
        ) from error


def claim_ports(host: str, count: int, apart: int) -> int:
    """Return a port that is free, as are those ``apart``, 2 · ``apart`` and so on above it.

    ``count`` is the number of these ports.  Raises ``ConfigError`` if none are found.
    """
    for _ in range(_TRIES):
        first = claim_port(host)
        try:
            for number in range(1, count):
                free_port(host, first + number * apart)
        except (OSError, OverflowError):
            continue
        return first
    raise ConfigError(
        f"no {count} free ports on {host} that are {apart} apart were found in {_TRIES} tries; "
        "start fewer units"
    )


def free_port(host: str, port: int) -> int:
    """As ``claim_port``, but raises ``OSError``.

    The kernel assigns ephemeral ports to outgoing connections, so one of them may be taken before
    the process listens, or during a restart.  For 0 the ports below the ephemeral range are tried
    one after the other, so that this process rarely returns a port twice.
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
    return (_LOWEST + next(_offsets) % count for _ in range(count))


def _first_of_connections() -> int:
    try:
        return int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: IANA's range
        return 49152


def _bound(host: str, port: int) -> int:
    family, address = resolved(host, listens=True)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])
