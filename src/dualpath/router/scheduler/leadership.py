"""Leader election among the schedulers of one address: one serves, the others stand by.

A scheduler without standbys is always the leader.  Leadership ends with its process; where the
store of a lease notices that only by time, the leader stops before the store lets another begin,
by its own clock: it counts from the moment at which it *requested* the lease, and no two clocks are
compared.

That is enough, because two leaders could do no harm but confuse operators: an engine has one
session with one scheduler, and drops messages of any other (``core.sessions``).
"""

import asyncio
import fcntl
import functools
import logging
import os
import re
import signal
import socket
import stat
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, TypeVar

from dualpath.core.errors import ConfigError
from dualpath.node.secret_file import read_secret
from dualpath.router.scheduler.leases import (
    EtcdAccess,
    EtcdLease,
    KubernetesLease,
    LeasedLeadership,
    LeaseStore,
)
from dualpath.router.settings import RouterSettings

logger = logging.getLogger(__name__)

#: The password of etcd's user, where no file has it.
LEASE_PASSWORD_VARIABLE = "DUALPATH_LEASE_PASSWORD"
#: Printed by a scheduler that has loaded everything and waits to become the leader.
STANDS_BY = "dualpath router: everything is loaded; it serves when it becomes the leader"

POLL_S = 0.05
#: The kernel frees the lock of a killed process before the last of its sockets.
_SOCKETS_FREED_S = 2.0

T = TypeVar("T")
_interrupt = functools.partial(signal.raise_signal, signal.SIGINT)


class Leadership(Protocol):
    """One scheduler's place in the election; ``acquired`` is awaited once, ``release`` at the end.

    ``contended``: whether there may be other schedulers of this address.
    """

    @property
    def contended(self) -> bool:
        """Whether there may be other schedulers of this address."""
        ...

    @property
    def held(self) -> bool:
        """Whether this scheduler is the leader now; checked before any request is placed."""
        ...

    async def acquired(self) -> None:
        """Return when this scheduler is the leader."""
        ...

    async def lost(self) -> str:
        """Return the reason when leadership has ended without ``release``."""
        ...

    async def release(self) -> None:
        """Let the next scheduler lead; idempotent."""
        ...


class SoleLeader:
    """The ``Leadership`` of a scheduler without standbys."""

    contended = False
    held = True

    async def acquired(self) -> None:
        """Return at once."""

    async def lost(self) -> str:
        """Wait for ever."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def release(self) -> None:
        """Do nothing: no other scheduler waits."""


class FileLeadership:
    """Leadership by a lock on ``lock_file``, for schedulers of one machine.

    The kernel frees the lock when its holder ends, however it ends, so that the next one serves
    moments after a kill without any detection.  Raises ``ConfigError`` if the file cannot be
    opened, or is another user's.
    """

    contended = True

    def __init__(self, lock_file: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(Path(lock_file), flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{{standby_lock}} {lock_file!r} cannot be opened ({error.strerror}); name a file "
                "on this machine in a directory that the routers may write to"
            ) from error
        found = os.fstat(self._file)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            self.free()
            raise ConfigError(
                f"{{standby_lock}} {lock_file!r} is not a file of this user, and its owner could "
                "hold the lock for ever; remove it or name another file"
            )
        self.held = False

    async def acquired(self) -> None:
        """Return when this scheduler has the lock."""
        while not self._try_lock():
            await asyncio.sleep(POLL_S)
        self.held = True

    async def lost(self) -> str:
        """Wait for ever: the kernel takes no lock away."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def release(self) -> None:
        """Let the next scheduler lead; idempotent."""
        self.free()

    def free(self) -> None:
        """Close the file, as the kernel does when a process ends; idempotent."""
        self.held = False
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


async def stop_when_lost(
    leadership: Leadership,
    stack: AsyncExitStack,
    stop: Callable[[], Awaitable[None]],
    end: Callable[[], None] = _interrupt,
) -> None:
    """Call ``stop`` on the service and ``end``, as at SIGINT, when leadership is lost.

    The watch ends with the stack.
    """

    async def watch() -> None:
        logger.critical("this scheduler ends: %s", await leadership.lost())
        # The service first: a process that ends waits some seconds for its clients' connections,
        # while front ends would retry as often as they may, and be refused each time.
        try:
            await stop()
        finally:
            end()

    watching = asyncio.create_task(watch(), name="leadership")
    stack.callback(watching.cancel)


async def bound(leadership: Leadership, bind: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``bind``, once the sockets of the previous leader are free.

    Raises its ``ConfigError`` if an address stays in use.
    """
    tries = round(_SOCKETS_FREED_S / POLL_S) if leadership.contended else 0
    for _ in range(tries):
        try:
            return await bind()
        except ConfigError:
            await asyncio.sleep(POLL_S)
    return await bind()


_FORMS = re.compile(r"(etcds?)://([^/]+:\d+)/([\w.-]+)|(kubernetes)://([a-z0-9-]+)/([a-z0-9.-]+)")


def open_leadership(
    settings: RouterSettings, clock: Callable[[], float] = time.monotonic
) -> Leadership:
    """Return this process's leadership by the settings; raises ``ConfigError`` for bad ones."""
    if settings.standby_lock:
        return FileLeadership(settings.standby_lock)
    if not (lease := settings.standby_lease):
        return SoleLeader()
    holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return LeasedLeadership(_store(settings, lease, clock), lease, holder, clock)


def _store(settings: RouterSettings, lease: str, clock: Callable[[], float]) -> LeaseStore:
    if (form := _FORMS.fullmatch(lease)) is None:
        raise ConfigError(
            f"{{standby_lease}} is {lease!r}; give etcds://HOST:PORT/NAME, "
            "etcd://HOST:PORT/NAME or kubernetes://NAMESPACE/NAME"
        )
    if form[1]:
        scheme = "https" if form[1] == "etcds" else "http"
        return EtcdLease(f"{scheme}://{form[2]}", form[3], _etcd_access(settings))
    return KubernetesLease(form[5], form[6], clock)


def _etcd_access(settings: RouterSettings) -> EtcdAccess:
    password = read_secret(
        settings.lease_password_file,
        setting="lease_password_file",
        variable=LEASE_PASSWORD_VARIABLE,
        remedy=f"write the password of lease_user there, or set {LEASE_PASSWORD_VARIABLE}",
    )
    if settings.lease_user and password is None:
        raise ConfigError(
            f"{{lease_user}} is {settings.lease_user!r} and there is no password; give "
            f"{{lease_password_file}} or set {LEASE_PASSWORD_VARIABLE}"
        )
    return EtcdAccess(
        ca_file=settings.lease_ca_file,
        cert_file=settings.lease_cert_file,
        key_file=settings.lease_key_file,
        user=settings.lease_user,
        password=password.text if settings.lease_user and password is not None else "",
    )
