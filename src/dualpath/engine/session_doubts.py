"""What a session that is over leaves at an engine: only what transfers may still write to."""

from collections.abc import Callable
from typing import NamedTuple

from dualpath.core.addresses import Writer
from dualpath.core.cluster import Role
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.peers import Peers


class Doubts(NamedTuple):
    """What sessions that are over have left: see ``core.control.Hello``."""

    unsettled: tuple[str, ...]
    quarantined: tuple[str, ...]
    writers: tuple[Writer, ...]


class SessionDoubts:
    """Ends sessions, and names what they leave; methods may be called from any thread.

    ``cancel_reads`` drops a request's storage reads.
    """

    def __init__(
        self,
        role: Role,
        active: ActiveRequests,
        buffer: BlockBuffer,
        peers: Peers,
        cancel_reads: Callable[[str], None],
    ) -> None:
        self._cancel_reads = cancel_reads
        self._role = role
        self._active = active
        self._buffer = buffer
        self._peers = peers
        self._said_unsettled: set[str] = set()

    def end_session(self, reason: str) -> None:
        """Forget all requests but those that decode, which have nothing here any more.

        What their transfers may still write to is kept: a DE's slots in quarantine, until a router
        says that no writer is left, a PE's requests in a forward pass until that is over.
        """
        for request_id, awaits_kv in self._active.end_session(reason).items():
            self._cancel_reads(request_id)
            if awaits_kv and self._role is Role.DECODE:
                self._buffer.quarantine(request_id)
            self._buffer.release(request_id)

    def named(self) -> Doubts:
        """Return what is in doubt, for the next ``Hello``."""
        unsettled = self._active.unsettled()
        self._said_unsettled.update(unsettled)
        return Doubts(unsettled, self._buffer.quarantined(), self._peers.writers())

    def settled_since(self) -> list[str]:
        """A session begins: return what has settled since it was named, which nobody heard."""
        settled = self._said_unsettled.difference(self._active.unsettled())
        self._said_unsettled.clear()
        return sorted(settled)
