"""One posted NIXL request.

A request cannot be recalled: over TCP, bytes of a cancelled READ were seen to arrive after the
peer had been removed and the handle released.  A transfer with a disconnected peer therefore stays
MOVING until NIXL itself calls it over, and only then turns FAILED; its handle and the peer's
connection live that long.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dualpath.core.errors import TransportError
from dualpath.transport.contract import TransferState

logger = logging.getLogger(__name__)


class TransferOwner(Protocol):
    """What a transfer needs of the transport that posted it."""

    errors: tuple[type[Exception], ...]

    def start(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Post a request and return its state."""
        ...

    def state_of(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Return the state of a request."""
        ...

    def note_failure(self, agent: str, error: Exception) -> None:
        """Learn that a request with ``agent`` failed."""
        ...

    def drop_if_idle(self, agent: str) -> None:
        """Learn that a request with a disconnected agent is over."""
        ...

    def forget(self, transfer: "NixlTransfer") -> None:
        """Learn that a transfer was released."""
        ...


class NixlTransfer:
    """One posted NIXL request; see ``dualpath.transport.contract.Transfer``."""

    def __init__(self, owner: TransferOwner, agent: str, handle: Any, size: int) -> None:  # noqa: ANN401 - untyped library
        self.bytes = size
        self.agent = agent
        self._owner = owner
        self._handle = handle
        self._lock = threading.Lock()
        self._state = TransferState.MOVING if handle is not None else TransferState.DONE
        self._error: str | None = None
        self._doom: str | None = None

    def poll(self) -> TransferState:
        """Drive progress and return the state; a lost peer turns it FAILED."""
        with self._lock:
            if self._state is TransferState.MOVING:
                self._advance(self._owner.state_of, "check")
            return self._state

    @property
    def is_moving(self) -> bool:
        """Whether bytes may still move, as far as was seen at the last poll."""
        return self._state is TransferState.MOVING

    def error(self) -> str | None:
        """Return why the transfer failed, or None."""
        return self._error

    def release(self) -> None:
        """Return the handle to NIXL; raises ``TransportError`` while the transfer is moving."""
        with self._lock:
            if self._state is TransferState.MOVING:
                raise TransportError("transfer released while moving; poll it to the end first")
            self._drop_handle()
        self._owner.forget(self)

    def start(self) -> None:
        """Post the request; called once by the transport."""
        with self._lock:
            self._advance(self._owner.start, "post")

    def fail_when_over(self, reason: str) -> None:
        """Turn FAILED with ``reason`` once nothing of the transfer can still arrive."""
        with self._lock:
            self._doom = reason

    def abort(self, reason: str) -> None:
        """End at once and return the handle; only when the agent itself is about to go."""
        with self._lock:
            if self._state is TransferState.MOVING:
                self._state = TransferState.FAILED
                self._error = reason
            self._drop_handle()

    def _advance(self, ask: Callable[[Any], str], verb: str) -> None:
        try:
            status = ask(self._handle)
        except self._owner.errors as error:
            self._state = TransferState.FAILED
            self._error = f"{verb} of a transfer with {self.agent!r} failed: {error}"
            self._owner.note_failure(self.agent, error)
        else:
            if status == "PROC":
                return
            if status != "DONE":
                self._error = f"transfer with {self.agent!r} ended in NIXL state {status}"
            elif self._doom is not None:
                self._error = self._doom
            self._state = TransferState.DONE if self._error is None else TransferState.FAILED
        if self._doom is not None:
            self._owner.drop_if_idle(self.agent)

    def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.release()
        except self._owner.errors as error:
            # The wrapper keeps the handle and retries when the agent is destroyed.
            logger.warning("transfer handle with %s not released yet: %s", self.agent, error)
