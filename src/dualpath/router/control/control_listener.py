"""Who learns from the control server what becomes of engines, and what they say."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from dualpath.core import control
from dualpath.core.cluster import Writer
from dualpath.router.engines import EngineInfo


class ControlListener(Protocol):
    """What the server reports to its owner; called from the event loop, must not block."""

    def on_joined(self, info: EngineInfo) -> None:
        """An engine may be used from now on; nothing of any request is on it."""

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        """Engines' sessions are over, and with them whatever they had of any request.

        They are one engine, or the ranks of a data-parallel group: nothing may be tried again on
        one of them.
        """

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        """Engines that were to leave with their group, and were named in ``on_lost``, did not."""

    def on_dead(self, writer: Writer) -> None:
        """A process is proven to be gone, or to have ended its transfers for good."""

    def on_message(self, info: EngineInfo, message: control.EngineMessage) -> None:
        """A live engine sent something else than ``Register`` or ``Deregister``."""

    def doubted(self) -> Iterable[Writer]:
        """Return the processes whose end would be good to know."""
