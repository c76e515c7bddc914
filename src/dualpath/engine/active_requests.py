"""The requests on one engine: their load, and what still keeps their buffer slots."""

from collections.abc import Iterable

from dualpath.core.request_messages import Release
from dualpath.engine.threads import OS_THREADS, Threads


class _Request:
    def __init__(self, tokens: int, asked_ns: int) -> None:
        self.tokens = tokens
        self.asked_ns = asked_ns
        self.kv_in_hbm = False
        #: Its session is over and it decodes on; what ends it is the end of its HTTP call.
        self.alone = False
        self.ended = False
        self.persist_seen = False
        self.streams = 0
        self.pass_ns = 0
        self.waited_ns = 0
        self.release: Release | None = None


class ActiveRequests:
    """Bookkeeping by request id; all methods may be called from any thread.

    A request in a forward pass (``streams`` > 0) is never dropped: its transfers may still write
    into another engine's buffer, whose slots must not be given to others before they are over.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._lock = threads.lock()
        self._active: dict[str, _Request] = {}

    def add(self, request_id: str, tokens: int, now_ns: int) -> None:
        """A request was assigned to this engine and counts ``tokens`` against its load."""
        with self._lock:
            self._active[request_id] = _Request(tokens, now_ns)

    def end_session(self, reason: str) -> dict[str, bool]:
        """Forget all requests but those in a forward pass, which are released when it is over.

        Return those that have to give back what they have of the buffer, and whether each still
        expected KV from elsewhere: a request whose prompt is to be persisted has all of it.  One
        that decodes needs no buffer and no router: it counts until the engine says that it ended.
        """
        forgotten = {}
        with self._lock:
            for request_id, request in list(self._active.items()):
                if request.streams:
                    request.release = request.release or Release(request_id, reason)
                    continue
                forgotten[request_id] = not (request.persist_seen or request.kv_in_hbm)
                request.alone = request.kv_in_hbm and not request.ended
                if not request.alone:
                    del self._active[request_id]
        return forgotten

    def ended(self, request_id: str) -> None:
        """The engine's own request is over; one without a session is forgotten with it."""
        with self._lock:
            if (request := self._active.get(request_id)) is None:
                return
            request.ended = True
            if request.alone:
                del self._active[request_id]

    @property
    def any_alone(self) -> bool:
        """Whether requests decode on whose session is over."""
        with self._lock:
            return any(request.alone for request in self._active.values())

    def unsettled(self) -> tuple[str, ...]:
        """Return the requests that are to leave and whose forward pass still needs them."""
        with self._lock:
            return tuple(name for name, r in self._active.items() if r.release is not None)

    def is_known(self, request_id: str) -> bool:
        """Whether anything of the request is left here."""
        with self._lock:
            return request_id in self._active

    def drop(self, request_id: str) -> None:
        """The request no longer counts."""
        with self._lock:
            self._active.pop(request_id, None)

    def load(self) -> tuple[int, int]:
        """Return (seq_e, tok_e) of §6.1."""
        with self._lock:
            return len(self._active), sum(r.tokens for r in self._active.values())

    def asked_ns(self, request_id: str) -> int | None:
        """When the request was assigned; None for one that is not (any more) here."""
        with self._lock:
            request = self._active.get(request_id)
            return None if request is None else request.asked_ns

    def is_active(self, request_id: str) -> bool:
        """Whether the request is here and not about to leave."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.release is None

    def persist_seen(self, request_id: str) -> bool:
        """Note that the prompt's new blocks are on their way to storage; False if unknown."""
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
        """Whether the slots have served: the KV is in HBM and new blocks are being persisted."""
        with self._lock:
            request = self._active.get(request_id)
            return request is not None and request.kv_in_hbm and request.persist_seen

    def enter_stream(self, request_ids: Iterable[str]) -> set[str]:
        """Let requests take part in a forward pass; return those refused, gone or leaving.

        One step with the check: a release that comes later waits for the pass.
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
        """Add a forward pass, and what it waited for transfers, to the times of its requests."""
        with self._lock:
            for request_id in request_ids:
                if request := self._active.get(request_id):
                    request.pass_ns += pass_ns
                    request.waited_ns += waited_ns

    def pass_times_ns(self, request_id: str) -> tuple[int, int]:
        """Return what ``passed`` has added up; zeros for a request that is not here."""
        with self._lock:
            request = self._active.get(request_id)
            return (0, 0) if request is None else (request.pass_ns, request.waited_ns)

    def leave_stream(self, request_ids: Iterable[str]) -> list[Release]:
        """The forward pass is over; return releases that had to wait for it."""
        waiting = []
        with self._lock:
            for request_id in request_ids:
                if request := self._active.get(request_id):
                    # An assignment that arrives in mid-pass has not entered it.
                    request.streams = max(request.streams - 1, 0)
                    if request.streams == 0 and request.release is not None:
                        waiting.append(request.release)
        return waiting

    def ask_release(self, release: Release) -> bool:
        """Note that the request is to leave; False if a forward pass still needs it."""
        with self._lock:
            request = self._active.get(release.request_id)
            if request is None:
                return True
            request.release = release
            return request.streams == 0
