"""Routers of one address take turns: one serves, the others wait with everything loaded.

The turn is a lock on a file that all of them name.  The kernel frees it when its holder ends,
however it ends, so that the next one serves moments after a kill; nobody has to notice anything.
"""

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from dualpath.core.errors import ConfigError

#: What a router says that has everything loaded and waits.
STANDS_BY = "dualpath router: everything is loaded; it serves at its turn"

_POLL_S = 0.05
#: A process that is killed frees its lock before the last of its sockets.
_SOCKETS_FREED_S = 2.0

T = TypeVar("T")


class Turn:
    """One router's place in the queue for ``lock_file``; empty: it has no others to wait for."""

    def __init__(self, lock_file: str) -> None:
        """Open the file, which is made if it is not there; raises ``ConfigError`` if it cannot."""
        self._file = -1
        if not lock_file:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(Path(lock_file), flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{{standby_lock}} {lock_file!r} cannot be opened ({error.strerror}); name a file "
                "on this machine in a directory that the routers may write to"
            ) from error

    @property
    def others(self) -> bool:
        """Whether there may be other routers of this address."""
        return self._file >= 0

    async def taken(self) -> None:
        """Return when it is this router's turn."""
        while self.others and not self._try():
            await asyncio.sleep(_POLL_S)

    async def bound(self, bind: Callable[[], Awaitable[T]]) -> T:
        """Return what ``bind`` does, once the sockets of the router before are free.

        Raises its ``ConfigError`` if an address stays taken.
        """
        tries = round(_SOCKETS_FREED_S / _POLL_S) if self.others else 0
        for _ in range(tries):
            try:
                return await bind()
            except ConfigError:
                await asyncio.sleep(_POLL_S)
        return await bind()

    def over(self) -> None:
        """Let the next one; idempotent."""
        if self.others:
            os.close(self._file)
            self._file = -1

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
