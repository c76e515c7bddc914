"""The socket by which engines and front ends connect to the one router or scheduler they have."""

from typing import Any

import zmq

from dualpath.core.errors import ConfigError
from dualpath.transport.cluster_secret import ClusterSecret

#: What was sent has so long to go out after the socket is closed.
LINGER_MS = 500
#: Between two tries to connect: the first, doubled each time up to the last.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 20, 250


def prepare_dealer(dealer: "zmq.Socket[Any]", secret: ClusterSecret | None) -> None:
    """Set what has to be set before a DEALER socket connects."""
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RETRY_MS)
    if secret is not None:
        secret.guard_connection(dealer)


def connect_dealer(dealer: "zmq.Socket[Any]", address: str, whose: str) -> None:
    """Connect; raises ``ConfigError`` for an address ZMQ cannot connect to, which is ``whose``."""
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.context.destroy(linger=0)
        raise ConfigError(
            f"{whose} address {address!r}: {error}; use the form tcp://host:port"
        ) from error
