"""Ports of this machine that processes about to start can have."""

import socket

from dualpath.core.errors import ConfigError

LOOPBACK = "127.0.0.1"


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
    """As ``claim_port``, but raises ``OSError``."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def family_of(host: str) -> socket.AddressFamily:
    """Return the kind of sockets that an address is of."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
