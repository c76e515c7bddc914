"""Keeps strangers off the control socket: asks for the engines' key, counts who had none.

libzmq asks an authenticator (ZAP) whether it may admit a key; which connections ended in their
handshake is heard by ``ControlConnections``.  A peer without the secret never gets further than
that: none of its bytes reach the router's own code.
"""

import logging

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from dualpath.node.cluster_secret import SECRET_VARIABLE, ClusterSecret
from dualpath.router.refusals import ControlRefusal, ControlRefusals

logger = logging.getLogger(__name__)


class ControlGuard:
    """Guards a socket that is about to be bound; connections without the key go to ``refusals``."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: "zmq.Socket[bytes]",
        secret: ClusterSecret,
        refusals: ControlRefusals,
    ) -> None:
        self._refusals = refusals
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=secret)
        secret.guard_listener(socket)

    def close(self) -> None:
        """Let go of the context, which cannot end before."""
        self._authenticator.stop()

    def refused(self, endpoint: str) -> None:
        """A connection has ended in its handshake at ``endpoint``, which names our end only."""
        refused = self._refusals.count(ControlRefusal.SECRET)
        # The peers themselves log that they are not welcomed.
        if refused & (refused - 1) == 0:
            logger.warning(
                "%d control connection(s) at %s refused so far: the peer does not have this "
                "router's cluster secret; give it the same (%s)",
                *(refused, endpoint, SECRET_VARIABLE),
            )
