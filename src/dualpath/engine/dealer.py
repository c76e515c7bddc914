"""The socket by which engines and front ends connect to their router or scheduler.

A process that ends closes its connections; a machine that is lost does not.  In that case the local
kernel retransmits unacknowledged packets for some 15 minutes (``net.ipv4.tcp_retries2``), even if
the address leads to another machine by now: address translation, such as a Kubernetes Service,
keeps an existing connection at the old machine.  So the kernel is configured to give up sooner, and
the next connection goes to the current target of the address.

ZMTP heartbeats are not used: a suspended process does not answer them though it may continue, and
``router.control.control_connections`` would count their bytes as traffic without messages.  They
are not needed either: a process that has a session or registers sends something at least every
``HEARTBEAT_S``.  The other machine's kernel acknowledges it also for a suspended process, as long
as its receive buffer has room; otherwise the session continues over another connection.
"""

from typing import Any

import zmq

from dualpath.core.errors import ConfigError
from dualpath.transport.cluster_secret import ClusterSecret

#: Time for queued messages to be sent after the socket is closed.
LINGER_MS = 500
#: Interval between attempts to connect: the first one, and the maximum after repeated doubling.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 20, 250
#: A connection without acknowledgements for this time is dropped.  Linux has retransmitted four
#: times by then (after 0.2, 0.4, 0.8 and 1.6 s), so that a few lost packets do not end it; and
#: another connection can be made before the session ends, after ``ROUTER_TIMEOUT_S`` of silence.
_UNACKNOWLEDGED_MS = 5000
#: Limit of one attempt to connect: two packets, the second after 1 s.  The kernel would send more
#: for two minutes, to the machine that had the address when the first packet was sent.
_CONNECT_MS = 2000


def prepare_dealer(dealer: "zmq.Socket[Any]", secret: ClusterSecret | None) -> None:
    """Set the options of a DEALER socket before it connects."""
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RETRY_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    dealer.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
    if secret is not None:
        secret.guard_connection(dealer)


def connect_dealer(dealer: "zmq.Socket[Any]", address: str, target: str) -> None:
    """Connect; raises ``ConfigError`` for an invalid address of ``target``."""
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.context.destroy(linger=0)
        raise ConfigError(
            f"{target} address {address!r}: {error}; use the form tcp://host:port"
        ) from error
