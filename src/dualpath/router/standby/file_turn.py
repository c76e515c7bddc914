"""The turn is a lock on a file, for schedulers of one machine.

The kernel frees it when its holder ends, however it ends, so that the next one serves moments after
a kill; nobody has to notice anything.
"""

import asyncio
import fcntl
import os
from pathlib import Path

from dualpath.core.errors import ConfigError
from dualpath.router.standby.turn import POLL_S


class FileTurn:
    """The ``Turn`` of those that name ``lock_file``, which is made if it is not there.

    Raises ``ConfigError`` if it cannot be opened.
    """

    others = True

    def __init__(self, lock_file: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(Path(lock_file), flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{{standby_lock}} {lock_file!r} cannot be opened ({error.strerror}); name a file "
                "on this machine in a directory that the routers may write to"
            ) from error
        self.held = False

    async def taken(self) -> None:
        """Return when it is this scheduler's turn."""
        while not self._try():
            await asyncio.sleep(POLL_S)
        self.held = True

    async def lost(self) -> str:
        """Wait for ever: the kernel takes no lock away."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def over(self) -> None:
        """Let the next one; idempotent."""
        self.free()

    def free(self) -> None:
        """Let the next one, as the kernel does when a process ends; idempotent."""
        self.held = False
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
