"""How engines end for the others: lost, left, or dead.

With a rank of a group ends its group, before anybody hears of it.  A group on which nothing is left
*leaves*: the first goodbye takes all of it out, and each rank still says itself that it is through,
in whatever order.  Whoever then ends in another way is lost after all, and with it those that were
still about to leave.
"""

import logging
from collections.abc import Callable, Sequence

from dualpath.core.cluster import Writer
from dualpath.core.control import PeerDown, RouterMessage
from dualpath.core.sessions import Action, Event
from dualpath.router.control.control_listener import ControlListener
from dualpath.router.control.engine_state import EngineState
from dualpath.router.control.registry import Registry
from dualpath.router.engines import EngineInfo

logger = logging.getLogger(__name__)

#: How the reason of an engine that said goodbye begins, for whoever asks about its requests.
LEFT = "left: "

_GOODBYES = (Event.DEREGISTERED, Event.DEREGISTERED_UNSETTLED)
#: After these a process may live on.
_UNCERTAIN = (
    Event.SILENT,
    Event.FAILED,
    Event.REREGISTERS,
    Event.REPLACED,
    Event.DEREGISTERED_UNSETTLED,
)


class Endings:
    """Tells the listener and the peers."""

    def __init__(
        self,
        registry: Registry,
        listener: ControlListener,
        send: Callable[[str, RouterMessage], None],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._listener = listener
        self._send = send
        self._clock = clock

    def lost(self, info: EngineInfo, reason: str, event: Event) -> None:
        """An engine takes no part any more, nor does any rank of its group."""
        group = self._registry.group(info)
        left = event in _GOODBYES and any(rank.drained for rank in group)
        others = self._others(
            info, Event.OTHER_RANK_LEFT if left else Event.OTHER_RANK_LOST, Action.REMOVE_ENGINE
        )
        for rank in others if left else ():
            rank.leaves_with_group(self._clock())
        ended = (info, *(rank.info for rank in others))
        _log(ended, reason, left=left or (event in _GOODBYES and not others))
        for one in ended:
            certain = one is info and event not in _UNCERTAIN
            self._notify_peers(one, one.writer, certain=certain)
        told = f"{info.engine_id}, of the same group: {reason}" if others else reason
        self._listener.on_lost(ended, told)

    def missed(self, engine: EngineState, info: EngineInfo, reason: str) -> None:
        """An engine that was to leave with its group is lost; ``info`` is that of its process."""
        others = self._others(info, Event.OTHER_RANK_LOST, Action.REPORT_LOST)
        for rank in (engine, *others):
            rank.left = False
        lost = (info, *(rank.info for rank in others))
        _log(lost, reason, left=False)
        self._listener.on_missed(lost)

    def bury(self, info: EngineInfo, writer: Writer) -> None:
        """A process of this engine, the one of now or a former one, is gone."""
        self._notify_peers(info, writer, certain=True)
        self._listener.on_dead(writer)

    def _others(self, info: EngineInfo, event: Event, action: Action) -> list[EngineState]:
        """Let something happen to the other ranks; return those for which ``action`` follows."""
        group = self._registry.group(info) if info.dp else []
        done = [rank for rank in group if action in rank.machine.on(event)]
        self._registry.changed()
        return done

    def _notify_peers(self, info: EngineInfo, writer: Writer, *, certain: bool) -> None:
        for peer in self._registry.peers(info):
            self._send(peer.engine_id, PeerDown(writer.engine_id, writer.epoch, certain))


def _log(ended: Sequence[EngineInfo], reason: str, *, left: bool) -> None:
    """Say of an engine, and of the ranks that go with it, that they have left or are lost."""
    first, *others = ended
    how, verb = ("leaves", "has left") if left else ("lost", "is lost")
    # Who says goodbye does what it was told to, and is no reason to wake anybody.
    level = logging.INFO if left else logging.WARNING
    reason = reason.removeprefix(LEFT)
    logger.log(level, "%s engine %s %s: %s", first.role.value, first.engine_id, how, reason)
    for one in others:
        logger.log(
            level,
            "%s engine %s %s: rank %s of its group %s: %s",
            *(one.role.value, one.engine_id, how, first.engine_id, verb, reason),
        )
