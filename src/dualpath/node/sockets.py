"""Sockets of clients and servers: families of hosts (names, IPv4, IPv6), ZMQ options, idle time."""

import socket
from typing import TYPE_CHECKING, Any

import zmq

from dualpath.core.addresses import http_url, is_ipv6, seen_from_here, tcp_address
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Idle time after which a client of this project closes an HTTP connection; below the 5 s after
#: which vLLM's server does (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``).
IDLE_CONNECTION_S = 3.0


def resolved(host: str, *, listens: bool = False) -> tuple[socket.AddressFamily, str]:
    """Return family and address of a host; IPv4 if a name has addresses of both families.

    ``listens``: the address is to be bound.  Raises ``OSError`` for a name without an address.
    """
    flags = socket.AI_PASSIVE if listens else 0
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    ordered: Sequence[Any] = sorted(found, key=lambda one: one[0] != socket.AF_INET)
    family, _, _, _, address = ordered[0]
    return socket.AddressFamily(family), str(address[0])


def listening_socket(host: str, port: int, backlog: int, *, share: bool) -> socket.socket:
    """Return a listener; ``::`` takes IPv4 as well.  ``share`` sets SO_REUSEPORT.

    Raises ``OSError`` if the address cannot be bound.
    """
    family, address = resolved(host, listens=True)
    dual = family is socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        (address, port), family=family, backlog=backlog, reuse_port=share, dualstack_ipv6=dual
    )
    # Connections inherit it.  asyncio sets it only on sockets created with the protocol TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def engine_url(host: str, port: int, router: str, *, tls: bool = False) -> str:
    """Return the URL at which the router reaches an engine's server that listens on ``host``.

    For a wildcard, it has this machine's address on the way to the router; no packet is sent.
    Raises ``ConfigError`` if there is no way to the router.
    """
    if host == seen_from_here(host):
        return http_url(host, port, tls=tls)
    try:
        target = tcp_address(router)
        family, address = resolved(target.host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, target.port))
            return http_url(str(probe.getsockname()[0]), port, tls=tls)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the router {router!r} cannot be reached ({error}); give {{router}} as "
            "tcp://host:port, or {api_url}"
        ) from error


def zmq_host(zmq_socket: "zmq.Socket[Any]", host: str, *, listens: bool = False) -> str:
    """Return the host for an endpoint of ``zmq_socket``, after setting the socket's family.

    libzmq binds addresses and interfaces, not names, so a name is resolved if ``listens``; it
    resolves names itself whenever it connects, but only in the socket's family.
    """
    try:
        family, address = resolved(host, listens=listens)
    except OSError:
        # To bind: an interface.  To connect: the name may have an address later; with this option
        # libzmq finds one of either family.
        zmq_socket.setsockopt(zmq.IPV6, not listens)
        return host
    zmq_socket.setsockopt(zmq.IPV6, family is socket.AF_INET6)
    return address if listens or is_ipv6(host) else host
