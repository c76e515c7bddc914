"""The teardown of a session at an engine: only in-doubt requests are left."""

from collections.abc import Callable
from typing import NamedTuple

from dualpath.core.addresses import Writer
from dualpath.core.cluster import Role
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.peers import Peers


class InDoubt(NamedTuple):
    """The in-doubt requests of earlier sessions, and their writers: see ``control.Register``."""

    unsettled: tuple[str, ...]
    quarantined: tuple[str, ...]
    writers: tuple[Writer, ...]


class SessionTeardown:
    """Ends sessions and tracks in-doubt requests; methods may be called from any thread.

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
        self._reported_unsettled: set[str] = set()

    def end_session(self, reason: str) -> None:
        """Drop all requests except those that decode, which hold no slots any more.

        Memory to which transfers may still write is not reused: a DE's slots are quarantined until
        the router confirms that they have no writer, a PE's requests in a forward pass stay until
        it is over.
        """
        for request_id, awaits_kv in self._active.end_session(reason).items():
            self._cancel_reads(request_id)
            if awaits_kv and self._role is Role.DECODE:
                self._buffer.quarantine(request_id)
            self._buffer.release(request_id)

    def in_doubt(self) -> InDoubt:
        """Return the in-doubt requests, for the next ``Register``."""
        unsettled = self._active.unsettled()
        self._reported_unsettled.update(unsettled)
        return InDoubt(unsettled, self._buffer.quarantined(), self._peers.writers())

    def settled_since(self) -> list[str]:
        """A session begins: return requests that have settled since they were reported in doubt."""
        settled = self._reported_unsettled.difference(self._active.unsettled())
        self._reported_unsettled.clear()
        return sorted(settled)
