"""From settings to the turn that they mean."""

import os
import re
import socket
import time
import uuid
from collections.abc import Callable

from dualpath.core.errors import ConfigError
from dualpath.router.settings import RouterSettings
from dualpath.router.standby.etcd_lease import EtcdLease
from dualpath.router.standby.file_turn import FileTurn
from dualpath.router.standby.kubernetes_lease import KubernetesLease
from dualpath.router.standby.leased_turn import LeasedTurn, LeaseStore
from dualpath.router.standby.turn import OnlyOne, Turn

_FORMS = re.compile(r"(etcd)://([^/]+:\d+)/([\w.-]+)|(kubernetes)://([a-z0-9-]+)/([a-z0-9.-]+)")


def open_turn(settings: RouterSettings, clock: Callable[[], float] = time.monotonic) -> Turn:
    """Return this process's place; raises ``ConfigError`` for what cannot be."""
    if settings.standby_lock:
        return FileTurn(settings.standby_lock)
    if not (lease := settings.standby_lease):
        return OnlyOne()
    holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return LeasedTurn(_store(lease, clock), lease, holder, clock)


def _store(lease: str, clock: Callable[[], float]) -> LeaseStore:
    if (form := _FORMS.fullmatch(lease)) is None:
        raise ConfigError(
            f"{{standby_lease}} is {lease!r}; give etcd://HOST:PORT/NAME or "
            "kubernetes://NAMESPACE/NAME"
        )
    if form[1]:
        return EtcdLease(f"http://{form[2]}", form[3])
    return KubernetesLease(form[5], form[6], clock)
