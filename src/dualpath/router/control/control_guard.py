"""Keeps strangers off the control socket: asks for the engines' key, counts who had none.

libzmq asks an authenticator (ZAP) whether it may admit a key, and reports on a monitor socket which
connections ended in their handshake.  A peer without the secret never gets further than that: none
of its bytes reach the router's own code.
"""

import asyncio
import contextlib
import logging

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from dualpath.router.requests.refusals import ControlRefusal, ControlRefusals
from dualpath.transport.cluster_secret import SECRET_VARIABLE, ClusterSecret

logger = logging.getLogger(__name__)

_FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class ControlGuard:
    """Guards a socket that is about to be bound; connections without the key go to ``refusals``."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        secret: ClusterSecret,
        refusals: ControlRefusals,
    ) -> None:
        self._refusals = refusals
        self._socket = socket
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=secret)
        secret.guard_listener(socket)
        self._monitor = socket.get_monitor_socket(int(_FAILED_HANDSHAKES))
        self._task = asyncio.create_task(self._watch(), name="control guard")

    async def close(self) -> None:
        """Let go of the context, which cannot end before; the socket may be closed afterwards."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.stop()

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            refused = self._refusals.count(ControlRefusal.SECRET)
            # The event names our end only; the peers themselves log that they are not welcomed.
            if refused & (refused - 1) == 0:
                logger.warning(
                    "%d control connection(s) at %s refused so far: the peer does not have this "
                    "router's cluster secret; give it the same (%s)",
                    *(refused, event["endpoint"].decode(), SECRET_VARIABLE),
                )
