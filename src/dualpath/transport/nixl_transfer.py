"""One posted NIXL request.

A request cannot be cancelled: over TCP, bytes of a cancelled READ were written after the peer had
been removed and the handle released.  A transfer with a disconnected peer therefore stays MOVING
until NIXL reports its end, and only then becomes FAILED; until then its handle and the peer's
connection are kept.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dualpath.core.errors import TransportError
from dualpath.transport.contract import TransferState

logger = logging.getLogger(__name__)


class TransferOwner(Protocol):
    """The interface of a transport for its transfers."""

    errors: tuple[type[Exception], ...]

    def start(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Post a request and return its state."""
        ...

    def state_of(self, handle: Any) -> str:  # noqa: ANN401 - untyped library
        """Return the state of a request."""
        ...

    def note_failure(self, agent: str, error: Exception) -> None:
        """Handle the failure of a request with ``agent``."""
        ...

    def drop_if_idle(self, agent: str) -> None:
        """Handle the end of a request with a disconnected agent."""
        ...

    def released(self, transfer: "NixlTransfer") -> None:
        """Handle the release of a transfer."""
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
        self._failure_reason: str | None = None

    def poll(self) -> TransferState:
        """Drive progress and return the state; it becomes FAILED if the peer is lost."""
        with self._lock:
            if self._state is TransferState.MOVING:
                self._advance(self._owner.state_of, "check")
            return self._state

    @property
    def is_moving(self) -> bool:
        """Whether bytes may still move, as of the last poll."""
        return self._state is TransferState.MOVING

    def error(self) -> str | None:
        """Return why the transfer failed, or None."""
        return self._error

    def release(self) -> None:
        """Release the handle; raises ``TransportError`` while the transfer is moving."""
        with self._lock:
            if self._state is TransferState.MOVING:
                raise TransportError("transfer released while moving; poll it to the end first")
            self._drop_handle()
        self._owner.released(self)

    def start(self) -> None:
        """Post the request; called once by the transport."""
        with self._lock:
            self._advance(self._owner.start, "post")

    def fail_when_over(self, reason: str) -> None:
        """Fail with ``reason`` once no more bytes of the transfer can be written."""
        with self._lock:
            self._failure_reason = reason

    def abort(self, reason: str) -> None:
        """Fail immediately and release the handle; only while the agent itself is closing."""
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
            elif self._failure_reason is not None:
                self._error = self._failure_reason
            self._state = TransferState.DONE if self._error is None else TransferState.FAILED
        if self._failure_reason is not None:
            self._owner.drop_if_idle(self.agent)

    def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.release()
        except self._owner.errors as error:
            # NIXL's wrapper retries when the agent is destroyed.
            logger.warning("cannot release a transfer handle with %s yet: %s", self.agent, error)
