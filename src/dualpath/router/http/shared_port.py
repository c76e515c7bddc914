"""A server's place at a port that other processes of this user serve as well (SO_REUSEPORT).

The kernel divides new connections among the listeners.  So a process that is about to end stops
listening first: from then on all new connections go to the others.  Connections that are made and
not accepted yet are still served, since closing their listener would reset them; and so are
requests on open connections, each of which is closed with its next answer.  No client is refused.

A connection in its handshake when its listener ends is reset: that takes microseconds on one
machine, a round trip for clients of others.  No process can lead new connections past its own
listener while it waits for those; with the sysctl ``net.ipv4.tcp_migrate_req`` the kernel moves
them to another one.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

from dualpath.router.connections import Connections

#: Idle time after which a client's connection is closed: an active client sends a request sooner,
#: and learns from its answer that the connection closes.
KEPT_S = 2.0


class Draining(Protocol):
    """``FrontEnd``, as far as its end goes."""

    async def drain(self, clients_gone: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let what is under way end."""
        ...


class SharedPort:
    """One server's place; ``left`` once it listens no more."""

    def __init__(self) -> None:
        self.left = False
        self._servers: tuple[asyncio.Server, ...] = ()

    def taken(
        self,
        servers: Iterable[asyncio.Server],
        connections: Connections,
        connected: Callable[[socket.socket], Awaitable[object]],
    ) -> None:
        """``servers`` listen; ``connected`` serves a connection that none of them has taken."""
        self._servers, self._connections, self._connected = tuple(servers), connections, connected

    async def leave(self, service: Draining) -> None:
        """Listen no more, and return when everything is over, or its time is."""
        self.left = True
        listeners = [_another(sock) for server in self._servers for sock in server.sockets]
        for server in self._servers:
            server.close()
        for connection in [one for listener in listeners for one in _waiting(listener)]:
            await self._connected(connection)
        await service.drain(lambda: self._connections.emptied(KEPT_S))


def _another(sock: socket.socket) -> socket.socket:
    """Return a second file of a listener, which listens for as long as it has one."""
    return socket.socket(fileno=os.dup(sock.fileno()))


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Take all that waits to be taken; the listener is closed."""
    listener.setblocking(False)
    with listener:
        while True:
            try:
                yield listener.accept()[0]
            except OSError:  # There is none, or no file for it.
                return
