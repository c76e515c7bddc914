"""The requests of one engine: their load, and their state until their buffer slots are free."""

from collections.abc import Iterable

from dualpath.core.request_messages import Release
from dualpath.engine.threads import OS_THREADS, Threads


class _Request:
    def __init__(self, tokens: int, assigned_ns: int) -> None:
        self.tokens = tokens
        self.assigned_ns = assigned_ns
        self.kv_in_hbm = False
        #: It decodes on after the end of its session, until the end of its HTTP call.
        self.detached = False
        self.ended = False
        self.persist_seen = False
        self.streams = 0
        self.pass_ns = 0
        self.waited_ns = 0
        self.release: Release | None = None


class ActiveRequests:
    """State of requests by id; all methods may be called from any thread.

    A request in a forward pass (``streams`` > 0) is never dropped: its transfers may still write
    into another engine's buffer, whose slots must not be reused before the transfers are over.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._active: dict[str, _Request] = {}

    def add(self, request_id: str, tokens: int, now_ns: int) -> None:
        """Count a request of ``tokens`` that was assigned to this engine."""
        with self._lock:
            assert request_id not in self._active, f"request {request_id} is active already"
            self._active[request_id] = _Request(tokens, now_ns)

    def end_session(self, reason: str) -> dict[str, bool]:
        """Drop all requests except those in a forward pass, which are released after it.

        Return the requests whose buffer slots have to be released, and whether each still expects
        KV from another engine: a request whose prompt is to be persisted has all of its KV.  A
        request that decodes needs no slots and no router: it is detached and counts until
        ``ended``.
        """
        dropped = {}
        with self._lock:
            for request_id, request in list(self._active.items()):
                if request.streams:
                    request.release = request.release or Release(request_id, reason)
                    continue
                dropped[request_id] = not (request.persist_seen or request.kv_in_hbm)
                request.detached = request.kv_in_hbm and not request.ended
                if not request.detached:
                    del self._active[request_id]
        return dropped

    def ended(self, request_id: str) -> None:
        """The engine's own request is over; a detached one is dropped."""
        with self._lock:
            if (request := self._active.get(request_id)) is None:
                return
            request.ended = True
            if request.detached:
                del self._active[request_id]

    @property
    def any_detached(self) -> bool:
        """Whether requests decode after the end of their session."""
        with self._lock:
            return any(request.detached for request in self._active.values())

    def unsettled(self) -> tuple[str, ...]:
        """Return the requests whose release waits for a forward pass."""
        with self._lock:
            return tuple(name for name, r in self._active.items() if r.release is not None)

    def is_known(self, request_id: str) -> bool:
        """Whether the request is here, released or not."""
        with self._lock:
            return request_id in self._active

    def drop(self, request_id: str) -> None:
        """Remove a request that is in no forward pass."""
        with self._lock:
            request = self._active.pop(request_id, None)
            assert request is None or not request.streams, f"request {request_id} is in a pass"

    def load(self) -> tuple[int, int]:
        """Return (seq_e, tok_e) of §6.1."""
        with self._lock:
            return len(self._active), sum(r.tokens for r in self._active.values())

    def assigned_ns(self, request_id: str) -> int | None:
        """Return when the request was assigned; None if it is not (or no longer) here."""
        with self._lock:
            request = self._active.get(request_id)
            return None if request is None else request.assigned_ns

    def is_active(self, request_id: str) -> bool:
        """Whether the request is here and not released."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.release is None

    def persist_seen(self, request_id: str) -> bool:
        """Note that the prompt's new blocks are being persisted; False for an unknown request."""
        with self._lock:
            if (request := self._active.get(request_id)) is None:
                return False
            request.persist_seen = True
            return True

    def kv_in_hbm(self, request_id: str) -> None:
        """Note that the prompt's KV is in HBM."""
        with self._lock:
            if request := self._active.get(request_id):
                request.kv_in_hbm = True

    def done_with_buffer(self, request_id: str) -> bool:
        """Whether its slots can be freed: the KV is in HBM and new blocks are being persisted."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.kv_in_hbm and request.persist_seen

    def enter_stream(self, request_ids: Iterable[str]) -> set[str]:
        """Add requests to a forward pass; return those refused, which are unknown or released.

        Check and addition are atomic: a release that comes later waits for the pass.
        """
        refused = set()
        with self._lock:
            for request_id in request_ids:
                request = self._active.get(request_id)
                if request is None or request.release is not None:
                    refused.add(request_id)
                else:
                    request.streams += 1
        return refused

    def passed(self, request_ids: Iterable[str], pass_ns: int, waited_ns: int) -> None:
        """Add the duration of a forward pass, and its wait for transfers, to its requests."""
        with self._lock:
            for request_id in request_ids:
                if request := self._active.get(request_id):
                    request.pass_ns += pass_ns
                    request.waited_ns += waited_ns

    def pass_times_ns(self, request_id: str) -> tuple[int, int]:
        """Return the sums of ``passed``; zeros for an unknown request."""
        with self._lock:
            request = self._active.get(request_id)
            return (0, 0) if request is None else (request.pass_ns, request.waited_ns)

    def leave_stream(self, request_ids: Iterable[str]) -> list[Release]:
        """Remove requests from a forward pass; return the releases that waited for it."""
        waiting = []
        with self._lock:
            for request_id in request_ids:
                if request := self._active.get(request_id):
                    # A request that was assigned during the pass is not part of it.
                    request.streams = max(request.streams - 1, 0)
                    if request.streams == 0 and request.release is not None:
                        waiting.append(request.release)
        return waiting

    def ask_release(self, release: Release) -> bool:
        """Note the release of a request; False if it has to wait for a forward pass."""
        with self._lock:
            request = self._active.get(release.request_id)
            if request is None:
                return True
            request.release = release
            return request.streams == 0
