"""The socket by which engines and front ends connect to the one router or scheduler they have.

A process that ends closes its connections; a machine that is lost does not.  Then the kernel here
repeats what nobody acknowledges for some 15 minutes (``net.ipv4.tcp_retries2``), also where the
address leads to another machine by now: what translates addresses, as a Kubernetes Service does,
keeps a connection where it was.  So the kernel is told to give up sooner, and the connection that
follows goes where the address leads then.

No heartbeat of ZMTP's: a process that stands still answers none though it comes back, and pings
are bytes that no message makes, which ``router.control.control_connections`` would count against
who sends them.  Nor is one needed: who has a session, or greets, sends something every
``HEARTBEAT_S`` at least.  The other machine's kernel acknowledges that for a process that stands
still, too, for as long as it has room for it; without, the session goes on over another connection.
"""

from typing import Any

import zmq

from dualpath.core.errors import ConfigError
from dualpath.transport.cluster_secret import ClusterSecret

#: What was sent has so long to go out after the socket is closed.
LINGER_MS = 500
#: Between two tries to connect: the first, doubled each time up to the last.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 20, 250
#: A connection on which nothing was acknowledged for so long is dropped.  Linux has repeated it
#: four times by then (after 0.2, 0.4, 0.8 and 1.6 s), so that a few lost packets do not end it; and
#: there is time for another one before the session ends, after ``ROUTER_TIMEOUT_S`` of silence.
_UNACKNOWLEDGED_MS = 5000
#: So long one try to connect may take: two packets, the second after 1 s.  The kernel would send
#: more for two minutes, to the machine that had the address when the first one was sent.
_CONNECT_MS = 2000


def prepare_dealer(dealer: "zmq.Socket[Any]", secret: ClusterSecret | None) -> None:
    """Set what has to be set before a DEALER socket connects."""
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RETRY_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    dealer.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
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
